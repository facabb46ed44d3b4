"""Weights from trainer rank 0 to every engine rank: the group, and the packed buckets over it.

Invariant: a generation has one fixed list of members; any change of members, or a failed
transfer, starts a new generation. Rank 0 is trainer rank 0; engine ranks follow in slot order,
each engine taking as many ranks as it has worker processes. The group is a bare backend object
with its own store, so it lives beside any default group and a new generation never meets an
old one. Sender and receivers derive the same buckets from the same metadata, so no message
describes another; tensors that lie as their bucket does are sent from there, and nothing is
copied on the way.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Optional

from trinity_dask.cluster.addresses import address_towards
from trinity_dask.models.protocol import TensorMeta, WeightGroupSpec, WeightUpdate
from trinity_dask.weights.checksum import Digest
from trinity_dask.weights.files import read_safetensors, weight_files
from trinity_dask.weights.memory import large_buffer

if TYPE_CHECKING:
    import torch

# who has not come by then is dead: the others must not wait for it as long as for a transfer
JOIN_TIMEOUT_S = 60.0
ALIGN_BYTES = 64  # every tensor starts on a cache line of its bucket
WINDOW = 4  # buckets on the wire at a time


# --------------------------------------------------------------------------- the members
@dataclass(frozen=True)
class Member:
    """An engine as the group sees it; ``incarnation`` changes when it is reborn."""

    slot: str
    incarnation: str
    ranks: int = 1


@dataclass
class TransferMembers:
    """The current generation and its members."""

    backend: str
    timeout_s: float
    generation: int = 0
    trainer: str | None = None
    members: tuple[Member, ...] = field(default_factory=tuple)
    world_size: int = 1
    formed: bool = False
    floor_bytes: int = 0  # what members broadcast, bare, in the first group of their number
    speeds: dict[int, float | None] = field(default_factory=dict)  # bytes per s, by world size

    def next_generation(
        self, trainer: str, members: tuple[Member, ...], host: str, port: int
    ) -> dict[str, WeightGroupSpec]:
        """Specs by slot of a new generation; the key ``"trainer"`` is rank 0's.

        Raises:
            ValueError: no engine to send to.
        """
        if not members:
            raise ValueError("a weight-transfer group needs at least one engine")
        self.generation += 1
        self.trainer, self.members, self.formed = trainer, members, False
        world = self.world_size = 1 + sum(member.ranks for member in members)
        specs = {"trainer": self._spec(host, port, world, 0)}
        offset = 1
        for member in members:
            specs[member.slot] = self._spec(host, port, world, offset)
            offset += member.ranks
        return specs

    @property
    def bytes_per_s(self) -> float | None:
        """Of a bare broadcast in a group of this size."""
        return self.speeds.get(self.world_size)

    def _spec(self, host: str, port: int, world: int, offset: int) -> WeightGroupSpec:
        return WeightGroupSpec(
            host=host,
            port=port,
            world_size=world,
            rank_offset=offset,
            generation=self.generation,
            backend=self.backend,
            timeout_s=self.timeout_s,
            floor_bytes=0 if world in self.speeds else self.floor_bytes,
        )


def engine_ranks(config: Mapping[str, Any]) -> int:
    """Worker processes of an engine with this section ``explorer.rollout_model``: each is a
    member of the group."""
    extra = config.get("extra_engine_args") or {}
    ranks = int(config.get("tensor_parallel_size", 1))
    for name in ("pipeline_parallel_size", "data_parallel_size"):
        ranks *= int(extra.get(name, 1))
    return ranks


# --------------------------------------------------------------------------- the group
@dataclass
class WeightGroup:
    """A bare process group, its store, and the device its buffers live on."""

    backend: Any
    store: Any
    device: str
    generation: int
    bytes_per_s: Optional[float] = None  # of a bare broadcast, as this member saw it

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
        RuntimeError: a member is missing after ``spec.timeout_s`` (at most a minute), or the
            port is taken.
    """
    import torch.distributed as dist

    join_s = min(spec.timeout_s, JOIN_TIMEOUT_S)
    timeout = timedelta(seconds=join_s)
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
            f"could not join at {spec.host}:{spec.port} within {join_s:g} s "
            f"({type(error).__name__}: {error})"
        ) from error
    backend._set_default_timeout(timedelta(seconds=spec.timeout_s))
    group = WeightGroup(backend, store, device, spec.generation)
    if spec.floor_bytes:
        group.bytes_per_s = _bare_speed(group, spec.floor_bytes)
    return group


def rank_of_worker(spec: WeightGroupSpec, parallel: Any) -> int:
    """Rank in the group of one worker process of an engine.

    ``parallel`` is vLLM's ``ParallelConfig`` in that process: ``world_size`` workers in each of
    its data-parallel replicas, of which this is ``rank`` in replica ``data_parallel_index``.

    Raises:
        ValueError: the group has no such rank; the engine has more workers than it was formed
            for.
    """
    inside = parallel.data_parallel_index * parallel.world_size + parallel.rank
    rank = spec.rank_offset + inside
    if not 0 < rank < spec.world_size:
        raise ValueError(
            f"worker {inside} of an engine at rank offset {spec.rank_offset} would be rank {rank}, "
            f"and the weight group has ranks 0 to {spec.world_size - 1}"
        )
    return rank


def _bare_speed(group: WeightGroup, n_bytes: int) -> float:
    """Bytes per second of a broadcast that nobody does anything with; every member calls it.

    The first one warms up; a last byte makes sure that the others are done too.
    """
    import torch

    buffer = torch.ones(n_bytes, dtype=torch.uint8, device=group.device)
    group.broadcast(buffer).wait()
    _synchronize(group.device)
    start = time.perf_counter()
    group.broadcast(buffer).wait()
    group.broadcast(buffer[:1]).wait()
    _synchronize(group.device)
    return n_bytes / max(time.perf_counter() - start, 1e-9)


def _synchronize(device: str) -> None:
    """An accelerator's transfers end later than the calls that start them."""
    import torch

    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize()


def _backend(spec: WeightGroupSpec, store: Any, rank: int, timeout: timedelta) -> Any:
    import torch.distributed as dist

    if spec.backend == "gloo":
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timeout
        options._devices = [gloo.create_device(hostname=address_towards(spec.host))]
        return gloo(store, rank, spec.world_size, options)
    if spec.backend == "nccl":
        nccl: Any = getattr(dist, "ProcessGroupNCCL", None)
        if nccl is None:
            raise ValueError("this torch has no NCCL; use backend gloo")
        options = nccl.Options()
        options._timeout = timeout
        return nccl(store, rank, spec.world_size, options)
    raise ValueError(f"weight group backend must be gloo or nccl (got {spec.backend!r})")


# --------------------------------------------------------------------------- the tensors
def named_weights(model: Any) -> list[tuple[str, torch.Tensor]]:
    """Parameters of a Hugging Face model, each stored tensor once, and its persistent buffers.

    A tied ``lm_head`` is the embedding under a second name; it is left out, as it is in a
    saved checkpoint. Order is that of the module tree, so layers stay together.
    """
    named = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    return [*named, *persistent_buffers(model).items()]


def persistent_buffers(model: Any) -> dict[str, torch.Tensor]:
    """Tensors of ``model`` that a checkpoint has and no optimizer moves."""
    saved = model.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


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
        content = []
        for slot in bucket.slots:
            name, tensor = next(tensors, ("nothing", None))
            if name != slot.meta.name or tensor is None or tuple(tensor.shape) != slot.meta.shape:
                raise ValueError(f"expected tensor {slot.meta}, got {name!r}: metadata is stale")
            content.append(tensor.detach())
        buffer = _as_bucket(bucket, content, group.device)
        on_wire.append((group.broadcast(buffer), buffer))
        for slot in bucket.slots:  # while the bucket is on the wire
            digest.add(slot.meta.name, _view(buffer, slot))
        if len(on_wire) == WINDOW:
            on_wire.popleft()[0].wait()
    for work, _ in on_wire:
        work.wait()
    return digest


def _as_bucket(bucket: Bucket, content: list[torch.Tensor], device: str) -> torch.Tensor:
    """The bucket's bytes: the tensors' own memory if they lie in it as the bucket says, else a
    copy."""
    import torch

    first = content[0]
    storage = first.untyped_storage()
    if all(
        tensor.dtype == torch_dtype(slot.meta.dtype)
        and tensor.device == torch.device(device)
        and tensor.is_contiguous()
        and tensor.data_ptr() == first.data_ptr() + slot.start
        and tensor.untyped_storage().data_ptr() == storage.data_ptr()
        for slot, tensor in zip(bucket.slots, content, strict=True)
    ):
        offset = first.storage_offset() * first.element_size()
        return torch.empty(0, dtype=torch.uint8, device=device).set_(
            storage, offset, (bucket.n_bytes,), (1,)
        )
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
    import torch

    on_wire: deque[tuple[Any, torch.Tensor, Bucket]] = deque()
    ahead: list[Optional[Bucket]] = [*plan_buckets(meta, bucket_bytes)]
    for bucket in [*ahead, *[None] * WINDOW]:
        if bucket is not None:
            name = bucket.slots[0].meta.name
            if len(bucket.slots) == 1 and own and name in own:
                buffer = own[name].view(-1).view(torch.uint8)
            elif memory is None:
                buffer = torch.empty(bucket.n_bytes, dtype=torch.uint8, device=group.device)
            else:
                buffer = memory[bucket.start : bucket.start + bucket.n_bytes]
            on_wire.append((group.broadcast(buffer), buffer, bucket))
        if on_wire and (bucket is None or len(on_wire) > WINDOW):
            work, buffer, arrived = on_wire.popleft()
            work.wait()
            for slot in arrived.slots:
                tensor = _view(buffer, slot)
                if digest is not None:
                    digest.add(slot.meta.name, tensor)
                yield slot.meta.name, tensor


def check_update(update: WeightUpdate, group: Optional[WeightGroup]) -> None:
    """Raises unless the tensors of ``update`` can be asked for (:func:`incoming`).

    Raises:
        ValueError: unknown method, or a file method without a path.
        FileNotFoundError: there are no weights at its path.
        RuntimeError: method ``nccl`` and no group of the update's generation.
    """
    if update.method == "nccl":
        if group is None or group.generation != update.generation:
            have = "none" if group is None else f"generation {group.generation}"
            raise RuntimeError(
                f"version {update.version} comes over weight group generation "
                f"{update.generation}, but this engine is in {have}"
            )
    elif update.method in ("memory", "checkpoint") and update.path:
        weight_files(update.path)
    else:
        raise ValueError(
            f"weight update method {update.method!r} with path {update.path!r}: use 'nccl', or "
            "'memory' or 'checkpoint' with a path"
        )


def incoming(
    update: WeightUpdate,
    group: Optional[WeightGroup],
    digest: Digest,
    memory: Optional[torch.Tensor] = None,
    own: Optional[Mapping[str, torch.Tensor]] = None,
) -> Iterable[tuple[str, torch.Tensor]]:
    """The tensors of an ``update`` that passed :func:`check_update`, from the group (see
    :func:`recv`) or from its file, which is one of this machine (see
    :func:`~trinity_dask.weights.files.fetched`)."""
    if update.method == "nccl" and group is not None:
        return recv(group, update.meta, update.bucket_bytes, digest, memory, own)
    return read_safetensors(str(update.path), digest)
