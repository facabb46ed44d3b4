"""Where received weights lie until a layer packs them; without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trinity_dask.models.vllm.cpu_loader import CpuLoader, Target, side_by_side
from trinity_dask.weights.checksum import checksum


class Layer(torch.nn.Module):
    """A linear layer that keeps only a packed copy, as vLLM's on a CPU."""

    def __init__(self, n_rows: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
        self.packed: Any = None
        self.n_rows = n_rows
        self.quant_method = SimpleNamespace(process_weights_after_loading=Layer.pack)

    def pack(self) -> None:
        self.packed = self.weight.detach().clone()
        self.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
        self.cpu_linear = lambda x, _, bias: x @ self.packed.T

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cpu_linear(x, self.weight, None)


class Model:
    """A fused layer of parts a and b, a layer c, and an embedding e that stays as it is."""

    def __init__(self) -> None:
        self.fused, self.c = Layer(5), Layer(3)
        self.e = torch.nn.Module()
        self.e.weight = torch.nn.Parameter(torch.zeros(4, 2), requires_grad=False)
        targets = {
            "fused": Target(self.fused, "weight", (5, 2), torch.float32, True),
            "c": Target(self.c, "weight", (3, 2), torch.float32, True),
            "e": Target(self.e, "weight", (4, 2), torch.float32, False),
        }
        places = {
            "e": (targets["e"], 0),
            "a": (targets["fused"], 0),
            "b": (targets["fused"], 3),
            "c": (targets["c"], 0),
        }
        self.loader = CpuLoader(places, {(name, "weight"): t for name, t in targets.items()})

    def receive(self, seed: int) -> Any:
        """One version as it comes over the group."""
        lease = self.loader.lease(14 * 2 * 4)
        lease.memory.view(torch.float32).copy_(torch.arange(28.0) + 100 * seed)
        self.loader.load(views(lease.memory), lease)
        return lease

    def serves(self, seed: int) -> bool:
        expected = dict(views((torch.arange(28.0) + 100 * seed).view(torch.uint8)))
        eye = torch.eye(2)
        return (
            torch.equal(self.fused(eye), torch.cat([expected["a"], expected["b"]]).T)
            and torch.equal(self.c(eye), expected["c"].T)
            and torch.equal(self.e.weight, expected["e"])
        )


def views(memory: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    rows = memory.view(torch.float32).view(14, 2)
    sizes = {"e": 4, "a": 3, "b": 2, "c": 3}
    parts = rows[: sum(sizes.values())].split(list(sizes.values()))
    return list(zip(sizes, parts, strict=True))


def test_memory_is_used_again_when_every_layer_has_packed_its_weight() -> None:
    model = Model()
    first = model.receive(1)
    assert model.serves(1)
    assert model.receive(2) is first
    assert model.serves(2)


def test_memory_that_a_layer_has_yet_to_read_is_not_written() -> None:
    """Versions that come without a request between: two places take turns."""
    model = Model()
    first = model.receive(1)
    model.c(torch.eye(2))  # one layer of two
    second = model.receive(2)
    assert second is not first
    assert model.receive(3) is first
    assert model.serves(3)
    assert len(model.loader.leases) == 2


def test_a_transfer_that_breaks_off_changes_nothing() -> None:
    model = Model()
    model.receive(1)

    def broken() -> Any:
        lease = model.loader.lease(14 * 2 * 4)
        lease.memory.fill_(7)
        yield from views(lease.memory)[:2]
        raise RuntimeError("the sender died")

    with pytest.raises(RuntimeError, match="the sender died"):
        model.loader.load(broken(), None)
    assert model.serves(1)
    model.receive(2)
    assert model.serves(2)


def test_views_of_a_file_are_packed_from_there() -> None:
    model = Model()
    named = views(torch.arange(28.0).view(torch.uint8))
    assert model.loader.load_views(named).value == checksum(named)
    waiting = model.fused.cpu_linear
    assert model.serves(0)
    assert model.fused.cpu_linear is not waiting


def test_parts_that_lie_side_by_side_are_not_copied() -> None:
    whole = torch.arange(20.0).view(10, 2)
    assert side_by_side({3: whole[3:5], 0: whole[:3]}).data_ptr() == whole.data_ptr()
    apart = side_by_side({3: whole[4:6], 0: whole[:3]})
    assert apart.data_ptr() != whole.data_ptr()
    assert torch.equal(apart, torch.cat([whole[:3], whole[4:6]]))
