"""Ranks whose every operation is collective: rank 0 leads, its peers follow.

Invariant: the peers run operations in the order in which rank 0 runs them, one at a time;
a peer that is lost during one is what the caller hears of.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Optional

from trinity_dask.cluster.rpc import ActorHandle, ActorLost, rpc

SETTLE_S = 5.0
#: operations that are also called on the peers themselves, for their own results
CALLED_EVERYWHERE = "_train_step"

Run = Callable[..., Awaitable[Any]]


class Ensemble:
    """One rank's part. Without ``peers`` on rank 0 and not ``collective``: just runs.

    Args:
        run: ``await run(name, *args)`` executes an operation on this rank.
    """

    def __init__(self, rank: int, run: Run, timeout_s: float) -> None:
        self.rank = rank
        self.collective = False
        self._run = run
        self._timeout_s = timeout_s
        self._peers: tuple[ActorHandle, ...] = ()
        self._results: dict[tuple[Any, ...], asyncio.Future[Any]] = {}
        self._turn: Optional[asyncio.Lock] = None

    def begin(self, collective: bool, peers: Sequence[ActorHandle]) -> None:
        """A new generation of ranks; ``peers`` are those of rank 0."""
        self.collective, self._peers = collective, tuple(peers)
        for waiting in self._results.values():
            waiting.cancel()
        self._results = {}
        self._turn = asyncio.Lock()

    async def call(self, name: str, *args: Any) -> Any:
        """Run an operation here and, on rank 0, on every peer; returns this rank's result."""
        if not self.collective:
            return await self._run(name, *args)
        if self.rank > 0:  # rank 0 says when
            return await asyncio.wait_for(self._result(args), self._timeout_s)
        assert self._turn is not None
        async with self._turn:
            return await self._lead(name, args)

    async def follow(self, name: str, *args: Any) -> None:
        """On a peer: rank 0 runs ``name`` now."""
        waiting = self._result(args) if name == CALLED_EVERYWHERE else None
        try:
            result = await self._run(name, *args)
        except Exception as error:
            if waiting is not None and not waiting.done():
                waiting.set_exception(error)
            raise
        if waiting is not None and not waiting.done():
            waiting.set_result(result)

    def _result(self, args: tuple[Any, ...]) -> asyncio.Future[Any]:
        """What a direct call with these arguments waits for; the last one is the step."""
        key = args[-1:]
        if key not in self._results:
            self._results[key] = asyncio.get_running_loop().create_future()
            for old in list(self._results)[:-2]:
                del self._results[old]
        return self._results[key]

    async def _lead(self, name: str, args: tuple[Any, ...]) -> Any:
        mine = asyncio.ensure_future(self._run(name, *args))
        theirs = [
            asyncio.ensure_future(rpc(peer, "follow", name, *args, timeout=self._timeout_s))
            for peer in self._peers
        ]
        tasks = [mine, *theirs]
        _, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if waiting:  # the loss of a peer may show after the broken collective that it causes
            await asyncio.wait(waiting, timeout=SETTLE_S)
        errors = [task.exception() for task in tasks if task.done() and task.exception()]
        for task in tasks:
            task.cancel()
        if errors:
            raise next((e for e in errors if isinstance(e, ActorLost)), errors[0])  # type: ignore[misc]
        return mine.result()
