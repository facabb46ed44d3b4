"""A low-rank adapter inside a Hugging Face model, by ``peft``.

Invariant: the base weights never change; the adapter's tensors travel and are saved under
the names of peft's ``adapter_model.safetensors``, so trainer, engines and files agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from trinity_dask.models.lora_config import peft_config

FILE_PREFIX = "base_model.model."
WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
_NAME = ".default."  # how a parameter's name tells its adapter


def add_adapter(model: Any, lora: Mapping[str, Any], base: str = "") -> None:
    """Put a new adapter (whose effect is zero) into ``model``; only it wants a gradient.

    Raises:
        ValueError: no module of the model has one of the target names (from peft).
    """
    config = peft_config(lora, base)
    from peft import get_peft_model

    # the wrapper finds the targets of "all-linear"; what it leaves is the model itself
    with _kept_where_made(model):
        wrapped = get_peft_model(model, config)
    model.trinity_adapter = wrapped.peft_config["default"]
    if lora.get("path"):
        load_adapter(model, read_adapter(str(lora["path"])))


@contextmanager
def _kept_where_made(model: Any) -> Iterator[None]:
    """Within it a new adapter has memory even if ``model`` has none (is on the meta device): peft
    moves it there, and its first values would be lost."""
    from peft.tuners.lora.layer import ParamWrapper
    from peft.tuners.tuners_utils import BaseTunerLayer

    if not any(parameter.is_meta for parameter in model.parameters()):
        yield
        return
    made: list[tuple[Any, str, Any]] = []

    def remember(layer: Any, *_: Any, **__: Any) -> None:
        for part in layer.modules():
            kept = [(k, p) for k, p in part._parameters.items() if p is not None]
            made.extend((part, key, p) for key, p in kept if not p.is_meta)

    name = "_move_adapter_to_device_of_base_layer"
    moves = [(kind, vars(kind)[name]) for kind in (BaseTunerLayer, ParamWrapper)]
    try:
        for kind, _ in moves:
            setattr(kind, name, remember)
        yield
    finally:
        for kind, move in moves:
            setattr(kind, name, move)
    for part, key, parameter in made:
        part._parameters[key] = parameter


def has_adapter(model: Any) -> bool:
    return getattr(model, "trinity_adapter", None) is not None


def adapter_parameters(model: Any) -> dict[str, torch.nn.Parameter]:
    """The adapter's parameters by the names of peft's file."""
    return {
        FILE_PREFIX + name.replace(_NAME, "."): parameter
        for name, parameter in model.named_parameters()
        if ".lora_" in name
    }


@torch.no_grad()
def load_adapter(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy an adapter's tensors into ``model``.

    Raises:
        ValueError: names or shapes are not those of the model's adapter; it is unchanged.
    """
    own = adapter_parameters(model)
    wrong = sorted(own.keys() ^ tensors.keys()) or sorted(
        name for name, value in own.items() if value.shape != tensors[name].shape
    )
    if wrong:
        raise ValueError(
            f"the adapter does not fit model.lora: {len(wrong)} tensors differ in name or shape, "
            f"the first is {wrong[0]!r}; use the rank and target_modules it was made with"
        )
    for name, parameter in own.items():
        parameter.copy_(tensors[name])


def read_adapter(path: str) -> dict[str, torch.Tensor]:
    """Tensors of the adapter directory (or file) at ``path``.

    Raises:
        FileNotFoundError: there is none.
    """
    from safetensors.torch import load_file

    file = Path(path) / WEIGHTS_FILE if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"no adapter at {path!r}: expected a directory with {WEIGHTS_FILE}")
    return load_file(file)


def write_adapter(
    config: Any, tensors: Mapping[str, torch.Tensor], directory: Path, base: str
) -> None:
    """Write an adapter as peft does; ``peft.PeftModel.from_pretrained`` loads it."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    config.base_model_name_or_path = base
    config.inference_mode = True
    config.save_pretrained(str(directory))
    plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    save_file(plain, directory / WEIGHTS_FILE, metadata={"format": "pt"})


@contextmanager
def adapter_off(model: Any) -> Iterator[None]:
    """Within it ``model`` is its base."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [part for part in model.modules() if isinstance(part, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
