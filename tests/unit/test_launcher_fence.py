"""Whose a job is: a launch that was cut off, and the one that took its job over."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trinity_dask.buffer.experience_buffer import ExperienceBuffer
from trinity_dask.config.schema_buffer import ExperienceBufferConfig
from trinity_dask.experience import EID, Experience
from trinity_dask.experience.schema import to_table
from trinity_dask.launcher import job_lock
from trinity_dask.launcher.job_lock import EXCLUSIVE, SHARED, JobInUse, JobLock, Superseded
from trinity_dask.models.actor import remote
from trinity_dask.models.actor.actor import EngineActor, ready_engine
from trinity_dask.models.protocol import EngineSpec, SamplingParams

HOLD = """
import asyncio, sys
from trinity_dask.launcher.job_lock import JobLock
async def main():
    async with JobLock(sys.argv[1], 5.0, launch=sys.argv[2]) as lock:
        print("held", flush=True)
        await lock.superseded()
asyncio.run(main())
"""


@pytest.fixture
def stopped(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the job as launch ``run/0`` and stands still."""
    words = [sys.executable, "-c", HOLD, str(tmp_path), "run/0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, text=True, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        process.send_signal(signal.SIGSTOP)
        yield process
        process.kill()


def test_the_next_launch_takes_the_job_and_the_stopped_one_ends_when_it_wakes(
    tmp_path: Path, stopped: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_lock, "FENCE_S", 0.1)

    async def main() -> None:
        with pytest.raises(JobInUse, match="run/0"):  # somebody else's run does not get it
            async with JobLock(tmp_path, 0.2, launch="other/1", supersedes=["other/0"]):
                pass
        async with JobLock(tmp_path, 0.2, launch="run/1", supersedes=["run/0"]) as lock:
            lock.require()
            stopped.send_signal(signal.SIGCONT)
            _, told = await asyncio.to_thread(stopped.communicate, timeout=60)
            assert stopped.returncode == 1
            assert "taken over by launch run/1" in told
            assert "run/0, was cut off from its scheduler and writes nothing" in told
            watch = asyncio.ensure_future(lock.superseded())
            deadline = time.monotonic() + 60
            while lock._not_locked:  # what the other one held is held by this one
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            watch.cancel()
            with pytest.raises(JobInUse):
                async with JobLock(tmp_path, 0.0):
                    pass

    asyncio.run(main())


def test_without_locks_the_later_launch_ends_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_lock, "_try", lambda *_: True)

    async def main() -> None:
        async with JobLock(tmp_path, launch="a/0") as first:
            first.require()
            async with JobLock(tmp_path, launch="b/0") as second:
                second.require()
                with pytest.raises(Superseded, match="taken over by launch b/0"):
                    await first.superseded()

    asyncio.run(main())


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 5}'])
def test_a_lock_file_that_names_nobody_takes_nothing_away(tmp_path: Path, text: str) -> None:
    async def main() -> None:
        async with JobLock(tmp_path, launch="a/0") as lock:
            (tmp_path / "run.lock").write_text(text)
            lock.require()
            os.unlink(tmp_path / "run.lock")
            lock.require()

    asyncio.run(main())


def test_members_of_a_job_that_share_a_lock_do_not_end_each_other(tmp_path: Path) -> None:
    def claims(name: str) -> tuple[tuple[str, int], ...]:
        return (("run.lock", SHARED), (f"{name}.lock", EXCLUSIVE))

    async def main() -> None:
        async with (
            JobLock(tmp_path, claims=claims("trainer"), launch="t/0") as one,
            JobLock(tmp_path, claims=claims("explorer"), launch="e/0") as two,
        ):
            assert json.loads((tmp_path / "run.lock").read_text())["launch"] == "e/0"
            one.require()
            two.require()

    asyncio.run(main())


def test_a_batch_of_a_launch_that_lost_its_job_is_not_committed(tmp_path: Path) -> None:
    table = to_table([Experience(np.arange(4), 2, eid=EID(1, 0, 0), reward=1.0)])

    def guard() -> None:
        raise Superseded("it is another's")

    async def main() -> None:
        buffer = ExperienceBuffer(ExperienceBufferConfig(path=str(tmp_path / "store")))
        await buffer.prepare()
        with pytest.raises(Superseded):
            await buffer.commit(1, table, {}, guard)
        assert await buffer.manifests() == []
        await buffer.commit(1, table, {})
        assert [m.batch_id for m in await buffer.manifests()] == [1]

    asyncio.run(main())


def engine(run: str) -> EngineActor:
    return EngineActor(EngineSpec("engine-0", "fake", "", {"fake_latency_s": 0.0}, run=run))


def test_a_worker_s_engine_is_that_of_the_launch_that_asks() -> None:
    async def main() -> None:
        old = engine("run")
        await old.open()
        assert await ready_engine(1.0, "run") is old
        with pytest.raises(TimeoutError, match=r"engine of run run\.1"):
            await ready_engine(0.1, "run.1")
        waits = asyncio.ensure_future(ready_engine(30.0, "run.1"))
        await asyncio.sleep(0.05)
        new = engine("run.1")
        await new.open()
        assert await waits is new
        assert await ready_engine(1.0) is new  # who names none takes what there is
        for each in (old, new):
            await each.close()

    asyncio.run(main())


def test_an_engine_elsewhere_answers_its_own_launch_only(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = SimpleNamespace(handlers={}, rpc=None)

    async def exchange(pool: Any, handle: Any, method: str, timeout: float, message: Any) -> Any:
        message = {**message, "args": [arg.data for arg in message.get("args", [])]}
        reply = await worker.handlers[message.pop("op")](**message)
        return {**reply, "result": reply["result"].data} if "result" in reply else reply

    monkeypatch.setattr(remote, "exchange", exchange)
    monkeypatch.setattr(remote, "_worker", lambda: worker)

    async def main() -> None:
        there = engine("run.1")
        await there.prepare()
        await there.open()
        remote.serve_engine(worker, there)  # type: ignore[arg-type]
        for run, answers in (("run.1", True), ("", True), ("run", False)):
            found = remote.RemoteEngine("engine-0", 5.0, run)
            found._handle = remote.ActorHandle("engine-0", "tcp://127.0.0.1:1", "engine-0")
            if answers:
                assert await found.generate([1, 2], SamplingParams(max_tokens=2), "r")
            else:
                with pytest.raises(remote.ActorLost):
                    await found.generate([1, 2], SamplingParams(max_tokens=2), "r")
        await there.close()

    asyncio.run(main())
