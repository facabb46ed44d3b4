"""Loading weights into a vLLM model on a CPU without copying them twice.

Invariant: used only where its plan covers every parameter of the model exactly; anything it
does not know (quantisation, several ranks, renamed or transformed weights) is left to vLLM's
own layer-wise reload, which is general and slower.

On a CPU a linear layer keeps no weight, only a packed copy for oneDNN. vLLM's reload makes
the weight again from its parts, in Python, part by part. Here every part is received at its
place in the fused weight (query, key and value of a layer share one), and a layer is packed
when its last part has arrived, while the following ones are on the wire.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import torch

from trinity_dask.models.protocol import TensorMeta


@dataclass
class Packed:
    """A linear layer whose weight exists only in packed form."""

    module: Any
    shape: tuple[int, int]
    dtype: torch.dtype
    n_parts: int = 0
    weight: Optional[torch.Tensor] = None  # while its parts arrive
    arrived: int = 0

    def part(self, start: int, n_rows: int) -> torch.Tensor:
        if self.weight is None:
            self.weight = torch.empty(self.shape, dtype=self.dtype)
        return self.weight[start : start + n_rows]

    def note_arrival(self) -> None:
        self.arrived += 1
        if self.arrived == self.n_parts and self.weight is not None:
            weight, self.weight, self.arrived = self.weight, None, 0
            self.module.weight = torch.nn.Parameter(weight, requires_grad=False)
            self.module.quant_method.process_weights_after_loading(self.module)


@dataclass
class Place:
    """Where one received tensor belongs: rows of a live parameter or of a packed layer."""

    start: int
    n_rows: int
    live: Optional[torch.Tensor] = None
    packed: Optional[Packed] = None

    def rows(self) -> torch.Tensor:
        if self.packed is not None:
            return self.packed.part(self.start, self.n_rows)
        assert self.live is not None
        return self.live[self.start : self.start + self.n_rows]


@dataclass
class CpuLoader:
    """The plan for one model and one list of received tensors."""

    places: dict[str, Place] = field(default_factory=dict)

    def target(self, meta: TensorMeta) -> torch.Tensor:
        """Memory for a tensor that is about to be received."""
        return self.places[meta.name].rows()

    def load(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Bring every tensor to its place, if it is not there already, and pack layers."""
        for name, tensor in named:
            place = self.places[name]
            rows = place.rows()
            if rows.data_ptr() != tensor.data_ptr():
                rows.copy_(tensor)
            if place.packed is not None:
                place.packed.note_arrival()

    def forget(self) -> None:
        """Drop what an update that broke off has left."""
        for place in self.places.values():
            if place.packed is not None:
                place.packed.weight, place.packed.arrived = None, 0


class NoPlan(Exception):
    """Why vLLM's own reload has to do it."""


def plan_cpu_loader(model: Any, meta: Sequence[TensorMeta], dtype: torch.dtype) -> CpuLoader:
    """The loader for tensors of ``meta``.

    Raises:
        NoPlan: something in the model or the list is not known here.
    """
    _check_is_plain(model)
    loader = CpuLoader()
    filled: dict[tuple[str, str], int] = defaultdict(int)
    packed: dict[str, Packed] = {}
    for path, attribute, tensor in _parts(model, meta):
        module = _module(model, path)
        place = _place(module, attribute, tensor, filled[path, attribute])
        if _is_packed_away(module, attribute):
            layer = packed.setdefault(path, Packed(module, _shape(module), dtype))
            layer.n_parts += 1
            place.packed = layer
        filled[path, attribute] += place.n_rows
        loader.places[tensor.name] = place
    _check_is_whole(model, filled)
    return loader


def _check_is_plain(model: Any) -> None:
    """Names are those of Hugging Face, and every weight method is an unquantised one."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    mapper = vars(getattr(model, "hf_to_vllm_mapper", None) or object)
    # "stacked" says which parts are fused, as packed_modules_mapping does
    if any(
        rule
        for name, rule in mapper.items()
        if name.startswith("orig_to_new") and name != "orig_to_new_stacked"
    ):
        raise NoPlan("the model renames tensors")
    known = (type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    for path, module in model.named_modules():
        if type(getattr(module, "quant_method", None)) not in known:
            raise NoPlan(f"{path} has the weight method {type(module.quant_method).__name__}")


def _parts(model: Any, meta: Sequence[TensorMeta]) -> list[tuple[str, str, TensorMeta]]:
    """``(module path, attribute, tensor)`` with the parts of a fused layer in its order."""
    fused = {
        part: (whole, number)
        for whole, names in (getattr(model, "packed_modules_mapping", None) or {}).items()
        for number, part in enumerate(names)
        if len(names) > 1
    }
    placed = []
    for tensor in meta:
        path, _, attribute = tensor.name.rpartition(".")
        parent, _, leaf = path.rpartition(".")
        whole, number = fused.get(leaf, (leaf, 0))
        placed.append((number, f"{parent}.{whole}" if parent else whole, attribute, tensor))
    placed.sort(key=lambda part: part[0])  # stable: only parts of one layer change their order
    return [part[1:] for part in placed]


def _module(model: Any, path: str) -> Any:
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        raise NoPlan(f"the model has no module {path!r}") from error


def _is_packed_away(module: Any, attribute: str) -> bool:
    weight = getattr(module, "weight", None)
    is_empty = weight is not None and weight.numel() == 0
    return attribute == "weight" and hasattr(module, "cpu_linear") and is_empty


def _shape(module: Any) -> tuple[int, int]:
    """Rows and columns of a linear layer's weight."""
    if not hasattr(module, "output_size_per_partition"):
        return module.output_size, module.input_size
    return module.output_size_per_partition, module.input_size_per_partition


def _place(module: Any, attribute: str, tensor: TensorMeta, start: int) -> Place:
    """The rows from ``start`` on; their parameter is live unless it is packed away."""
    live = module._parameters.get(attribute)
    if live is None or not tensor.shape:
        raise NoPlan(f"there is no place for {tensor.name}")
    shape = _shape(module) if _is_packed_away(module, attribute) else tuple(live.shape)
    n_rows = tensor.shape[0]
    if shape[1:] != tensor.shape[1:] or start + n_rows > shape[0]:
        raise NoPlan(f"{tensor.name} has shape {tensor.shape}, its place {shape} from {start}")
    return Place(start, n_rows, live=live.data)


def _check_is_whole(model: Any, filled: dict[tuple[str, str], int]) -> None:
    """Every parameter is filled to its last row, under one of its names.

    A vocabulary may be padded in memory: its padding rows stay what they are.
    """
    complete: dict[int, bool] = defaultdict(bool)  # by identity: tied modules share one
    names: dict[int, str] = {}
    for path, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            if _is_packed_away(module, attribute):
                n_rows = _shape(module)[0]
            else:
                n_rows = getattr(module, "org_vocab_size", parameter.shape[0])
            complete[id(parameter)] |= filled.get((path, attribute)) == n_rows
            names[id(parameter)] = f"{path}.{attribute}"
    if missing := [names[key] for key, whole in complete.items() if not whole]:
        raise NoPlan(f"{missing[0]} is not filled by the tensors ({len(missing)} in all)")
