"""Loading weights into a vLLM model on a CPU without copying them twice.

Invariant: the model changes only after every tensor of a version has arrived, and then all
of it; and this is used only where its plan covers every parameter exactly. What it does not
know (quantisation, several ranks, renamed or transformed weights) is left to vLLM's own
layer-wise reload, which is general and slower.

On a CPU a linear layer keeps no weight, only a packed copy for oneDNN. What is to be packed
is used where it was received: the parts of a layer (query, key and value share one weight) lie
side by side there. It is packed when the layer is used for the first time: the trainer, which
waits for the end of the update, need not wait for that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import torch

from trinity_dask.models.checksum import Digest, in_threads
from trinity_dask.models.protocol import TensorMeta


@dataclass
class Target:
    """A parameter, or the packed weight of a linear layer, and its next value."""

    module: Any
    attribute: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_packed: bool
    adopted: dict[int, torch.Tensor] = field(default_factory=dict)  # by first row
    copied: Optional[torch.Tensor] = None
    in_use: Optional[torch.Tensor] = None
    spare: Optional[torch.Tensor] = None  # the copy before the one in use, written again

    def take(self, start: int, tensor: torch.Tensor) -> None:
        """Rows from ``start`` on of the next value: ``tensor`` itself if it will only be read,
        once, to be packed; else a copy."""
        if self.is_packed and tensor.dtype == self.dtype:
            self.adopted[start] = tensor
            return
        self.prepare()
        assert self.copied is not None
        self.copied[start : start + len(tensor)].copy_(tensor)

    def prepare(self) -> None:
        """Have memory for copies."""
        if self.copied is None:
            spare, self.spare = self.spare, None
            self.copied = torch.empty(self.shape, dtype=self.dtype) if spare is None else spare

    def install(self, lease: Lease) -> None:
        """Put the next value in use."""
        value = side_by_side(self.adopted) if self.adopted else self.copied
        if self.adopted:
            lease.n_users += 1
        adopted = bool(self.adopted)
        self.adopted, self.copied = {}, None
        if value is None:
            return
        parameter = getattr(self.module, self.attribute)
        if self.is_packed:
            pack_at_first_use(self.module, value, lease if adopted else None)
        elif parameter.shape == value.shape:
            if self.in_use is not None and parameter.data_ptr() == self.in_use.data_ptr():
                self.spare = self.in_use
            parameter.data = self.in_use = value
        else:  # a vocabulary that is padded in memory
            parameter.data[: len(value)].copy_(value)
            self.spare = value

    def forget(self) -> None:
        self.spare = self.spare if self.copied is None else self.copied
        self.adopted, self.copied = {}, None


@dataclass(frozen=True)
class Place:
    """Where one received tensor belongs."""

    target: Target
    start: int

    def take(self, tensor: torch.Tensor) -> None:
        self.target.take(self.start, tensor)


@dataclass(eq=False)
class Lease:
    """Memory that a version was received into, and how many layers will still read it."""

    memory: Optional[torch.Tensor] = None
    n_users: int = 0


@dataclass
class CpuLoader:
    """The plan for one model and one list of tensors."""

    places: dict[str, Place] = field(default_factory=dict)
    targets: dict[tuple[str, str], Target] = field(default_factory=dict)
    leases: list[Lease] = field(default_factory=list)

    def lease(self, n_bytes: int) -> Lease:
        """Memory to receive into that no layer will read any more; at most two are made."""
        for lease in self.leases:
            if lease.n_users == 0:
                return lease
        self.leases.append(Lease(torch.empty(n_bytes, dtype=torch.uint8)))
        return self.leases[-1]

    def load(self, named: Iterable[tuple[str, torch.Tensor]], lease: Optional[Lease]) -> None:
        """Take all tensors, then put them in use. An error before that changes nothing.

        The tensors are views of the memory of ``lease``, or of some that stays as it is for as
        long as they live (None).
        """
        try:
            for name, tensor in named:
                self.places[name].take(tensor)
        except BaseException:
            self._forget()
            raise
        self._install(lease or Lease())

    def load_views(self, named: Sequence[tuple[str, torch.Tensor]]) -> Digest:
        """Like :meth:`load`, of tensors that are all there and stay as they are until the next
        version is in use. Returns their digest."""
        for target in self.targets.values():
            if not target.is_packed:
                target.prepare()  # not by several threads at once

        def take(item: tuple[str, torch.Tensor]) -> Digest:
            digest = Digest()
            digest.add(*item)
            self.places[item[0]].take(item[1])
            return digest

        try:
            digest = in_threads(take, named)
        except BaseException:
            self._forget()
            raise
        self._install(Lease())
        return digest

    def _forget(self) -> None:
        for target in self.targets.values():
            target.forget()

    def _install(self, lease: Lease) -> None:
        for old in self.leases:
            old.n_users = 0  # every layer gets its weight anew
        for target in self.targets.values():
            target.install(lease)


def side_by_side(parts: dict[int, torch.Tensor]) -> torch.Tensor:
    """The rows of all parts, by first row: as one view if they lie like that already."""
    tensors = [parts[start] for start in sorted(parts)]
    first = tensors[0]
    n_rows, end = 0, first.data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != end or not tensor.is_contiguous():
            return torch.cat(tensors)
        end += tensor.numel() * tensor.element_size()
        n_rows += len(tensor)
    return first.as_strided((n_rows, *first.shape[1:]), first.stride())


def pack_at_first_use(
    module: Any, weight: Optional[torch.Tensor] = None, lease: Optional[Lease] = None
) -> None:
    """Have ``module`` pack ``weight``, or the weight it owns, when it is called next; the
    weight lies in the memory of ``lease``."""

    def first_call(x: torch.Tensor, _: torch.Tensor, bias: Optional[torch.Tensor]) -> torch.Tensor:
        if weight is not None:
            module.weight = torch.nn.Parameter(weight, requires_grad=False)
        # replaces this function by one that uses the packed copy
        module.quant_method.process_weights_after_loading(module)
        if lease is not None and module.weight.numel() == 0:  # only the packed copy is left
            lease.n_users -= 1
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
        loader.places[tensor.name] = Place(target, start)
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
