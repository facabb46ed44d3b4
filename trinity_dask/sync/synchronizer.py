"""The synchronizer: a Dask actor that lets explorers and trainer meet, in four styles.

Invariant: every waiter is woken by an event or by its deadline and leaves no status behind;
weights are read from the trainer only while it stands still (it waits here, or has stopped);
after a transfer every engine's checksum equals the trainer's, or the run stops.

The decisions are :class:`~trinity_dask.sync.state.SyncState`; this module waits
and moves bytes. The calls that go by Trinity-RFT's names are in
:mod:`~trinity_dask.sync.sync_calls` and :mod:`~trinity_dask.sync.sync_group`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Optional

from distributed import Client

from trinity_dask.cluster.rpc import ActorHandle
from trinity_dask.config.schema import Config, SynchronizerConfig
from trinity_dask.engines.pool import EnginePool
from trinity_dask.sync.state import RunningStatus
from trinity_dask.sync.sync_boundary import SyncBoundary
from trinity_dask.sync.sync_calls import TRAINER
from trinity_dask.sync.sync_registry import abandon, get_or_create
from trinity_dask.sync.transport import WeightTransport

log = logging.getLogger("trinity_dask.synchronizer")

DEFAULT_NAME = "explorer"


class Synchronizer(SyncBoundary):
    """One per run. All methods run on its worker's event loop.

    Explorers whose engines are in this process are attached with their pool and transport;
    the others call :meth:`explorer_acquire` and load what they are given themselves
    (:class:`~trinity_dask.sync.remote_sync.RemoteSynchronizer`).
    """

    def __init__(
        self, cfg: SynchronizerConfig, job_dir: Optional[str] = None, run_id: str = "run"
    ) -> None:
        super().__init__(cfg, job_dir, run_id)

    @classmethod
    async def get_actor(
        cls, config: Config, client: Optional[Client] = None, timeout_s: float = 60.0
    ) -> ActorHandle:
        """The synchronizer of the run that ``config`` names; created, on the control worker,
        by whoever asks first. It lives until every module that was added is gone."""
        return await get_or_create(cls, config, client, timeout_s)

    async def leave_with_modules(self, name: str) -> None:
        """This synchronizer is shared under ``name``, until the last module is gone."""
        self.on_abandoned = abandon(name)

    async def is_alive(self) -> bool:
        return True

    async def close(self) -> None:
        """Nobody will ask any more: the published files go."""
        await asyncio.to_thread(self._carrier.shelf.remove_all)

    # set-up ---------------------------------------------------------------------------
    def attach(
        self,
        pool: EnginePool,
        transport: WeightTransport,
        rows_available: Callable[[], bool] = lambda: False,
        ensure_trainer: Optional[Callable[[], Awaitable[None]]] = None,
    ) -> None:
        """:meth:`attach_trainer` and :meth:`attach_explorer` for a run with one of each."""
        self.attach_trainer(rows_available, ensure_trainer)
        self.attach_explorer(DEFAULT_NAME, pool, transport)

    def attach_trainer(
        self,
        rows_available: Callable[[], bool] = lambda: False,
        ensure_trainer: Optional[Callable[[], Awaitable[None]]] = None,
        writes_blocked: Callable[[], bool] = lambda: False,
    ) -> None:
        """``rows_available()`` says whether the buffer could serve the next train step,
        ``writes_blocked()`` whether an explorer waits for room in it; ``ensure_trainer()``
        brings back trainer ranks that died while they were waiting."""
        self._rows_available, self._writes_blocked = rows_available, writes_blocked
        if ensure_trainer is not None:
            self._carrier.ensure_trainer = ensure_trainer

    def attach_explorer(self, name: str, pool: EnginePool, transport: WeightTransport) -> None:
        """The engines of ``name`` are in this process; the synchronizer loads into them.

        Raises:
            ValueError: method nccl has its one explorer already.
        """
        self.state.explorer_joined(name)
        self._carrier.attach(name, pool, transport)

    def set_trainer_rank0(self, handle: ActorHandle) -> None:
        self._carrier.trainer.rank0 = handle

    async def register_explorer(self, name: str, submitted: int = 0) -> int:
        """``name``, which has begun ``submitted`` batches (before it was resumed), takes part
        from now on; returns the version its engines serve (-1: the start model). One that was
        lost or has stopped begins anew.

        Raises:
            ValueError: method nccl has its one explorer already.
        """
        self.state.explorer_joined(name)
        explorer = self.state.explorers[name]
        explorer.submitted = max(explorer.submitted, submitted)
        await self._notify()
        return self.state.explorers[name].version

    async def admit(self, name: str) -> int:
        """Let the attached engines of ``name``, which joins a trainer that is there, serve.

        They get the trainer's weights first, unless it is still at the start model that they
        hold already. Returns the version they serve.
        """
        state = self.state
        if state.trainer_version > 0:
            await self._wait(
                lambda: state.offer(name) is not None or state.trainer_lost,
                lambda: f"explorer {name!r}: the first weights",
            )
        version = state.offer(name)
        if version is not None:
            await self._load(name, version)
        state.explorer_running(name, state.next_required(state.progress + self.cfg.sync_offset))
        pool = self._carrier.pool(name)
        await pool.mark_ready(pool.slots())
        await self._notify()
        return state.explorers[name].version

    async def initial_sync(self, trainer_step: int, progress: int) -> dict[str, float]:
        """Send the trainer's weights as version ``trainer_step`` before anything runs."""
        self.state.trainer_joined(trainer_step, progress)
        self.state.trainer_starved(trainer_step, progress)  # nothing to train on yet
        for name in self._carrier.names:
            await self._first_weights(name, trainer_step, progress)
        self.state.trainer_running()
        return dict(self.metrics)

    async def _first_weights(self, name: str, version: int, progress: int) -> None:
        await self._load(name, version)
        next_required = self.state.next_required(progress + self.cfg.sync_offset)
        self.state.explorer_running(name, next_required)
        pool = self._carrier.pool(name)
        await pool.mark_ready(pool.slots())

    async def trainer_joined(self, step: int, progress: int = 0) -> None:
        """A trainer of another process is ready at ``step``; its weights can be fetched."""
        self.state.trainer_joined(step, progress)
        self._carrier.shelf.users.add(TRAINER)
        if self.cfg.sync_method != "nccl":
            await self._publish(step)
        await self._notify()

    # trainer side ---------------------------------------------------------------------
    async def trainer_sync(self, step: int, progress: int) -> int:
        """The trainer has finished ``step`` and all batches up to ``progress``.

        Returns the newest version that engines serve: at once between sync points, else
        when nobody needs the weights of this very step any more.

        Raises:
            TimeoutError: style ``fixed``, and the explorer did not come. In the other
                styles the trainer goes on and meets the explorers later.
        """
        state = self.state
        if not state.sync_due(step):
            return state.engine_version
        state.trainer_at_sync(step, progress)
        try:
            if state.should_publish:
                await self._publish(step)
            await self._notify()
            await self._wait(
                lambda: state.trainer_may_continue,
                lambda: f"trainer at step {step}: the explorer to take its weights",
            )
        except TimeoutError as error:
            self._late(error)
        finally:
            state.trainer_running()
        return state.engine_version

    async def trainer_starved(self, step: int) -> None:
        """The trainer cannot train on without new rows."""
        self.state.trainer_starved(step, self.state.progress)
        await self._notify()

    async def trainer_resumed(self) -> None:
        """Rows arrived; weights are about to change again, once nobody reads them."""
        self.state.trainer_resuming()
        await self._wait(
            lambda: not self.state.sending, lambda: "trainer with new rows: a transfer to end"
        )
        self.state.trainer_running()

    async def trainer_stopped(self, step: int, progress: Optional[int] = None) -> None:
        """No more steps. The last weights can still be fetched."""
        self.state.trainer_stopped(step, self.state.progress if progress is None else progress)
        await self._notify()

    # explorer side --------------------------------------------------------------------
    async def explorer_should_sync(self, name: str, step: int) -> bool:
        """Whether ``name`` is to drain after ``step`` and call :meth:`explorer_sync`.

        At a boundary (every ``sync_interval`` steps after ``sync_offset``): always in styles
        ``fixed`` and ``explorer_driven``, only if newer weights are there in
        ``trainer_driven``. Never in ``fully_async``.
        """
        self._look()
        return self.state.should_sync(name, step)

    async def explorer_may_submit(
        self, name: str, step: int, in_flight: Callable[[], int] = lambda: 0
    ) -> bool:
        """Pacing by ``synchronizer.max_staleness``: wait until ``name``, with ``in_flight()``
        batches not yet committed, may begin its batch ``step``.

        False: newer weights have to be taken first (:meth:`explorer_sync`).

        Raises:
            TimeoutError: neither within ``sync_timeout_s``.
        """
        explorer = self.state.explorers[name]

        def decided() -> bool:
            explorer.paced = in_flight() == 0
            return self.state.may_submit(name, step) is not None

        try:
            await self._wait(decided, lambda: f"explorer {name!r}: batch {step} to be young enough")
        finally:
            explorer.paced = False
        if not self.state.may_submit(name, step):
            return False
        explorer.submitted = max(explorer.submitted, step)
        return True

    async def explorer_sync(
        self, name: str | int, step: Optional[int] = None, final: bool = False
    ) -> int:
        """``name`` stands, drained, after ``step``; returns the version its engines serve.

        Waits for the trainer as the style says, then loads newer weights if there are any.
        ``final``: waits for the last weights that the rows made so far can give. The form
        without a name is for a run with one explorer.

        Raises:
            TimeoutError: style ``fixed`` or ``final``, and the trainer did not come. In the
                other styles the explorer goes on with the weights it has.
        """
        name, step = self._named(name, step)
        version = await self._await_offer(name, step, final)
        if version is not None:
            try:
                await self._load(name, version)
            finally:
                self.state.explorer_running(name)
                await self._notify()
        await self._passed(name, step)
        return self.state.explorers[name].version

    async def watch(self, name: str, timeout_s: Optional[float] = None) -> int:
        """Style ``fully_async``: load the next version into the engines of ``name``, under
        their running requests, as soon as there is one.

        Returns the version they serve: the new one, or the same after ``timeout_s``
        (default ``sync_timeout_s``) or when the explorer stopped.
        """
        version = await self._await_newer(name, timeout_s)
        if version is not None:
            await self._load(name, version)
        return self.state.explorers[name].version

    async def explorer_stopped(self, name: str | int, step: Optional[int] = None) -> None:
        """``name`` explores no more. Nobody waits for it, and its own waits end."""
        name, _ = self._named(name, step)
        self.state.explorer_stopped(name)
        self._carrier.sweep(self.state)
        await self._notify()

    def _named(self, name: str | int, step: Optional[int]) -> tuple[str, int]:
        """``(name, step)``, also of a call with the step alone."""
        if isinstance(name, str):
            return name, 0 if step is None else step
        if len(self.state.explorers) != 1:
            raise ValueError(
                f"which explorer? {sorted(self.state.explorers)} take part; pass the name first"
            )
        return next(iter(self.state.explorers)), name

    # queries --------------------------------------------------------------------------
    async def stats(self) -> dict[str, Any]:
        s = self.state
        return {
            "trainer": s.trainer.value,
            "explorer": self._explorer_status().value,
            "explorers": {n: (e.status.value, e.version) for n, e in s.explorers.items()},
            "model_version": s.engine_version,
            "trainer_version": s.trainer_version,
            "progress": s.progress,
            "transfers": self._carrier.transfers,
            "timeouts": self.timeouts,
        }

    def _explorer_status(self) -> RunningStatus:
        """Of the one explorer; of several, RUNNING while any of them is."""
        counts = self.state.explorer_status_counts
        return next((status for status, n in counts.items() if n), RunningStatus.STOPPED)
