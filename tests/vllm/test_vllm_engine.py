"""Real vLLM on a CPU: what it samples is what Hugging Face computes, before and after updates.

One engine serves the whole file, because it takes a while to start; it lives on a loop of
its own and every test leaves it usable. Versions only grow.
"""

import asyncio
import copy
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from models_support import (
    PROMPT,
    SHARED,
    engine_spec,
    free_port,
    hf_logprobs,
    randomised,
    save_model,
    send_by_file,
    send_by_group,
)
from trainer_support import batch_of, engine

from trinity_dask.experience import EID, Experience
from trinity_dask.models.actor.actor import EngineActor, build_engine
from trinity_dask.models.protocol import (
    SamplingParams,
    TensorMeta,
    WeightGroupSpec,
    WeightReceipt,
    WeightUpdate,
)
from trinity_dask.models.torch.engine import load_model
from trinity_dask.models.wrapper import ModelWrapper, load_tokenizer
from trinity_dask.sync.shelf import Published, WeightShelf
from trinity_dask.weights.broadcast import make_group, named_weights, tensor_meta
from trinity_dask.weights.files import write_safetensors
from trinity_dask.weights.memory import set_free

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

OTHER = [85, 1, 21]
# old checkpoints carry it; no module has it, and vLLM skips it
UNKNOWN_TENSOR = ("model.layers.0.self_attn.rotary_emb.inv_freq", "float32", (16,))
START_S = 600.0
CALL_S = 240.0
versions = itertools.count(1)


class Served:
    """The engine, its loop, and the weights that it should hold now."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.loop = asyncio.new_event_loop()
        self.actor = EngineActor(engine_spec(path, "vllm"))
        self.model = load_model(path, "float32", "cpu")

    def run(self, coroutine, timeout_s: float = CALL_S):
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, timeout_s))

    def generate(self, prompt=PROMPT, **sampling):
        params = SamplingParams(**{"max_tokens": 8, **sampling})
        return self.run(self.actor.generate(prompt, params, f"t{next(versions)}"))

    def assert_in_sync(self, completion, prompt=PROMPT, temperature=1.0):
        expected = hf_logprobs(self.model, prompt, completion.token_ids, temperature)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-3)
        assert np.abs(completion.logprobs - expected).mean() <= 1e-4


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    served = Served(save_model(tmp_path_factory.mktemp("model")))
    facts = served.run(served.actor.prepare(), START_S)
    assert facts["dtype"] == "float32"
    served.run(served.actor.open())
    yield served
    served.run(served.actor.close())
    served.loop.close()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_fault_20_logprobs_are_those_of_hf_at_the_sampling_temperature(served, temperature):
    for completion in served.generate(n=4, temperature=temperature, max_tokens=20):
        served.assert_in_sync(completion, temperature=temperature)
        assert completion.token_ids.dtype == np.int32
        assert completion.logprobs.dtype == np.float32
        tokens = [*PROMPT, *completion.token_ids.tolist()]
        scores = served.run(served.actor.logprobs(tokens, temperature))
        assert len(scores) == len(tokens) - 1
        np.testing.assert_allclose(scores[len(PROMPT) - 1 :], completion.logprobs, atol=1e-3)


def trained_on(served, temperature=1.0, **sampling):
    """Metrics of a train step, with the engine's weights, on what it has sampled."""
    experiences = []
    for k in range(3):
        group = served.generate([*PROMPT, k], n=8, temperature=temperature, **sampling)
        for run, completion in enumerate(group):
            experiences.append(
                Experience(
                    tokens=np.concatenate([[*PROMPT, k], completion.token_ids]),
                    prompt_length=len(PROMPT) + 1,
                    eid=EID(batch=1, task=k, run=run),
                    reward=0.0,
                    logprobs=completion.logprobs,
                    versions=completion.versions,
                    advantages=np.ones(len(completion.token_ids), np.float32),
                )
            )
    model = copy.deepcopy(served.model).requires_grad_(True)
    return engine(model=model, temperature=temperature).train_step(batch_of(experiences), 1)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_fault_20_the_trainer_s_ratio_to_vllm_is_one_at_lag_0(served, temperature):
    metrics = trained_on(served, temperature, max_tokens=30)
    assert metrics["correction/gap_max"] < 1e-3
    for name in ("ratio_p01", "ratio_p50", "ratio_p99", "ratio_mean"):
        assert metrics[f"correction/{name}"] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("narrow", [{"top_p": 0.8}, {"top_k": 20}])
def test_fault_21_a_narrowed_sampler_shows_as_a_gap(served, narrow):
    metrics = trained_on(served, max_tokens=30, **narrow)
    assert metrics["correction/gap"] > 0.05
    assert metrics["correction/ratio_mean"] < 0.97


def test_logprobs_of_concurrent_prompts_keep_their_temperatures(served):
    async def ask():
        heats = [0.5, 1.0, 2.0, 0.5]
        calls = [served.actor.logprobs([*PROMPT, 3, 4, 5], heat) for heat in heats]
        return heats, await asyncio.gather(*calls)

    heats, scores = served.run(ask())
    for heat, got in zip(heats, scores, strict=True):
        expected = hf_logprobs(served.model, PROMPT[:1], [*PROMPT[1:], 3, 4, 5], heat)
        np.testing.assert_allclose(got, expected, atol=1e-3)


def test_greedy_logprobs_are_those_at_temperature_1(served):
    (completion,) = served.generate(temperature=0.0)
    served.assert_in_sync(completion)


def test_more_seeded_prompts_than_one_step_can_take_do_not_end_the_engine(served):
    """A client may send a seed with any request, and as many at a time as it likes."""
    length = served.run(served.actor.describe())["max_model_len"] - 4
    draw = np.random.default_rng(4)
    prompts = draw.integers(3, 90, (16384 // length, length)).tolist()

    async def ask():
        calls = [
            served.actor.generate(ids, SamplingParams(max_tokens=3, seed=k), f"s{next(versions)}")
            for k, ids in enumerate(prompts)
        ]
        return await asyncio.gather(*calls)

    first, second = served.run(ask()), served.run(ask())
    for prompt, (a,), (b,) in zip(prompts, first, second, strict=True):
        assert np.array_equal(a.token_ids, b.token_ids)
        served.assert_in_sync(a, prompt)


def test_seed_length_and_stop(served):
    first = served.generate(n=3, seed=5)
    second = served.generate(n=3, seed=5)
    for a, b in zip(first, second, strict=True):
        assert np.array_equal(a.token_ids, b.token_ids)
    (probe,) = served.generate(temperature=0.0, max_tokens=6)
    assert (probe.finish_reason, len(probe.token_ids)) == ("length", 6)
    stop = int(probe.token_ids[2])
    (stopped,) = served.generate(temperature=0.0, max_tokens=6, stop_token_ids=(stop,))
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids[-1] == stop
    (longer,) = served.generate(temperature=0.0, max_tokens=6, min_tokens=5, stop_token_ids=(stop,))
    assert stop not in longer.token_ids[:5]


def test_cancelling_a_request_aborts_it_and_the_engine_goes_on(served):
    async def cancel():
        params = SamplingParams(n=16, max_tokens=50)
        task = asyncio.create_task(served.actor.generate(PROMPT, params, "cancelled"))
        while not (await served.actor.stats())["running"]:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await served.actor.stats()

    assert served.run(cancel())["running"] == 0
    served.assert_in_sync(served.generate(OTHER)[0], OTHER)


def test_the_engine_says_how_far_the_answers_to_a_request_have_grown(served):
    async def watch():
        params = SamplingParams(n=2, max_tokens=50, min_tokens=50)
        task = asyncio.create_task(served.actor.generate(PROMPT, params, "watched"))
        seen = set()
        while not task.done():
            seen.add(served.actor._engine.sampled_tokens("watched"))
            await asyncio.sleep(0.001)
        await task
        return seen

    seen = served.run(watch())
    assert {0} < seen
    assert 50 < max(seen) <= 100
    assert served.actor._engine.sampled_tokens("watched") == 0


def test_bad_requests_are_refused_before_they_reach_the_engine(served):
    with pytest.raises(ValueError, match="vocabulary of 99"):
        served.generate([300])
    with pytest.raises(ValueError, match="max_model_len = 64"):
        served.generate([1] * 64)
    assert len(served.generate(n=2)) == 2


@pytest.mark.parametrize("method", ["nccl", "memory", "checkpoint"])
def test_fault_16_no_cached_key_of_the_old_weights_survives_an_update(served, tmp_path, method):
    """The same prompt before and after, prefix cache on, twice per method."""
    long_prompt = (PROMPT * 5)[:40]
    for seed in (1, 2):
        before = served.generate(long_prompt)[0]
        new = randomised(load_model(served.path, "float32", "cpu"), seed=seed)
        version = next(versions)
        if method == "nccl":
            served.run(send_by_group(served.actor, new, version, generation=version))
        else:
            path = tmp_path / "w.safetensors"
            served.run(send_by_file(served.actor, new, version, path, method))
        served.model = new
        after = served.generate(long_prompt)[0]
        served.assert_in_sync(after, long_prompt)
        assert set(after.versions) == {version}
        assert served.actor.model_version == version
        stale = hf_logprobs(new, long_prompt, before.token_ids, 1.0)
        assert np.abs(stale - before.logprobs).max() > 0.1  # the update was a large one


def test_fault_17_the_same_path_twice_gives_the_second_file(served, tmp_path):
    path = tmp_path / "same.safetensors"
    for seed in (11, 12, 13):
        new = randomised(load_model(served.path, "float32", "cpu"), seed=seed)
        served.run(send_by_file(served.actor, new, next(versions), path, "checkpoint"))
        served.model = new
        served.assert_in_sync(served.generate()[0])


def test_no_file_in_shared_memory_changes_under_the_engine(served, tmp_path):
    """Versions take turns in a few files. Every other one is not used before the next comes,
    and at the end the file in use is given away by mistake."""
    shelf = WeightShelf(tmp_path / "shelf", in_memory=True)
    for seed in (51, 52, 53, 54):
        served.model = randomised(load_model(served.path, "float32", "cpu"), seed=seed)
        version = next(versions)
        path = shelf.path(version)
        served.run(send_by_file(served.actor, served.model, version, Path(path), "memory"))
        shelf.put(Published(version, path, WeightReceipt(version, 0, 0, 0.0)))
        shelf.sweep({version})
        if seed % 2 == 0:
            served.assert_in_sync(served.generate()[0])
    other = randomised(load_model(served.path, "float32", "cpu"), seed=55)
    served.run(send_by_file(served.actor, served.model, version, Path(path), "memory"))
    set_free(path)
    for _ in range(2):
        SHARED.write(shelf.path(version + 1), named_weights(other))
    served.assert_in_sync(served.generate()[0])


def test_running_requests_continue_under_the_new_version(served, tmp_path):
    """An update in the middle of an answer: each token carries the version that sampled it."""

    async def update_while_sampling():
        params = SamplingParams(n=8, max_tokens=50, min_tokens=50)
        task = asyncio.create_task(served.actor.generate(PROMPT, params, f"t{next(versions)}"))
        while not (await served.actor.stats())["running"]:
            await asyncio.sleep(0.001)
        new = randomised(load_model(served.path, "float32", "cpu"), seed=21)
        version = next(versions)
        await send_by_file(served.actor, new, version, tmp_path / "w.safetensors", "memory")
        return new, version, await task

    old = served.actor.model_version
    served.model, version, completions = served.run(update_while_sampling())
    for completion in completions:
        assert len(completion.token_ids) == 50
        assert set(completion.versions) <= {old, version}
        assert (np.diff(completion.versions) >= 0).all()
    served.assert_in_sync(served.generate()[0])


@pytest.mark.parametrize("policy", ["keep", "wait", "abort"])
def test_fault_16_no_policy_lets_a_running_request_use_cached_keys(served, tmp_path, policy):
    """Each token has the log-prob that its version's weights give it, prefix cache on."""
    long_prompt = (PROMPT * 5)[:32]
    served.generate(long_prompt)  # so that its keys are in the cache
    served.actor._requests.policy = policy
    old, counted = served.actor.model_version, served.actor._requests.aborted

    async def update_while_sampling():
        params = SamplingParams(n=4, max_tokens=30)
        task = asyncio.create_task(served.actor.generate(long_prompt, params, f"p{policy}"))
        while not (await served.actor.stats())["running"]:
            await asyncio.sleep(0.001)
        new = randomised(load_model(served.path, "float32", "cpu"), seed=22)
        await send_by_file(served.actor, new, version, tmp_path / "w.safetensors", "memory")
        return new, await task

    before, version = served.model, next(versions)
    served.model, completions = served.run(update_while_sampling())
    served.actor._requests.policy = "keep"
    assert served.actor._requests.aborted - counted == (policy == "abort")
    allowed = {"keep": {old, version}, "wait": {old}, "abort": {version}}[policy]
    for completion in completions:
        assert set(completion.versions) <= allowed
        by_version = [
            hf_logprobs(model, long_prompt, completion.token_ids, 1.0)
            for model in (before, served.model)
        ]
        expected = np.where(completion.versions == old, *by_version)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-3)
    served.assert_in_sync(served.generate(long_prompt)[0], long_prompt)


async def broken_update(served, meta):
    """A sender that joins the group and dies before its first byte."""
    generation = next(versions)
    spec = WeightGroupSpec("127.0.0.1", free_port(), 2, 1, generation, "gloo", 60.0)
    join = asyncio.to_thread(make_group, spec, 0, True)
    group, _ = await asyncio.gather(join, served.actor.init_weight_group(spec))
    update = WeightUpdate(10_000, "nccl", meta, generation)
    receiving = asyncio.create_task(served.actor.update_weights(update))
    await asyncio.sleep(0)
    group.close()
    with pytest.raises(Exception, match=r"."):
        await receiving
    await served.actor.teardown_weight_group()


def test_a_sender_that_dies_leaves_the_old_weights_in_use(served):
    before = served.actor.model_version
    served.run(broken_update(served, tensor_meta(named_weights(served.model))))
    (completion,) = served.generate()
    served.assert_in_sync(completion)
    assert set(completion.versions) == {before} == {served.actor.model_version}
    new = randomised(load_model(served.path, "float32", "cpu"), seed=31)
    version = next(versions)
    served.run(send_by_group(served.actor, new, version, generation=version))
    served.model = new
    served.assert_in_sync(served.generate()[0])


def test_weights_that_were_loaded_half_are_not_sampled_from(served):
    """vLLM's own reload changes weights as they come; then only a whole version helps."""

    async def update_while_a_request_waits(new, version):
        params = SamplingParams(n=2, max_tokens=8)
        waiting = asyncio.create_task(served.actor.generate(PROMPT, params, f"t{next(versions)}"))
        await send_by_group(served.actor, new, version, generation=version)
        return await waiting

    meta = (*tensor_meta(named_weights(served.model)), TensorMeta(*UNKNOWN_TENSOR))
    served.run(broken_update(served, meta))
    served.model = randomised(load_model(served.path, "float32", "cpu"), seed=32)
    version = next(versions)
    for completion in served.run(update_while_a_request_waits(served.model, version)):
        served.assert_in_sync(completion)
        assert set(completion.versions) == {version}


def test_an_update_refused_before_it_started_changes_nothing(served):
    before = served.actor.model_version
    for update in (WeightUpdate(10_000, "nccl", generation=77), WeightUpdate(10_000, "mail")):
        with pytest.raises(Exception, match=r"generation 77|'mail'"):
            served.run(served.actor.update_weights(update))
    (completion,) = served.generate()
    served.assert_in_sync(completion)
    assert set(completion.versions) == {before}


def test_tensors_without_a_plan_take_vllm_s_own_reload(served, tmp_path):
    new = randomised(load_model(served.path, "float32", "cpu"), seed=41)
    extra = (UNKNOWN_TENSOR[0], torch.ones(UNKNOWN_TENSOR[2]))
    path = str(tmp_path / "old.safetensors")
    digest = write_safetensors(path, [*named_weights(new), extra])
    version = next(versions)
    receipt = served.run(served.actor.update_weights(WeightUpdate(version, "memory", path=path)))
    assert receipt.checksum == digest.value
    served.model = new
    served.assert_in_sync(served.generate()[0])
    again = randomised(load_model(served.path, "float32", "cpu"), seed=42)
    served.run(send_by_file(served.actor, again, next(versions), tmp_path / "w", "memory"))
    served.model = again
    served.assert_in_sync(served.generate()[0])


def test_fault_18_the_gap_to_hf_stays_flat_over_updates_that_change_nothing(served, tmp_path):
    gaps = []
    for _ in range(6):
        path = tmp_path / "w.safetensors"
        served.run(send_by_file(served.actor, served.model, next(versions), path, "memory"))
        (completion,) = served.generate(temperature=0.0, max_tokens=12)
        expected = hf_logprobs(served.model, PROMPT, completion.token_ids, 1.0)
        gaps.append(float(np.abs(completion.logprobs - expected).mean()))
    assert max(gaps) <= 1e-4, json.dumps(gaps)


def test_vllm_and_the_trainer_see_the_same_ids(served):
    tokenizer = load_tokenizer(served.path)
    theirs = served.actor._engine._llm.get_tokenizer()
    for text in ("sort 407193=", " two  spaces ", "\n~!{}", "<|im_end|>x"):
        assert theirs.encode(text) == tokenizer.encode(text)
        assert theirs.decode(tokenizer.encode(text)) == text


def test_wrapper_over_vllm(served):
    wrapper = ModelWrapper(
        served.actor, load_tokenizer(served.path), {"max_response_tokens": 5}, loop=served.loop
    )
    experiences = served.run(wrapper.generate_async(["sort 12=", "sort 21="], n=3))
    assert len(experiences) == 6
    for experience in experiences:
        prompt = experience.tokens[: experience.prompt_length].tolist()
        response = experience.tokens[experience.prompt_length :]
        expected = hf_logprobs(served.model, prompt, response, 1.0)
        np.testing.assert_allclose(experience.logprobs, expected, atol=1e-3)


def test_a_head_size_without_a_kernel_is_refused_at_once(served, tmp_path):
    directory = tmp_path / "model"
    save_model(directory)
    config = json.loads((directory / "config.json").read_text())
    config["num_attention_heads"] = config["num_key_value_heads"] = 4
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="head size 16"):
        build_engine(engine_spec(str(directory), "vllm"))
