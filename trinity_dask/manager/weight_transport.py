"""Carry one version from the trainer to a list of engines, and prove that it arrived.

Invariant: ``send`` returns only when every engine reported the trainer's checksum for the
version it asked for; a checksum or log-prob mismatch is :class:`WeightMismatch`, which is
never retried, because sending again would only hide it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from trinity_dask.cluster.rpc import ActorHandle, rpc
from trinity_dask.config.schema import SynchronizerConfig
from trinity_dask.manager.engine_pool import EnginePool
from trinity_dask.manager.weight_group import WeightGroup
from trinity_dask.models.protocol import TensorMeta, WeightReceipt, WeightUpdate

log = logging.getLogger("trinity_dask.weights")

N_PROBES = 8
PROBE_TOKENS = 12


class WeightMismatch(RuntimeError):
    """An engine does not hold the trainer's weights. The run has to stop."""


def probe_sequences(vocab_size: int) -> list[list[int]]:
    """Eight fixed token sequences, the same in every process and run."""
    generator = np.random.default_rng(20_240_229)
    return generator.integers(0, vocab_size, size=(N_PROBES, PROBE_TOKENS)).tolist()


class WeightTransport:
    """One way (``nccl``, ``memory`` or ``checkpoint``) from trainer rank 0 to the engines."""

    def __init__(
        self, cfg: SynchronizerConfig, pool: EnginePool, job_dir: str, run_id: str, backend: str
    ) -> None:
        self.cfg = cfg
        self.pool = pool
        self.job_dir = Path(job_dir)
        self.run_id = run_id
        self.group = WeightGroup(backend=backend, timeout_s=cfg.sync_timeout_s)
        self.rank0: ActorHandle | None = None
        self._meta: tuple[TensorMeta, ...] | None = None
        self._probes: list[list[int]] | None = None
        self._previous_file: Path | None = None

    async def send(self, version: int, slots: list[str], probe: bool) -> dict[str, float]:
        """Send ``version`` to ``slots``.

        Returns metrics: ``sync/bytes``, ``sync/seconds`` and, when probed,
        ``sync/probe_max_abs_diff`` (nats).

        Raises:
            WeightMismatch: checksum, version or log-probs differ.
            ActorLost, TimeoutError, RuntimeError: a peer died or hung; may be retried.
        """
        start = time.perf_counter()
        if self.cfg.sync_method == "nccl":
            receipts = await self._by_group(version, slots)
        else:
            receipts = await self._by_file(version, slots)
        seconds = time.perf_counter() - start
        self._check(version, receipts)
        metrics = {"sync/bytes": float(receipts["trainer"].n_bytes), "sync/seconds": seconds}
        if probe:
            metrics["sync/probe_max_abs_diff"] = await self._probe(slots)
        return metrics

    # nccl -----------------------------------------------------------------------------
    async def _by_group(self, version: int, slots: list[str]) -> dict[str, WeightReceipt]:
        await self._form_group(slots)
        update = WeightUpdate(
            version=version,
            method="nccl",
            meta=await self._tensor_meta(),
            generation=self.group.generation,
            bucket_bytes=self.cfg.bucket_mb << 20,
        )
        try:
            return await self._everywhere(slots, "send_weights", update, update)
        except BaseException:
            self.group.mark_broken()
            raise

    async def _form_group(self, slots: list[str]) -> None:
        rank0 = self._trainer()
        members = self.pool.members(slots)
        identity = f"{rank0.key}@{rank0.address}"
        if self.group.is_current(identity, members):
            return
        await self.teardown()
        port = await self._call(rank0, "free_port")
        host = rank0.address.split("://")[-1].rsplit(":", 1)[0]
        specs = self.group.next_generation(identity, members, host, port)
        joins = [self._call(rank0, "open_weight_group", specs["trainer"])]
        joins += [
            self._call(self.pool.handle(slot), "init_weight_group", specs[slot]) for slot in slots
        ]
        await _all_or_first_error(joins)
        self.group.mark_formed()
        log.info(
            "weight group generation %d: trainer rank 0 and %s (%s)",
            self.group.generation,
            ", ".join(slots),
            self.group.backend,
        )

    async def teardown(self) -> None:
        """Leave the current group on every side that still answers."""
        self.group.mark_broken()
        if self.group.generation == 0 or self.rank0 is None:
            return
        calls = [rpc(self.rank0, "close_weight_group", timeout=10.0)]
        calls += [
            rpc(self.pool.handle(slot), "teardown_weight_group", timeout=10.0)
            for slot in self.pool.slots()
        ]
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, Exception):
                log.info("a side left the weight group uncleanly: %s", result)

    # memory and checkpoint ------------------------------------------------------------
    async def _by_file(self, version: int, slots: list[str]) -> dict[str, WeightReceipt]:
        path = self._file(version)
        path.parent.mkdir(parents=True, exist_ok=True)
        written = await self._call(self._trainer(), "write_weights", str(path), version)
        update = WeightUpdate(version=version, method=self.cfg.sync_method, path=str(path))
        loads = [self._call(self.pool.handle(slot), "update_weights", update) for slot in slots]
        receipts = await _all_or_first_error(loads)
        # every engine has loaded it, so the file before it has no reader left
        if self._previous_file is not None and self._previous_file != path:
            self._previous_file.unlink(missing_ok=True)
        self._previous_file = path
        return {"trainer": written, **dict(zip(slots, receipts, strict=True))}

    def _file(self, version: int) -> Path:
        name = f"weights-{version}.safetensors"
        if self.cfg.sync_method == "memory":
            return Path("/dev/shm") / f"trinity-dask-{os.getuid()}-{self.run_id}" / name
        return self.job_dir / "weights" / name

    def remove_files(self) -> None:
        if self._previous_file is not None:
            self._previous_file.unlink(missing_ok=True)
            if self.cfg.sync_method == "memory":
                self._previous_file.parent.rmdir()
            self._previous_file = None

    # proof ----------------------------------------------------------------------------
    def _check(self, version: int, receipts: dict[str, WeightReceipt]) -> None:
        expected = receipts["trainer"].checksum
        for side, receipt in receipts.items():
            if receipt.version != version or receipt.checksum != expected:
                raise WeightMismatch(
                    f"{side} holds version {receipt.version} with checksum "
                    f"{receipt.checksum:#x}; the trainer sent version {version} with "
                    f"{expected:#x}. The engine must not sample with these weights."
                )

    async def _probe(self, slots: list[str]) -> float:
        """Largest |log-prob difference| over the fixed sequences and engines, in nats."""
        sequences = await self._probe_sequences()
        wanted = await self._call(self._trainer(), "probe_logprobs", sequences)
        worst = 0.0
        for slot in slots:
            handle = self.pool.handle(slot)
            got = await asyncio.gather(*(self._call(handle, "logprobs", s) for s in sequences))
            worst = max(
                worst, *(float(np.abs(a - b).max()) for a, b in zip(got, wanted, strict=True))
            )
            if not worst <= self.cfg.probe_tolerance:
                raise WeightMismatch(
                    f"after the update {slot} and the trainer differ by {worst:.3g} nats on "
                    f"fixed sequences (allowed: synchronizer.probe_tolerance = "
                    f"{self.cfg.probe_tolerance:g}); the checksum agrees, so the engine keeps "
                    f"a stale copy of some tensor or computes in another precision"
                )
        return worst

    async def _probe_sequences(self) -> list[list[int]]:
        if self._probes is None:
            vocab = min(int(m.shape[0]) for m in await self._tensor_meta() if "embed" in m.name)
            self._probes = probe_sequences(vocab)
        return self._probes

    # plumbing -------------------------------------------------------------------------
    async def _everywhere(
        self, slots: list[str], trainer_method: str, sent: Any, received: Any
    ) -> dict[str, WeightReceipt]:
        calls = [self._call(self._trainer(), trainer_method, sent)]
        calls += [self._call(self.pool.handle(slot), "update_weights", received) for slot in slots]
        receipts = await _all_or_first_error(calls)
        return dict(zip(["trainer", *slots], receipts, strict=True))

    async def _tensor_meta(self) -> tuple[TensorMeta, ...]:
        if self._meta is None:
            self._meta = tuple(await self._call(self._trainer(), "weight_meta"))
        return self._meta

    def _trainer(self) -> ActorHandle:
        if self.rank0 is None:
            raise RuntimeError("no trainer rank is attached to the weight transport")
        return self.rank0

    async def _call(self, handle: ActorHandle, method: str, *args: Any) -> Any:
        return await rpc(handle, method, *args, timeout=self.cfg.sync_timeout_s)


async def _all_or_first_error(calls: list[Any]) -> list[Any]:
    """Results in order; at the first error the others are cancelled and it is raised."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
