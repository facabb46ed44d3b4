"""Carry one version to the engines of one explorer, and prove that it arrived.

Invariant: ``send`` and ``load`` return only when every engine reported the trainer's checksum
for the version it asked for; a checksum or log-prob mismatch is :class:`WeightMismatch`, which
is never retried, because sending again would only hide it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Optional

import numpy as np

from trinity_dask.cluster.rpc import ActorHandle, rpc
from trinity_dask.config.schema import SynchronizerConfig
from trinity_dask.engines.errors import WeightMismatch
from trinity_dask.engines.pool import EnginePool
from trinity_dask.models.protocol import WeightReceipt, WeightUpdate
from trinity_dask.sync.link_floor import SAMPLE_BYTES, FileFloor, share
from trinity_dask.sync.shelf import Probe, Published, WeightShelf
from trinity_dask.sync.trainer_side import TrainerSide
from trinity_dask.weights.membership import WeightGroup

log = logging.getLogger("trinity_dask.weights")


class WeightTransport:
    """The way (``nccl``, ``memory`` or ``checkpoint``) to the engines of one explorer."""

    def __init__(
        self, cfg: SynchronizerConfig, pool: EnginePool, job_dir: str, run_id: str, backend: str
    ) -> None:
        self.cfg = cfg
        self.pool = pool
        self.user = ""  # the explorer, once attached
        self.trainer = TrainerSide(cfg.sync_timeout_s)
        self.shelf = WeightShelf.for_run(
            cfg.sync_method, job_dir, run_id, cfg.path, cfg.storage_options
        )
        self.group = WeightGroup(backend=backend, timeout_s=cfg.sync_timeout_s)
        self._floor = FileFloor()

    # nccl -----------------------------------------------------------------------------
    async def send(
        self, version: int, slots: list[str], probe: bool, relabel: bool = False
    ) -> dict[str, float]:
        """Broadcast the trainer's weights to ``slots`` as ``version``.

        With ``relabel`` the trainer may be training: the engines, which serve nobody yet,
        are labelled with the step whose weights they got.

        Returns metrics: ``sync/bytes``, ``sync/seconds``, ``sync/floor_share`` (of a bare
        transfer, if that is known), ``sync/version``, ``sync/aborted_requests`` and, when
        probed, ``sync/probe_max_abs_diff`` (nats).

        Raises:
            WeightMismatch: checksum, version or log-probs differ.
            ActorLost, TimeoutError, RuntimeError: a peer died or hung; may be retried.
        """
        await self.form_group(slots)
        start = time.perf_counter()
        update = WeightUpdate(
            version=version,
            method="nccl",
            meta=await self.trainer.tensor_meta(),
            generation=self.group.generation,
            bucket_bytes=self.cfg.bucket_mb << 20,
        )
        try:
            calls = [self.trainer.call("send_weights", update)]
            sent, *receipts = await _all_or_first_error([*calls, *self._updates(slots, update)])
        except BaseException:
            self.group.mark_broken()
            raise
        metrics = _metrics(sent, time.perf_counter() - start, self.group.bytes_per_s)
        found = dict(zip(slots, receipts, strict=True))
        check_receipts(version, sent, found)
        metrics["sync/aborted_requests"] = _aborted(found)
        if relabel and sent.step is not None and sent.step > version:
            await self._label(sent.step, slots)
            metrics["sync/version"] = float(sent.step)
        able = _able_to_probe(found) if probe else []
        return metrics | (await self._probed(None, able) if able else {})

    async def form_group(
        self, slots: list[str], host: Optional[str] = None, port: Optional[int] = None
    ) -> None:
        """A group of trainer rank 0 and ``slots``, unless the current one is just that.

        Rank 0 serves the store at ``host:port`` (default: its own address, a free port).
        """
        rank0 = self.trainer.handle
        members = self.pool.members(slots)
        identity = f"{rank0.key}@{rank0.address}"
        if self.group.is_current(identity, members):
            return
        await self.teardown()
        port = port or await self.trainer.call("free_port")
        host = host or rank0.address.split("://")[-1].rsplit(":", 1)[0]
        n_bytes = sum(meta.n_bytes for meta in await self.trainer.tensor_meta())
        self.group.floor_bytes = min(n_bytes, SAMPLE_BYTES)
        specs = self.group.next_generation(identity, members, host, port)
        joins = [self.trainer.call("open_weight_group", specs["trainer"])]
        joins += [self._call(slot, "init_weight_group", specs[slot]) for slot in slots]
        speed, *_ = await _all_or_first_error(joins)
        self.group.mark_formed(speed)
        log.info(
            "weight group generation %d: trainer rank 0 and %s (%s)",
            self.group.generation,
            ", ".join(slots),
            self.group.backend,
        )

    async def teardown(self) -> None:
        """Leave the current group on every side that still answers."""
        self.group.mark_broken()
        if self.group.generation == 0 or self.trainer.rank0 is None:
            return
        calls = [rpc(self.trainer.rank0, "close_weight_group", timeout=10.0)]
        calls += [
            rpc(self.pool.handle(slot), "teardown_weight_group", timeout=10.0)
            for slot in self.pool.slots()
        ]
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, Exception):
                log.info("a side left the weight group uncleanly: %s", result)

    # memory and checkpoint ------------------------------------------------------------
    async def load(self, published: Published, slots: list[str]) -> dict[str, float]:
        """Have ``slots`` read a published version. Returns and raises as :meth:`send`."""
        floor = await self._floor.bytes_per_s(self.shelf, published.receipt.n_bytes)
        start = time.perf_counter()
        update = WeightUpdate(
            published.version,
            self.cfg.sync_method,
            path=published.path,
            storage_options=dict(self.cfg.storage_options),
        )
        receipts = await _all_or_first_error(self._updates(slots, update))
        seconds = published.receipt.seconds + time.perf_counter() - start
        metrics = _metrics(published.receipt, seconds, floor)
        found = dict(zip(slots, receipts, strict=True))
        check_receipts(published.version, published.receipt, found)
        metrics["sync/aborted_requests"] = _aborted(found)
        probe, able = published.probe, _able_to_probe(found)
        return metrics | (await self._probed(probe, able) if probe is not None and able else {})

    def remove_files(self) -> None:
        """This explorer reads no more; the files go with the last one that does."""
        self.shelf.leave(self.user)

    # proof ----------------------------------------------------------------------------
    async def _probed(self, given: Optional[Probe], slots: list[str]) -> dict[str, float]:
        """Largest |log-prob difference| over the fixed sequences and engines, in nats.

        ``given``: the trainer's log-probs; None asks it, which stands still.
        """
        sequences = given.sequences if given else await self.trainer.sequences()
        calls = [self._call(slot, "logprobs_of", sequences) for slot in slots]
        if given is None:  # while the engines compute theirs
            calls.append(self.trainer.probe())
        found = await _all_or_first_error(calls)
        wanted = found.pop() if given is None else given
        worst = 0.0
        for slot, got in zip(slots, found, strict=True):
            gaps = (np.abs(a - b).max() for a, b in zip(got, wanted.logprobs, strict=True))
            worst = max(worst, *(float(gap) for gap in gaps))
            if not worst <= self.cfg.probe_tolerance:
                raise WeightMismatch(
                    f"after the update {slot} and the trainer differ by {worst:.3g} nats on "
                    f"fixed sequences (allowed: synchronizer.probe_tolerance = "
                    f"{self.cfg.probe_tolerance:g}); the checksum agrees, so the engine keeps "
                    f"a stale copy of some tensor or computes in another precision"
                )
        return {"sync/probe_max_abs_diff": worst}

    # plumbing -------------------------------------------------------------------------
    def _updates(self, slots: list[str], update: WeightUpdate) -> list[Any]:
        return [self._call(slot, "update_weights", update) for slot in slots]

    async def _label(self, version: int, slots: list[str]) -> None:
        await asyncio.gather(*(self._call(slot, "label_weights", version) for slot in slots))

    async def _call(self, slot: str, method: str, *args: Any) -> Any:
        handle: ActorHandle = self.pool.handle(slot)
        return await rpc(handle, method, *args, timeout=self.cfg.sync_timeout_s)


def _metrics(
    sent: WeightReceipt, seconds: float, bare_bytes_per_s: Optional[float]
) -> dict[str, float]:
    return {
        "sync/bytes": float(sent.n_bytes),
        "sync/seconds": seconds,
        "sync/version": float(sent.version),
        **share(sent.n_bytes, bare_bytes_per_s, seconds),
    }


def _aborted(receipts: dict[str, WeightReceipt]) -> float:
    """Requests that are sampled again because of this update (``synchronizer.in_flight``)."""
    return float(sum(receipt.aborted for receipt in receipts.values()))


def _able_to_probe(receipts: dict[str, WeightReceipt]) -> list[str]:
    """Slots whose engines compute log-probs with what they received."""
    return [slot for slot, receipt in receipts.items() if receipt.has_logprobs]


def check_receipts(version: int, sent: WeightReceipt, receipts: dict[str, WeightReceipt]) -> None:
    """Raise :class:`WeightMismatch` unless every side saw ``version`` with one checksum."""
    for side, receipt in {"trainer": sent, **receipts}.items():
        if receipt.version != version or receipt.checksum != sent.checksum:
            raise WeightMismatch(
                f"{side} holds version {receipt.version} with checksum "
                f"{receipt.checksum:#x}; the trainer sent version {version} with "
                f"{sent.checksum:#x}. The engine must not sample with these weights."
            )


async def _all_or_first_error(calls: list[Any]) -> list[Any]:
    """Results in order; at the first error the others are cancelled and it is raised."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
