"""What the ranks write into a checkpoint, and read back from it.

Invariant: every tensor is written whole, whatever the ranks have of it, so a checkpoint
continues with any number of ranks; the directory of a model is itself one that transformers
loads (with an adapter: one that peft loads).
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Optional

import torch
from safetensors.torch import load_file, save_file

from trinity_dask.models.lora import has_adapter, read_adapter, write_adapter
from trinity_dask.trainer.checkpoints.checkpoint import (
    ADAPTER_DIR,
    OPTIMIZER_FILE,
    RNG,
    WEIGHTS_FILE,
)
from trinity_dask.trainer.model.trainable import TrainableModel

TEXT_FILES = (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken")


def write_engine(
    models: Mapping[str, TrainableModel], directory: Optional[Path], source: str = ""
) -> None:
    """Weights, optimizer state and configuration of every model, and the random generator.

    Args:
        directory: None on a rank that only takes part in gathering shards.
        source: the model directory that training started from, for the tokenizer's files.
    """
    for name, model in models.items():
        weights = _gathered(model.full_weights(), directory)
        state = _gathered(model.state_tensors(), directory)
        if directory is not None:
            _write_model(model, weights, state, directory / name, source)
    if directory is not None:
        save_file({"torch": torch.get_rng_state()}, directory / RNG)


def _gathered(
    named: Iterable[tuple[str, torch.Tensor]], directory: Optional[Path]
) -> dict[str, torch.Tensor]:
    """Every tensor on the CPU; where nothing is written, none is kept."""
    kept = {}
    for name, tensor in named:
        if directory is not None:
            kept[name] = tensor.detach().cpu().contiguous()
    return kept


def _write_model(
    model: TrainableModel,
    weights: dict[str, torch.Tensor],
    state: dict[str, torch.Tensor],
    directory: Path,
    source: str,
) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    if has_adapter(model.module):
        config = model.module.trinity_adapter
        write_adapter(config, weights, directory / ADAPTER_DIR, source)
    else:
        save_file(weights, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    save_file(state, directory / OPTIMIZER_FILE)
    _write_config(model.module, directory)
    copy_text_files(Path(source), directory)


def _write_config(module: Any, directory: Path) -> None:
    config = copy.deepcopy(module.config)
    # sharding gives the class another name
    config.architectures = [type(module).__name__.removeprefix("FSDP")]
    config.save_pretrained(directory)
    generation = getattr(module, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(directory)


def copy_text_files(source: Path, target: Path) -> None:
    """Tokenizer, chat template, remote code: what is not weights and not there already.

    Saving a tokenizer anew would let transformers choose its class by the model's type,
    which can change the ids.
    """
    for file in sorted(source.iterdir()) if source.is_dir() else ():
        index = file.name.endswith(".index.json")
        if file.suffix in TEXT_FILES and not index and not (target / file.name).exists():
            shutil.copyfile(file, target / file.name)


def read_engine(models: Mapping[str, TrainableModel], checkpoint: str | Path) -> None:
    """Continue where the models of :func:`write_engine` were, bit for bit.

    Raises:
        FileNotFoundError, ValueError: the checkpoint is of other models.
    """
    for name, model in models.items():
        directory = Path(checkpoint) / name
        model.load_weights(_weights(model, directory))
        model.load_state_tensors(load_file(directory / OPTIMIZER_FILE))
    torch.set_rng_state(load_file(Path(checkpoint) / RNG)["torch"])


def _weights(model: TrainableModel, directory: Path) -> dict[str, torch.Tensor]:
    if has_adapter(model.module):
        return read_adapter(str(directory / ADAPTER_DIR))
    if not (directory / WEIGHTS_FILE).is_file():
        raise FileNotFoundError(
            f"{directory} has no {WEIGHTS_FILE}: it was not trained with this setting of "
            "model.lora.rank, or it is damaged; use the configuration that it was made with"
        )
    return load_file(directory / WEIGHTS_FILE)
