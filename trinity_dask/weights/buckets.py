"""Weights from trainer rank 0 to every engine rank, in packed buckets over one group.

Invariant: sender and receivers derive the same buckets from the same metadata, so no
message describes another; tensors that lie as their bucket does are sent from there, and
nothing is copied on the way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Optional

from trinity_dask.models.protocol import TensorMeta
from trinity_dask.models.torch.malloc import large_buffer
from trinity_dask.weights.checksum import Digest, checksum
from trinity_dask.weights.files import read_safetensors, write_safetensors
from trinity_dask.weights.group import WeightGroup, make_group

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
WINDOW = 4  # buckets on the wire at a time


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
    start: int = 0  # in memory that holds all buckets


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
    begin = end = 0
    for tensor in meta:
        start = _aligned(end)
        if slots and start + tensor.n_bytes > bucket_bytes:
            buckets.append(Bucket(tuple(slots), end, begin))
            begin, slots, start = _aligned(begin + end), [], 0
        slots.append(Slot(tensor, start, tensor.n_bytes))
        end = start + tensor.n_bytes
    if slots:
        buckets.append(Bucket(tuple(slots), end, begin))
    return buckets


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // ALIGN_BYTES) * ALIGN_BYTES


def memory_bytes(meta: Sequence[TensorMeta], bucket_bytes: int) -> int:
    """Size of memory that holds all buckets."""
    buckets = plan_buckets(meta, bucket_bytes)
    return buckets[-1].start + buckets[-1].n_bytes if buckets else 0


def lay_out(
    parameters: Mapping[str, torch.Tensor], meta: Sequence[TensorMeta], bucket_bytes: int
) -> bool:
    """Move ``parameters`` into one block of memory in which they lie as their buckets do.

    They keep their identity and values; from then on :func:`send` need not copy them. False,
    and nothing is done, where that cannot be: shards, another device, or a wire dtype that is
    not theirs.
    """
    import torch

    plain = all(
        type(tensor) is torch.nn.Parameter
        and tensor.device == next(iter(parameters.values())).device
        for tensor in parameters.values()
    )
    if not plain or tensor_meta(parameters.items()) != tuple(meta):
        return False
    device = next(iter(parameters.values())).device
    memory = large_buffer(memory_bytes(meta, bucket_bytes), device)
    for bucket in plan_buckets(meta, bucket_bytes):
        for slot in bucket.slots:
            place = _view(memory[bucket.start :], slot)
            place.copy_(parameters[slot.meta.name].detach())
            parameters[slot.meta.name].data = place
    return True


# --------------------------------------------------------------------------- the transfer
def send(
    group: WeightGroup,
    named: Iterable[tuple[str, torch.Tensor]],
    meta: Sequence[TensorMeta],
    bucket_bytes: int,
) -> Digest:
    """Broadcast ``named`` as rank 0, converted to the wire dtypes of ``meta``.

    The tensors must not change until it returns: those that lie side by side (see
    :func:`lay_out`) are sent from where they are.

    Raises:
        ValueError: ``named`` does not match ``meta`` in order, names or shapes.
        RuntimeError: a peer died or the group's timeout passed.
    """
    digest = Digest()
    tensors = iter(named)
    on_wire: deque[tuple[Any, torch.Tensor]] = deque()
    for bucket in plan_buckets(meta, bucket_bytes):
        content = _take(bucket, tensors)
        buffer = _where_it_lies(bucket, content, group.device)
        if buffer is None:
            buffer = _packed(bucket, content, group.device)
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


def _where_it_lies(
    bucket: Bucket, content: list[torch.Tensor], device: str
) -> Optional[torch.Tensor]:
    """The tensors' own memory as the bucket's bytes, if they lie in it as the bucket says."""
    import torch

    first = content[0]
    storage = first.untyped_storage()
    for slot, tensor in zip(bucket.slots, content, strict=True):
        lies = (
            tensor.dtype == torch_dtype(slot.meta.dtype)
            and tensor.device == torch.device(device)
            and tensor.is_contiguous()
            and tensor.data_ptr() == first.data_ptr() + slot.start
            and tensor.untyped_storage().data_ptr() == storage.data_ptr()
        )
        if not lies:
            return None
    offset = first.storage_offset() * first.element_size()
    return torch.empty(0, dtype=torch.uint8, device=device).set_(
        storage, offset, (bucket.n_bytes,), (1,)
    )


def _packed(bucket: Bucket, content: list[torch.Tensor], device: str) -> torch.Tensor:
    import torch

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
    memory: torch.Tensor | None = None,
    own: Mapping[str, torch.Tensor] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Receive what rank 0 sends: ``(name, tensor)`` in the order of ``meta``.

    Tensors are views of their bucket. The buckets lie in ``memory``, uint8 of
    :func:`memory_bytes` on the group's device; without it each has memory of its own, which is
    never used again, so the consumer may keep them. A tensor that is a bucket by itself is
    received into that of its name in ``own``, contiguous and on that device. The next buckets
    are on the wire while this one is consumed. Every tensor is added to ``digest`` when one
    is given.

    Raises:
        RuntimeError: the sender died or the group's timeout passed.
    """
    on_wire: deque[tuple[Any, torch.Tensor, Bucket]] = deque()
    ahead = iter(plan_buckets(meta, bucket_bytes))
    while True:
        for bucket in islice(ahead, WINDOW - len(on_wire)):
            on_wire.append(_post(group, bucket, memory, own or {}))
        if not on_wire:
            return
        work, buffer, bucket = on_wire.popleft()
        work.wait()
        for following in islice(ahead, 1):
            on_wire.append(_post(group, following, memory, own or {}))
        for slot in bucket.slots:
            tensor = _view(buffer, slot)
            if digest is not None:
                digest.add(slot.meta.name, tensor)
            yield slot.meta.name, tensor


def _post(
    group: WeightGroup,
    bucket: Bucket,
    memory: torch.Tensor | None,
    own: Mapping[str, torch.Tensor],
) -> tuple[Any, torch.Tensor, Bucket]:
    import torch

    name = bucket.slots[0].meta.name
    if len(bucket.slots) == 1 and name in own:
        buffer = own[name].view(-1).view(torch.uint8)
    elif memory is None:
        buffer = torch.empty(bucket.n_bytes, dtype=torch.uint8, device=group.device)
    else:
        buffer = memory[bucket.start : bucket.start + bucket.n_bytes]
    return group.broadcast(buffer), buffer, bucket
