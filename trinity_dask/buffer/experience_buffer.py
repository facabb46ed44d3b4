"""The experience buffer: the store and its queue behind one async actor.

Invariant: a row is leased only after its batch is committed, and a batch enters the queue
exactly once however often it is committed. The queue is first-in-first-out, or by priority
with ``replay_buffer.enable``. All file work runs in threads, so the actor
answers while a disk is slow; every wait has a deadline. Counts go by increments, and of a batch
that is finished only its id is kept: neither time nor memory grows with the number of steps.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import pyarrow as pa

from trinity_dask.aio import Changes, Spans
from trinity_dask.buffer.errors import EndOfData, StoreError
from trinity_dask.buffer.queue.lease_queue import Lease, LeaseQueue
from trinity_dask.buffer.queue.replay_queue import PRIORITY_FNS, ReplayQueue
from trinity_dask.buffer.store.experience_store import ExperienceStore
from trinity_dask.buffer.store.manifest import INDEX_KEY, Manifest, RowIndex, RowRef
from trinity_dask.config.schema import ExperienceBufferConfig
from trinity_dask.registry import build

log = logging.getLogger(__name__)

__all__ = ["BufferLease", "EndOfData", "ExperienceBuffer"]


@dataclass(frozen=True)
class BufferLease:
    """Rows for one train step. ``batches`` are the ids they come from, in order.

    ``use_counts`` (one per ref) is how often the rows are handed out with this time;
    ``versions`` the oldest and newest model version and the row count of each group.
    """

    lease_id: int
    refs: tuple[RowRef, ...]
    rows: int
    batches: tuple[int | str, ...]
    use_counts: tuple[int, ...] = ()
    versions: tuple[tuple[int, int, int], ...] = ()


class ExperienceBuffer:
    """Commit batches on one side, lease rows on the other. Call :meth:`prepare` first."""

    def __init__(self, cfg: ExperienceBufferConfig) -> None:
        if not cfg.path:
            raise ValueError(
                f"buffer {cfg.name!r} has no path; set buffer.trainer_input.experience_buffer.path"
            )
        self._cfg = cfg
        self._url = cfg.path
        self._store: ExperienceStore | None = None
        self._queue = self._new_queue()
        self._indices: dict[int | str, RowIndex] = {}
        self.foreign_rows = 0  # trained rows that came from elsewhere (expert rows)
        self._refs: dict[int | str, RowRef] = {}  # of batches with rows to come
        self._committed: set[int | str] = set()
        self._committed_rows = 0
        self._counts: Counter[str] = Counter()  # accounts of all committed batches together
        self._committing: set[int | str] = set()
        self._closed = False
        self._changed = Changes()
        self._reserving = 0
        self._moves = 0  # leases that were given or ended
        self.spans = Spans()  # waits for room

    def _new_queue(self) -> LeaseQueue | ReplayQueue:
        replay = self._cfg.replay_buffer
        if not replay.enable:
            return LeaseQueue()
        name, args = replay.priority_fn, replay.priority_fn_args
        priority = build(f"priority_fn {name!r}", PRIORITY_FNS.get(name), args)
        cooldown_s = replay.reuse_cooldown_time_s
        return ReplayQueue(priority, replay.capacity_groups, cooldown_s, time.monotonic)

    @property
    def store(self) -> ExperienceStore:
        if self._store is None:
            raise RuntimeError("ExperienceBuffer.prepare() was not called")
        return self._store

    # -- life -----------------------------------------------------------------------

    async def prepare(self, lease_state: dict[str, Any] | None = None) -> dict[str, Any]:
        """Open the store and queue every committed row that ``lease_state`` does not consume.

        Returns ``batches`` and ``rows`` (committed, all), ``queued_rows`` and
        ``last_batch`` (id of the last committed batch, or None).

        Raises:
            StoreError: the store is unreadable, or lacks batches that the state consumed.
        """
        manifests = await asyncio.to_thread(self._open)
        queue = self._new_queue()
        if lease_state is not None:
            queue.load_state_dict(lease_state)
            self.foreign_rows = int(lease_state.get("foreign_rows", 0))
        lost = {str(b) for b in queue.consumed_batches()} - {str(m.batch_id) for m in manifests}
        if lost:
            raise StoreError(
                f"the checkpoint has trained batches {', '.join(sorted(lost)[:5])} that are not in "
                f"{self._url}: new batches of these ids would be taken for trained ones. "
                "Restore the store, or start a new job directory."
            )
        self._indices = await asyncio.to_thread(
            lambda: {m.batch_id: self._index_of(m) for m in manifests}
        )
        for manifest in manifests:
            queue.add(manifest.batch_id, manifest.rows, self._indices[manifest.batch_id])
        self._queue = queue
        self._refs, self._committed, self._committed_rows = {}, set(), 0
        self._counts = Counter()
        for manifest in manifests:
            self._count(manifest)
        self._forget_finished()
        return {
            "batches": len(manifests),
            "rows": sum(m.rows for m in manifests),
            "queued_rows": queue.queued_rows,
            "last_batch": manifests[-1].batch_id if manifests else None,
        }

    def _open(self) -> list[Manifest]:
        cfg = self._cfg
        options = dict(cfg.storage_options)
        self._store = ExperienceStore(self._url, options, cfg.compression, cfg.skip_corrupt)
        return self._store.finish_commits()

    def _count(self, manifest: Manifest) -> None:
        """Add a committed batch to what is known; once for each."""
        self._refs[manifest.batch_id] = manifest.ref()
        self._committed.add(manifest.batch_id)
        self._committed_rows += manifest.rows
        for name, value in manifest.meta.get("accounts", {}).items():
            self._counts[name] += int(value)

    def _forget_finished(self) -> None:
        """Batches that give no row any more are known by their ids only."""
        for batch_id in [b for b in self._refs if self._queue.is_finished(b)]:
            del self._refs[batch_id], self._indices[batch_id]

    def _index_of(self, manifest: Manifest) -> RowIndex:
        """From the manifest; from the rows themselves when an earlier version wrote it."""
        index = RowIndex.from_meta(manifest.meta, manifest.rows)
        if index is not None:
            return index
        try:
            return RowIndex.of(self.store.read([manifest.ref()], skip_corrupt=False))
        except StoreError as error:  # the reader of the rows will stop on it or skip it
            log.warning("batch %r: its groups are unknown (%s)", manifest.batch_id, error)
            return RowIndex.unknown(manifest.rows)

    async def close_writes(self) -> None:
        """No batch will come any more; waiting leases learn it at once."""
        self._closed = True
        self._close_queue_if_quiet()

    def _close_queue_if_quiet(self) -> None:
        # a commit that is being written when writes close still counts
        if self._closed and not self._committing:
            self._queue.close()
        self._changed.notify()

    # -- write ----------------------------------------------------------------------

    async def commit(
        self,
        batch_id: int | str,
        table: pa.Table,
        meta: dict[str, Any],
        guard: Callable[[], None] = lambda: None,
    ) -> Manifest:
        """Commit a batch and queue its rows; a batch that is committed already is returned.

        Waits while ``capacity_batches`` batches are committed and not yet trained
        (0 or less: no limit). ``guard()`` raises where the caller may not write any more; it is
        called in a thread when there is room.

        Raises:
            TimeoutError: there was no room, and no lease was given or ended, for
                ``max_read_timeout_s`` seconds.
            StoreError: the batch could not be written; it does not exist.
        """
        if batch_id in self._committed:
            return await self._manifest_of(batch_id)
        self._reserving += 1
        started = time.time()
        try:
            timeout_s, free, moves = self._cfg.max_read_timeout_s, False, -1
            while not free and moves != self._moves:  # each move begins the time anew
                moves = self._moves
                free = await self._changed.until(lambda: self._has_room(batch_id), timeout_s)
        finally:
            self._reserving -= 1
        if not free:
            raise TimeoutError(
                f"batch {batch_id!r} waited {timeout_s:g} s for room in the experience buffer: "
                f"{self._queue.unfinished_batches} batches are not trained yet "
                f"(capacity_batches={self._cfg.capacity_batches}). Is the trainer alive?"
            )
        who = f"explorer {meta.get('explorer', '')!r}"
        self.spans.tell("wait", started, who=who, awaited="room in the buffer")
        self._committing.add(batch_id)
        try:
            index = await asyncio.to_thread(RowIndex.of, table)
            meta = {**meta, INDEX_KEY: asdict(index)}
            await asyncio.to_thread(guard)
            manifest = await asyncio.to_thread(self.store.commit, batch_id, table, meta)
            # an earlier commit may have won
            index = await asyncio.to_thread(self._index_of, manifest)
            if batch_id not in self._committed:
                self._indices[batch_id] = index
                self._count(manifest)
                self._queue.add(batch_id, manifest.rows, index)
        finally:
            self._committing.discard(batch_id)
            self._close_queue_if_quiet()
        return manifest

    async def _manifest_of(self, batch_id: int | str) -> Manifest:
        manifest = await asyncio.to_thread(self.store.get_manifest, batch_id)
        if manifest is None:
            raise StoreError(
                f"batch {batch_id!r} was committed to {self._url}, where its manifest is not any "
                "more; restore the store, then resume"
            )
        return manifest

    def _has_room(self, batch_id: int | str) -> bool:
        if self._closed:
            raise RuntimeError(f"batch {batch_id!r} came after the experience buffer was closed")
        if batch_id in self._committing:
            return False
        used = self._queue.unfinished_batches + len(self._committing)
        bounded = self._queue.bounded_by_batches and batch_id not in self._committed
        return not (bounded and 0 < self._cfg.capacity_batches <= used)

    @property
    def n_committed(self) -> int:
        """Batches in the store, of all incarnations (for callers on the same loop)."""
        return len(self._committed)

    @property
    def writes_blocked(self) -> bool:
        """Whether a commit waits for room (for callers on the same loop)."""
        return self._reserving > 0

    # -- read -----------------------------------------------------------------------

    async def lease(
        self,
        n_rows: int | None,
        timeout_s: float,
        min_version: int = 0,
        whole_groups: bool = False,
    ) -> BufferLease | None:
        """Lease ``n_rows`` rows, or the next batch for None; None after ``timeout_s``.

        ``min_version``: waiting groups with a token of an older model version are dropped
        first. ``whole_groups``: more rows rather than a part of a group. A caller that is
        cancelled has either taken nothing or got what it took.

        Raises:
            EndOfData: writes are closed and fewer rows are left (``left_rows``).
        """
        taken: list[Lease] = []

        def try_lease() -> bool:
            if min_version > 0 and self._queue.drop_older(min_version):
                self._forget_finished()
                self._changed.notify()  # there may be room for a writer now
            lease = self._queue.lease(n_rows, whole_groups)
            if lease is not None:
                taken.append(lease)
            elif (left := self._queue.left_rows(n_rows)) is not None:
                raise EndOfData(left)
            return lease is not None

        # rows of a replay buffer also come back by the passing of time
        if not await self._changed.until(try_lease, timeout_s, self._queue.next_change_s):
            return None
        (lease,) = taken
        self._moves += 1
        refs = tuple(replace(self._refs[b], start=a, stop=z) for b, a, z in lease.parts)
        versions = tuple(
            (oldest, newest, rows)
            for batch_id, start, stop in lease.parts
            for low, high, oldest, newest in self._indices[batch_id].groups()
            if oldest >= 0 and (rows := min(high, stop) - max(low, start)) > 0
        )
        batches = tuple(dict.fromkeys(ref.batch_id for ref in refs))
        return BufferLease(lease.lease_id, refs, lease.rows, batches, lease.use_counts, versions)

    def has_lease(self, n_rows: int | None) -> bool:
        """Whether :meth:`lease` would return rows at once (for callers on the same loop)."""
        return self._queue.can_lease(n_rows)

    async def ack(self, lease_id: int) -> int:
        """The lease is trained. Returns the largest batch up to which all are consumed.

        Raises:
            KeyError: an unknown lease, or one that was acknowledged or released before.
        """
        self._queue.ack(lease_id)
        self._forget_finished()
        self._moves += 1
        self._changed.notify()
        return self._queue.consumed_batch

    async def release(self, lease_id: int) -> None:
        """The lease was not trained; its rows return to their place.

        Raises:
            KeyError: as :meth:`ack`.
        """
        self._queue.release(lease_id)
        self._moves += 1
        self._changed.notify()

    # -- state ----------------------------------------------------------------------

    async def state_dict(self) -> dict[str, Any]:
        """What was trained or dropped, for the trainer's checkpoint."""
        return {**self._queue.state_dict(), "foreign_rows": self.foreign_rows}

    async def manifests(self) -> list[Manifest]:
        """All committed batches, integer ids in numeric order, named batches after those.

        Read from the store, in time proportional to their number: for the start of a run.
        """
        return await asyncio.to_thread(self.store.manifests)

    async def stats(self) -> dict[str, Any]:
        """Counters of rows and batches by state; the consumed ones over the whole lineage.

        ``accounts`` is the sum of those in all manifests.
        """
        queue = self._queue
        return {
            "committed_batches": len(self._committed),
            "committed_rows": self._committed_rows,
            "accounts": dict(self._counts),
            "queued_batches": queue.queued_batches,
            "unfinished_batches": queue.unfinished_batches,
            "queued_rows": queue.queued_rows,
            "leased_rows": queue.leased_rows,
            "consumed_rows": queue.consumed_rows,
            "dropped_rows": queue.dropped_rows,
            "reused_rows": queue.reused_rows,
            "foreign_rows": self.foreign_rows,
            "consumed_batch": queue.consumed_batch,
            "closed": self._closed,
        }
