"""Who is in the weight-transfer group, without I/O.

Invariant: a generation has one fixed list of members; any change of members, or a failed
transfer, starts a new generation. Rank 0 is trainer rank 0; engine ranks follow in slot
order, each engine taking as many ranks as it has tensor-parallel workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trinity_dask.models.protocol import WeightGroupSpec


@dataclass(frozen=True)
class Member:
    """An engine as the group sees it; ``incarnation`` changes when it is reborn."""

    slot: str
    incarnation: str
    ranks: int = 1


@dataclass
class WeightGroup:
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
        return self.formed and self.trainer == trainer and self.members == members

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

    def mark_broken(self) -> None:
        self.formed = False

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
