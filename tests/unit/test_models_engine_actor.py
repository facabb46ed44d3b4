"""The actor gates rollouts, bounds requests, and is found by its worker's tasks."""

import asyncio
import subprocess
import sys
import time

import numpy as np
import pytest
from models_support import engine_spec, run

from trinity_dask.config import Config, ConfigError, resolve
from trinity_dask.models.actor.actor import EngineActor, build_engine, ready_engine
from trinity_dask.models.fake_engine import FakeEngine
from trinity_dask.models.protocol import SamplingParams, WeightUpdate
from trinity_dask.models.vllm.engine import LoopThread
from trinity_dask.run.names import check_names
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


def test_the_engine_before_is_over_when_its_successor_loads(monkeypatch):
    """A device has room for one: after its control worker was lost a run makes it again."""
    events, load, unload = [], FakeEngine.prepare, FakeEngine.close

    async def prepare(self):
        events.append("load")
        await asyncio.sleep(0.1)
        facts = await load(self)
        events.append("loaded")
        return facts

    async def close(self):
        await unload(self)
        events.append("closed")

    monkeypatch.setattr(FakeEngine, "prepare", prepare)
    monkeypatch.setattr(FakeEngine, "close", close)

    async def main():
        first, second = actor(), None
        await first.prepare()
        second = actor()
        loading = asyncio.create_task(second.prepare())
        await asyncio.sleep(0.05)  # lost again while it loads
        third = actor()
        await third.prepare()
        with pytest.raises(RuntimeError, match="was closed while it was loading"):
            await loading
        await third.close()

    run(main())
    assert events == ["load", "loaded", "closed"] * 3


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


def test_the_engine_of_this_process_is_the_newest_until_it_is_closed():
    async def main():
        engine = actor()
        await engine.open()
        assert await ready_engine(1.0) is engine
        newer = actor()
        await newer.open()
        await engine.close()
        assert await ready_engine(1.0) is newer
        await newer.close()
        with pytest.raises(TimeoutError, match="did not serve"):
            await ready_engine(0.05)

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
    with pytest.raises(ValueError, match="unknown engine_type 'tensorrt'"):
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


OWN_ENGINE = """
from dataclasses import replace

import numpy as np

from trinity_dask.models import ENGINES
from trinity_dask.models.fake_engine import FakeEngine


@ENGINES.register_module("NAME")
class EchoEngine(FakeEngine):
    async def generate(self, prompt_token_ids, sampling, request_id):
        answers = await super().generate(prompt_token_ids, sampling, request_id)
        n = len(prompt_token_ids)
        said = np.asarray(prompt_token_ids, dtype=np.int32)
        return [
            replace(a, token_ids=said, logprobs=np.zeros(n, np.float32), versions=said * 0)
            for a in answers
        ]
"""


@pytest.mark.parametrize("by_path", [True, False])
def test_a_user_s_engine_serves_by_its_path_and_by_its_plugin_s_name(tmp_path, by_path):
    file = tmp_path / "own_engine.py"
    name = f"{file}:EchoEngine" if by_path else "echo"
    file.write_text(OWN_ENGINE.replace("NAME", "another" if by_path else name))
    spec = engine_spec("", name)
    spec.plugin_dirs = () if by_path else (str(tmp_path),)

    async def main():
        engine = EngineActor(spec)
        facts = await engine.prepare()
        await engine.open()
        (completion,) = await engine.generate([5, 6, 7], SamplingParams(max_tokens=4), "r")
        await engine.close()
        return facts, completion.token_ids.tolist()

    facts, tokens = run(main())
    assert facts["engine"] == spec.engine_type
    assert tokens == [5, 6, 7]


def test_a_misspelt_engine_is_refused_before_anything_starts():
    config = Config()
    config.model.model_path = "m"
    config.buffer.explorer_input.taskset.path = "tasks.jsonl"
    config.buffer.explorer_input.taskset.reward_fn = "math_reward"
    config.explorer.rollout_model.engine_type = "torhc"
    with pytest.raises(ConfigError, match=r"rollout_model\.engine_type: .*did you mean 'torch'"):
        check_names(resolve(config))


def test_a_loop_whose_thread_begins_late_takes_work_and_a_closed_one_none():
    class Late(LoopThread):
        def _main(self) -> None:
            time.sleep(0.2)  # a busy machine
            super()._main()

    async def main() -> str:
        thread = Late("late")
        answer = await thread.run(asyncio.sleep(0, "done"))
        await thread.close()
        with pytest.raises(RuntimeError, match="late is closed"):
            await thread.run(asyncio.sleep(0))
        await thread.close()
        return answer

    assert asyncio.run(main()) == "done"
