"""The torch engine samples what Hugging Face computes, before and after weight updates."""

import asyncio
import socket

import numpy as np
import pytest
from models_support import (
    MAX_LEN,
    PROMPT,
    engine_spec,
    hf_logprobs,
    randomised,
    run,
    save_model,
    send_by_file,
    send_by_group,
)

from trinity_dask.models.protocol import (
    SamplingParams,
    WeightGroupSpec,
    WeightUpdate,
)
from trinity_dask.models.torch.engine import TorchEngine, load_model
from trinity_dask.weights.broadcast import make_group, named_weights, tensor_meta

OTHER = [85, 1, 21]


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(path):
    return load_model(path, "float32", "cpu")


def with_engine(path, use, **config):
    """Run ``use(engine)`` on a prepared engine and close it."""

    async def main():
        engine = TorchEngine(engine_spec(path, **config))
        facts = await engine.prepare()
        assert facts["parameters"] == 88_960
        try:
            return await use(engine)
        finally:
            await engine.close()

    return run(main())


def assert_same_logprobs(model, prompt, completion, temperature):
    expected = hf_logprobs(model, prompt, completion.token_ids, temperature)
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_fault_20_logprobs_are_those_of_hf_at_the_sampling_temperature(path, model, temperature):
    sampling = SamplingParams(n=5, temperature=temperature, max_tokens=12)

    async def use(engine):
        groups = await asyncio.gather(
            engine.generate(PROMPT, sampling, "a"), engine.generate(OTHER, sampling, "b")
        )
        tokens = [*PROMPT, *groups[0][0].token_ids.tolist()]
        return groups, tokens, await engine.logprobs(tokens, temperature)

    groups, tokens, again = with_engine(path, use)
    for prompt, group in zip((PROMPT, OTHER), groups, strict=True):
        assert len(group) == 5
        for completion in group:
            assert_same_logprobs(model, prompt, completion, temperature)
    first = groups[0][0]
    np.testing.assert_allclose(again[len(PROMPT) - 1 :], first.logprobs, atol=1e-5)
    assert len(again) == len(tokens) - 1


def test_greedy_takes_the_most_likely_token_with_its_logprob_at_temperature_1(path, model):
    async def use(engine):
        return await engine.generate(PROMPT, SamplingParams(temperature=0, max_tokens=9), "g")

    (completion,) = with_engine(path, use)
    prefix = list(PROMPT)
    for token in completion.token_ids:
        import torch

        logits = model(input_ids=torch.tensor([prefix])).logits[0, -1]
        assert int(logits.argmax()) == token
        prefix.append(int(token))
    assert_same_logprobs(model, PROMPT, completion, 1.0)


def test_completions_have_the_dtypes_of_the_protocol_and_versions(path):
    async def use(engine):
        engine.model_version = 7
        return await engine.generate(PROMPT, SamplingParams(n=3, max_tokens=4), "d")

    for completion in with_engine(path, use):
        assert completion.token_ids.dtype == np.int32
        assert completion.logprobs.dtype == np.float32
        assert completion.versions.dtype == np.int32
        assert set(completion.versions) == {7}
        assert len(completion.token_ids) == len(completion.logprobs) == len(completion.versions)


def test_mixed_requests_in_one_batch_keep_their_own_limits(path):
    wanted = [
        (PROMPT, SamplingParams(n=2, max_tokens=1)),
        (OTHER, SamplingParams(n=1, max_tokens=9, min_tokens=9)),
        ([5], SamplingParams(n=3, temperature=0.0, max_tokens=6)),
        (PROMPT, SamplingParams(n=2, top_k=1, max_tokens=5)),
    ]

    async def use(engine):
        calls = [engine.generate(p, s, str(i)) for i, (p, s) in enumerate(wanted)]
        return await asyncio.gather(*calls), await engine.stats()

    groups, stats = with_engine(path, use)
    assert [len(group) for group in groups] == [2, 1, 3, 2]
    for group, (_, sampling) in zip(groups, wanted, strict=True):
        for completion in group:
            assert sampling.min_tokens <= len(completion.token_ids) <= sampling.max_tokens
    assert len(groups[1][0].token_ids) == 9
    greedy = groups[2]
    assert all(np.array_equal(greedy[0].token_ids, c.token_ids) for c in greedy)
    assert all(np.allclose(c.logprobs, 0, atol=1e-6) for c in groups[3])
    assert stats["requests"] == 4
    assert stats["generated_tokens"] == sum(len(c.token_ids) for g in groups for c in g)


def test_stop_ids_end_an_answer_and_min_tokens_postpones_them(path):
    async def use(engine):
        (probe,) = await engine.generate(PROMPT, SamplingParams(temperature=0, max_tokens=6), "p")
        stop = (int(probe.token_ids[2]),)
        first = list(probe.token_ids).index(stop[0])
        stopped = await engine.generate(
            PROMPT, SamplingParams(temperature=0, max_tokens=6, stop_token_ids=stop), "s"
        )
        later = await engine.generate(
            PROMPT,
            SamplingParams(temperature=0, max_tokens=9, min_tokens=5, stop_token_ids=stop),
            "l",
        )
        return probe, first, stop, stopped[0], later[0]

    probe, first, stop, stopped, later = with_engine(path, use)
    assert probe.finish_reason == "length"
    assert stopped.finish_reason == "stop"
    assert np.array_equal(stopped.token_ids, probe.token_ids[: first + 1])
    assert len(later.token_ids) >= 5
    assert stop[0] not in later.token_ids[:5]


def test_a_seed_repeats_a_request_whatever_else_is_in_the_batch(path):
    seeded = SamplingParams(n=4, max_tokens=8, seed=11)

    async def use(engine):
        alone = await engine.generate(PROMPT, seeded, "a")
        other = engine.generate(OTHER, SamplingParams(n=7, max_tokens=3), "o")
        crowd = await asyncio.gather(other, engine.generate(PROMPT, seeded, "b"))
        different = await engine.generate(PROMPT, SamplingParams(n=4, max_tokens=8, seed=12), "c")
        return alone, crowd[1], different

    alone, crowd, different = with_engine(path, use)
    for one, other in zip(alone, crowd, strict=True):
        assert np.array_equal(one.token_ids, other.token_ids)
    assert any(
        not np.array_equal(a.token_ids, b.token_ids) for a, b in zip(alone, different, strict=True)
    )
    assert len({tuple(c.token_ids) for c in alone}) > 1


def test_more_requests_than_fit_into_a_batch(path):
    async def use(engine):
        sampling = SamplingParams(n=3, max_tokens=2)
        calls = [engine.generate(PROMPT, sampling, str(i)) for i in range(9)]
        return await asyncio.gather(*calls, engine.generate(OTHER, SamplingParams(n=10), "big"))

    groups = with_engine(path, use, max_num_seqs=4)
    assert [len(group) for group in groups] == [3] * 9 + [10]


def test_cancelled_requests_do_not_disturb_the_others(path, model):
    async def use(engine):
        tasks = [
            asyncio.create_task(engine.generate(PROMPT, SamplingParams(n=8, max_tokens=40), str(i)))
            for i in range(6)
        ]
        while not (await engine.stats())["running"]:
            await asyncio.sleep(0.001)
        for task in tasks[::2]:
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = with_engine(path, use)
    for i, result in enumerate(results):
        if i % 2 == 0:
            # cancelled, unless its batch was faster
            assert isinstance(result, asyncio.CancelledError) or len(result) == 8
        else:
            assert_same_logprobs(model, PROMPT, result[0], 1.0)


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], SamplingParams(), "no tokens"),
        ([99], SamplingParams(), "vocabulary of 99"),
        ([-1], SamplingParams(), "token id -1"),
        ([1] * MAX_LEN, SamplingParams(), "max_model_len = 64"),
        ([1], SamplingParams(n=0), "n must be at least 1"),
        ([1], SamplingParams(temperature=-1), "temperature"),
        ([1], SamplingParams(top_p=0), "top_p"),
        ([1], SamplingParams(top_k=0), "top_k"),
        ([1], SamplingParams(max_tokens=0), "max_tokens"),
        ([1], SamplingParams(max_tokens=2, min_tokens=3), "min_tokens"),
    ],
)
def test_bad_requests_are_refused_and_named(path, prompt, sampling, message):
    async def use(engine):
        with pytest.raises(ValueError, match=message):
            await engine.generate(prompt, sampling, "bad")
        return await engine.generate(PROMPT, SamplingParams(max_tokens=2), "good")

    assert len(with_engine(path, use)) == 1


def test_an_answer_ends_at_the_model_length(path):
    async def use(engine):
        return await engine.generate(
            [1] * (MAX_LEN - 3), SamplingParams(max_tokens=50, min_tokens=3), "l"
        )

    (completion,) = with_engine(path, use)
    assert len(completion.token_ids) == 3
    assert completion.finish_reason == "length"


# weights ----------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["nccl", "memory", "checkpoint"])
def test_fault_16_after_an_update_the_answers_are_the_new_model_s(path, tmp_path, method):
    new = randomised(load_model(path, "float32", "cpu"), seed=5)

    async def use(engine):
        sampling = SamplingParams(n=2, max_tokens=8)
        (before, _) = await engine.generate(PROMPT, sampling, "before")
        if method == "nccl":
            await send_by_group(engine, new, version=3, generation=1)
            await send_by_group(engine, new, version=4, generation=2)
        else:
            await send_by_file(engine, new, 4, tmp_path / "w.safetensors", method)
        return before, await engine.generate(PROMPT, sampling, "after"), engine.model_version

    before, after, version = with_engine(path, use)
    assert version == 4
    for completion in after:
        assert_same_logprobs(new, PROMPT, completion, 1.0)
        assert set(completion.versions) == {4}
    stale = hf_logprobs(new, PROMPT, before.token_ids, 1.0)
    assert np.abs(stale - before.logprobs).max() > 0.1  # the update was a large one


def test_fault_17_the_same_path_twice_gives_the_second_file(path, tmp_path):
    first = randomised(load_model(path, "float32", "cpu"), seed=1)
    second = randomised(load_model(path, "float32", "cpu"), seed=2)

    async def use(engine):
        for version, model in ((1, first), (2, second)):
            await send_by_file(engine, model, version, tmp_path / "w.safetensors", "checkpoint")
            (completion,) = await engine.generate(PROMPT, SamplingParams(max_tokens=6), "x")
            assert_same_logprobs(model, PROMPT, completion, 1.0)

    with_engine(path, use)


def test_an_update_that_fails_leaves_the_old_weights_and_version(path, model, tmp_path):
    async def use(engine):
        await broken_group_update(engine, model)
        wrong = [("nonsense", named_weights(model)[0][1])]
        from trinity_dask.weights.files import write_safetensors

        write_safetensors(str(tmp_path / "bad.safetensors"), wrong)
        bad = WeightUpdate(9, "checkpoint", path=str(tmp_path / "bad.safetensors"))
        with pytest.raises(ValueError, match="missing"):
            await engine.update_weights(bad)
        with pytest.raises(RuntimeError, match="generation 5"):
            await engine.update_weights(WeightUpdate(9, "nccl", generation=5))
        (completion,) = await engine.generate(PROMPT, SamplingParams(max_tokens=6), "x")
        return completion, engine.model_version

    completion, version = with_engine(path, use)
    assert version == 0
    assert_same_logprobs(model, PROMPT, completion, 1.0)


async def broken_group_update(engine, model):
    """The sender leaves after the first of many buckets."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spec = WeightGroupSpec("127.0.0.1", port, 2, 1, 4, "gloo", 60.0)
    group, _ = await asyncio.gather(
        asyncio.to_thread(make_group, spec, 0, True), engine.init_weight_group(spec)
    )
    meta = tensor_meta(named_weights(model))
    update = asyncio.create_task(
        engine.update_weights(WeightUpdate(9, "nccl", meta, 4, None, bucket_bytes=1))
    )
    import torch

    first = meta[0].shape[0] * meta[0].shape[1] * 4
    await asyncio.to_thread(group.broadcast(torch.zeros(first, dtype=torch.uint8)).wait)
    group.close()
    with pytest.raises(RuntimeError):
        await update


def test_a_closed_engine_says_so(path):
    async def main():
        engine = TorchEngine(engine_spec(path))
        await engine.prepare()
        await engine.close()
        await engine.close()
        with pytest.raises(RuntimeError, match="closed"):
            await engine.generate(PROMPT, SamplingParams(), "x")

    run(main())
