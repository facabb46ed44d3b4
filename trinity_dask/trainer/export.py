"""What a rank writes into a checkpoint, and reads back from it.

Invariant: the weights of an export are those of the moment of the save, and its tokenizer
files are byte for byte those of the model that training started from.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from trinity_dask.models.weight_transfer import named_weights
from trinity_dask.trainer.checkpoint import HF_EXPORT, OPTIMIZER, WEIGHTS
from trinity_dask.trainer.engine import TrainEngine

_TEXT_FILES = (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken")


def write_engine(engine: TrainEngine, directory: Path) -> None:
    """Weights and optimizer state of ``engine`` under ``directory``."""
    (directory / WEIGHTS).parent.mkdir(parents=True, exist_ok=True)
    save_file(_plain(dict(named_weights(engine.model))), directory / WEIGHTS)
    save_file(_plain(engine.state_tensors()), directory / OPTIMIZER)


def read_engine(engine: TrainEngine, checkpoint: str | Path) -> None:
    """Continue where the engine of :func:`write_engine` was, bit for bit."""
    checkpoint = Path(checkpoint)
    engine.load_weights(load_file(checkpoint / WEIGHTS))
    engine.load_state_tensors(load_file(checkpoint / OPTIMIZER))


def _plain(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def export_model(model: Any, directory: Path, dtype: torch.dtype, source: str) -> None:
    """Write ``model`` as a Hugging Face model directory in ``dtype``.

    The tokenizer's files are copied from ``source``: saving them anew would let
    transformers choose a tokenizer class by the model's type, which can change the ids.
    """
    target = directory / HF_EXPORT
    cast: dict[int, torch.Tensor] = {}  # tied weights stay one tensor
    state = {
        name: cast.setdefault(tensor.data_ptr(), tensor.detach().to(dtype))
        for name, tensor in model.state_dict().items()
    }
    model.save_pretrained(target, state_dict=state)
    _set_dtype(target / "config.json", dtype)
    if Path(source).is_dir():
        _copy_text_files(Path(source), target)


def _set_dtype(config: Path, dtype: torch.dtype) -> None:
    values = json.loads(config.read_text(encoding="utf-8"))
    values["dtype"] = str(dtype).removeprefix("torch.")
    config.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _copy_text_files(source: Path, target: Path) -> None:
    """Tokenizer, chat template, remote code: what is not weights and not there already."""
    for file in sorted(source.iterdir()):
        index = file.name.endswith(".index.json")
        if file.suffix in _TEXT_FILES and not index and not (target / file.name).exists():
            shutil.copyfile(file, target / file.name)
