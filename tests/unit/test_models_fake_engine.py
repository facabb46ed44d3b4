"""The fake engine: deterministic, cancellable, and honest about weights."""

import asyncio
import time

import numpy as np
import pytest
import torch
from models_support import engine_spec, run

from trinity_dask.models.fake_engine import EOS_ID, FakeEngine
from trinity_dask.models.protocol import SamplingParams, WeightUpdate
from trinity_dask.weights.files import write_safetensors


def make(**config) -> FakeEngine:
    return FakeEngine(engine_spec("", "fake", **config))


def generate(engine, prompt=(1, 2, 3), **sampling):
    params = SamplingParams(**{"n": 3, "max_tokens": 6, **sampling})
    return run(engine.generate(list(prompt), params, "r"))


def test_answers_depend_on_prompt_seed_and_version_only():
    engine = make()
    first = generate(engine)
    assert [c.token_ids.tolist() for c in first] == [c.token_ids.tolist() for c in generate(make())]
    assert len({tuple(c.token_ids) for c in first}) > 1
    for other in (generate(engine, prompt=(1, 2, 4)), generate(engine, seed=5)):
        assert [c.token_ids.tolist() for c in other] != [c.token_ids.tolist() for c in first]
    engine.model_version = 2
    second = generate(engine)
    assert [c.token_ids.tolist() for c in second] != [c.token_ids.tolist() for c in first]
    assert {v for c in second for v in c.versions} == {2}


def test_lengths_and_finish_reasons_fit_together():
    engine = make()
    reasons = set()
    for i in range(60):
        for completion in generate(engine, prompt=(i,), min_tokens=2):
            assert 2 <= len(completion.token_ids) <= 6
            assert (completion.token_ids[-1] == EOS_ID) == (completion.finish_reason == "stop")
            assert len(completion.logprobs) == len(completion.token_ids)
            if completion.finish_reason == "length":
                assert len(completion.token_ids) == 6
            reasons.add(completion.finish_reason)
    assert reasons == {"stop", "length"}


def test_latency_is_waited_and_cancellation_ends_it():
    async def main():
        engine = make(fake_latency_s=0.2, fake_latency_sigma=0.3)
        start = time.monotonic()
        await engine.generate([1], SamplingParams(), "r")
        assert time.monotonic() - start > 0.02
        slow = make(fake_latency_s=600.0)
        task = asyncio.create_task(slow.generate([1], SamplingParams(), "r"))
        await asyncio.sleep(0)
        assert (await slow.stats())["running"] == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await slow.stats())["running"] == 0

    run(main())


def test_mean_latency_is_the_configured_one():
    engine = make(fake_latency_s=1.0, fake_latency_sigma=0.5, seed=1)
    waits = [engine.draw_latency_s() for _ in range(4000)]
    assert np.mean(waits) == pytest.approx(1.0, rel=0.05)
    assert np.std(np.log(waits)) == pytest.approx(0.5, rel=0.05)


def test_a_weight_update_gives_the_checksum_of_the_bytes_and_the_version(tmp_path):
    engine = make()
    path = str(tmp_path / "w.safetensors")
    digest = write_safetensors(path, [("w", torch.arange(10.0))])
    receipt = run(engine.update_weights(WeightUpdate(5, "memory", path=path)))
    assert (receipt.version, receipt.checksum, receipt.n_bytes) == (5, digest.value, 40)
    assert not receipt.has_logprobs  # nothing to compare with the trainer's
    assert engine.model_version == 5


def test_a_trained_model_knows_every_sampled_token(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 20}')
    engine = FakeEngine(engine_spec(str(tmp_path), "fake"))
    found = [t for i in range(20) for c in generate(engine, prompt=(i,)) for t in c.token_ids]
    assert 0 <= min(found) < max(found) == 19
