"""Where a rank's models lie: in shards over the ranks (FSDP2), or in CPU memory between uses.

Invariant: what a model's own keys leave open is as ``trainer.parallel`` and
``trainer.offload`` say. A parameter keeps its identity wherever its storage goes (the
optimizer and tied names refer to the same object). Gradients are summed over the ranks, never
averaged (a loss is already divided by counts of the global mini-batch); the default process
group belongs to one generation of the ranks and ends before the next one begins.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Optional

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from trinity_dask.config.schema import Config
from trinity_dask.weights.broadcast import WeightGroup

POLICY, CRITIC, FROZEN = "policy", "critic", "frozen"
ROLES = (POLICY, CRITIC, FROZEN)  # frozen: reference and teacher


def strategy_of(cfg: Config, role: str) -> str:
    """``ddp`` or ``fsdp2``."""
    own = {CRITIC: cfg.critic.strategy, FROZEN: cfg.trainer.frozen_strategy}.get(role)
    return cfg.trainer.parallel.strategy if own is None else own


def offload_of(cfg: Config, role: str) -> bool:
    own = {CRITIC: cfg.critic.offload, FROZEN: cfg.trainer.frozen_offload}.get(role)
    return cfg.trainer.offload if own is None else own


def open_mesh(
    group: WeightGroup, rank: int, world_size: int, device: str, host: str, timeout_s: float
) -> Any:
    """The default process group of this generation, and a mesh of all its ranks.

    Args:
        group: the ranks' group, whose store is shared.
        host: a peer's address; gloo takes this machine's interface on the route to it.

    Raises:
        RuntimeError: a rank is missing after ``timeout_s``.
    """
    from torch.distributed.device_mesh import init_device_mesh

    close_mesh()
    with _gloo_interface(host):
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            store=dist.PrefixStore(f"shards/{group.generation}", group.store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    return init_device_mesh(device, (world_size,))


def close_mesh() -> None:
    """Leave the default process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def _gloo_interface(host: str) -> Iterator[None]:
    """Gloo would resolve the host name, which may not be what the peers can reach."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        yield
        return
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # a datagram socket only picks a route; nothing is sent
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == own for entry in addresses):
            os.environ["GLOO_SOCKET_IFNAME"] = name
            break
    try:
        yield
    finally:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)


@dataclass(frozen=True)
class Sharding:
    """How a model is dealt to the ranks of ``mesh``; the rest as in :func:`shard`."""

    mesh: Any
    compute: Optional[torch.dtype] = None
    reshard: bool = True


def shard(
    module: Any, mesh: Any, compute: Optional[torch.dtype] = None, reshard: bool = True
) -> None:
    """Shard ``module`` in place, layer by layer, over the ranks of ``mesh``.

    Args:
        compute: dtype of gathered weights, None for their own; gradients are reduced in
            float32, and shards stay as they are.
        reshard: free a layer's gathered weights after its forward pass.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    names = set(getattr(module, "_no_split_modules", None) or ())
    for layer in [part for part in module.modules() if type(part).__name__ in names]:
        fully_shard(layer, reshard_after_forward=reshard, **options)
    fully_shard(module, reshard_after_forward=False, **options)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)


def is_sharded(module: Any) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def whole(tensor: Tensor) -> Tensor:
    """The tensor of which every rank has a shard; every rank must ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(value: Tensor, parameter: Tensor) -> Tensor:
    """``value``, which every rank has whole, placed as ``parameter`` is."""
    value = value.to(parameter.device)
    if not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


def to_device(module: Any, device: torch.device) -> None:
    """Move parameters, buffers and shards; gradients are dropped."""
    for parameter in module.parameters():
        parameter.grad = None
    module.to(device)


def local_bytes(tensor: Tensor) -> int:
    """Memory of ``tensor`` on this rank."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes
