"""Actors and tasks of the cluster tests; workers import this module."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from trinity_dask.cluster import (
    ActorHandle,
    ActorRef,
    call,
    create_actor,
    current_worker,
    local_actor,
    on_lost,
    recreate_actor,
    release_actor,
    rpc,
)


class Counter:
    """An actor with something of everything."""

    def __init__(self) -> None:
        self.n = 0

    async def add(self, k: int) -> int:
        self.n += k
        return self.n

    async def pid(self) -> int:
        return os.getpid()

    async def worker_name(self) -> str:
        worker = current_worker()
        assert worker is not None
        return str(worker.name)

    async def fail(self) -> None:
        raise ValueError("no such luck")

    async def fail_key(self) -> None:
        raise KeyError("mine")

    async def lock(self) -> Any:
        return threading.Lock()

    async def wait(self) -> None:
        await asyncio.wait_for(asyncio.Event().wait(), 300)

    async def same(self, thing: object) -> object:
        return thing

    def start_grandchild(self, own_session: bool) -> int:
        """A process that only SIGKILL or its own deadline ends; returns its pid."""
        code = (
            "import signal, sys, time\n"
            "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
            "print('up', flush=True)\n"
            "time.sleep(600)\n"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=own_session
        )
        assert process.stdout is not None
        process.stdout.readline()
        return process.pid


class Control:
    """An actor that owns and calls another one, always from a task of its own."""

    def __init__(self) -> None:
        self.ref: ActorRef | None = None
        self.waiting: asyncio.Task[Any] | None = None

    async def make(self, cls: type, slot: str, key: str) -> ActorHandle:
        job = create_actor(cls, slot=slot, key=key, timeout=60)
        self.ref = await asyncio.create_task(job)
        return self.ref.handle

    async def ask(self, handle: ActorHandle, method: str, *args: object) -> object:
        return await asyncio.create_task(rpc(handle, method, *args, timeout=60))

    async def ask_for(self, handle: ActorHandle, method: str, timeout: float) -> object:
        return await rpc(handle, method, timeout=timeout)

    async def ask_in_thread(self, handle: ActorHandle) -> int:
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()

        def work() -> None:  # a bare thread: no context variables
            value = call(None, handle, "add", 1, timeout=60)
            loop.call_soon_threadsafe(done.set_result, value)

        threading.Thread(target=work).start()
        return await done

    async def is_same_object(self, handle: ActorHandle) -> bool:
        thing = object()
        returned = await rpc(handle, "same", thing, timeout=60)
        return returned is thing and local_actor(handle.key) is not None

    async def watch(self) -> None:
        assert self.ref is not None
        self.lost = asyncio.Event()
        self.losses = 0

        def note(ref: ActorRef) -> None:
            self.losses += 1
            self.lost.set()

        on_lost(self.ref, note)

    async def lost_event(self, timeout: float) -> None:
        await asyncio.wait_for(self.lost.wait(), timeout)

    async def start_waiting(self, handle: ActorHandle) -> None:
        self.waiting = asyncio.create_task(rpc(handle, "wait", timeout=200))
        # let it reach the other side
        await rpc(handle, "pid", timeout=60)

    async def waited(self) -> BaseException | None:
        assert self.waiting is not None
        await asyncio.wait({self.waiting}, timeout=60)
        return self.waiting.exception()

    async def recreate(self, timeout: float) -> ActorHandle:
        assert self.ref is not None
        return (await recreate_actor(self.ref, timeout)).handle

    async def release(self) -> None:
        if self.ref is not None:
            await release_actor(self.ref)


async def wait_for_cancel(started: str, ended: str) -> None:
    """A task that leaves a file when it runs and one when it is cancelled."""
    Path(started).touch()
    try:
        await asyncio.wait_for(asyncio.Event().wait(), 300)
    except asyncio.CancelledError:
        Path(ended).touch()
        raise


async def quick() -> str:
    return "done"
