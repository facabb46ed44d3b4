"""Loading weights into a vLLM model on a CPU without copying them twice.

Invariant: the model changes only after every tensor of a version has arrived, and then all
of it; and this is used only where its plan covers every parameter exactly. What it does not
know (quantisation, several ranks, renamed or transformed weights) is left to vLLM's own
layer-wise reload, which is general and slower.

On a CPU a linear layer keeps no weight, only a packed copy for oneDNN. Every tensor is
received at its place in new memory (query, key and value of a layer share one weight). The
weight is packed when the layer is used for the first time: the trainer, which waits for the
end of the update, need not wait for that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import torch

from trinity_dask.models.protocol import TensorMeta


@dataclass
class Target:
    """A parameter, or the packed weight of a linear layer, and its next value."""

    module: Any
    attribute: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_packed: bool
    arriving: Optional[torch.Tensor] = None

    def rows(self, start: int, n_rows: int) -> torch.Tensor:
        """A part of the next value."""
        if self.arriving is None:
            self.arriving = torch.empty(self.shape, dtype=self.dtype)
        return self.arriving[start : start + n_rows]

    def install(self) -> None:
        """Put the next value in use."""
        value, self.arriving = self.arriving, None
        if value is None:
            return
        parameter = getattr(self.module, self.attribute)
        if self.is_packed:
            pack_at_first_use(self.module, value)
        elif parameter.shape == value.shape:
            parameter.data = value
        else:  # a vocabulary that is padded in memory
            parameter.data[: len(value)].copy_(value)


@dataclass(frozen=True)
class Place:
    """Where one received tensor belongs."""

    target: Target
    start: int
    n_rows: int

    def memory(self) -> torch.Tensor:
        return self.target.rows(self.start, self.n_rows)


@dataclass
class CpuLoader:
    """The plan for one model and one list of tensors."""

    places: dict[str, Place] = field(default_factory=dict)
    targets: dict[tuple[str, str], Target] = field(default_factory=dict)

    def memory(self, meta: TensorMeta) -> torch.Tensor:
        """Where a tensor that is about to be received is to lie."""
        return self.places[meta.name].memory()

    def load(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take all tensors, then put them in use. An error before that changes nothing."""
        try:
            for name, tensor in named:
                memory = self.places[name].memory()
                if memory.data_ptr() != tensor.data_ptr():
                    memory.copy_(tensor)
        except BaseException:
            for target in self.targets.values():
                target.arriving = None
            raise
        for target in self.targets.values():
            target.install()


def pack_at_first_use(module: Any, weight: Optional[torch.Tensor] = None) -> None:
    """Have ``module`` pack ``weight``, or the weight it owns, when it is called next."""

    def first_call(x: torch.Tensor, _: torch.Tensor, bias: Optional[torch.Tensor]) -> torch.Tensor:
        if weight is not None:
            module.weight = torch.nn.Parameter(weight, requires_grad=False)
        # replaces this function by one that uses the packed copy
        module.quant_method.process_weights_after_loading(module)
        return module.cpu_linear(x, module.weight, bias)

    module.cpu_linear = first_call


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
    for path, attribute, tensor in _parts(model, meta):
        key = path, attribute
        if key not in loader.targets:
            loader.targets[key] = _target(model, path, attribute, dtype)
        target, start = loader.targets[key], filled[key]
        _check_fits(tensor, target, start)
        filled[key] += tensor.shape[0]
        loader.places[tensor.name] = Place(target, start, tensor.shape[0])
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


def _target(model: Any, path: str, attribute: str, dtype: torch.dtype) -> Target:
    try:
        module = model.get_submodule(path)
    except AttributeError as error:
        raise NoPlan(f"the model has no module {path!r}") from error
    parameter = module._parameters.get(attribute)
    if parameter is None or parameter.ndim == 0:
        raise NoPlan(f"there is no place for {path}.{attribute}")
    if _is_packed_away(module, attribute):
        return Target(module, attribute, _shape(module), dtype, True)
    n_rows = getattr(module, "org_vocab_size", parameter.shape[0])
    return Target(module, attribute, (n_rows, *parameter.shape[1:]), parameter.dtype, False)


def _is_packed_away(module: Any, attribute: str) -> bool:
    weight = getattr(module, "weight", None)
    is_empty = weight is not None and weight.numel() == 0
    return attribute == "weight" and hasattr(module, "cpu_linear") and is_empty


def _shape(module: Any) -> tuple[int, int]:
    """Rows and columns of a linear layer's weight."""
    if not hasattr(module, "output_size_per_partition"):
        return module.output_size, module.input_size
    return module.output_size_per_partition, module.input_size_per_partition


def _check_fits(tensor: TensorMeta, target: Target, start: int) -> None:
    is_as_wide = len(tensor.shape) > 0 and tensor.shape[1:] == target.shape[1:]
    if not is_as_wide or start + tensor.shape[0] > target.shape[0]:
        raise NoPlan(f"{tensor.name} has shape {tensor.shape}, its place {target.shape}")


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
