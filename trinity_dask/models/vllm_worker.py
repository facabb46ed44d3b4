"""The part of the engine that runs inside vLLM's worker processes.

Invariant: weights are loaded while they arrive, so from the first one on the model is
``half_loaded`` until a whole version is in, with every packed copy of a weight made again;
the engine does not sample in between. The receipt is computed here, over the bytes that
this process received.

vLLM loads this module in its workers because the engine names :class:`WeightWorker` as
``worker_extension_cls``; importing it registers the weight-transfer backend ``trinity``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from trinity_dask.models.checksum import Digest
from trinity_dask.models.malloc import keep_freed_memory
from trinity_dask.models.protocol import TensorMeta, WeightGroupSpec, WeightUpdate
from trinity_dask.models.torch_weights import check_update, incoming
from trinity_dask.models.vllm_cpu_loader import CpuLoader, NoPlan, plan_cpu_loader
from trinity_dask.models.vllm_plugin import register
from trinity_dask.models.vllm_prompt_logprobs import heat_prompt_logprobs
from trinity_dask.models.weight_files import file_meta
from trinity_dask.models.weight_transfer import WeightGroup, make_group

log = logging.getLogger("trinity_dask.engines")

BACKEND = "trinity"

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


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Fields of :class:`WeightUpdate`; vLLM carries them as a dict."""

    version: int
    method: str
    meta: list[Any] = field(default_factory=list)  # (name, dtype, shape)
    generation: int = 0
    path: Optional[str] = None
    bucket_bytes: int = 64 << 20

    def update(self) -> WeightUpdate:
        meta = tuple(TensorMeta(name, dtype, tuple(shape)) for name, dtype, shape in self.meta)
        return WeightUpdate(
            self.version, self.method, meta, self.generation, self.path, self.bucket_bytes
        )


class TrinityTransfer(WeightTransferEngine[GroupInfo, UpdateInfo]):
    """Receives a version by group or by file and loads it into the vLLM model."""

    init_info_cls = GroupInfo
    update_info_cls = UpdateInfo
    group: Optional[WeightGroup] = None
    receipt: Optional[dict[str, Any]] = None
    half_loaded = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._planned: dict[tuple[TensorMeta, ...], Optional[CpuLoader]] = {}

    def init_transfer_engine(self, init_info: GroupInfo) -> None:
        self.shutdown()
        spec = WeightGroupSpec(**vars(init_info))
        parallel = self.parallel_config
        rank = spec.rank_offset + parallel.data_parallel_index * parallel.world_size
        self.group = make_group(spec, rank + parallel.rank, False, str(self.device))

    def start_weight_update(self) -> None:
        self.receipt = None

    def receive_weights(self, update_info: UpdateInfo) -> None:
        start = time.perf_counter()
        update, digest = update_info.update(), Digest()
        check_update(update, self.group)
        loader = self._cpu_loader(update)
        named = incoming(update, self.group, digest, loader.target if loader else None)
        self.half_loaded = True
        if loader is not None:
            load_by_plan(self.model, loader, named)
        else:
            load_weights(self.model, self.model_config, named)
        self.half_loaded = False
        self.receipt = {
            "checksum": digest.value,
            "n_bytes": digest.n_bytes,
            "seconds": time.perf_counter() - start,
        }

    def _cpu_loader(self, update: WeightUpdate) -> Optional[CpuLoader]:
        """The fast loader for these tensors, if there is one; planned once per list."""
        if self.device.type != "cpu" or self.parallel_config.world_size > 1:
            return None
        meta = update.meta or file_meta(str(update.path))
        if meta not in self._planned:
            self._planned[meta] = self._plan(meta)
        return self._planned[meta]

    def _plan(self, meta: tuple[TensorMeta, ...]) -> Optional[CpuLoader]:
        dtype: Any = self.model_config.dtype
        try:
            return plan_cpu_loader(self.model, meta, dtype)
        except NoPlan as reason:
            log.warning("weights take vLLM's layer-wise reload, which is slower: %s", reason)
            return None

    def finish_weight_update(self) -> None:
        """Nothing is left to do: the weights are in use when they are loaded."""

    def shutdown(self) -> None:
        group, self.group = self.group, None
        if group is not None:
            group.close()


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, TrinityTransfer)


class WeightWorker:
    """Methods that vLLM mixes into its worker class; called by ``collective_rpc``."""

    device: torch.device
    weight_transfer_engine: Any
    model_runner: Any

    def trinity_setup(self) -> bool:
        """Whether prompt log-probs can be asked for at temperatures other than 1."""
        if self.device.type == "cpu":
            keep_freed_memory()
        return heat_prompt_logprobs(self.model_runner)

    def trinity_half_loaded(self) -> bool:
        """Whether an update broke off after it had changed weights."""
        return self.weight_transfer_engine.half_loaded

    def trinity_receipt(self) -> Optional[dict[str, Any]]:
        """Checksum, bytes and seconds of the last update, or None if it failed."""
        return self.weight_transfer_engine.receipt


@torch.no_grad()
def load_by_plan(model: Any, loader: CpuLoader, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load along a plan; tied packed copies are made again at the end."""
    try:
        loader.load(named)
    finally:
        loader.forget()
    repack_cpu_linears(model)


@torch.no_grad()
def load_weights(model: Any, model_config: Any, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load Hugging Face names into a vLLM model; fused modules are fused by the model."""
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    initialize_layerwise_reload(model)
    try:
        model.load_weights(named)
    finally:
        finalize_layerwise_reload(model, model_config)
    repack_cpu_linears(model)


def repack_cpu_linears(model: Any) -> None:
    """Make again the packed copy of every weight that a module still owns.

    On a CPU a linear layer computes with a packed copy of its weight. A ``lm_head`` that is
    tied to the embedding has such a copy of the embedding's weight, and no weight of that
    name is ever loaded, so nothing else would refresh it.
    """
    for module in model.modules():
        weight = getattr(module, "weight", None)
        method = getattr(module, "quant_method", None)
        owns_weight = weight is not None and weight.numel() > 0
        if hasattr(module, "cpu_linear") and method is not None and owns_weight:
            method.process_weights_after_loading(module)
