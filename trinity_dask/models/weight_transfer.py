"""Weights from trainer rank 0 to every engine rank, in packed buckets over one group.

Invariant: sender and receivers derive the same buckets from the same metadata, so no
message describes another; the group is a bare backend object with its own store, so it
lives beside any default group and a new generation never meets an old one.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
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

    A tensor larger than ``bucket_bytes`` gets a bucket of its own.

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
        if slots and start + n_bytes > bucket_bytes:
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

    One bucket is packed while the one before it is on the wire.

    Raises:
        ValueError: ``named`` does not match ``meta`` in order, names or shapes.
        RuntimeError: a peer died or the group's timeout passed.
    """
    import torch

    digest = Digest()
    tensors = iter(named)
    buckets = plan_buckets(meta, bucket_bytes)
    size = max((bucket.n_bytes for bucket in buckets), default=0)
    buffers = [
        torch.empty(size, dtype=torch.uint8, device=group.device)
        for _ in range(min(2, len(buckets)))
    ]
    in_flight: list[Any] = [None] * len(buffers)
    for k, bucket in enumerate(buckets):
        turn = k % len(buffers)
        if in_flight[turn] is not None:
            in_flight[turn].wait()
        buffer = buffers[turn][: bucket.n_bytes]
        _pack(buffer, bucket, tensors, digest)
        in_flight[turn] = group.broadcast(buffer)
    for work in in_flight:
        if work is not None:
            work.wait()
    return digest


def _pack(
    buffer: torch.Tensor,
    bucket: Bucket,
    tensors: Iterator[tuple[str, torch.Tensor]],
    digest: Digest,
) -> None:
    for slot in bucket.slots:
        name, tensor = next(tensors, ("nothing", None))
        if name != slot.meta.name or tensor is None or tuple(tensor.shape) != slot.meta.shape:
            raise ValueError(f"expected tensor {slot.meta}, got {name!r}: metadata is stale")
        view = _view(buffer, slot)
        view.copy_(tensor.detach())
        digest.add(name, view)


def _view(buffer: torch.Tensor, slot: Slot) -> torch.Tensor:
    part = buffer[slot.start : slot.start + slot.n_bytes]
    return part.view(torch_dtype(slot.meta.dtype)).view(slot.meta.shape)


def recv(
    group: WeightGroup,
    meta: Sequence[TensorMeta],
    bucket_bytes: int,
    digest: Digest | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Receive what rank 0 sends: ``(name, tensor)`` in the order of ``meta``.

    Tensors are views of their bucket, which is never reused: the consumer may keep them.
    The next bucket is on the wire while this one is consumed. Every tensor is added to
    ``digest`` when one is given.

    Raises:
        RuntimeError: the sender died or the group's timeout passed.
    """
    buckets = plan_buckets(meta, bucket_bytes)
    following = _post(group, buckets[0]) if buckets else None
    for k, bucket in enumerate(buckets):
        assert following is not None
        buffer, work = following
        work.wait()
        following = _post(group, buckets[k + 1]) if k + 1 < len(buckets) else None
        for slot in bucket.slots:
            tensor = _view(buffer, slot)
            if digest is not None:
                digest.add(slot.meta.name, tensor)
            yield slot.meta.name, tensor


def _post(group: WeightGroup, bucket: Bucket) -> tuple[torch.Tensor, Any]:
    import torch

    buffer = torch.empty(bucket.n_bytes, dtype=torch.uint8, device=group.device)
    return buffer, group.broadcast(buffer)
