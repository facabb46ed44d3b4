"""A Hugging Face model of which a rank never holds more than its shards and one tensor.

Invariant: after :meth:`Skeleton.fill` every parameter is what ``from_pretrained`` would have
given it, of which this rank has its rows; buffers are whole. Of a file a rank reads the rows that
it keeps. Where transformers makes a tensor out of several in the file (experts that it stacks,
projections that it fuses or splits) its own conversions do it, one target at a time; a rank then
reads its own experts, and all parts of what is fused otherwise. What no file has starts from the
model's own initialisation and torch's seed, the same on every rank.

The model is built with parameters on the meta device and real buffers, so those that no file
holds (the frequencies of rotary embeddings) are as the model's code computes them.
"""

from __future__ import annotations

import copy
import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trinity_dask.trainer.ranks.parallel import Sharding, shard

log = logging.getLogger(__name__)

WEIGHTS_NAME = "model.safetensors"
WRAPPED = ".base_layer"  # what an adapter puts into the name of the layer that it wraps


@dataclass
class _Target:
    """A tensor of the model and what it is made of: names in the files, by conversion pattern."""

    converter: Optional[Any] = None
    sources: dict[str, list[str]] = field(default_factory=dict)


class Skeleton:
    """A model without memory for its parameters, float32, and the files that can fill it.

    Args:
        auto: a class of transformers such as ``AutoModelForCausalLM``.
        path: a model's directory, or its name on the hub.
        config: of the model; ``options`` are ``from_config``'s.

    Raises:
        FileNotFoundError: no safetensors files.
        ValueError: the files are quantised.
    """

    def __init__(self, auto: Any, path: str, config: Any, **options: Any) -> None:
        if getattr(config, "quantization_config", None):
            raise ValueError(f"{path} is quantised; fsdp2 shards whole floating-point weights")
        with torch.random.fork_rng(devices=[]), _without_memory():
            self.module = auto.from_config(config, dtype=torch.float32, **options)
        if self.module.can_generate():
            _take_generation_config(self.module, path)
        self._files = _open_all(path)
        self._targets = self._plan()

    def _plan(self) -> dict[str, _Target]:
        """What fills what, as transformers' loader decides it."""
        from transformers import conversion_mapping as mappings
        from transformers import core_model_loading as loading

        mapping = mappings.get_model_conversion_mapping(self.module)
        renamings = [each for each in mapping if isinstance(each, loading.WeightRenaming)]
        converters = [each for each in mapping if isinstance(each, loading.WeightConverter)]
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        own, prefix = self.module.state_dict(), self.module.base_model_prefix
        targets: dict[str, _Target] = {}
        for key in sorted(self._files, key=loading.dot_natural_key):
            name, pattern = loading.rename_source_key(key, renamings, converters, prefix, own)
            if name not in own and key in own:
                name, pattern = loading.rename_source_key(key, [], [], prefix, own)
            if name not in own:
                log.info("%s is in the files, but not in the model", key)
                continue
            target = targets.setdefault(name, _Target())
            if pattern is not None and target.converter is None:
                target.converter = copy.deepcopy(by_pattern[pattern])
            target.sources.setdefault(pattern or key, []).append(key)
        self.module._weight_conversions = [each for each in mapping if each.was_used()]
        return targets

    @torch.no_grad()
    def fill(self, sharding: Sharding, device: str, new: tuple[str, ...] = ()) -> Any:
        """Shard the model, which may hold an adapter by now, and read this rank's shards.

        What no file has is told in a warning, unless it is in a module of ``new``.
        Parameters that want no gradient are kept in the dtype that they are computed with.

        Raises:
            ValueError: a tensor of another shape than the model's.
        """
        for parameter in self.module.parameters():
            if not parameter.requires_grad and sharding.compute is not None:
                parameter.data = parameter.data.to(sharding.compute)
        shard(self.module, sharding.mesh, sharding.compute, sharding.reshard)
        parameters = _materialised(self.module, torch.device(device))
        buffers = {n.replace(WRAPPED, ""): b for n, b in self.module.named_buffers()}
        filled: set[int] = set()
        for first, target in self._targets.items():
            for name, value in self._read(first, target, parameters):
                place = parameters.get(name, buffers.get(name))
                if place is None:  # one of several that a conversion makes
                    log.info("%s is in the files, but not in the model", name)
                else:
                    _put(name, value, place, again=id(place) in filled)
                    filled.add(id(place))
        self._initialise(parameters, filled, new)
        self._files = {}  # maps them no longer
        return self.module

    def _read(
        self, first: str, target: _Target, parameters: dict[str, Tensor]
    ) -> Iterator[tuple[str, Any]]:
        """``(name, value)``; a value is this rank's rows already, or sliceable as the whole."""
        if target.converter is None:
            for keys in target.sources.values():
                for key in keys:
                    yield first, self._files[key].get_slice(key)
            return
        rows: Optional[slice] = None
        if _stacks(target.converter) and isinstance(parameters.get(first), DTensor):
            rows = own_rows(parameters[first])
            if rows.start == rows.stop:
                yield first, _Rows(torch.empty(0, *parameters[first].shape[1:]))
                return
        for pattern, keys in target.sources.items():
            for key in keys if rows is None else keys[rows]:
                tensor = self._files[key].get_tensor(key)
                target.converter.add_tensor(first, key, pattern, tensor)
        made = target.converter.convert(first, model=self.module, config=self.module.config)
        for name, value in made.items():
            value = value[0] if isinstance(value, list) else value
            yield name, value if rows is None else _Rows(value)

    def _initialise(
        self, parameters: dict[str, Tensor], filled: set[int], new: tuple[str, ...]
    ) -> None:
        """Give what no file has its first values."""
        from torch.distributed.fsdp import FSDPModule

        missing = {id(p): name for name, p in parameters.items() if id(p) not in filled}
        unset = [name for name in missing.values() if ".lora_" not in name]
        seed = torch.initial_seed()
        for name in unset:
            if name.partition(".")[0] not in new:
                log.warning("%s is in no file and starts from its initialisation", name)
            place, label = parameters[name], name.rpartition(".")[2]
            owner = self.module.get_submodule(name.rpartition(".")[0])
            kind = type(owner)
            kind = kind.__mro__[2] if issubclass(kind, FSDPModule) else kind
            alone = torch.nn.Module.__new__(kind)  # one module, with memory for all of itself
            alone.__dict__.update(owner.__dict__)
            whole = {
                key: each if each is None else torch.nn.Parameter(torch.zeros(each.shape))
                for key, each in owner._parameters.items()
            }
            alone.__dict__["_parameters"] = whole
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                self.module._init_weights(alone)
            _put(name, whole[label], place)


class _Rows:
    """A value of which a rank has its own rows already."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def own_rows(parameter: Tensor) -> slice:
    """The rows of the whole tensor that this rank's shard of ``parameter`` holds."""
    if not isinstance(parameter, DTensor):
        return slice(0, parameter.shape[0] if parameter.dim() else 1)
    mesh, total = parameter.device_mesh, parameter.shape[0]
    start = min(mesh.get_local_rank() * -(-total // mesh.size()), total)
    return slice(start, start + parameter.to_local().shape[0])


def _put(name: str, value: Any, place: Tensor, again: bool = False) -> None:
    """Copy this rank's part of ``value``, a tensor or a slice of a file, to ``place``."""
    local = place.to_local() if isinstance(place, DTensor) else place
    if isinstance(value, _Rows):
        found, part = [place.shape[0], *value.tensor.shape[1:]], value.tensor
    else:
        found = list(value.shape if isinstance(value, Tensor) else value.get_shape())
        part = value[own_rows(place)] if found else value[...]
    if found != list(place.shape) or part.shape != local.shape:
        raise ValueError(f"{name} is {found} in the files and {list(place.shape)} in the model")
    if again and not torch.equal(local, part.to(local)):
        raise ValueError(
            f"{name} is tied to another tensor by the model's config.json, but the files have two "
            "different ones; set tie_word_embeddings to false there"
        )
    local.copy_(part)


def _stacks(converter: Any) -> bool:
    """Whether each part in the file is one row of the target and rows do not mix."""
    from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose

    first, *rest = converter.operations
    return (
        isinstance(first, MergeModulelist)
        and first.dim == 0
        and all(
            (isinstance(each, Concatenate) and each.dim > 0)
            or (isinstance(each, Transpose) and each.dim0 > 0 and each.dim1 > 0)
            for each in rest
        )
    )


def _materialised(module: Any, device: torch.device) -> dict[str, Tensor]:
    """Give ``module`` uninitialised memory for its shards; its parameters by the names that they
    have without an adapter. A parameter of several names stays one."""
    made: dict[int, torch.nn.Parameter] = {}
    names: dict[str, Tensor] = {}
    for prefix, part in module.named_modules():
        for name, old in part._parameters.items():
            if old is None:
                continue
            if id(old) not in made:
                made[id(old)] = _with_memory(old, device) if _is_meta(old) else old
                made[id(made[id(old)])] = made[id(old)]
            part._parameters[name] = made[id(old)]
            label = f"{prefix}.{name}".lstrip(".").replace(WRAPPED, "")
            names[label] = made[id(old)]
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffer.to(device)
    return names


def _is_meta(parameter: Tensor) -> bool:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.is_meta


def _with_memory(old: Any, device: torch.device) -> torch.nn.Parameter:
    local = torch.empty(old.to_local().shape, dtype=old.dtype, device=device)
    tensor = DTensor.from_local(
        local,
        old.device_mesh,
        old.placements,
        run_check=False,
        shape=old.shape,
        stride=old.stride(),
    )
    return torch.nn.Parameter(tensor, requires_grad=old.requires_grad)


@contextmanager
def _without_memory() -> Iterator[None]:
    """Within it, modules that this thread builds have parameters on the meta device."""
    register = torch.nn.Module.register_parameter
    thread = threading.get_ident()

    def on_meta(module: Any, name: str, parameter: Any) -> None:
        if threading.get_ident() == thread and parameter is not None and not parameter.is_meta:
            kept = parameter.__dict__
            parameter = torch.nn.Parameter(parameter.data.to("meta"), parameter.requires_grad)
            parameter.__dict__.update(kept)
        register(module, name, parameter)

    patched: Any = torch.nn.Module
    patched.register_parameter = on_meta
    try:
        yield
    finally:
        patched.register_parameter = register


def _take_generation_config(module: Any, path: str) -> None:
    from transformers import GenerationConfig

    try:
        module.generation_config = GenerationConfig.from_pretrained(path)
    except OSError:
        log.info("%s has no generation config: the model's own is taken", path)


def _open_all(path: str) -> dict[str, Any]:
    """The open file of every tensor's name."""
    from safetensors import safe_open

    opened: dict[str, Any] = {}
    for file in _weight_files(path):
        handle = safe_open(file, framework="pt")
        opened |= dict.fromkeys(handle.keys(), handle)
    return opened


def _weight_files(path: str) -> list[Path]:
    directory = Path(path)
    if not directory.is_dir():
        from huggingface_hub import snapshot_download

        directory = Path(snapshot_download(path, allow_patterns=["*.safetensors", "*.json"]))
    index = directory / f"{WEIGHTS_NAME}.index.json"
    if (directory / WEIGHTS_NAME).is_file():
        return [directory / WEIGHTS_NAME]
    if index.is_file():
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return [directory / name for name in sorted(set(names))]
    raise FileNotFoundError(
        f"{path} has no {WEIGHTS_NAME} and no index of several: fsdp2 reads each rank's part from "
        "safetensors files; save the model with transformers' save_pretrained first"
    )
