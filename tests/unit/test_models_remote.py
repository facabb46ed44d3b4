"""What a request to an engine elsewhere looks like on the wire."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from distributed.protocol import dumps, loads

from trinity_dask.cluster.rpc import ActorHandle
from trinity_dask.models.actor import remote
from trinity_dask.models.protocol import SamplingParams


def test_a_long_prompt_is_one_frame_and_arrives_as_a_list(monkeypatch: Any) -> None:
    """Dask walks through a list that it is given to serialise, and sends each item as a frame."""
    prompt, handlers, frames = list(range(8192)), {}, []

    class Engine:
        model_version = 3

        async def generate(self, ids: list[int], sampling: Any, name: str) -> Any:
            assert {type(token) for token in ids} == {int}
            return [ids, sampling.n, name]

        async def logprobs(self, ids: list[int], temperature: float) -> Any:
            assert type(ids) is list
            return np.full(len(ids) - 1, temperature, np.float32)

    class Worker:
        rpc = None

    Worker.handlers = handlers

    async def exchange(pool: Any, handle: Any, method: str, timeout: float, message: Any) -> Any:
        sent = dumps(message)
        frames.append(len(sent))
        arrived = loads(sent)
        arrived.pop("op")
        return loads(dumps(await handlers[remote.OP](**arrived)))

    monkeypatch.setattr(remote, "exchange", exchange)
    monkeypatch.setattr(remote, "_worker", Worker)
    remote.serve_engine(Worker, Engine())
    engine = remote.RemoteEngine("engine-0", 10.0)
    engine._handle = ActorHandle("engine-0", "tcp://127.0.0.1:1", "engine-0")

    async def main() -> None:
        assert await engine.generate(prompt, SamplingParams(n=2), "r") == [prompt, 2, "r"]
        found = await engine.logprobs(prompt, 0.5)
        np.testing.assert_array_equal(found, np.full(8191, 0.5, np.float32))

    asyncio.run(main())
    assert engine.model_version == 3
    assert max(frames) < 20
