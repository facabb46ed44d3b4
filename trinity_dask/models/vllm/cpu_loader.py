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

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import torch

from trinity_dask.models.protocol import TensorMeta
from trinity_dask.weights.broadcast import torch_dtype
from trinity_dask.weights.checksum import Digest, in_threads
from trinity_dask.weights.memory import large_buffer


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

    def take(self, start: int, tensor: torch.Tensor, stays: bool = False) -> None:
        """Rows from ``start`` on of the next value: ``tensor`` itself if that will do, else a
        copy. One that ``stays`` is what it is until there is another version."""
        if self.adopts(tensor, stays):
            self.adopted[start] = tensor
            return
        place = self.prepare()[start : start + len(tensor)]
        if place.data_ptr() != tensor.data_ptr():  # else it was received there
            place.copy_(tensor)

    def adopts(self, tensor: torch.Tensor, stays: bool) -> bool:
        """Whether ``tensor`` need not be copied: it is read once, to be packed, or can be the
        parameter itself, which may be padded in memory."""
        fits = stays and tensor.shape == getattr(self.module, self.attribute).shape
        return tensor.dtype == self.dtype and (self.is_packed or fits)

    def prepare(self) -> torch.Tensor:
        """Memory for the next value."""
        if self.copied is None:
            self.copied, self.spare = self.spare, None
        if self.copied is None:
            n_bytes = math.prod(self.shape) * self.dtype.itemsize
            self.copied = large_buffer(n_bytes).view(self.dtype).view(self.shape)
        return self.copied

    def install(self, lease: Lease) -> None:
        """Put the next value in use."""
        adopted, copied = self.adopted, self.copied
        self.adopted, self.copied = {}, None
        if self.is_packed and adopted:
            lease.n_users += 1
            pack_at_first_use(self.module, adopted, lease)
        elif self.is_packed and copied is not None:
            pack_at_first_use(self.module, {0: copied})
        elif adopted:
            self._use(adopted[0], is_ours=False)
        elif copied is not None:
            self._use(copied, is_ours=True)

    def _use(self, value: torch.Tensor, is_ours: bool) -> None:
        parameter = getattr(self.module, self.attribute)
        if parameter.shape != value.shape:  # a vocabulary that is padded in memory
            parameter.data[: len(value)].copy_(value)
            self.spare = value
            return
        if self.in_use is not None and parameter.data_ptr() == self.in_use.data_ptr():
            self.spare = self.in_use
        parameter.data = value
        self.in_use = value if is_ours else None

    def forget(self) -> None:
        self.spare = self.spare if self.copied is None else self.copied
        self.adopted, self.copied = {}, None


@dataclass(eq=False)
class Lease:
    """Memory that a version was received into, and how many layers will still read it."""

    memory: Optional[torch.Tensor] = None
    n_users: int = 0


@dataclass
class CpuLoader:
    """The plan for one model and one list of tensors."""

    places: dict[str, tuple[Target, int]] = field(default_factory=dict)  # and first row
    targets: dict[tuple[str, str], Target] = field(default_factory=dict)
    leases: list[Lease] = field(default_factory=list)
    tied: list[Any] = field(default_factory=list)  # layers that pack a parameter of another

    def lease(self, n_bytes: int) -> Lease:
        """Memory to receive into that no layer will read any more; at most two are made."""
        for lease in self.leases:
            if lease.n_users == 0:
                return lease
        self.leases.append(Lease(large_buffer(n_bytes)))
        return self.leases[-1]

    def load(self, named: Iterable[tuple[str, torch.Tensor]], lease: Optional[Lease]) -> None:
        """Take all tensors, then put them in use. An error before that changes nothing.

        The tensors are views of the memory of ``lease``, or of some that stays as it is for as
        long as they live (None).
        """
        try:
            for name, tensor in named:
                target, start = self.places[name]
                target.take(start, tensor)
        except BaseException:
            self._forget()
            raise
        self._install(lease or Lease())

    def own_memory(self, meta: Sequence[TensorMeta]) -> dict[str, torch.Tensor]:
        """By name, the memory of tensors that are the whole of a parameter: what is received
        there need not be copied."""
        found = {}
        for tensor in meta:
            target, _ = self.places[tensor.name]
            is_same = tensor.shape == target.shape and torch_dtype(tensor.dtype) == target.dtype
            if is_same and not target.is_packed:
                found[tensor.name] = target.prepare()
        return found

    def load_views(self, named: Sequence[tuple[str, torch.Tensor]]) -> Digest:
        """Like :meth:`load`, of tensors that are all there and stay as they are until the next
        version is in use. Returns their digest."""

        def take(digest: Digest, item: tuple[str, torch.Tensor]) -> None:
            name, tensor = item
            digest.add(name, tensor)
            target, start = self.places[name]
            target.take(start, tensor, stays=True)

        for name, tensor in named:
            target, _ = self.places[name]
            if not target.adopts(tensor, stays=True):
                target.prepare()  # not by several threads at once
        try:
            digest = in_threads(take, named, [tensor.nbytes for _, tensor in named])
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
        for module in self.tied:
            pack_at_first_use(module)


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
    module: Any, parts: Optional[dict[int, torch.Tensor]] = None, lease: Optional[Lease] = None
) -> None:
    """Have ``module`` pack the weight made of ``parts``, or the one it owns, when it is called
    next; the parts lie in the memory of ``lease``."""

    def first_call(x: torch.Tensor, _: torch.Tensor, bias: Optional[torch.Tensor]) -> torch.Tensor:
        if parts is not None:
            module.weight = torch.nn.Parameter(side_by_side(parts), requires_grad=False)
        # replaces this function by one that uses the packed copy
        module.quant_method.process_weights_after_loading(module)
        if lease is not None and module.weight.numel() == 0:  # only the packed copy is left
            lease.n_users -= 1
        return module.cpu_linear(x, module.weight, bias)

    vars(module)["cpu_linear"] = first_call  # setting it would search the module's tensors first


class NoPlan(Exception):
    """Why vLLM's own reload has to do it."""


def plan_cpu_loader(
    model: Any, meta: Sequence[TensorMeta], dtype: torch.dtype, tied: Sequence[Any] = ()
) -> CpuLoader:
    """The loader for tensors of ``meta``; ``tied`` layers pack their weight anew each time.

    Raises:
        NoPlan: something in the model or the list is not known here.
    """
    _check_is_plain(model)
    loader = CpuLoader(tied=list(tied))
    filled: dict[tuple[str, str], int] = defaultdict(int)
    for path, attribute, tensor in _parts(model, meta):
        key = path, attribute
        if key not in loader.targets:
            loader.targets[key] = _target(model, path, attribute, dtype)
        target, start = loader.targets[key], filled[key]
        is_as_wide = len(tensor.shape) > 0 and tensor.shape[1:] == target.shape[1:]
        if not is_as_wide or start + tensor.shape[0] > target.shape[0]:
            raise NoPlan(f"{tensor.name} has shape {tensor.shape}, its place {target.shape}")
        filled[key] += tensor.shape[0]
        loader.places[tensor.name] = (target, start)
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
