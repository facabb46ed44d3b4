"""Weights from trainer rank 0 to every engine rank, in packed buckets over one group.

Invariant: sender and receivers derive the same buckets from the same metadata, so no
message describes another; a tensor that is large enough to be a message of its own is sent
from where it lies. The group is a bare backend object with its own store, so it
lives beside any default group and a new generation never meets an old one.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from math import prod
from typing import TYPE_CHECKING, Any

from trinity_dask.models.checksum import Digest, checksum
from trinity_dask.models.protocol import TensorMeta, WeightGroupSpec
from trinity_dask.models.weight_files import read_safetensors, write_safetensors

if TYPE_CHECKING:
    import torch

__all__ = [
    "Digest",
    "WeightGroup",
    "checksum",
    "make_group",
    "named_weights",
    "plan_buckets",
    "read_safetensors",
    "recv",
    "send",
    "tensor_meta",
    "write_safetensors",
]

ALIGN_BYTES = 64  # every tensor starts on a cache line of its bucket
DIRECT_BYTES = 1 << 20  # from here on a tensor is a bucket, which saves copying it
WINDOW = 3  # buckets on the wire at a time


# --------------------------------------------------------------------------- the tensors
def named_weights(model: Any) -> list[tuple[str, torch.Tensor]]:
    """Parameters of a Hugging Face model, each stored tensor once.

    A tied ``lm_head`` is the embedding under a second name; it is left out, as it is in a
    saved checkpoint. Order is that of the module tree, so layers stay together.
    """
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def tensor_meta(
    named: Iterable[tuple[str, torch.Tensor]], dtype: str | None = None
) -> tuple[TensorMeta, ...]:
    """Metadata of ``named``, with ``dtype`` as the wire dtype (None: each tensor's own)."""
    return tuple(
        TensorMeta(name, dtype or str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in named
    )


def torch_dtype(name: str) -> torch.dtype:
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a torch dtype; use a name such as 'float32'")
    return dtype


# --------------------------------------------------------------------------- the buckets
@dataclass(frozen=True)
class Slot:
    """Place of one tensor in its bucket."""

    meta: TensorMeta
    start: int
    n_bytes: int


@dataclass(frozen=True)
class Bucket:
    slots: tuple[Slot, ...]
    n_bytes: int


def plan_buckets(meta: Sequence[TensorMeta], bucket_bytes: int) -> list[Bucket]:
    """Whole tensors in order, at most ``bucket_bytes`` per bucket.

    A tensor of :data:`DIRECT_BYTES` or more, or larger than ``bucket_bytes``, gets a bucket
    of its own.

    Raises:
        ValueError: ``bucket_bytes`` is not positive.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be at least 1 (got {bucket_bytes})")
    buckets: list[Bucket] = []
    slots: list[Slot] = []
    end = 0
    for tensor in meta:
        n_bytes = prod(tensor.shape) * torch_dtype(tensor.dtype).itemsize
        start = -(-end // ALIGN_BYTES) * ALIGN_BYTES
        full = start + n_bytes > bucket_bytes or max(n_bytes, end) >= DIRECT_BYTES
        if slots and full:
            buckets.append(Bucket(tuple(slots), end))
            slots, start = [], 0
        slots.append(Slot(tensor, start, n_bytes))
        end = start + n_bytes
    if slots:
        buckets.append(Bucket(tuple(slots), end))
    return buckets


# --------------------------------------------------------------------------- the group
@dataclass
class WeightGroup:
    """A bare process group, its store, and the device its buffers live on."""

    backend: Any
    store: Any
    device: str
    generation: int

    def broadcast(self, buffer: torch.Tensor) -> Any:
        """Start the broadcast of ``buffer`` from rank 0; ``wait()`` on the result."""
        return self.backend.broadcast(buffer, 0)

    def close(self) -> None:
        """Leave the group; a transfer that is under way fails on every side. Idempotent."""
        backend, self.backend, self.store = self.backend, None, None
        if backend is not None:
            backend.abort()


def make_group(
    spec: WeightGroupSpec, rank: int, is_master: bool, device: str = "cpu"
) -> WeightGroup:
    """Join generation ``spec.generation`` of the transfer group as ``rank``.

    The master serves the TCP store at ``spec.host:spec.port``. Returns once every member
    has joined.

    Raises:
        RuntimeError: a member is missing after ``spec.timeout_s``, or the port is taken.
    """
    import torch.distributed as dist

    timeout = timedelta(seconds=spec.timeout_s)
    try:
        store = dist.TCPStore(
            spec.host,
            spec.port,
            spec.world_size,
            is_master=is_master,
            timeout=timeout,
            wait_for_workers=False,
        )
        prefixed = dist.PrefixStore(f"weights/{spec.generation}", store)
        backend = _backend(spec, prefixed, rank, timeout)
    except (RuntimeError, ValueError) as error:
        raise RuntimeError(
            f"weight group generation {spec.generation}: rank {rank} of {spec.world_size} "
            f"could not join at {spec.host}:{spec.port} within {spec.timeout_s:g} s "
            f"({type(error).__name__}: {error})"
        ) from error
    return WeightGroup(backend, store, device, spec.generation)


def _backend(spec: WeightGroupSpec, store: Any, rank: int, timeout: timedelta) -> Any:
    import torch.distributed as dist

    if spec.backend == "gloo":
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timeout
        options._devices = [gloo.create_device(hostname=_own_address(spec.host))]
        return gloo(store, rank, spec.world_size, options)
    if spec.backend == "nccl":
        nccl: Any = getattr(dist, "ProcessGroupNCCL", None)
        if nccl is None:
            raise ValueError("this torch has no NCCL; use backend gloo")
        options = nccl.Options()
        options._timeout = timeout
        return nccl(store, rank, spec.world_size, options)
    raise ValueError(f"weight group backend must be gloo or nccl (got {spec.backend!r})")


def _own_address(peer: str) -> str:
    """This machine's address on the route to ``peer``.

    Gloo would otherwise resolve the host name, which on many machines is not the
    interface that the peer can reach.
    """
    family, _, _, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # a datagram socket only picks a route; nothing is sent
        return probe.getsockname()[0]


# --------------------------------------------------------------------------- the transfer
def send(
    group: WeightGroup,
    named: Iterable[tuple[str, torch.Tensor]],
    meta: Sequence[TensorMeta],
    bucket_bytes: int,
) -> Digest:
    """Broadcast ``named`` as rank 0, converted to the wire dtypes of ``meta``.

    The tensors must not change until it returns: large ones are sent from their own memory.

    Raises:
        ValueError: ``named`` does not match ``meta`` in order, names or shapes.
        RuntimeError: a peer died or the group's timeout passed.
    """
    digest = Digest()
    tensors = iter(named)
    on_wire: deque[tuple[Any, torch.Tensor]] = deque()
    for bucket in plan_buckets(meta, bucket_bytes):
        content = _take(bucket, tensors)
        buffer = _buffer(bucket, content, group.device)
        on_wire.append((group.broadcast(buffer), buffer))
        for slot in bucket.slots:  # while the bucket is on the wire
            digest.add(slot.meta.name, _view(buffer, slot))
        if len(on_wire) == WINDOW:
            on_wire.popleft()[0].wait()
    for work, _ in on_wire:
        work.wait()
    return digest


def _take(bucket: Bucket, tensors: Iterator[tuple[str, torch.Tensor]]) -> list[torch.Tensor]:
    taken = []
    for slot in bucket.slots:
        name, tensor = next(tensors, ("nothing", None))
        if name != slot.meta.name or tensor is None or tuple(tensor.shape) != slot.meta.shape:
            raise ValueError(f"expected tensor {slot.meta}, got {name!r}: metadata is stale")
        taken.append(tensor.detach())
    return taken


def _buffer(bucket: Bucket, content: list[torch.Tensor], device: str) -> torch.Tensor:
    """The bucket's bytes: the only tensor's own memory if it will do, else a packed copy."""
    import torch

    own = _own_bytes(content[0], bucket.slots[0].meta, device) if len(content) == 1 else None
    if own is not None:
        return own
    buffer = torch.empty(bucket.n_bytes, dtype=torch.uint8, device=device)
    for slot, tensor in zip(bucket.slots, content, strict=True):
        _view(buffer, slot).copy_(tensor)
    return buffer


def _view(buffer: torch.Tensor, slot: Slot) -> torch.Tensor:
    part = buffer[slot.start : slot.start + slot.n_bytes]
    return part.view(torch_dtype(slot.meta.dtype)).view(slot.meta.shape)


def recv(
    group: WeightGroup,
    meta: Sequence[TensorMeta],
    bucket_bytes: int,
    digest: Digest | None = None,
    target: Callable[[TensorMeta], torch.Tensor] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Receive what rank 0 sends: ``(name, tensor)`` in the order of ``meta``.

    Tensors are views of their bucket, which is never reused: the consumer may keep them.
    With ``target``, a tensor that is a bucket of its own is received into the memory that
    ``target`` names for it, if that has its dtype, device and a contiguous layout.
    The next buckets are on the wire while this one is consumed. Every tensor is added to
    ``digest`` when one is given.

    Raises:
        RuntimeError: the sender died or the group's timeout passed.
    """
    on_wire: deque[tuple[Any, torch.Tensor, Bucket]] = deque()
    ahead = iter(plan_buckets(meta, bucket_bytes))
    while True:
        for bucket in islice(ahead, WINDOW - len(on_wire)):
            on_wire.append(_post(group, bucket, target))
        if not on_wire:
            return
        work, buffer, bucket = on_wire.popleft()
        work.wait()
        on_wire.extend(_post(group, following, target) for following in islice(ahead, 1))
        for slot in bucket.slots:
            tensor = _view(buffer, slot)
            if digest is not None:
                digest.add(slot.meta.name, tensor)
            yield slot.meta.name, tensor


def _post(
    group: WeightGroup, bucket: Bucket, target: Callable[[TensorMeta], torch.Tensor] | None
) -> tuple[Any, torch.Tensor, Bucket]:
    import torch

    buffer = None
    if target is not None and len(bucket.slots) == 1:
        buffer = _own_bytes(target(bucket.slots[0].meta), bucket.slots[0].meta, group.device)
    if buffer is None:
        buffer = torch.empty(bucket.n_bytes, dtype=torch.uint8, device=group.device)
    return group.broadcast(buffer), buffer, bucket


def _own_bytes(tensor: torch.Tensor, meta: TensorMeta, device: str) -> torch.Tensor | None:
    """The memory of ``tensor`` as bytes, if it can stand for ``meta`` on the wire."""
    import torch

    is_wire_form = tensor.dtype == torch_dtype(meta.dtype) and tensor.is_contiguous()
    if not is_wire_form or tensor.device != torch.device(device):
        return None
    return tensor.view(-1).view(torch.uint8)
