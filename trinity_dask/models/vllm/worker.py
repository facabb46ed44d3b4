"""The part of the engine that runs inside vLLM's worker processes.

Invariant: the model holds one whole version, with no packed copy of an older weight, or it
says that it is ``half_loaded`` and the engine does not sample. The latter can happen only
where weights are loaded while they arrive (accelerators, which have no room for a second
copy, and models that the loader for CPUs does not know) and the transfer breaks off. The
receipt is computed here, over the bytes that this process received.

vLLM loads this module in its workers because the engine names :class:`WeightWorker` as
``worker_extension_cls``; importing it registers the weight-transfer backend ``trinity``.
"""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Optional

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from trinity_dask.models.protocol import TensorMeta, WeightGroupSpec, WeightUpdate
from trinity_dask.models.vllm.adapter import AdapterHolder
from trinity_dask.models.vllm.cpu_loader import CpuLoader, NoPlan, plan_cpu_loader
from trinity_dask.models.vllm.plugin import register
from trinity_dask.weights.broadcast import (
    WeightGroup,
    check_update,
    incoming,
    make_group,
    memory_bytes,
    rank_of_worker,
)
from trinity_dask.weights.checksum import Digest
from trinity_dask.weights.files import fetched, file_meta
from trinity_dask.weights.memory import Look, SharedFiles, keep_freed_memory

# "1" in a rollout worker's environment: take vLLM's own reload, to compare with or to rule
# this project's loader out when a fault is looked for
RELOAD_ENV = "TRINITY_DASK_VLLM_RELOAD"
log = logging.getLogger("trinity_dask.engines")

BACKEND = "trinity"
PROMPT_LOGPROBS = "_get_prompt_logprobs_dict"
# follow from the configuration; vLLM skips them too
CONSTANTS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")

# the package may be used from a checkout, where no entry point announces the plugin
register()


@dataclass
class GroupInfo(WeightTransferInitInfo):
    """Fields of :class:`WeightGroupSpec`; vLLM carries them as a dict."""

    host: str
    port: int
    world_size: int
    rank_offset: int
    generation: int
    backend: str
    timeout_s: float
    floor_bytes: int = 0


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Fields of :class:`WeightUpdate`; vLLM carries them as a dict."""

    version: int
    method: str
    meta: list[Any] = field(default_factory=list)  # (name, dtype, shape)
    generation: int = 0
    path: Optional[str] = None
    bucket_bytes: int = 64 << 20
    storage_options: dict[str, Any] = field(default_factory=dict)


class TrinityTransfer(WeightTransferEngine[GroupInfo, UpdateInfo]):
    """Receives a version by group or by file and loads it into the vLLM model."""

    init_info_cls = GroupInfo
    update_info_cls = UpdateInfo
    group: Optional[WeightGroup] = None
    receipt: Optional[dict[str, Any]] = None
    half_loaded = False
    adapter: Optional[AdapterHolder] = None  # then an update is one of the adapter alone

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._planned: dict[tuple[TensorMeta, ...], Optional[CpuLoader]] = {}
        self._shared = SharedFiles()
        self._look: Optional[Look] = None  # at the version in use, if it lies in shared memory

    def init_transfer_engine(self, init_info: GroupInfo) -> None:
        self.shutdown()
        spec = WeightGroupSpec(**vars(init_info))
        rank = rank_of_worker(spec, self.parallel_config)
        self.group = make_group(spec, rank, False, str(self.device))

    def start_weight_update(self) -> None:
        self.receipt = None

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receive and load one version; over a group, or from a file or URL."""
        start = time.perf_counter()
        meta = tuple(
            TensorMeta(name, dtype, tuple(shape)) for name, dtype, shape in update_info.meta
        )
        update = WeightUpdate(**{**vars(update_info), "meta": meta})
        digest, look = Digest(), None  # what is looked at from now on
        with fetched(update) if update.path else nullcontext(update) as here:
            check_update(here, self.group)
            # the way that this device, model and method allow
            if self.adapter is not None:
                self.adapter.stage(dict(incoming(here, self.group, digest)))
            elif (loader := self._cpu_loader(here)) is None:
                self.half_loaded = True
                load_weights(self.model, self.model_config, incoming(here, self.group, digest))
            elif _is_shared(here):
                digest, look = self._load_shared(loader, str(here.path))
            elif here.method == "nccl":
                lease = loader.lease(memory_bytes(here.meta, here.bucket_bytes))
                own = loader.own_memory(here.meta)
                loader.load(incoming(here, self.group, digest, lease.memory, own), lease)
            else:
                # copies: what is packed later must not wait on a disk, nor on a file that is gone
                arriving = incoming(here, self.group, digest)
                loader.load(((name, tensor.clone()) for name, tensor in arriving), None)
        self.half_loaded = self.adapter is not None  # until the staged adapter is taken
        self._look, before = look, self._look
        if before is not None:  # nothing of the version before is in use any more
            before.end()
        self.receipt = {
            "checksum": digest.value,
            "n_bytes": digest.n_bytes,
            "seconds": time.perf_counter() - start,
        }

    def _load_shared(self, loader: CpuLoader, path: str) -> tuple[Digest, Look]:
        """What is to be packed is read from the file when it is; so long it is looked at."""
        look = self._shared.look(path)
        try:
            return loader.load_views(look.tensors()), look
        except BaseException:
            look.end()
            raise

    def _cpu_loader(self, update: WeightUpdate) -> Optional[CpuLoader]:
        """The fast loader for these tensors, if there is one; planned once per list."""
        if self.device.type != "cpu" or self.parallel_config.world_size > 1:
            return None
        if os.environ.get(RELOAD_ENV) == "1":
            return None
        meta = update.meta or self._meta_of_file(update)
        if meta not in self._planned:
            dtype: Any = self.model_config.dtype
            tied = tied_packed_layers(self.model)
            self._planned[meta] = None
            try:
                self._planned[meta] = plan_cpu_loader(self.model, meta, dtype, tied)
            except NoPlan as reason:
                log.warning("weights take vLLM's layer-wise reload, which is slower: %s", reason)
        return self._planned[meta]

    def _meta_of_file(self, update: WeightUpdate) -> tuple[TensorMeta, ...]:
        if not _is_shared(update):
            return file_meta(str(update.path))
        look = self._shared.look(str(update.path))
        try:
            return look.meta()
        finally:
            look.end()

    def finish_weight_update(self) -> None:
        """Nothing is left to do: the weights are in use when they are loaded."""

    def shutdown(self) -> None:
        group, self.group = self.group, None
        if group is not None:
            group.close()


def _is_shared(update: WeightUpdate) -> bool:
    """Whether it lies in one file in shared memory."""
    return update.method == "memory" and os.path.isfile(str(update.path))


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, TrinityTransfer)


class WeightWorker:
    """Methods that vLLM mixes into its worker class; called by ``collective_rpc``."""

    device: torch.device
    weight_transfer_engine: Any
    model_runner: Any

    def trinity_setup(self, lora: Optional[dict[str, Any]] = None) -> bool:
        """Whether prompt log-probs can be asked for at temperatures other than 1.

        ``lora``: the section ``model.lora`` when updates are those of an adapter.
        """
        if self.device.type == "cpu":
            keep_freed_memory()
        if lora is not None:
            manager = self.model_runner.lora_manager
            self.weight_transfer_engine.adapter = AdapterHolder(manager, lora)
        return heat_prompt_logprobs(self.model_runner)

    def trinity_half_loaded(self) -> bool:
        """Whether an update broke off after it had changed weights."""
        return self.weight_transfer_engine.half_loaded

    def trinity_end_update(self) -> Optional[dict[str, Any]]:
        """Checksum, bytes and seconds of the last update, or None if it failed.

        An adapter that has arrived is served from here on: after vLLM's own end of an update,
        which would drop every adapter.
        """
        transfer = self.weight_transfer_engine
        if transfer.adapter is not None:
            transfer.adapter.take()
            transfer.half_loaded = False
        return transfer.receipt


@torch.no_grad()
def load_weights(model: Any, model_config: Any, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load Hugging Face names into a vLLM model; fused modules are fused by the model.

    Raises:
        ValueError: a tensor that no parameter took, or a parameter that none filled.
    """
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    wanted = {name for name, _ in model.named_parameters()}
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    for module in model.modules() if on_cpu else ():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            # it packs the experts when it is made, and never again
            method.moe_kernel = None
    initialize_layerwise_reload(model)
    claims = Claims(model)
    try:
        filled = model.load_weights(claims.watched(named))
    finally:
        claims.close()
        finalize_layerwise_reload(model, model_config)
    for module in tied_packed_layers(model):
        module.quant_method.process_weights_after_loading(module)
    empty = [] if filled is None else sorted(wanted - filled)
    if claims.refused or empty:
        raise ValueError(
            f"{type(model).__name__} does not hold what was sent: no parameter took "
            f"{claims.refused[:3]} ({len(claims.refused)} tensors), nothing filled {empty[:3]} "
            f"({len(empty)} parameters). vLLM cannot change these weights of this architecture "
            "while it runs; use explorer.rollout_model.engine_type=torch"
        )


class Claims:
    """Which tensors the parameters of ``model`` took, as their loaders saw it."""

    def __init__(self, model: Any) -> None:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        self._given: list[tuple[int, int, str]] = []  # where each lies, and its name
        self._taken: set[str] = set()
        self._loaders = [
            (parameter, getattr(parameter, "weight_loader", default_weight_loader))
            for parameter in model.parameters()
        ]
        for parameter, loader in self._loaders:
            parameter.weight_loader = self._noting(loader)

    def watched(
        self, named: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in named:
            begin = tensor.data_ptr()
            self._given.append((begin, begin + tensor.nbytes, name))
            yield name, tensor

    def _noting(self, loader: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(loader)  # vLLM knows its own loaders by name, and unwraps them
        def noted(*args: Any, **kwargs: Any) -> Any:
            loaded = args[1] if len(args) > 1 else kwargs["loaded_weight"]
            place = loaded.data_ptr()
            lying = (name for begin, end, name in reversed(self._given) if begin <= place < end)
            # one that lies nowhere was made of the last that was given
            self._taken.add(next(lying, self._given[-1][2]))
            return loader(*args, **kwargs)

        return noted

    @property
    def refused(self) -> list[str]:
        """Tensors that nothing took, but for constants that old checkpoints carry."""
        names = (name for _, _, name in self._given if name not in self._taken)
        return [name for name in names if not name.endswith(CONSTANTS)]

    def close(self) -> None:
        for parameter, loader in self._loaders:
            parameter.weight_loader = loader


def tied_packed_layers(model: Any) -> list[Any]:
    """Modules that own a weight and compute with a packed copy of it.

    That is a ``lm_head`` on a CPU. If it is tied to the embedding, its copy is one of the
    embedding's weight, and no weight of its own name is ever loaded: nothing else would
    make that copy again.
    """

    packed = [module for module in model.modules() if hasattr(module, "cpu_linear")]
    weights = [getattr(module, "weight", None) for module in packed]
    pairs = zip(packed, weights, strict=True)
    return [module for module, weight in pairs if weight is not None and weight.numel() > 0]


def heat_prompt_logprobs(runner: Any) -> bool:
    """Have ``runner`` score each request's prompt with the softmax of ``logits / temperature``, as
    its sampled tokens are; vLLM scores prompts at temperature 1 whatever the request says. False
    if this vLLM has no such hook."""
    if not all(
        hasattr(runner, name) for name in (PROMPT_LOGPROBS, "num_prompt_logprobs", "sampler")
    ):
        return False
    original = getattr(runner, PROMPT_LOGPROBS)

    def by_temperature(hidden_states: Any, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
        everyone = runner.num_prompt_logprobs
        results: dict[str, Any] = {}
        groups: dict[float, list[str]] = defaultdict(list)
        for request_id in everyone:
            params = runner.requests[request_id].sampling_params
            groups[params.temperature or 1.0].append(request_id)
        for heat, requests in groups.items():
            # the original works through this table and removes what it finished
            runner.num_prompt_logprobs = {r: everyone.pop(r) for r in requests}
            try:
                with _ScaledLogits(runner.sampler, heat):
                    results.update(original(hidden_states, num_scheduled_tokens))
            finally:
                everyone.update(runner.num_prompt_logprobs)
                runner.num_prompt_logprobs = everyone
        return results

    setattr(runner, PROMPT_LOGPROBS, by_temperature)
    return True


class _ScaledLogits:
    """While it is entered, the sampler's log-probs are those of ``logits / heat``."""

    def __init__(self, sampler: Any, heat: float) -> None:
        self.sampler, self.heat = sampler, heat

    def __enter__(self) -> None:
        if self.heat != 1.0:
            original = type(self.sampler).compute_logprobs
            self.sampler.compute_logprobs = lambda logits: original(logits.float() / self.heat)

    def __exit__(self, *_: object) -> None:
        self.sampler.__dict__.pop("compute_logprobs", None)
