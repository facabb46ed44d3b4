"""The synchronizer: a Dask actor that lets explorers and trainer meet, in four styles.

Invariant: every waiter is woken by an event or by its deadline and leaves no status behind;
a decision is taken on what the buffer says at that moment, and nothing is awaited between a
decision and the event that it leads to; weights are read from the trainer only while it
stands still (it waits here, or has stopped); after a transfer every engine's checksum equals
the trainer's, or the run stops.

The decisions are :class:`~trinity_dask.sync.state.SyncState`, the bytes are
:class:`~trinity_dask.sync.transfer.WeightTransfers`; this module waits.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Optional

from trinity_dask.aio import Changes, Spans
from trinity_dask.cluster.rpc import ActorHandle
from trinity_dask.config.schema import SynchronizerConfig
from trinity_dask.engines.pool import EnginePool, WeightMismatch
from trinity_dask.sync.shelf import Published, WeightShelf
from trinity_dask.sync.state import SyncState
from trinity_dask.sync.transfer import WeightTransfers

log = logging.getLogger("trinity_dask.synchronizer")

TRAINER = "trainer"
# conditions also look at things that announce no change (rows in the buffer)
RECHECK_S = 1.0


class Late(TimeoutError):
    """What was waited for did not happen in time; a transfer's own time-outs are none of these."""


class Synchronizer:
    """One per job. All methods run on its worker's event loop.

    What an adapter with other calls stands on: ``state`` holds every status and version, and
    whoever changes it calls :meth:`notify`; :meth:`wait` waits for a condition on it; :meth:`put`
    publishes weights, :attr:`published` is the newest version that lies in a file;
    ``transfers`` knows the trainer's rank 0, its tensors and the weight groups. ``spans`` tells of
    every wait of one side for the other, and of every transfer.
    """

    def __init__(
        self, cfg: SynchronizerConfig, job_dir: Optional[str] = None, run_id: str = "run"
    ) -> None:
        self.cfg = cfg
        self.job_dir = job_dir
        self.state = SyncState(cfg.sync_style, cfg.sync_method, cfg.sync_interval, cfg.sync_offset)
        self.state.max_staleness = cfg.max_staleness
        self.timeouts = 0
        self.spans = Spans()
        shelf = WeightShelf.for_run(
            cfg.sync_method, job_dir or ".", run_id, cfg.path, cfg.storage_options
        )
        self.transfers = WeightTransfers(cfg, self.state, shelf)
        self._changes = Changes()
        self._rows_available: Callable[[], bool] = lambda: False
        self._writes_blocked: Callable[[], bool] = lambda: False

    async def close(self) -> None:
        """Nobody will ask any more: the published files go."""
        await asyncio.to_thread(self.transfers.shelf.remove_all)

    # set-up ---------------------------------------------------------------------------
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
        self.transfers.ensure_trainer = ensure_trainer

    def set_trainer_rank0(self, handle: ActorHandle) -> None:
        self.transfers.rank0 = handle

    def attach_explorer(self, name: str, pool: EnginePool, backend: str = "gloo") -> None:
        """The engines of ``name``; groups with them are of ``backend`` (``gloo`` or ``nccl``).

        Raises:
            ValueError: method nccl has its one explorer already.
        """
        self.state.explorer_joined(name)
        self.transfers.attach(name, pool, backend)

    async def detach_explorer(self, name: str) -> None:
        """The engines of ``name`` take no more weights: they leave their group, and the
        published files go with the last side that uses them."""
        try:
            await self.transfers.leave_group(name)
        finally:
            await asyncio.to_thread(self.transfers.shelf.leave, name)

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
        self._changes.notify()
        return explorer.version

    async def admit(self, name: str) -> int:
        """Let the attached engines of ``name``, which joins a trainer that is there, serve.

        They get the trainer's weights first, unless it is still at the start model that they
        hold already. Returns the version they serve.
        """
        state = self.state
        if state.trainer_version > 0:
            await self.wait(
                lambda: state.offer(name) is not None or state.trainer_lost,
                lambda: f"explorer {name!r}: the first weights",
            )
        version = state.offer(name)
        if version is not None:
            await self._load(name, version)
        await self._serve(name, state.progress)
        self._changes.notify()
        return state.explorers[name].version

    async def initial_sync(
        self, trainer_step: int, progress: int, begun: Optional[Mapping[str, int]] = None
    ) -> dict[str, float]:
        """Send the trainer's weights as version ``trainer_step`` before anything runs;
        ``begun``: batches that each explorer of the job has begun before, whether it is back or
        not."""
        self.state.begun_before = dict(begun or {})
        self.state.trainer_joined(trainer_step, progress)
        self.state.trainer_starved(trainer_step, progress)  # nothing to train on yet
        for name in self.transfers.names:
            await self._load(name, trainer_step)
            await self._serve(name, progress)
        self.state.trainer_running()
        return dict(self.metrics)

    async def _serve(self, name: str, progress: int) -> None:
        """Its engines hold the first weights: rollouts may begin."""
        next_required = self.state.next_required(progress + self.cfg.sync_offset)
        self.state.explorer_running(name, next_required)
        pool = self.transfers.pool(name)
        await pool.mark_ready(pool.slots())

    async def trainer_joined(
        self, step: int, progress: int = 0, begun: Optional[Mapping[str, int]] = None
    ) -> None:
        """A trainer of another process is ready at ``step``; its weights can be fetched.
        ``begun`` as in :meth:`initial_sync`."""
        self.state.begun_before = dict(begun or {})
        self.state.trainer_joined(step, progress)
        self.transfers.shelf.users.add(TRAINER)
        if self.cfg.sync_method != "nccl":
            await self.transfers.publish(step)
        self._changes.notify()

    # trainer side ---------------------------------------------------------------------
    async def trainer_sync(self, step: int, progress: int) -> int:
        """The trainer has finished ``step`` and all batches up to ``progress``.

        At a sync point it publishes its weights, or brings them to every explorer that stands
        ready for them before its deadline. Returns the newest version that engines serve: at
        once between sync points, else when nobody needs the weights of this very step any more.

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
                await self.transfers.publish(step)
            self._changes.notify()
            while True:
                await self.wait(
                    lambda: state.receiver is not None or state.trainer_may_continue,
                    lambda: f"trainer at step {step}: the explorer to take its weights",
                )
                receiver = state.receiver
                if receiver is None:
                    break
                await self._load(receiver, step)
        except Late as error:
            self._go_on_without(error)
        finally:
            state.trainer_running()
        return state.engine_version

    async def trainer_starved(self, step: int) -> None:
        """The trainer cannot train on without new rows."""
        self.state.trainer_starved(step, self.state.progress)
        self._changes.notify()

    async def trainer_resumed(self) -> None:
        """Rows arrived; weights are about to change again, once nobody reads them."""
        self.state.trainer_resuming()
        await self.wait(
            lambda: not self.state.sending, lambda: "trainer with new rows: a transfer to end"
        )
        self.state.trainer_running()

    async def trainer_stopped(self, step: int, progress: Optional[int] = None) -> None:
        """No more steps. The last weights can still be fetched."""
        self.state.trainer_stopped(step, self.state.progress if progress is None else progress)
        self._changes.notify()

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
        allowed: Optional[bool] = None  # as it was decided: with ``paced`` gone it is another

        def decided() -> bool:
            nonlocal allowed
            explorer.paced = in_flight() == 0
            allowed = self.state.may_submit(name, step)
            return allowed is not None

        try:
            await self.wait(decided, lambda: f"explorer {name!r}: batch {step} to be young enough")
        finally:
            explorer.paced = False
        if allowed:
            explorer.submitted = max(explorer.submitted, step)
        return bool(allowed)

    async def changed(self) -> None:
        """Return at the next change of either side's position, or after a second."""
        await self._changes.next(RECHECK_S)

    async def explorer_sync(self, name: str, step: int, final: bool = False) -> int:
        """``name`` stands, drained, after ``step``; returns the version its engines serve.

        Waits for the trainer as the style says: until it has brought newer weights, or until
        they can be fetched, which is done here. ``final``: waits for the last weights that the
        rows made so far can give.

        Raises:
            TimeoutError: style ``fixed`` or ``final``, and the trainer did not come. In the
                other styles the explorer goes on with the weights it has.
        """
        state, explorer = self.state, self.state.explorers[name]
        state.explorer_waiting(name, max(step - self.cfg.sync_offset, 0), final)
        try:
            self._changes.notify()
            while True:
                await self.wait(
                    lambda: explorer.loading is not None or state.may_pass(name),
                    lambda: (
                        f"explorer {name!r} at step {step}: the trainer to finish batch "
                        f"{explorer.required}"
                    ),
                )
                if explorer.loading is None:
                    break
                await self._loaded(name)
            version = state.may_fetch(name)
            if version is not None:
                await self._load(name, version)
        except Late as error:
            self._go_on_without(error, strict=final)
        finally:
            state.explorer_running(name)
            self._changes.notify()
        state.explorer_running(name, state.next_required(step))
        return explorer.version

    async def watch(self, name: str, timeout_s: Optional[float] = None) -> int:
        """Style ``fully_async``: take the next version into the engines of ``name``, under
        their running requests, as soon as there is one.

        Returns the version they serve: the new one, or the same after ``timeout_s``
        (default ``sync_timeout_s``) or when the explorer stopped.
        """
        state, explorer = self.state, self.state.explorers[name]
        served = explorer.version

        def ready() -> bool:
            news = explorer.version > served or state.may_fetch(name) is not None
            return not explorer.live or (explorer.loading is None and news)

        explorer.watching = explorer.live
        try:
            self._changes.notify()
            await self.wait(ready, lambda: f"explorer {name!r}: a newer version", timeout_s)
        except Late:
            return explorer.version
        finally:
            explorer.watching = False
        version = state.may_fetch(name)
        if explorer.live and explorer.version == served and version is not None:
            await self._load(name, version)
        return explorer.version

    async def explorer_stopped(self, name: str) -> None:
        """``name`` explores no more: nobody waits for it, and its own waits end. Returns when
        nothing is on its way to its engines any more."""
        self.state.explorer_stopped(name)
        self.transfers.sweep()
        self._changes.notify()
        with suppress(RuntimeError):  # a failure is for those who go on
            await self._loaded(name)

    # versions -------------------------------------------------------------------------
    async def put(self, version: int, weights: Mapping[str, Any] | str) -> Published:
        """Publish ``weights`` that somebody else has: tensors by name, or a safetensors file
        or directory.

        Raises:
            ValueError: a newer version is published already.
            FileNotFoundError: no weights at the path.
        """
        if version < self.state.published:
            raise ValueError(
                f"version {version} is older than {self.state.published}, which is "
                "published; versions only grow"
            )
        published = await self.transfers.put(version, weights)
        self._changes.notify()
        return published

    @property
    def published(self) -> Optional[Published]:
        """The newest version that lies in a file."""
        return self.transfers.shelf.get(self.state.published)

    @property
    def metrics(self) -> dict[str, float]:
        """Of the last transfer: bytes, seconds, version, and the probe's gap in nats."""
        return self.transfers.metrics

    # waiting and loading --------------------------------------------------------------
    async def wait(
        self,
        ready: Callable[[], bool],
        what: Callable[[], str],
        timeout_s: Optional[float] = None,
    ) -> None:
        """Return when ``ready()``; it is asked at every change and once a second.

        Without ``timeout_s`` the other side has ``meet_timeout_s`` for each of its moves: every
        train step, every batch and every version begins the time anew, so that nobody who is
        slow and well is ended.

        Raises:
            Late: not within ``timeout_s``, or nobody has moved on for ``meet_timeout_s``.
            RuntimeError: the synchronisation failed meanwhile.
        """
        meet_s = self.cfg.meet_timeout_s or self.cfg.sync_timeout_s
        limit = meet_s if timeout_s is None else timeout_s
        started, text = time.time(), what() if timeout_s is None else ""

        def woken() -> bool:
            self._look()
            return ready()

        positions = self.state.positions
        while not await self._changes.until(woken, limit, RECHECK_S):
            before, positions = positions, self.state.positions
            if timeout_s is not None or before == positions:
                raise Late(
                    f"{what()} ({self.state}): nobody has moved on for "
                    f"synchronizer.meet_timeout_s = {limit:g} s"
                )
        if text:
            who, _, awaited = text.partition(": ")
            self.spans.tell("wait", started, who=who, awaited=awaited)

    def notify(self) -> None:
        """``state`` has changed: every waiter looks again."""
        self._changes.notify()

    def fail(self, error: BaseException) -> None:
        """End every wait, now and later, with ``error``; the first one counts."""
        failure = RuntimeError(f"weight synchronisation failed: {error}")
        failure.__cause__ = error
        self._changes.fail(failure)

    def _look(self) -> None:
        self.state.rows_available = self._rows_available()
        self.state.writes_blocked = self._writes_blocked()

    def _go_on_without(self, error: Late, strict: bool = False) -> None:
        """The other side did not come in time. Style ``fixed`` promises a version at each
        boundary, so there (or with ``strict``) a miss is an error."""
        if strict or self.cfg.sync_style == "fixed":
            raise error
        self.timeouts += 1
        log.warning("%s; going on without", error)

    async def _loaded(self, name: str) -> None:
        """Nothing is on its way to the engines of ``name``; a transfer has its own deadlines."""
        explorer = self.state.explorers[name]
        await self.wait(
            lambda: explorer.loading is None, lambda: f"explorer {name!r}: a transfer", math.inf
        )

    async def _load(self, name: str, version: int) -> None:
        """Into every engine of ``name``. An error ends the run of a lone explorer; beside
        others it is that explorer's own, unless engine and trainer differ. It is nobody's
        once the explorer has stopped."""
        state, explorer = self.state, self.state.explorers[name]
        explorer.loading, reached, started = version, None, time.time()
        try:
            await self.transfers.load(name, version)
            reached = version
            facts = self._transferred(version)
            self.spans.tell("transfer", started, who=f"explorer {name!r}", **facts)
        except Exception as error:
            if isinstance(error, WeightMismatch) or state.live_explorers == [explorer]:
                self.fail(error)
            elif not explorer.live:
                log.info("explorer %r stopped while it got version %d: %s", name, version, error)
                return
            raise
        finally:
            state.load_ended(name, reached)
            self.transfers.sweep()
            self._changes.notify()

    def _transferred(self, version: int) -> dict[str, Any]:
        """Of the transfer that has just ended: ``version``, ``bytes`` and ``floor_share``."""
        keys = {"bytes": "sync/bytes", "floor_share": "sync/floor_share"}
        return {"version": version} | {name: self.metrics.get(key) for name, key in keys.items()}
