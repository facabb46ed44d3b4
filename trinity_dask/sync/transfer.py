"""One transfer: from trainer rank 0 to every engine of one explorer, proved, and tried again.

Invariant: a version has arrived only when every engine reported it with the trainer's checksum,
and, where that was probed, computes the trainer's log-probs; a mismatch is never retried, because
sending again would only hide it. The trainer's weights are read only between
``state.sending += 1`` and its end, a time in which the trainer is not let go. A reborn engine
is labelled with the version of the weights it really got.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Optional

import numpy as np

from trinity_dask.aio import all_or_first_error, retry
from trinity_dask.cluster.rpc import ActorHandle, rpc
from trinity_dask.config.schema import SynchronizerConfig
from trinity_dask.engines.pool import EnginePool, WeightMismatch
from trinity_dask.models.protocol import TensorMeta, WeightReceipt, WeightUpdate
from trinity_dask.sync.shelf import SAMPLE_BYTES, Probe, Published, WeightShelf
from trinity_dask.sync.state import RUNNING, SyncState
from trinity_dask.weights.broadcast import TransferMembers

log = logging.getLogger("trinity_dask.weights")

# a transfer in which an engine was lost is not counted: the engines' restarts bound those
ATTEMPTS = 3
N_PROBES = 8
PROBE_TOKENS = 12


@dataclass
class _Receiver:
    """The engines of one explorer."""

    pool: EnginePool
    group: TransferMembers
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # one load into its engines

    async def ask(self, slots: list[str], method: str, *args: Any, timeout_s: float) -> list[Any]:
        """What the engines of ``slots`` answer, in order, or the first error."""
        calls = (rpc(self.pool.handle(s), method, *args, timeout=timeout_s) for s in slots)
        return await all_or_first_error(*calls)


class WeightTransfers:
    """All transfers of one job: by group (``nccl``) or by file (``memory``, ``checkpoint``).

    ``rank0`` is the trainer's, replaced when the ranks are rebuilt. ``metrics`` are those of the
    last transfer: ``sync/bytes``, ``sync/seconds``, ``sync/version``, ``sync/floor_share`` (of a
    bare transfer, if that is known), ``sync/aborted_requests`` (sampled again because of it) and,
    when probed, ``sync/probe_max_abs_diff`` (nats).
    """

    def __init__(self, cfg: SynchronizerConfig, state: SyncState, shelf: WeightShelf) -> None:
        self.cfg = cfg
        self.state = state
        self.shelf = shelf
        self.rank0: Optional[ActorHandle] = None
        self.ensure_trainer: Optional[Callable[[], Awaitable[None]]] = None  # brings ranks back
        self.transfers = 0
        self.failed_attempts = 0
        self.metrics: dict[str, float] = {}
        self._receivers: dict[str, _Receiver] = {}
        self._publishing = asyncio.Lock()
        self._meta: Optional[tuple[TensorMeta, ...]] = None
        self._sequences: Optional[list[list[int]]] = None

    # who ------------------------------------------------------------------------------
    def attach(self, name: str, pool: EnginePool, backend: str) -> None:
        """The engines of explorer ``name``; one that is born again asks for its weights here."""
        self.shelf.users.add(name)
        group = TransferMembers(backend=backend, timeout_s=self.cfg.sync_timeout_s)
        self._receivers[name] = _Receiver(pool, group)
        pool.on_reborn = lambda slot: self._bring_current_weights(name, slot)

    @property
    def names(self) -> list[str]:
        """The explorers whose engines are attached."""
        return list(self._receivers)

    def pool(self, name: str) -> EnginePool:
        return self._receivers[name].pool

    def group(self, name: str) -> TransferMembers:
        """Who is in the current weight group of ``name``."""
        return self._receivers[name].group

    async def tensor_meta(self) -> tuple[TensorMeta, ...]:
        """The trainer's tensors; asked for once, since they do not change during a run."""
        if self._meta is None:
            self._meta = tuple(await self._ask_trainer("weight_meta"))
        return self._meta

    async def _ask_trainer(self, method: str, *args: Any) -> Any:
        if self.rank0 is None:
            raise RuntimeError("no trainer rank is attached; its weights cannot be asked for")
        return await rpc(self.rank0, method, *args, timeout=self.cfg.sync_timeout_s)

    # a version ------------------------------------------------------------------------
    async def load(self, name: str, version: int) -> None:
        """Bring ``version`` to every engine of ``name`` that is present; the trainer stands
        still, or the version is published.

        Raises:
            EngineFailed: no engine is left.
            WeightMismatch: checksum, version or log-probs differ.
            Exception: what the last of ATTEMPTS failures raised.
        """
        to, failed, limit = self._receivers[name], 0, self.cfg.sync_timeout_s
        with self._standing_still(version):
            while True:
                await to.pool.wait_present(limit)
                losses = to.pool.losses
                try:
                    # not around the attempts: an engine that comes back takes it for its weights
                    async with to.lock:
                        slots = to.pool.slots()
                        if self.cfg.sync_method == "nccl":
                            return await self._broadcast(name, version, slots)
                        return await self._read(to, await self._published(version), slots)
                except WeightMismatch:
                    raise
                except Exception as error:
                    self.failed_attempts += 1
                    await to.pool.look_for_lost()  # now: the next attempt needs everyone
                    failed += to.pool.losses == losses
                    if failed == ATTEMPTS or not self.state.explorers[name].live:
                        raise
                    log.warning("sending version %d failed (%s); once more", version, error)
                await self._ensure_standing_trainer()

    async def publish(self, version: int) -> Published:
        """The file of ``version``; written now, with the trainer standing still, if it is
        not there. Lost ranks are brought back and asked again."""
        with self._standing_still(version):
            what = f"writing version {version}"
            wait = self._ensure_standing_trainer
            return await retry(lambda: self._published(version), ATTEMPTS, what, between=wait)

    async def _published(self, version: int) -> Published:
        async with self._publishing:
            found = self.shelf.get(version)
            if found is not None:
                return found
            path, options = self.shelf.path(version), self.shelf.storage_options
            arguments = (path, version, *([options] if options else []))
            due, probe = self._probe_is_due(), None
            receipt: WeightReceipt = await self._ask_trainer("write_weights", *arguments)
            if due:
                sequences = await self._probe_sequences()
                probe = Probe(sequences, await self._ask_trainer("probe_logprobs", sequences))
            return self._put(Published(version, path, receipt, probe))

    async def put(self, version: int, weights: Mapping[str, Any] | str) -> Published:
        """Publish what somebody else has: tensors by name, or a file or directory of them."""
        return self._put(await asyncio.to_thread(self.shelf.take, version, weights))

    def _put(self, published: Published) -> Published:
        self.shelf.put(published)
        self.state.version_published(published.version)
        self.sweep()
        return published

    def sweep(self) -> None:
        """Remove the files nobody reads and no reborn engine could ask for."""
        live = self.state.live_explorers
        self.shelf.sweep({v for e in live for v in (e.version, e.loading) if v is not None})

    @contextmanager
    def _standing_still(self, version: int) -> Iterator[None]:
        needs_trainer = self.shelf.get(version) is None
        self.state.sending += needs_trainer
        try:
            yield
        finally:
            self.state.sending -= needs_trainer

    async def _ensure_standing_trainer(self) -> None:
        if self.state.trainer is not RUNNING and self.ensure_trainer is not None:
            await self.ensure_trainer()

    # a reborn engine ------------------------------------------------------------------
    async def _bring_current_weights(self, name: str, slot: str) -> None:
        """A reborn or new engine gets the version the others serve before its first token.

        From a file it is just that version. Over a group it is what the trainer has, which
        may be newer; the engine's label says which.
        """
        for attempt in range(1, ATTEMPTS + 1):
            try:
                # what the others serve is looked at under the lock: a load may be under way
                async with self._receivers[name].lock:
                    if self.state.explorers[name].version >= 0:
                        await self._bring(name, slot)
                return
            except WeightMismatch:
                raise
            except Exception as error:
                if attempt == ATTEMPTS or await self.pool(name).is_gone(slot):
                    raise
                log.warning("weights for reborn %s failed (%s); once more", slot, error)
                if self.ensure_trainer is not None:
                    await self.ensure_trainer()

    async def _bring(self, name: str, slot: str) -> None:
        state = self.state
        if self.cfg.sync_method != "nccl":
            published = self.shelf.get(state.explorers[name].version)
            if published is not None:  # else it is the start model, which the engine has
                await self._read(self._receivers[name], published, [slot])
            return
        standing = state.standing
        state.sending += standing
        try:
            await self._broadcast(name, state.trainer_version, [slot], relabel=not standing)
        finally:
            state.sending -= standing

    # the ways -------------------------------------------------------------------------
    async def _broadcast(
        self, name: str, version: int, slots: list[str], relabel: bool = False
    ) -> None:
        """The trainer's weights to ``slots`` as ``version``, over a group.

        With ``relabel`` the trainer may be training: the engines, which serve nobody yet,
        are labelled with the step whose weights they got.
        """
        to, limit = self._receivers[name], self.cfg.sync_timeout_s
        # a probe compares with the trainer's own log-probs, so it needs it standing still
        probe = self._probe_is_due() and not relabel
        rank0 = await self.form_group(name, slots)
        start = time.perf_counter()
        update = WeightUpdate(
            version=version,
            method="nccl",
            meta=self._meta or await self.tensor_meta(),
            generation=to.group.generation,
            bucket_bytes=self.cfg.bucket_mb << 20,
        )
        engines = [to.pool.handle(slot) for slot in slots]
        try:
            sent, *receipts = await all_or_first_error(
                rpc(rank0, "send_weights", update, timeout=limit),
                *(rpc(engine, "update_weights", update, timeout=limit) for engine in engines),
            )
        except BaseException:
            to.group.formed = False
            raise
        seconds = time.perf_counter() - start
        self._arrived(version, sent, slots, receipts, seconds, to.group.bytes_per_s)
        to.pool.took_weights(slots, version)
        if relabel and sent.step is not None and sent.step > version:
            await to.ask(slots, "label_weights", sent.step, timeout_s=limit)
            self.metrics["sync/version"] = float(sent.step)
            to.pool.took_weights(slots, sent.step)
        if probe:
            self.metrics |= await self._probed(to, None, slots, receipts)

    async def _read(self, to: _Receiver, published: Published, slots: list[str]) -> None:
        """A published version into ``slots``, each of which reads its file."""
        sent, limit = published.receipt, self.cfg.sync_timeout_s
        floor = await self.shelf.bare_bytes_per_s(sent.n_bytes)
        start = time.perf_counter()
        update = WeightUpdate(
            published.version,
            self.cfg.sync_method,
            path=published.path,
            storage_options=dict(self.cfg.storage_options),
        )
        receipts = await to.ask(slots, "update_weights", update, timeout_s=limit)
        seconds = sent.seconds + time.perf_counter() - start
        self._arrived(published.version, sent, slots, receipts, seconds, floor)
        to.pool.took_weights(slots, published.version)
        if published.probe is not None:
            self.metrics |= await self._probed(to, published.probe, slots, receipts)

    def _arrived(
        self,
        version: int,
        sent: WeightReceipt,
        slots: list[str],
        receipts: list[WeightReceipt],
        seconds: float,
        bare_bytes_per_s: Optional[float],
    ) -> None:
        """Every side saw ``version`` with one checksum; the metrics of that transfer.

        Raises:
            WeightMismatch: one did not.
        """
        for side, receipt in zip(["trainer", *slots], [sent, *receipts], strict=True):
            if receipt.version != version or receipt.checksum != sent.checksum:
                raise WeightMismatch(
                    f"{side} holds version {receipt.version} with checksum "
                    f"{receipt.checksum:#x}; the trainer sent version {version} with "
                    f"{sent.checksum:#x}. The engine must not sample with these weights."
                )
        self.metrics = {
            "sync/bytes": float(sent.n_bytes),
            "sync/seconds": seconds,
            "sync/version": float(version),
            "sync/aborted_requests": float(sum(receipt.aborted for receipt in receipts)),
        }
        bare = ""
        if bare_bytes_per_s is not None:
            share = sent.n_bytes / bare_bytes_per_s / max(seconds, 1e-9)
            self.metrics["sync/floor_share"] = share
            bare = f", {share:.0%} of it on the bare way"
        log.info(
            "version %d on %d engine(s): %.1f MB in %.3f s%s",
            version,
            len(slots),
            sent.n_bytes / 1e6,
            seconds,
            bare,
        )

    # a group --------------------------------------------------------------------------
    async def form_group(
        self,
        name: str,
        slots: Optional[list[str]] = None,
        host: Optional[str] = None,
        port: Optional[int] = None,
    ) -> ActorHandle:
        """A group of trainer rank 0, which is returned, and ``slots`` (default: all that take
        part) of ``name``, unless the current one is just that.

        Rank 0 serves the store at ``host:port`` (default: its own address, a free port).

        Raises:
            RuntimeError: no trainer rank is attached.
        """
        to, rank0 = self._receivers[name], self.rank0
        if rank0 is None:
            raise RuntimeError("no trainer rank is attached; its weights cannot be asked for")
        slots = to.pool.slots() if slots is None else slots
        members = to.pool.members(slots)
        identity = f"{rank0.key}@{rank0.address}"
        if to.group.formed and (to.group.trainer, to.group.members) == (identity, members):
            return rank0
        await self.leave_group(name)
        limit = self.cfg.sync_timeout_s
        n_bytes = sum(meta.n_bytes for meta in await self.tensor_meta())
        to.group.floor_bytes = min(n_bytes, SAMPLE_BYTES)
        specs = to.group.next_generation(
            identity,
            members,
            host or rank0.address.split("://")[-1].rsplit(":", 1)[0],
            port or await rpc(rank0, "free_port", timeout=limit),
        )
        joins = [rpc(rank0, "open_weight_group", specs["trainer"], timeout=limit)]
        for slot in slots:
            handle = to.pool.handle(slot)
            joins.append(rpc(handle, "init_weight_group", specs[slot], timeout=limit))
        speed, *_ = await all_or_first_error(*joins)
        to.group.formed = True
        to.group.speeds.setdefault(to.group.world_size, speed)
        log.info(
            "weight group generation %d: trainer rank 0 and %s (%s)",
            to.group.generation,
            ", ".join(slots),
            to.group.backend,
        )
        return rank0

    async def leave_group(self, name: str) -> None:
        """Leave the current group of ``name`` on every side that still answers."""
        to = self._receivers[name]
        to.group.formed = False
        if to.group.generation == 0 or self.rank0 is None:
            return
        calls = [rpc(self.rank0, "close_weight_group", timeout=10.0)]
        for slot in to.pool.slots():
            calls.append(rpc(to.pool.handle(slot), "teardown_weight_group", timeout=10.0))
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, Exception):
                log.info("a side left the weight group uncleanly: %s", result)

    # proof ----------------------------------------------------------------------------
    def _probe_is_due(self) -> bool:
        self.transfers += 1
        interval = self.cfg.probe_interval
        # the first always: an engine that cannot load these weights shows it there
        return self.transfers == 1 or (interval > 0 and (self.transfers - 1) % interval == 0)

    async def _probe_sequences(self) -> list[list[int]]:
        """A few fixed token sequences, the same in every process and run."""
        if self._sequences is None:
            n_ids, shape = await self._ask_trainer("vocab_size"), (N_PROBES, PROBE_TOKENS)
            generator = np.random.default_rng(20_240_229)
            self._sequences = generator.integers(0, n_ids, size=shape).tolist()
        return self._sequences

    async def _probed(
        self,
        to: _Receiver,
        given: Optional[Probe],
        slots: list[str],
        receipts: list[WeightReceipt],
    ) -> dict[str, float]:
        """Largest |log-prob difference| over the fixed sequences and those engines that
        compute log-probs with what they received, in nats.

        ``given``: the trainer's log-probs; None asks it, which stands still.
        """
        able = [s for s, receipt in zip(slots, receipts, strict=True) if receipt.has_logprobs]
        if not able:
            return {}
        sequences = await self._probe_sequences() if given is None else given.sequences
        limit = self.cfg.sync_timeout_s
        work: list[Any] = [to.ask(able, "logprobs_of", sequences, timeout_s=limit)]
        if given is None:  # while the engines compute theirs
            work.append(self._ask_trainer("probe_logprobs", sequences))
        found, *own = await all_or_first_error(*work)
        wanted = own[0] if given is None else given.logprobs
        worst = 0.0
        for slot, got in zip(able, found, strict=True):
            gaps = (np.abs(a - b).max() for a, b in zip(got, wanted, strict=True))
            worst = max(worst, *(float(gap) for gap in gaps))
            if not worst <= self.cfg.probe_tolerance:
                raise WeightMismatch(
                    f"after the update {slot} and the trainer differ by {worst:.3g} nats on "
                    f"fixed sequences (allowed: synchronizer.probe_tolerance = "
                    f"{self.cfg.probe_tolerance:g}); the checksum agrees, so the engine keeps "
                    f"a stale copy of some tensor or computes in another precision"
                )
        return {"sync/probe_max_abs_diff": worst}
