"""An engine of another worker, used as if it were the worker's own.

Invariant: a call ends with the engine's answer, the engine's error, or
:class:`~trinity_dask.cluster.rpc.ActorLost`; a caller that is cancelled has its request
aborted at the engine. The engine is found by its slot, so one that was born again
elsewhere is found there.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any

import numpy as np
from distributed import Worker
from distributed.protocol import to_serialize

from trinity_dask.aio import Background, ended
from trinity_dask.cluster.context import current_worker
from trinity_dask.cluster.placement import slots_in
from trinity_dask.cluster.rpc import ActorHandle, ActorLost, exchange
from trinity_dask.models.protocol import Completion, SamplingParams

OP = "trinity_engine"
ABORT_OP = "trinity_engine_abort"
KNOWS_OP = "trinity_engine_knows"
CONNECT_TIMEOUT_S = 30.0
LOCATE_TIMEOUT_S = 120.0
LOCATE_PERIOD_S = 0.2
OF_ENGINES = "engine-"  # begins their slots


# the engine's side ------------------------------------------------------------------------
def serve_engine(worker: Worker, engine: Any) -> None:
    """Answer the remote calls to ``engine``, the one of ``worker``; replaces an earlier one."""
    calls: dict[str, asyncio.Task[Any]] = {}

    async def execute(call_id: str, method: str, args: list[Any], run: str = "") -> dict[str, Any]:
        if run and not engine.serves(run):
            return {"status": "foreign"}
        plain = [arg.tolist() if isinstance(arg, np.ndarray) else arg for arg in args]
        task = asyncio.ensure_future(getattr(engine, method)(*plain))
        calls[call_id] = task
        try:
            result = await task
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            return {"status": "aborted"}
        except Exception as error:  # the caller's to handle, there
            return {"status": "error", "exception": to_serialize(error)}
        finally:
            calls.pop(call_id, None)
        return {
            "status": "OK",
            "result": to_serialize(result),
            "version": engine.model_version,
        }

    async def abort(call_id: str) -> str:
        task = calls.get(call_id)
        if task is not None:
            task.cancel()
        return "OK"

    async def knows(call_id: str) -> bool:
        return call_id in calls

    worker.handlers[OP] = execute
    worker.handlers[KNOWS_OP] = knows
    worker.handlers[ABORT_OP] = abort


# the caller's side ------------------------------------------------------------------------
class RemoteEngine:
    """The sampling half of :class:`~trinity_dask.models.protocol.InferenceEngine`.

    ``slot`` is the engine's (``engine-0``); ``run`` the launch that asks: the engine of another
    one is as good as none. Use it on the event loop of a Dask worker.
    How long a request may take the engine decides. One whose answer is not there after
    ``call_timeout_s`` is asked for, and again every so many seconds: the call ends when the
    engine does not know it or does not answer that.
    """

    def __init__(self, slot: str, call_timeout_s: float, run: str = "") -> None:
        self.slot, self.run = slot, run
        self.model_version = 0
        self._call_timeout_s = call_timeout_s
        self._handle: ActorHandle | None = None

    async def prepare(self) -> None:
        """Find the engine and learn its version.

        Raises:
            TimeoutError: no worker carries the slot, or its engine does not answer.
        """
        deadline = time.monotonic() + LOCATE_TIMEOUT_S
        while True:
            self._handle = await _locate(self.slot, deadline)
            try:
                facts = await self._call("describe")
            except ActorLost:
                facts = None
            if facts is not None:
                self.model_version = facts["model_version"] or 0
                return
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the engine of slot {self.slot!r} at {self._handle.address} did not answer "
                    f"within {LOCATE_TIMEOUT_S:g} s"
                )
            await asyncio.sleep(LOCATE_PERIOD_S)

    async def generate(
        self, prompt_token_ids: list[int], sampling: SamplingParams, request_id: str
    ) -> list[Completion]:
        return await self._found_call("generate", _packed(prompt_token_ids), sampling, request_id)

    async def logprobs(self, token_ids: list[int], temperature: float = 1.0) -> np.ndarray:
        return await self._found_call("logprobs", _packed(token_ids), temperature)

    async def _found_call(self, method: str, *args: Any) -> Any:
        if self._handle is None:
            await self.prepare()
        try:
            return await self._call(method, *args)
        except ActorLost:
            self._handle = None  # looked for again by the next call
            raise

    async def _call(self, method: str, *args: Any) -> Any:
        handle, pool, call_id = self._handle, _worker().rpc, uuid.uuid4().hex
        assert handle is not None
        message = {
            "op": OP,
            "call_id": call_id,
            "method": method,
            "args": [to_serialize(arg) for arg in args],
            "run": self.run,
        }
        call = asyncio.ensure_future(exchange(pool, handle, method, CONNECT_TIMEOUT_S, message))
        try:
            while not (await asyncio.wait({call}, timeout=self._call_timeout_s))[0]:
                if not await _tell(handle, KNOWS_OP, call_id) and not call.done():
                    raise TimeoutError(
                        f"the engine of slot {self.slot!r} knows nothing of {method!r} any more, "
                        f"{self._call_timeout_s:g} s after it was last heard of"
                    )
            reply = call.result()
        except (asyncio.CancelledError, TimeoutError):
            _aborts.start(_tell(handle, ABORT_OP, call_id))  # beside: the caller is going away
            raise
        finally:
            await ended({call})
        if not isinstance(reply, dict) or reply.get("status") in ("aborted", "foreign"):
            # a worker without the handler (its engine is not there yet) answers None
            raise ActorLost(handle, method, None)
        if reply["status"] != "OK":
            raise reply["exception"]
        self.model_version = reply["version"]
        return reply["result"]


def _packed(token_ids: list[int]) -> np.ndarray:
    """One frame on the wire: Dask walks through a list, and 8192 ids are as many frames."""
    return np.asarray(token_ids, dtype=np.int32)


_aborts = Background("a request could not be aborted at its engine")


async def _tell(handle: ActorHandle, op: str, call_id: str) -> Any:
    """Send a message about a call. Raises ActorLost, or TimeoutError without a reply."""
    message = {"op": op, "call_id": call_id}
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            return await exchange(_worker().rpc, handle, op, CONNECT_TIMEOUT_S, message)
    except TimeoutError:
        raise TimeoutError(
            f"the engine of slot {handle.slot!r} at {handle.address} did not answer within "
            f"{CONNECT_TIMEOUT_S:g} s"
        ) from None


async def _locate(slot: str, deadline: float) -> ActorHandle:
    """The worker that carries ``slot``. Raises TimeoutError when there is none in time."""
    while True:
        found = await engine_slots()
        if slot in found:
            return ActorHandle(slot, found[slot], slot)
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"no worker carries the engine slot {slot!r} after {LOCATE_TIMEOUT_S:g} s; "
                f"present: {', '.join(sorted(found)) or 'none'}"
            )
        await asyncio.sleep(LOCATE_PERIOD_S)


async def engine_slots() -> dict[str, str]:
    """Slot and worker address of every engine, as the Dask scheduler knows them now."""
    slots = slots_in(await _worker().scheduler.identity(n_workers=-1))
    return {slot: address for slot, address in slots.items() if slot.startswith(OF_ENGINES)}


def _worker() -> Worker:
    worker = current_worker()
    if worker is None:
        raise RuntimeError("a remote engine is used from inside a Dask worker; here is none")
    return worker
