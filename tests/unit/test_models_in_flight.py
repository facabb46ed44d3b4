"""Requests that run while the weights change: kept, waited for, or sampled again."""

import asyncio
import itertools
import threading

import numpy as np
import pytest
import torch
from models_support import (
    PROMPT,
    engine_spec,
    hf_logprobs,
    randomised,
    run,
    save_model,
    send_by_file,
)

from trinity_dask.models.actor.actor import EngineActor
from trinity_dask.models.protocol import SamplingParams, WeightUpdate
from trinity_dask.models.torch.engine import load_model
from trinity_dask.weights.files import write_safetensors

LONG_S = 600.0


def actor(policy: str, engine_type: str = "fake", path: str = "", **config) -> EngineActor:
    spec = engine_spec(path, engine_type, **config)
    spec.in_flight = policy
    spec.in_flight_timeout_s = config.get("wait_s", LONG_S)
    return EngineActor(spec)


async def running(engine: EngineActor, n: int = 1) -> None:
    async with asyncio.timeout(60):
        while (await engine.stats())["running"] < n:
            await asyncio.sleep(0.001)


@pytest.fixture(scope="module")
def update(tmp_path_factory) -> WeightUpdate:
    path = str(tmp_path_factory.mktemp("weights") / "w.safetensors")
    write_safetensors(path, [("w", torch.arange(4.0))])
    return WeightUpdate(1, "memory", path=path)


def with_fake(policy, body, **config):
    async def main():
        engine = actor(policy, **config)
        await engine.prepare()
        await engine.open()
        try:
            return await body(engine)
        finally:
            await engine.close()

    return run(main())


def test_abort_samples_again_with_the_new_weights_and_counts(update):
    async def body(engine):
        engine._engine.latency_s = LONG_S  # it would not end by itself
        asked = [
            asyncio.create_task(engine.generate([i], SamplingParams(n=2, max_tokens=4), str(i)))
            for i in range(3)
        ]
        await running(engine, 3)
        engine._engine.latency_s = 0.0
        receipt = await engine.update_weights(update)
        return receipt, await asyncio.gather(*asked), await engine.stats()

    receipt, answers, stats = with_fake("abort", body)
    assert receipt.aborted == 3 == stats["aborted"]
    assert stats["running"] == 0
    assert {v for group in answers for c in group for v in c.versions} == {1}


def test_a_cancelled_caller_of_an_aborted_request_is_cancelled(update):
    async def body(engine):
        engine._engine.latency_s = LONG_S
        asked = asyncio.create_task(engine.generate([1], SamplingParams(), "r"))
        await running(engine)
        await engine.update_weights(update)
        await running(engine)  # again
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert (await engine.stats())["running"] == 0

    with_fake("abort", body)


def test_a_request_keeps_its_own_deadline_under_abort(update):
    async def body(engine):
        engine._engine.latency_s = LONG_S
        asked = asyncio.create_task(engine.generate([1], SamplingParams(), "r"))
        await running(engine)
        await engine.update_weights(update)
        with pytest.raises(TimeoutError, match=r"request_timeout_s = 0\.3 s"):
            await asked

    with_fake("abort", body, request_timeout_s=0.3)


def test_wait_lets_running_requests_end_and_holds_new_ones_back(update):
    async def body(engine):
        first = asyncio.create_task(engine.generate([1], SamplingParams(max_tokens=9), "a"))
        await running(engine)
        updating = asyncio.create_task(engine.update_weights(update))
        await asyncio.sleep(0)
        second = asyncio.create_task(engine.generate([1], SamplingParams(max_tokens=9), "b"))
        receipt = await updating
        assert first.done()
        assert receipt.aborted == 0
        return await first, await second

    first, second = with_fake("wait", body, fake_latency_s=0.1)
    assert set(first[0].versions) == {0}
    assert set(second[0].versions) == {1}


def test_wait_has_a_deadline_and_aborts_what_is_left(update):
    async def body(engine):
        engine._engine.latency_s = LONG_S
        asked = asyncio.create_task(engine.generate([1], SamplingParams(), "r"))
        await running(engine)
        engine._engine.latency_s = 0.0
        receipt = await engine.update_weights(update)
        return receipt, await asked

    receipt, answer = with_fake("wait", body, wait_s=0.05)
    assert receipt.aborted == 1
    assert set(answer[0].versions) == {1}


@pytest.mark.parametrize("policy", ["abort", "wait"])
def test_requests_go_on_after_an_update_that_failed(policy):
    async def body(engine):
        asked = asyncio.create_task(engine.generate([1], SamplingParams(), "r"))
        await running(engine)
        with pytest.raises(FileNotFoundError):
            await engine.update_weights(WeightUpdate(1, "memory", path="/nowhere"))
        assert set((await asked)[0].versions) == {0}
        assert set((await engine.generate([1], SamplingParams(), "s"))[0].versions) == {0}

    with_fake(policy, body, fake_latency_s=0.05)


def test_keep_goes_on_and_says_which_token_is_of_which_version(update):
    async def body(engine):
        asked = asyncio.create_task(
            engine.generate([1], SamplingParams(max_tokens=400, min_tokens=400), "r")
        )
        await running(engine)
        await asyncio.sleep(0.1)
        assert (await engine.update_weights(update)).aborted == 0
        return await asked

    (answer,) = with_fake("keep", body, fake_latency_s=0.4)
    assert set(answer.versions) == {0, 1}
    assert (np.diff(answer.versions) >= 0).all()


# the torch engine ---------------------------------------------------------------------------
@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


def hold_at_token(sampler, n: int) -> threading.Event:
    """The sampler stands before its ``n``-th token until the event is set."""
    go_on, forward, passes = threading.Event(), sampler._forward, itertools.count(1)

    def held(*args):
        if next(passes) == n:
            go_on.wait(60)
        return forward(*args)

    sampler._forward = held
    return go_on


@pytest.mark.parametrize("policy", ["keep", "wait", "abort"])
@pytest.mark.parametrize("seed", [None, 7])
def test_fault_16_every_token_is_of_the_weights_its_version_says(path, tmp_path, policy, seed):
    """No cached key of the old weights outlives the update, and none of its tokens is lost."""
    models = [load_model(path, "float32", "cpu")]
    models.append(randomised(load_model(path, "float32", "cpu"), seed=3))
    sampling = SamplingParams(n=6, max_tokens=50, seed=seed)

    async def main():
        engine = actor(policy, "torch", path)
        await engine.prepare()
        await engine.open()
        go_on = hold_at_token(engine._engine._sampler, 5)
        asked = [asyncio.create_task(engine.generate(PROMPT, sampling, str(i))) for i in range(2)]
        await running(engine, 2)
        updating = asyncio.create_task(
            send_by_file(engine, models[1], 1, tmp_path / "w.safetensors", "memory")
        )
        for _ in range(10):
            await asyncio.sleep(0)  # the update has begun
        go_on.set()
        await updating
        answers = await asyncio.gather(*asked)
        after = await engine.generate(PROMPT, sampling, "after")
        stats = await engine.stats()
        await engine.close()
        return [*answers[0], *answers[1]], after, stats

    answers, after, stats = run(main())
    for answer in [*answers, *after]:
        assert len(answer.token_ids) == len(answer.versions) == len(answer.logprobs) <= 50
        assert len(answer.token_ids) == 50 or answer.finish_reason == "stop"
        assert (np.diff(answer.versions) >= 0).all()
        expected = [hf_logprobs(m, PROMPT, answer.token_ids, 1.0) for m in models]
        right = np.where(answer.versions == 0, *expected)
        np.testing.assert_allclose(answer.logprobs, right, atol=1e-4)
    assert {v for a in after for v in a.versions} == {1}
    found = {v for a in answers for v in a.versions}
    assert found == {"keep": {0, 1}, "wait": {0}, "abort": {1}}[policy]
    assert stats["aborted"] == (2 if policy == "abort" else 0)
    assert len({tuple(a.token_ids) for a in answers[:6]}) == 6  # the rows stay different
