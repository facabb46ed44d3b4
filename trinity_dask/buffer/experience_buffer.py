"""The experience buffer: the store and its queue behind one async actor.

Invariant: a row is leased only after its batch is committed, and a batch enters the queue
exactly once however often it is committed. The queue is first-in-first-out, or by priority
with ``replay_buffer.enable``. All file work runs in threads, so the actor
answers while a disk is slow; every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from trinity_dask.buffer.errors import EndOfData, StoreError
from trinity_dask.buffer.queue.lease_queue import LeaseQueue
from trinity_dask.buffer.queue.priority import PRIORITY_FNS
from trinity_dask.buffer.queue.replay_queue import ReplayQueue
from trinity_dask.buffer.queue.row_queue import Lease, RowQueue
from trinity_dask.buffer.store.experience_store import ExperienceStore
from trinity_dask.buffer.store.manifest import Manifest, RowRef
from trinity_dask.buffer.store.row_index import META_KEY, RowIndex
from trinity_dask.config.schema import ExperienceBufferConfig
from trinity_dask.experience.schema import check_schema
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
        self._queue: RowQueue = self._new_queue()
        self._indices: dict[int | str, RowIndex] = {}
        self.foreign_rows = 0  # trained rows that came from elsewhere (expert rows)
        self._manifests: dict[int | str, Manifest] = {}
        self._committing: set[int | str] = set()
        self._closed = False
        self._changed = asyncio.Condition()
        self._reserving = 0

    def _new_queue(self) -> RowQueue:
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
        self._check_lineage(queue, manifests)
        self._indices = await asyncio.to_thread(self._read_indices, manifests)
        for manifest in manifests:
            queue.add(manifest.batch_id, manifest.rows, self._indices[manifest.batch_id])
        self._queue = queue
        self._manifests = {m.batch_id: m for m in manifests}
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
        self._store.finish_commits()
        return self._store.manifests()

    def _read_indices(self, manifests: list[Manifest]) -> dict[int | str, RowIndex]:
        return {m.batch_id: self._read_index(m) for m in manifests}

    def _read_index(self, manifest: Manifest) -> RowIndex:
        """From the manifest; from the rows themselves when an earlier version wrote it."""
        index = RowIndex.from_meta(manifest.meta, manifest.rows)
        if index is not None:
            return index
        try:
            table = self.store.peek(manifest)
        except StoreError as error:  # the reader of the rows will stop on it or skip it
            log.warning("batch %r: its groups are unknown (%s)", manifest.batch_id, error)
            return RowIndex.unknown(manifest.rows)
        return RowIndex.of(table)

    def _check_lineage(self, queue: RowQueue, manifests: list[Manifest]) -> None:
        lost = sorted(
            {str(b) for b in queue.consumed_batches()} - {str(m.batch_id) for m in manifests}
        )
        if lost:
            raise StoreError(
                f"the checkpoint has trained batches {', '.join(lost[:5])} that are not in "
                f"{self._url}: new batches of these ids would be taken for trained ones. "
                "Restore the store, or start a new job directory."
            )

    async def close_writes(self) -> None:
        """No batch will come any more; waiting leases learn it at once."""
        async with self._changed:
            self._closed = True
            self._close_queue_if_quiet()
            self._changed.notify_all()

    def _close_queue_if_quiet(self) -> None:
        # a commit that is being written when writes close still counts
        if self._closed and not self._committing:
            self._queue.close()

    # -- write ----------------------------------------------------------------------

    async def commit(self, batch_id: int | str, table: pa.Table, meta: dict[str, Any]) -> Manifest:
        """Commit a batch and queue its rows; a batch that is committed already is returned.

        Waits while ``capacity_batches`` batches are committed and not yet trained
        (0 or less: no limit).

        Raises:
            TimeoutError: there was no room for ``max_read_timeout_s`` seconds.
            StoreError: the batch could not be written; it does not exist.
        """
        known = self._manifests.get(batch_id)
        if known is not None:
            return known
        await self._reserve(batch_id)
        written: tuple[Manifest, RowIndex] | None = None
        try:
            written = await asyncio.to_thread(self._write, batch_id, table, meta)
        finally:
            await self._settle(batch_id, written)
        return written[0]

    def _write(
        self, batch_id: int | str, table: pa.Table, meta: dict[str, Any]
    ) -> tuple[Manifest, RowIndex]:
        check_schema(table)
        meta = {**meta, META_KEY: RowIndex.of(table).to_meta()}
        manifest = self.store.commit(batch_id, table, meta)
        return manifest, self._read_index(manifest)  # an earlier commit may have won

    async def _settle(self, batch_id: int | str, written: tuple[Manifest, RowIndex] | None) -> None:
        async with self._changed:
            if written is not None:
                manifest, index = written
                self._manifests[batch_id] = manifest
                self._indices[batch_id] = index
                self._queue.add(batch_id, manifest.rows, index)
            self._committing.discard(batch_id)
            self._close_queue_if_quiet()
            self._changed.notify_all()

    async def _reserve(self, batch_id: int | str) -> None:
        self._reserving += 1
        try:
            free = await self._wait(lambda: self._has_room(batch_id), self._cfg.max_read_timeout_s)
        finally:
            self._reserving -= 1
        if free:
            return
        raise TimeoutError(
            f"batch {batch_id!r} waited {self._cfg.max_read_timeout_s:g} s for room in the "
            f"experience buffer: {self._queue.unfinished_batches} batches are not trained yet "
            f"(capacity_batches={self._cfg.capacity_batches}). Is the trainer alive?"
        )

    @property
    def writes_blocked(self) -> bool:
        """Whether a commit waits for room (for callers on the same loop)."""
        return self._reserving > 0

    def _has_room(self, batch_id: int | str) -> bool:
        """True, and the place is taken, when there is one."""
        if self._closed:
            raise RuntimeError(f"batch {batch_id!r} came after the experience buffer was closed")
        if batch_id in self._committing:
            return False
        used = self._queue.unfinished_batches + len(self._committing)
        bounded = self._queue.bounded_by_batches and batch_id not in self._manifests
        if bounded and 0 < self._cfg.capacity_batches <= used:
            return False
        self._committing.add(batch_id)
        return True

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
        first. ``whole_groups``: more rows rather than a part of a group.

        Raises:
            EndOfData: writes are closed and fewer rows are left (``left_rows``).
        """
        taken: list[Lease] = []

        def try_lease() -> bool:
            if min_version > 0 and self._queue.drop_older(min_version):
                self._changed.notify_all()  # there may be room for a writer now
            lease = self._queue.lease(n_rows, whole_groups)
            if lease is not None:
                taken.append(lease)
            elif self._exhausted(n_rows):
                raise EndOfData(self._queue.leasable_rows)
            return lease is not None

        await self._wait(try_lease, timeout_s)
        return self._with_refs(taken[0]) if taken else None

    def has_lease(self, n_rows: int | None) -> bool:
        """Whether :meth:`lease` would return rows at once (for callers on the same loop)."""
        return self._queue.can_lease(n_rows)

    def _exhausted(self, n_rows: int | None) -> bool:
        # leased rows may come back by a release, so they still count as available
        if not self._queue.closed:
            return False
        if n_rows is None:
            return self._queue.unfinished_batches == 0
        return self._queue.leasable_rows + self._queue.returnable_rows < n_rows

    def _with_refs(self, lease: Lease) -> BufferLease:
        refs = tuple(self._manifests[b].ref(start, stop) for b, start, stop in lease.parts)
        batches = tuple(dict.fromkeys(ref.batch_id for ref in refs))
        versions = tuple(v for part in lease.parts for v in self._versions(*part))
        return BufferLease(lease.lease_id, refs, lease.rows, batches, lease.use_counts, versions)

    def _versions(
        self, batch_id: int | str, start: int, stop: int
    ) -> Iterator[tuple[int, int, int]]:
        """Oldest and newest version, and rows, of the groups that overlap a range."""
        for low, high, oldest, newest in self._indices[batch_id].groups():
            rows = min(high, stop) - max(low, start)
            if rows > 0 and oldest >= 0:
                yield oldest, newest, rows

    async def ack(self, lease_id: int) -> int:
        """The lease is trained. Returns the new :attr:`RowQueue.consumed_batch`."""
        async with self._changed:
            self._queue.ack(lease_id)
            self._changed.notify_all()
        return self._queue.consumed_batch

    async def release(self, lease_id: int) -> None:
        """The lease was not trained; its rows return to their place."""
        async with self._changed:
            self._queue.release(lease_id)
            self._changed.notify_all()

    # -- state ----------------------------------------------------------------------

    async def state_dict(self) -> dict[str, Any]:
        """What was trained or dropped, for the trainer's checkpoint."""
        return {**self._queue.state_dict(), "foreign_rows": self.foreign_rows}

    async def last_manifest(self) -> Manifest | None:
        """The last committed batch: the highest integer id, named batches after those."""
        return max(self._manifests.values(), key=lambda m: m.sort_key, default=None)

    async def manifests(self) -> list[Manifest]:
        """All committed batches, integer ids in numeric order."""
        return sorted(self._manifests.values(), key=lambda m: m.sort_key)

    async def stats(self) -> dict[str, Any]:
        """Counters of rows and batches by state; the consumed ones over the whole lineage."""
        queue = self._queue
        return {
            "committed_batches": len(self._manifests),
            "committed_rows": sum(m.rows for m in self._manifests.values()),
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

    async def _wait(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until ``ready()`` is true or ``timeout_s`` passed; says which.

        ``ready`` runs in the caller's task and nothing is awaited after it was true, so
        a cancelled caller has either taken nothing or got what it took.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        async with self._changed:
            while not ready():
                if clock() >= deadline:
                    return False
                # rows of a replay buffer also come back by the passing of time
                change_s = self._queue.next_change_s()
                wake = deadline if change_s is None else min(deadline, clock() + change_s)
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(wake):
                        await self._changed.wait()
            return True
