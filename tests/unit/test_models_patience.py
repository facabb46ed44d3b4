"""The limit of a request to an engine: what waits is not late, what is stuck ends."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from models_support import PROMPT, engine_spec, run, save_model

from trinity_dask.cluster.rpc import ActorHandle
from trinity_dask.models.actor import remote
from trinity_dask.models.actor.actor import EngineActor
from trinity_dask.models.fake_engine import FakeEngine
from trinity_dask.models.protocol import Completion, SamplingParams, WeightUpdate
from trinity_dask.models.torch.engine import TorchEngine

LOST = 7  # a prompt that the engine loses


class FewAtOnce(FakeEngine):
    """Decodes two requests together, in order, and loses one of them."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.places = asyncio.Semaphore(2)

    async def generate(self, ids: list[int], sampling: Any, name: str) -> list[Completion]:
        if ids == [LOST]:
            await asyncio.Event().wait()
        async with self.places:
            return await super().generate(ids, sampling, name)


class Slow(FakeEngine):
    """One answer of many tokens, of which it tells."""

    tokens = 0

    def sampled_tokens(self, request_id: str) -> int:
        return self.tokens

    async def generate(self, ids: list[int], sampling: Any, name: str) -> list[Completion]:
        for _ in range(sampling.max_tokens):
            await asyncio.sleep(self.latency_s)
            self.tokens += 1
        await asyncio.sleep(600.0 if ids == [LOST] else 0.0)
        return await super().generate(ids, sampling, name)


async def opened(engine_class: type[FakeEngine], **config: float) -> EngineActor:
    spec = engine_spec("", f"{__file__}:{engine_class.__name__}", **config)
    engine = EngineActor(spec)
    await engine.prepare()
    await engine.open()
    return engine


def ask(engine: EngineActor, token: int, max_tokens: int = 1) -> asyncio.Task[Any]:
    sampling = SamplingParams(max_tokens=max_tokens)
    return asyncio.create_task(engine.generate([token], sampling, f"r{token}"))


def test_what_waits_in_the_queue_of_the_engine_is_not_late():
    async def main():
        engine = await opened(FewAtOnce, fake_latency_s=0.02, request_timeout_s=2.0)
        asked = [ask(engine, 10 + n) for n in range(400)]
        started = asyncio.get_running_loop().time()
        found = await asyncio.gather(*asked)
        assert asyncio.get_running_loop().time() - started > 2.0  # more than the limit
        await engine.close()
        return found

    assert len(run(main())) == 400


def test_a_request_that_the_engine_loses_ends_while_others_go_on():
    async def main():
        engine = await opened(FewAtOnce, fake_latency_s=0.02, request_timeout_s=0.5)
        before = [ask(engine, 10 + n) for n in range(4)]
        lost = ask(engine, LOST)
        after = [ask(engine, 100 + n) for n in range(200)]
        with pytest.raises(TimeoutError, match=r"request r7 .*request_timeout_s = 0\.5 s"):
            await lost
        assert not all(task.done() for task in after)
        await asyncio.gather(*before, *after)
        await engine.close()

    run(main())


def test_an_engine_that_answers_nobody_is_given_up_by_all():
    async def main():
        engine = await opened(FakeEngine, fake_latency_s=600.0, request_timeout_s=0.2)
        asked = [ask(engine, n) for n in range(20)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert {type(error) for error in found} == {TimeoutError}
        assert (await engine.stats())["running"] == 0
        await engine.close()

    run(main())


def test_an_answer_that_grows_may_take_longer_and_one_that_stopped_ends():
    async def main():
        engine = await opened(Slow, fake_latency_s=0.05, request_timeout_s=0.3)
        assert len(await ask(engine, 1, max_tokens=30)) == 1
        stopped = ask(engine, LOST, max_tokens=10)
        with pytest.raises(TimeoutError, match="did not go on with request r7"):
            await stopped
        await engine.close()

    run(main())


def test_no_request_is_late_while_the_weights_change(monkeypatch, tmp_path):
    async def main():
        engine = await opened(FakeEngine, fake_latency_s=1.2, request_timeout_s=0.5)
        begun = asyncio.Event()

        async def slowly(self: Any, update: WeightUpdate) -> Any:
            begun.set()
            await asyncio.sleep(1.0)
            raise OSError("it does not matter how it ends")

        monkeypatch.setattr(FakeEngine, "update_weights", slowly)
        asked = ask(engine, 1)
        with pytest.raises(OSError, match="does not matter"):
            await engine.update_weights(WeightUpdate(1, "memory", path="none"))
        assert begun.is_set()
        assert len(await asked) == 1
        await engine.close()

    run(main())


def test_the_torch_engine_says_what_is_in_its_batch(tmp_path):
    """One that waits for the batch before it has sampled nothing."""

    async def main():
        engine = TorchEngine(engine_spec(save_model(tmp_path), max_num_seqs=1))
        await engine.prepare()
        sampling = SamplingParams(max_tokens=50, min_tokens=50)
        asked = [asyncio.create_task(engine.generate(PROMPT, sampling, name)) for name in "ab"]
        seen: dict[str, set[int]] = {"a": set(), "b": set()}
        while not asked[0].done():
            for name, counts in seen.items():
                counts.add(engine.sampled_tokens(name))
            await asyncio.sleep(0.001)
        assert len(seen["a"]) > 3
        assert 0 in seen["b"]
        await asyncio.gather(*asked)
        assert engine.sampled_tokens("a") == engine.sampled_tokens("b") == 0
        await engine.close()

    run(main())


def remote_engine(monkeypatch: Any, engine: Any, limit_s: float) -> remote.RemoteEngine:
    """``engine``, used over the handlers of its worker; nothing of it goes over a wire."""

    class Worker:
        rpc = None

    Worker.handlers = {}

    async def exchange(pool: Any, handle: Any, method: str, timeout: float, message: Any) -> Any:
        message = dict(message)
        op = message.pop("op")
        if "args" in message:
            message["args"] = [arg.data for arg in message["args"]]
        reply = await Worker.handlers[op](**message)
        return {**reply, "result": reply["result"].data} if isinstance(reply, dict) else reply

    monkeypatch.setattr(remote, "exchange", exchange)
    monkeypatch.setattr(remote, "_worker", Worker)
    remote.serve_engine(Worker, engine)
    found = remote.RemoteEngine("engine-0", limit_s)
    found._handle = ActorHandle("engine-0", "tcp://127.0.0.1:1", "engine-0")
    return found


class Waits:
    """An engine in whose queue every request waits until it is let go."""

    model_version = 0

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def generate(self, ids: list[int], sampling: Any, name: str) -> Any:
        await self.go.wait()
        return np.asarray(ids)


def test_a_runner_asks_again_before_it_gives_up_an_engine_elsewhere(monkeypatch):
    async def main():
        engine = Waits()
        there = remote_engine(monkeypatch, engine, 0.05)
        asked = asyncio.create_task(there.generate([1, 2], SamplingParams(), "r"))
        await asyncio.sleep(0.5)  # ten times its limit
        assert not asked.done()
        engine.go.set()
        assert list(await asked) == [1, 2]

    asyncio.run(main())


def test_an_engine_that_knows_nothing_of_a_request_any_more_is_given_up(monkeypatch):
    async def main():
        there = remote_engine(monkeypatch, Waits(), 0.05)

        async def forgets(call_id: str) -> bool:
            return False

        remote._worker().handlers[remote.KNOWS_OP] = forgets
        with pytest.raises(TimeoutError, match="knows nothing of 'generate' any more"):
            await there.generate([1, 2], SamplingParams(), "r")

    asyncio.run(main())
