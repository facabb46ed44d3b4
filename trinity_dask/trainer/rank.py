"""One trainer rank: a Dask actor on a trainer worker that owns a model replica.

Invariant: everything that touches the model runs in the rank's single thread, in the order
of the calls, so a save or a send sees the weights between two steps and the worker's event
loop always answers.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional, TypeVar

import numpy as np
import pyarrow as pa
import torch

from trinity_dask.algorithm.table import resolve_algorithm
from trinity_dask.config.schema import Config
from trinity_dask.experience.collate import collate
from trinity_dask.models.protocol import (
    TensorMeta,
    WeightGroupSpec,
    WeightReceipt,
    WeightUpdate,
)
from trinity_dask.models.weight_transfer import (
    Digest,
    WeightGroup,
    make_group,
    named_weights,
    send,
    tensor_meta,
    write_safetensors,
)
from trinity_dask.trainer.checkpoint import write_checkpoint
from trinity_dask.trainer.engine import EngineSettings, TrainEngine
from trinity_dask.trainer.export import export_model, read_engine, write_engine
from trinity_dask.trainer.gradients import GradientGroup
from trinity_dask.trainer.policy_model import (
    autocast_dtype,
    frozen_copy,
    load_policy,
    torch_dtype,
)
from trinity_dask.trainer.rows import (
    RowSource,
    TrainInput,
    available_fields,
    describe_rows,
    row_lengths,
)

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass
class _Loaded:
    """What exists between ``prepare`` and ``close``."""

    engine: TrainEngine
    model_path: str
    pad_token_id: int
    group: Optional[WeightGroup] = None  # gradients
    weights: Optional[WeightGroup] = None  # to the engines


class TrainerRank:
    """Rank ``rank`` of ``world_size``; ``cfg`` is the stage's validated config."""

    def __init__(self, cfg: Config, rank: int, world_size: int) -> None:
        self.cfg = cfg
        self.rank = rank
        self.world_size = world_size
        self.device = "cuda" if cfg.cluster.trainer.gpus_per_worker else "cpu"
        self._source = RowSource()
        self._loaded: Optional[_Loaded] = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"trainer-{rank}")

    async def _run(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    @property
    def _now(self) -> _Loaded:
        if self._loaded is None:
            raise RuntimeError(f"trainer rank {self.rank}: prepare() was not called")
        return self._loaded

    # life -------------------------------------------------------------------------------
    async def free_port(self) -> int:
        """A TCP port that is free on this machine at the moment."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return probe.getsockname()[1]

    async def prepare(
        self, master: str, generation: int, model_path: str, checkpoint: Optional[str]
    ) -> dict[str, Any]:
        """Load the model (from ``checkpoint`` if given) and join the other ranks.

        Args:
            master: ``host:port`` at which rank 0 serves the ranks' store.
            generation: grows with every rebuild, so old and new groups never meet.

        Returns:
            Facts for the log: parameters, device, seconds.
        """
        return await self._run(self._prepare, master, generation, model_path, checkpoint)

    def _prepare(
        self, master: str, generation: int, model_path: str, checkpoint: Optional[str]
    ) -> dict[str, Any]:
        start = time.perf_counter()
        self._loaded = None  # a rebuild must not hold two models, nor the old group
        torch.set_num_threads(self.cfg.cluster.trainer.omp_threads)
        torch.manual_seed(self.cfg.seed)
        spec = resolve_algorithm(asdict(self.cfg.algorithm))
        trust = self.cfg.model.trust_remote_code
        options: dict[str, Any] = {"device": self.device, "trust_remote_code": trust}
        checkpointing = self.cfg.trainer.gradient_checkpointing
        model = load_policy(model_path, gradient_checkpointing=checkpointing, **options)
        reference = frozen_copy(model_path, **options) if spec.uses_reference else None
        group = self._join(master, generation)
        settings = EngineSettings.from_config(self.cfg, autocast_dtype(self.cfg.model.dtype))
        sums = GradientGroup(group and group.backend, self.device, self.cfg.trainer.step_timeout_s)
        engine = TrainEngine(model, spec, settings, sums, reference)
        if checkpoint is not None:
            read_engine(engine, checkpoint)
        # padding is masked everywhere, so any valid id serves
        pad = getattr(model.config, "pad_token_id", None)
        self._loaded = _Loaded(engine, model_path, 0 if pad is None else int(pad), group)
        return {
            "parameters": sum(p.numel() for p in model.parameters()),
            "device": str(engine.device),
            "algorithm": spec.resolved,
            "seconds": time.perf_counter() - start,
        }

    def _join(self, master: str, generation: int) -> Optional[WeightGroup]:
        if self.world_size == 1:
            return None
        host, _, port = master.rpartition(":")
        spec = WeightGroupSpec(
            host=host,
            port=int(port),
            world_size=self.world_size,
            rank_offset=self.rank,
            generation=generation,
            backend="nccl" if self.device == "cuda" else "gloo",
            timeout_s=self.cfg.cluster.start_timeout_s,
        )
        return make_group(spec, self.rank, is_master=self.rank == 0, device=self.device)

    async def close(self) -> None:
        """Drop model and groups. What still runs in the thread is not waited for."""
        self._loaded = None
        self._thread.shutdown(wait=False, cancel_futures=True)

    # training ---------------------------------------------------------------------------
    async def train_step(self, train_input: TrainInput, step: int) -> dict[str, float]:
        """Train on this rank's share of the rows; metrics as in :class:`TrainEngine`.

        Rank 0 adds ``sample/*`` of all rows. ``time/*`` in seconds, ``tokens`` of this rank.
        """
        return await self._run(self._train_step, train_input, step)

    def _train_step(self, train_input: TrainInput, step: int) -> dict[str, float]:
        start = time.perf_counter()
        engine = self._now.engine
        table = self._source.read(train_input)
        if table.num_rows == 0:  # all of it damaged, and skip_corrupt allows to go on
            return {"tokens": 0.0, **describe_rows(table)}
        # on all rows, before the ranks part: one rank that refuses alone would leave its
        # peers waiting for it in a sum
        engine.objective.check(available_fields(table))
        plan = engine.plan(row_lengths(table), step, self.rank, self.world_size)
        mine = table if len(plan.rows) == table.num_rows else table.take(pa.array(plan.rows))
        batch = collate(mine, self._now.pad_token_id)
        ready = time.perf_counter()
        metrics = engine.train_step(batch, step, plan)
        metrics["time/load_rows"] = ready - start
        metrics["time/update"] = time.perf_counter() - ready
        metrics["tokens"] = float(row_lengths(mine).sum())
        return metrics | (describe_rows(table) if self.rank == 0 else {})

    # checkpoints ------------------------------------------------------------------------
    async def save_checkpoint(
        self, job_dir: str, step: int, state: dict[str, Any], save_hf: bool
    ) -> str:
        """Write ``global_step_<step>`` (rank 0 only: the ranks are replicas); its path."""
        return await self._run(self._save, job_dir, step, state, save_hf)

    def _save(self, job_dir: str, step: int, state: dict[str, Any], save_hf: bool) -> str:
        now = self._now

        def fill(directory: Path) -> None:
            write_engine(now.engine, directory)
            if save_hf:
                dtype = torch_dtype(self.cfg.model.dtype)
                export_model(now.engine.model, directory, dtype, now.model_path)

        keep = self.cfg.trainer.max_checkpoints_to_keep
        return str(write_checkpoint(job_dir, step, state, fill, keep))

    # weights ----------------------------------------------------------------------------
    def _weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        dtype = torch_dtype(self.cfg.model.dtype)
        for name, tensor in named_weights(self._now.engine.model):
            yield name, tensor.to(dtype)

    async def weight_meta(self) -> tuple[TensorMeta, ...]:
        """Names, wire dtypes and shapes, in sending order."""
        named = named_weights(self._now.engine.model)
        return tensor_meta(named, self.cfg.model.dtype)

    async def open_weight_group(self, spec: WeightGroupSpec) -> None:
        """Join generation ``spec.generation`` as rank 0; serves its store."""

        def join() -> None:
            self._leave_weight_group()
            self._now.weights = make_group(spec, 0, is_master=True, device=self.device)

        await self._run(join)

    async def close_weight_group(self) -> None:
        if self._loaded is not None:
            # not on the compute thread: it may be inside the transfer that this ends
            await asyncio.to_thread(self._leave_weight_group)

    def _leave_weight_group(self) -> None:
        """Closed, not only dropped: engines that wait in the group then fail at once."""
        group, self._now.weights = self._now.weights, None
        if group is not None:
            group.close()

    async def send_weights(self, update: WeightUpdate) -> WeightReceipt:
        """Broadcast the current weights to the open weight group."""
        group = self._now.weights
        if group is None or group.generation != update.generation:
            raise RuntimeError(
                f"weight group generation {update.generation} is not open on trainer rank "
                f"{self.rank} (open: {group and group.generation}); form it again"
            )

        def work() -> Digest:
            named = named_weights(self._now.engine.model)
            return send(group, named, update.meta, update.bucket_bytes)

        return await self._run(_timed, work, update.version)

    async def write_weights(self, path: str, version: int) -> WeightReceipt:
        """Write the current weights as one safetensors file, atomically."""
        return await self._run(_timed, lambda: write_safetensors(path, self._weights()), version)

    async def probe_logprobs(
        self, sequences: list[list[int]], temperature: float = 1.0
    ) -> list[np.ndarray]:
        """Per sequence the log-prob of every token after the first: float32."""

        def work() -> list[np.ndarray]:
            engine = self._now.engine
            return [engine.sequence_logprobs(ids, temperature) for ids in sequences]

        return await self._run(work)


def _timed(work: Callable[[], Digest], version: int) -> WeightReceipt:
    start = time.perf_counter()
    digest = work()
    seconds = time.perf_counter() - start
    return WeightReceipt(version, digest.value, digest.n_bytes, seconds)
