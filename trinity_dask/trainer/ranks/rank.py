"""The trainer ranks: each a Dask actor on a trainer worker that owns a model replica.

Invariant: everything that touches the model runs in the rank's single thread, in the order
of the calls, so a save or a send sees the weights between two steps and the worker's event
loop always answers. Where ranks hold shards, the peers of rank 0 run its operations in its
order. Either every rank is prepared with the same generation, model and checkpoint, or no step
runs: the loss of one costs all their place, the lost ones are created again and all of them load
the same checkpoint.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional, TypeVar

import numpy as np
import pyarrow as pa
import torch

from trinity_dask.aio import all_or_first_error, ended
from trinity_dask.algorithm.table import AlgorithmSpec, resolve_algorithm
from trinity_dask.buffer.store.experience_store import ExperienceStore
from trinity_dask.cluster.actors import (
    ActorRef,
    create_actor,
    on_lost,
    recreate_actor,
    release_actor,
)
from trinity_dask.cluster.context import freeze_loaded
from trinity_dask.cluster.rpc import ActorHandle, ActorLost, rpc
from trinity_dask.cluster.slots import trainer_slot
from trinity_dask.cluster.specs import away_s
from trinity_dask.config.schema import Config
from trinity_dask.experience.schema import decode, group_codes
from trinity_dask.lazy import MODEL_LIBRARY, import_modules
from trinity_dask.models.protocol import (
    TensorMeta,
    WeightGroupSpec,
    WeightReceipt,
    WeightUpdate,
)
from trinity_dask.registry import load_plugins
from trinity_dask.trainer.checkpoints.checkpoint import read_state, write_checkpoint
from trinity_dask.trainer.checkpoints.export import export_policy, read_engine, write_engine
from trinity_dask.trainer.checkpoints.shards import agree_on
from trinity_dask.trainer.model.frozen import load_reference, load_teacher
from trinity_dask.trainer.model.policy_model import autocast_dtype, load_policy, torch_dtype
from trinity_dask.trainer.model.value_model import load_critic
from trinity_dask.trainer.ranks.gradients import GradientGroup
from trinity_dask.trainer.ranks.parallel import (
    CRITIC,
    FROZEN,
    POLICY,
    ROLES,
    Sharding,
    close_mesh,
    open_mesh,
    strategy_of,
)
from trinity_dask.trainer.sources import TrainInput, stale_metrics, without_stale
from trinity_dask.trainer.step.batching import collate
from trinity_dask.trainer.step.engine import StepEngine
from trinity_dask.trainer.step.recording import StepRecorder
from trinity_dask.trainer.step.row_metrics import (
    available_fields,
    describe_rows,
    max_memory_gb,
    row_lengths,
)
from trinity_dask.trainer.step.utilisation import Meter, model_flops, peak_tflops
from trinity_dask.weights.broadcast import WeightGroup, lay_out, make_group, send
from trinity_dask.weights.checksum import Digest
from trinity_dask.weights.files import write_weights
from trinity_dask.weights.memory import SharedFiles

log = logging.getLogger(__name__)
T = TypeVar("T")

SETTLE_S = 5.0
CALL_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 10.0


async def all_or_loss(*work: Awaitable[T]) -> list[T]:
    """Results in order. The first error ends the wait: the peers of a rank that failed may be
    waiting for it in a sum. When a rank was lost, that is the error, whatever its peers report.
    """
    calls = [asyncio.ensure_future(each) for each in work]
    try:
        _, waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
        if waiting:  # a peer's broken sum may be seen before the loss that caused it
            await asyncio.wait(waiting, timeout=SETTLE_S)
        errors = [error for call in calls if call.done() and (error := call.exception())]
    finally:
        await ended(calls)
    if errors:
        raise next((e for e in errors if isinstance(e, ActorLost)), errors[0])
    return [call.result() for call in calls]


def on_all_ranks(work: Callable[..., T]) -> Callable[..., Coroutine[Any, Any, T]]:
    """Make a method an operation: it runs in the rank's thread and, where the ranks hold
    shards, on every rank, since each tensor then takes all of them.

    Arguments are positional. Rank 0 is the one to call; it has its peers
    :meth:`~TrainerRank.follow`. A train step may also be called on a peer, for the peer's own
    metrics.
    """

    @functools.wraps(work)
    async def called(rank: TrainerRank, *args: Any) -> T:
        run = functools.partial(work, rank, *args)
        if not rank.sharded:
            return await asyncio.get_running_loop().run_in_executor(rank.thread, run)
        timeout_s = rank.cfg.trainer.step_timeout_s
        if rank.rank > 0:  # rank 0 says when
            return await asyncio.wait_for(rank.followed(args[-1]), timeout_s)
        async with rank.turn:
            mine = asyncio.get_running_loop().run_in_executor(rank.thread, run)
            follow = ("follow", work.__name__, *args)
            theirs = (rpc(peer, *follow, timeout=timeout_s) for peer in rank.peers)
            return (await all_or_loss(mine, *theirs))[0]

    return called


@dataclass
class _Loaded:
    """What exists between ``prepare`` and ``close``."""

    engine: StepEngine
    model_path: str
    pad_token_id: int
    meter: Meter
    group: Optional[WeightGroup] = None  # gradients
    weights: Optional[WeightGroup] = None  # to the engines
    generation: int = 0  # of weights, or that is being joined
    step: int = 0  # the train step whose weights these are
    laid_out: tuple[Any, ...] = ()  # how the weights lie in memory: metadata, bucket size


class TrainerRank:
    """Rank ``rank`` of ``world_size``; ``cfg`` is the stage's validated config."""

    def __init__(self, cfg: Config, rank: int, world_size: int) -> None:
        self.cfg = cfg
        self.rank = rank
        self.world_size = world_size
        self.device = "cuda" if cfg.cluster.trainer.gpus_per_worker else "cpu"
        # whether the ranks hold shards, so that all of them take part in everything
        self.sharded = world_size > 1 and any(strategy_of(cfg, r) == "fsdp2" for r in ROLES)
        self.thread = ThreadPoolExecutor(1, thread_name_prefix=f"trainer-{rank}")
        self.turn = asyncio.Lock()  # of rank 0's operations
        self.peers: tuple[ActorHandle, ...] = ()
        self._steps: dict[Any, asyncio.Future[Any]] = {}  # what a peer followed
        self._store: Optional[ExperienceStore] = None  # that the last step read from
        self._loaded: Optional[_Loaded] = None
        self._shared = SharedFiles()  # what it has written for method memory
        self._recorder = StepRecorder(cfg, rank, world_size)

    async def follow(self, name: str, *args: Any) -> None:
        """On a peer: rank 0 runs operation ``name`` and needs this rank's shards."""
        run = functools.partial(getattr(TrainerRank, name).__wrapped__, self, *args)
        work = asyncio.get_running_loop().run_in_executor(self.thread, run)
        await asyncio.wait({work})
        if name == "train_step" and not (waiting := self.followed(args[-1])).done():
            if (error := work.exception()) is not None:
                waiting.set_exception(error)
            else:
                waiting.set_result(work.result())
        await work

    def followed(self, step: Any) -> asyncio.Future[Any]:
        """On a peer: the result of following train step ``step``, before or after it is there."""
        if step not in self._steps:
            self._steps[step] = asyncio.get_running_loop().create_future()
            for old in list(self._steps)[:-2]:
                del self._steps[old]
        return self._steps[step]

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
        self,
        master: str,
        generation: int,
        model_path: str,
        checkpoint: Optional[str],
        peers: Sequence[ActorHandle] = (),
    ) -> dict[str, Any]:
        """Load the model (from ``checkpoint`` if given) and join the other ranks.

        Args:
            master: ``host:port`` at which rank 0 serves the ranks' store.
            generation: grows with every rebuild, so old and new groups never meet.
            peers: the other ranks, which rank 0 leads when they hold shards.

        Returns:
            Facts for the log: parameters, device, seconds.
        """
        self.peers, self.turn = tuple(peers), asyncio.Lock()
        for waiting in self._steps.values():
            waiting.cancel()
        self._steps = {}
        run = functools.partial(self._prepare, master, generation, model_path, checkpoint)
        return await asyncio.get_running_loop().run_in_executor(self.thread, run)

    def _prepare(
        self, master: str, generation: int, model_path: str, checkpoint: Optional[str]
    ) -> dict[str, Any]:
        start = time.perf_counter()
        import_modules(MODEL_LIBRARY)
        self._loaded = None  # a rebuild must not hold two models, nor the old group
        torch.set_num_threads(self.cfg.cluster.trainer.omp_threads)
        torch.manual_seed(self.cfg.seed)
        load_plugins(self.cfg.plugin_dirs)  # they may register a function of the algorithm
        spec = resolve_algorithm(asdict(self.cfg.algorithm))
        group = self._join(master, generation)
        model, *others = self._models(spec, model_path, group, master)
        sums = GradientGroup(group and group.backend, self.device, self.cfg.trainer.step_timeout_s)
        engine = StepEngine(self.cfg, spec, model, sums, *others)
        if checkpoint is not None:
            read_engine(engine.trainables, checkpoint)
            engine.load_state_dict(read_state(checkpoint).get("algorithm", {}))
        # padding is masked everywhere, so any valid id serves
        pad = getattr(model.config, "pad_token_id", None)
        pad = pad if pad is not None and 0 <= pad < model.config.get_text_config().vocab_size else 0
        peak = peak_tflops(self.cfg.trainer.peak_tflops, self.device, engine.policy.autocast)
        meter = Meter(model_flops(model), peak, whole=self.cfg.model.lora.rank == 0)
        freeze_loaded()
        self._loaded = _Loaded(engine, model_path, int(pad), meter, group)
        return {
            "parameters": sum(p.numel() for p in model.parameters()),
            "trained": sum(t.numel() for t in engine.policy.named.values()),
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

    def _models(
        self, spec: AlgorithmSpec, model_path: str, group: Optional[WeightGroup], master: str
    ) -> tuple[Any, ...]:
        """Policy, reference, teacher and critic (None where there is none), sharded if need be."""
        cfg, timeout_s = self.cfg, self.cfg.trainer.step_timeout_s
        dealt: dict[str, Optional[Sharding]] = dict.fromkeys(ROLES)
        if group is not None and self.sharded:
            host = master.rpartition(":")[0]
            mesh = open_mesh(group, self.rank, self.world_size, self.device, host, timeout_s)
            reshard = cfg.trainer.parallel.reshard_after_forward
            sharding = Sharding(mesh, autocast_dtype(cfg.model.dtype), reshard)
            dealt = {r: sharding if strategy_of(cfg, r) == "fsdp2" else None for r in ROLES}
        model = load_policy(
            model_path,
            device=self.device,
            trust_remote_code=cfg.model.trust_remote_code,
            gradient_checkpointing=cfg.trainer.gradient_checkpointing,
            lora=cfg.model.lora,
            fused_kernels=cfg.trainer.fused_kernels != "off",
            attention=cfg.model.attn_implementation,
            sharding=dealt[POLICY],
        )
        teacher = load_teacher(cfg, spec, model, self.device, dealt[FROZEN])
        # the reference under an adapter is the policy itself
        reference = load_reference(cfg, spec, model_path, self.device, model, dealt[FROZEN])
        critic = load_critic(cfg, spec, model_path, self.device, dealt[CRITIC])
        return model, reference, teacher, critic

    async def close(self) -> None:
        """Drop model and groups. What still runs in the thread is not waited for."""
        self._loaded = None
        await asyncio.to_thread(self._recorder.close)
        if self.sharded:
            close_mesh()
        self.thread.shutdown(wait=False, cancel_futures=True)

    # training ---------------------------------------------------------------------------
    @on_all_ranks
    def train_step(self, train_input: TrainInput, step: int) -> dict[str, float]:
        """Train on this rank's share of the rows; metrics as in :class:`StepEngine`.

        Rank 0 adds ``sample/*`` of all rows. ``time/*`` in seconds, ``tokens`` of this rank.

        Raises:
            ValueError: an input without rows, or rows that lack what the algorithm needs.
            Exception: what the store raises for damaged files.
        """
        start = time.perf_counter()
        engine = self._now.engine
        self._now.step = step
        tables, url = [], train_input.store_url
        if url is not None:
            if self._store is None or self._store.url != url:
                options, skip = train_input.storage_options, train_input.skip_corrupt
                self._store = ExperienceStore(url, options, skip_corrupt=skip)
            tables.append(self._store.read(train_input.refs))
        if train_input.payload is not None:
            tables.append(decode(train_input.payload)[0])
        if not tables:
            raise ValueError("a train input needs a payload or a store_url")
        table = without_stale(pa.concat_tables(tables), train_input.min_version)
        if table.num_rows == 0:  # all of it damaged, and skip_corrupt allows to go on
            return {"tokens": 0.0, **describe_rows(table, step)}
        # on all rows, before the ranks part: one rank that refuses alone would leave its
        # peers waiting for it in a sum
        engine.check(available_fields(table))
        place = self.rank, self.world_size
        plan = engine.planner.plan(row_lengths(table), step, *place, group_codes(table))
        mine = table if len(plan.rows) == table.num_rows else table.take(pa.array(plan.rows))
        batch = collate(mine, self._now.pad_token_id, table)
        whole = batch
        if mine is not table and engine.spec.advantage_in_trainer:
            whole = collate(table, self._now.pad_token_id)
        ready = time.perf_counter()
        look = functools.partial(self._recorder.take, mine, step, whole=url is None)
        metrics = engine.train_step(batch, step, plan, whole, look)
        metrics |= {"time/load_rows": ready - start, "time/update": time.perf_counter() - ready}
        metrics["tokens"] = float(row_lengths(mine).sum())
        metrics["perf/max_memory_gb"] = max_memory_gb(self.device)
        metrics |= self._now.meter.of_step(batch, plan, metrics)
        if self.rank == 0:
            metrics |= describe_rows(table, step) | stale_metrics(table, train_input.min_version)
        return metrics

    # checkpoints ------------------------------------------------------------------------
    @on_all_ranks
    def save_checkpoint(self, job_dir: str, step: int, state: dict[str, Any], save_hf: bool) -> str:
        """Write ``global_step_<step>`` (called on rank 0 only); its path."""
        now, lead, begun = self._now, self.rank == 0, False
        self._recorder.flush()

        def fill(directory: Path) -> None:
            nonlocal begun
            begun = True
            if self.sharded:
                agree_on(directory)
            write_engine(now.engine.trainables, directory, now.model_path)
            if save_hf:
                dtype = torch_dtype(self.cfg.model.dtype)
                export_policy(directory, dtype, self.cfg.model.lora.merge_export)

        if not lead:
            if (directory := agree_on(None)) is not None:
                write_engine(now.engine.trainables, directory, lead=False)
            return ""
        of_algorithm = now.engine.state_dict()
        if of_algorithm:
            state = state | {"algorithm": of_algorithm}
        keep = self.cfg.trainer.max_checkpoints_to_keep
        try:
            return str(write_checkpoint(job_dir, step, state, fill, keep))
        finally:
            if self.sharded and not begun:  # the peers wait to be told
                agree_on(None)

    # weights ----------------------------------------------------------------------------
    async def weight_meta(self) -> tuple[TensorMeta, ...]:
        """Names, wire dtypes and shapes, in sending order: the model, or only its adapter."""
        return self._now.engine.policy.wire_meta(self.cfg.model.dtype)

    async def vocab_size(self) -> int:
        """Token ids below it are valid."""
        return int(self._now.engine.policy.module.config.get_text_config().vocab_size)

    async def open_weight_group(self, spec: WeightGroupSpec) -> Optional[float]:
        """Join generation ``spec.generation`` as rank 0; serves its store. Returns the bytes per
        second of a bare broadcast, if one was asked for."""
        now = self._now
        now.generation = spec.generation
        # not on the compute thread: the peers would wait for a train step to end, and the training
        # for a peer that has died
        await asyncio.to_thread(self._leave_weight_group)
        group = await asyncio.to_thread(make_group, spec, 0, True, self.device)
        if now.generation != spec.generation:  # given up meanwhile, and another one asked for
            group.close()
            raise RuntimeError(f"weight group generation {spec.generation} came too late")
        now.weights = group
        return group.bytes_per_s

    async def close_weight_group(self) -> None:
        if self._loaded is not None:
            # not on the compute thread: it may be inside the transfer that this ends
            await asyncio.to_thread(self._leave_weight_group)

    def _leave_weight_group(self) -> None:
        """Closed, not only dropped: engines that wait in the group then fail at once."""
        group, self._now.weights = self._now.weights, None
        if group is not None:
            group.close()

    @on_all_ranks
    def send_weights(self, update: WeightUpdate) -> WeightReceipt:
        """Broadcast the current weights to the open weight group."""
        start = time.perf_counter()
        now, group = self._now, self._now.weights
        layout = (update.meta, update.bucket_bytes)
        if now.laid_out != layout:
            lay_out(now.engine.policy.named, *layout)
            now.laid_out = layout
        named = now.engine.policy.full_weights(hub=True)
        if group is not None and group.generation == update.generation:
            digest = send(group, named, *layout)
        else:
            digest = Digest()
            for _ in named:  # the others' shards need this rank's
                pass
            if self.rank == 0:
                raise RuntimeError(
                    f"weight group generation {update.generation} is not open on trainer rank "
                    f"{self.rank} (open: {group and group.generation}); form it again"
                )
        seconds = time.perf_counter() - start
        return WeightReceipt(update.version, digest.value, digest.n_bytes, seconds, now.step)

    @on_all_ranks
    def write_weights(
        self, path: str, version: int, storage_options: Optional[dict[str, Any]] = None
    ) -> WeightReceipt:
        """Write the current weights to a file, or an fsspec URL, that appears whole."""
        start = time.perf_counter()
        policy = self._now.engine.policy
        every = policy.wire_meta(self.cfg.model.dtype)
        dtypes = {each.name: each.dtype for each in every}
        weights = policy.full_weights(hub=True)
        named = ((name, tensor.to(getattr(torch, dtypes[name]))) for name, tensor in weights)
        # where each tensor is gathered no two need exist at once
        meta = every if self.sharded else None
        digest = Digest()
        if self.sharded and self.rank > 0:
            for _ in named:  # rank 0 needs this rank's shards
                pass
        elif self.cfg.synchronizer.sync_method == "memory":
            digest = self._shared.write(path, named, meta)
        else:
            digest = write_weights(path, named, storage_options, meta=meta)
        seconds = time.perf_counter() - start
        return WeightReceipt(version, digest.value, digest.n_bytes, seconds, self._now.step)

    @on_all_ranks
    def probe_logprobs(
        self, sequences: list[list[int]], temperature: float = 1.0
    ) -> list[np.ndarray]:
        """Per sequence the log-prob of every token after the first: float32."""
        return self._now.engine.sequence_logprobs(sequences, temperature)


class RanksFailed(RuntimeError):
    """Trainer ranks died more often than ``trainer.max_rank_restarts`` allows."""


class RankPool:
    """One :class:`TrainerRank` per trainer worker; lives on the control worker's loop."""

    def __init__(self, cfg: Config, run_id: str) -> None:
        self.cfg = cfg
        self.run_id = run_id
        self.world_size = cfg.cluster.trainer.n_workers
        self.generation = 0
        self.restarts = 0
        self._refs: list[ActorRef] = []
        self._lost: dict[int, ActorHandle] = {}

    @property
    def handles(self) -> list[ActorHandle]:
        """Of all ranks, rank 0 first."""
        return [ref.handle for ref in self._refs]

    @property
    def lost(self) -> list[int]:
        """Ranks whose worker is known to be gone."""
        return sorted(self._lost)

    # life -------------------------------------------------------------------------------
    async def start(self, model_path: str, checkpoint: Optional[str]) -> dict[str, Any]:
        """Create and prepare all ranks; returns rank 0's facts.

        Raises:
            TimeoutError: a trainer slot has no worker, or a rank is not ready in time.
            Exception: what a rank raised.
        """
        ranks = range(self.world_size)
        self._refs = await all_or_first_error(*(self._create(rank) for rank in ranks))
        for rank in ranks:
            self._watch(rank)
        return await self._prepare(model_path, checkpoint)

    async def _create(self, rank: int) -> ActorRef:
        return await create_actor(
            TrainerRank,
            self.cfg,
            rank,
            self.world_size,
            slot=trainer_slot(rank),
            key=f"{self.run_id}-{trainer_slot(rank)}",
            timeout=self.cfg.cluster.start_timeout_s,
        )

    def _watch(self, rank: int) -> None:
        def lost(ref: ActorRef) -> None:
            self._lost[rank] = ref.handle
            log.warning("trainer rank %d was lost with its worker %s", rank, ref.handle.address)

        on_lost(self._refs[rank], lost)

    async def _prepare(self, model_path: str, checkpoint: Optional[str]) -> dict[str, Any]:
        self.generation += 1
        host = self.handles[0].address.split("://")[-1].rpartition(":")[0]
        port = await self.call(0, "free_port", timeout_s=CALL_TIMEOUT_S)
        peers = tuple(self.handles[1:])
        arguments = (f"{host}:{port}", self.generation, model_path, checkpoint, peers)
        timeout_s = self.cfg.trainer.step_timeout_s
        facts = await self.call_all("prepare", *arguments, timeout_s=timeout_s)
        return facts[0]

    async def rebuild(self, model_path: str, checkpoint: Optional[str], cause: Exception) -> None:
        """Create the lost ranks again and prepare all from ``checkpoint``.

        A rank that dies during the rebuild counts as the next loss.

        Raises:
            RanksFailed: there were ``max_rank_restarts`` losses already.
        """
        allowed = self.cfg.trainer.max_rank_restarts
        while True:
            if self.restarts >= allowed:
                raise RanksFailed(
                    f"trainer ranks were rebuilt {self.restarts} times and one is lost again "
                    f"({cause}); trainer.max_rank_restarts = {allowed}. The last complete "
                    "checkpoint is kept: run the same command to continue from it"
                ) from cause
            self.restarts += 1
            try:
                await self._recreate_lost(cause)
                await self._prepare(model_path, checkpoint)
                return
            except ActorLost as error:
                cause = error

    async def _recreate_lost(self, cause: Exception) -> None:
        if isinstance(cause, ActorLost):
            self._lost.update({r: h for r, h in enumerate(self.handles) if h == cause.handle})
        timeout_s = away_s(self.cfg.cluster, self.cfg.cluster.start_timeout_s)
        for rank in self.lost:
            log.warning("creating trainer rank %d again", rank)
            self._refs[rank] = await recreate_actor(self._refs[rank], timeout_s)
            del self._lost[rank]
            self._watch(rank)

    async def close(self) -> None:
        """Close and release every rank; a rank that does not answer is left to its worker."""
        closing = (rpc(h, "close", timeout=CLOSE_TIMEOUT_S) for h in self.handles)
        for result in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(result, Exception):
                log.info("a trainer rank did not close cleanly: %s", result)
        for ref in self._refs:
            await release_actor(ref)
        self._refs = []

    # calls ------------------------------------------------------------------------------
    async def call(self, rank: int, method: str, *args: Any, timeout_s: float) -> Any:
        return await rpc(self._refs[rank].handle, method, *args, timeout=timeout_s)

    async def call_all(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """Call every rank at once; results in rank order, errors as of :func:`all_or_loss`."""
        calls = (rpc(handle, method, *args, timeout=timeout_s) for handle in self.handles)
        return await all_or_loss(*calls)
