"""The actor gates rollouts, bounds requests, and is found by its worker's tasks."""

import asyncio
import subprocess
import sys

import numpy as np
import pytest
from models_support import engine_spec, run

from trinity_dask.models.actor.actor import EngineActor, build_engine, local_engine
from trinity_dask.models.protocol import SamplingParams, WeightUpdate
from trinity_dask.weights.files import write_safetensors


def actor(**config) -> EngineActor:
    return EngineActor(engine_spec("", "fake", **config))


def test_generate_waits_until_the_engine_is_opened(tmp_path):
    path = str(tmp_path / "w.safetensors")
    write_safetensors(path, [])

    async def main():
        engine = actor()
        await engine.prepare()
        waiting = asyncio.create_task(engine.generate([1], SamplingParams(), "r"))
        await engine.update_weights(WeightUpdate(3, "memory", path=path))
        assert len(await engine.logprobs([1, 2])) == 1
        assert not waiting.done()
        assert (await engine.describe())["open"] is False
        await engine.open()
        (completion,) = await waiting
        assert set(completion.versions) == {3}
        assert (await engine.describe())["model_version"] == engine.model_version == 3
        await engine.close()

    run(main())


def test_the_wait_for_opening_has_a_deadline():
    async def main():
        engine = actor(prepare_timeout_s=0.05)
        await engine.prepare()
        with pytest.raises(TimeoutError, match=r"engine-0 was not opened within 0\.05 s"):
            await engine.generate([1], SamplingParams(), "r")
        await engine.close()

    run(main())


def test_a_request_has_a_deadline():
    async def main():
        engine = actor(fake_latency_s=600.0, request_timeout_s=0.05)
        await engine.prepare()
        await engine.open()
        with pytest.raises(TimeoutError, match=r"request r7 .*request_timeout_s = 0\.05 s"):
            await engine.generate([1], SamplingParams(), "r7")
        assert (await engine.stats())["running"] == 0
        await engine.close()

    run(main())


def test_local_engine_is_the_one_of_this_process_until_it_is_closed():
    async def main():
        engine = actor()
        await engine.prepare()
        assert local_engine() is engine
        newer = actor()
        await engine.close()
        assert local_engine() is newer
        await newer.close()
        with pytest.raises(RuntimeError, match="has no engine"):
            local_engine()

    run(main())


def test_using_an_unprepared_or_closed_actor_is_an_error():
    async def main():
        engine = actor()
        with pytest.raises(RuntimeError, match="not prepared"):
            await engine.logprobs([1, 2])
        await engine.prepare()
        await engine.close()
        await engine.close()
        with pytest.raises(RuntimeError, match="closed"):
            await engine.stats()

    run(main())


def test_unknown_engine_type_names_the_known_ones():
    with pytest.raises(ValueError, match="vllm, torch, fake"):
        build_engine(engine_spec("", "tensorrt"))


def test_prepare_reports_facts_and_failures():
    async def main():
        facts = await actor(fake_latency_s=0.5).prepare()
        assert facts["slot"] == "engine-0"
        assert facts["latency_s"] == 0.5
        with pytest.raises(ValueError, match="not a directory"):
            await EngineActor(engine_spec("/nowhere", "torch")).prepare()

    run(main())


def test_importing_the_package_imports_no_heavy_library():
    """A fresh interpreter, since this one has loaded them."""
    code = (
        "import sys, trinity_dask.models, trinity_dask.models.actor.actor,"
        " trinity_dask.models.wrapper, trinity_dask.weights.broadcast,"
        " trinity_dask.models.vllm.engine, trinity_dask.models.vllm.plugin,"
        " trinity_dask.models.checks, trinity_dask.models.fake_engine,"
        " trinity_dask.demo.sort_digits;"
        " print(sorted({'torch', 'transformers', 'vllm'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert result.stdout.strip() == "[]"


def test_engine_results_are_arrays_of_the_protocol():
    async def main():
        engine = actor()
        await engine.prepare()
        await engine.open()
        (completion,) = await engine.generate([1], SamplingParams(), "r")
        assert completion.token_ids.dtype == np.int32
        await engine.close()

    run(main())
