"""Names and shapes of weights as the hub has them, and as transformers holds them in memory.

Invariant: what leaves the trainer (to engines, in an export) has the hub's names and shapes, which
every library reads; transformers 5 fuses some tensors when it loads a model (the experts of a
mixture lie in one) and renames others, by a table of its own that this module applies both ways. A
model that the table does not know keeps its names, and its tensors pass untouched.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


class HubNames:
    """The two directions for one transformers ``model`` (of which only the class and the
    configuration matter: its weights may be shards, or on no device)."""

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange

        self._model = model
        # sharding makes a class of another name
        shown = _class_of_transformers(model)
        sharded, model.__class__ = model.__class__, shown
        try:
            found = get_model_conversion_mapping(model, add_legacy=False)
        finally:
            model.__class__ = sharded
        forward = [each for each in found if not isinstance(each, PrefixChange)]
        self.same = not forward  # whether the hub's names are the model's own
        self._tables = {False: forward, True: [t.reverse_transform() for t in reversed(forward)]}

    def to_hub(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """``named`` under the hub's names, in its order; each is converted as it comes where that
        can be, so that whole tensors of a sharded model need not be held all at once."""
        if self.same:
            yield from named
            return
        waiting = {}
        for name, tensor in named:
            if name in self._joined:
                waiting[name] = tensor
            else:
                yield from self._converted({name: tensor}, to_hub=True).items()
        if waiting:
            yield from self._converted(waiting, to_hub=True).items()

    def to_model(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The other way, of all tensors of a model."""
        return dict(tensors) if self.same else self._converted(tensors, to_hub=False)

    @cached_property
    def _joined(self) -> frozenset[str]:
        """Own names of tensors that the hub has as parts of one."""
        named = {
            name: torch.empty(value.shape, dtype=value.dtype, device="meta")
            for name, value in self._model.state_dict(keep_vars=True).items()
        }
        whole = {name: t.shape for name, t in self._converted(named, to_hub=True).items()}
        return frozenset(
            name
            for name, tensor in named.items()
            if any(
                whole.get(part) != value.shape
                for part, value in self._converted({name: tensor}, to_hub=True).items()
            )
        )

    def _converted(self, tensors: Mapping[str, Tensor], to_hub: bool) -> dict[str, Tensor]:
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        table = self._tables[to_hub]
        renamings = [each for each in table if isinstance(each, WeightRenaming)]
        converters = [each for each in table if isinstance(each, WeightConverter)]
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        steps: dict[str, Any] = {}
        found: dict[str, Tensor] = {}
        # experts in the order of their numbers
        for name in sorted(tensors, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, reverse=to_hub)
            if pattern is None:
                found[target] = tensors[name]
                continue
            if target not in steps:
                steps[target] = copy.deepcopy(by_pattern[pattern])
            steps[target].add_tensor(target, name, pattern, tensors[name])
        for target, step in steps.items():
            made = step.convert(target, model=self._model, config=self._model.config)
            for name, value in made.items():
                found[name] = value[0] if isinstance(value, list) else value
        return found


def _class_of_transformers(model: Any) -> type:
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(model, FSDPModule):
        return type(model)
    return next(each for each in type(model).__mro__ if not issubclass(each, FSDPModule))
