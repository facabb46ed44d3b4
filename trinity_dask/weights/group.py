"""The process group over which weights travel: who is in it, and how fast it is when bare.

Invariant: a generation has one fixed list of members; any change of members, or a failed
transfer, starts a new generation. Rank 0 is trainer rank 0; engine ranks follow in slot order,
each engine taking as many ranks as it has worker processes. The group is a bare backend object
with its own store, so it lives beside any default group and a new generation never meets an
old one.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Optional

from trinity_dask.models.protocol import WeightGroupSpec

if TYPE_CHECKING:
    import torch


# who has not come by then is dead: the others must not wait for it as long as for a transfer
JOIN_TIMEOUT_S = 60.0


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
    formed: bool = False
    floor_bytes: int = 0  # what members broadcast, bare, in the first group of their number
    speeds: dict[int, float | None] = field(default_factory=dict)  # bytes per s, by world size

    def is_current(self, trainer: str, members: tuple[Member, ...]) -> bool:
        return self.formed and (self.trainer, self.members) == (trainer, members)

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
        world = self.world_size
        specs = {"trainer": self._spec(host, port, world, 0)}
        offset = 1
        for member in members:
            specs[member.slot] = self._spec(host, port, world, offset)
            offset += member.ranks
        return specs

    def mark_formed(self, bytes_per_s: float | None = None) -> None:
        self.formed = True
        self.speeds.setdefault(self.world_size, bytes_per_s)

    @property
    def world_size(self) -> int:
        return 1 + sum(member.ranks for member in self.members)

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
