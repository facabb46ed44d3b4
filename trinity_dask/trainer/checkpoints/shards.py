"""A sharded model's weights and moments in a checkpoint, by ``torch.distributed.checkpoint``.

Invariant: each rank writes what it holds and reads what it needs, bit for bit, whatever the
numbers of ranks of the writer and the reader are (one with the whole model included); no process
holds more than one tensor beyond its own share. The files are part of a checkpoint that its marker
completes: by themselves they do not count.

A label is ``weight|<name>``, or that of :meth:`TrainableModel.state_tensors`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from trinity_dask.models.protocol import TensorMeta
from trinity_dask.trainer.checkpoints.checkpoint import WEIGHTS_FILE
from trinity_dask.trainer.model.trainable import TrainableModel
from trinity_dask.weights.files import read_safetensors, write_safetensors

SHARDS_DIR = "shards"  # in the directory of a model, in place of weights and optimizer
WEIGHT = "weight"  # begins a weight's label
READ_BYTES = 64 << 20  # of whole weights, at a time


def agree_on(directory: Optional[Path]) -> Optional[Path]:
    """Rank 0's ``directory``, which the others learn here; None: there will be no checkpoint."""
    told: list[Any] = [directory and str(directory)]
    dist.broadcast_object_list(told, src=0)
    return None if told[0] is None else Path(told[0])


def write_shards(model: TrainableModel, directory: Path) -> None:
    """Write this rank's part; every rank must call it with the same ``directory``.

    Raises:
        OSError: a rank could not write; every rank raises it.
    """
    import torch.distributed.checkpoint as dcp

    tensors = {f"{WEIGHT}|{name}": p.detach() for name, p in (model.named | model.buffers).items()}
    tensors |= dict(model.state_tensors(gather=False))
    try:
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(directory, sync_files=True))
    except dcp.CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise OSError(
            f"trainer rank {rank} could not write its shards to {directory}: {cause}"
        ) from error


@torch.no_grad()
def read_shards(model: TrainableModel, directory: Path) -> None:
    """Load what this rank holds of weights and moments; a call of each rank by itself.

    Raises:
        ValueError: names or shapes are not the model's.
    """
    found = _metadata(directory)
    weights = {label.split("|")[1] for label in found if _is_weight(label)}
    model.check_names(weights)
    own = model.named | model.buffers
    places: dict[str, Tensor] = {}
    for label, (shape, dtype) in found.items():
        parameter = own[label.split("|")[1]].detach()
        if _is_weight(label):
            if parameter.shape != shape:
                raise ValueError(
                    f"{label} has shape {tuple(shape)} in {directory} and "
                    f"{tuple(parameter.shape)} in the model"
                )
            places[label] = parameter
        elif parameter.shape == shape:
            places[label] = torch.zeros_like(parameter, dtype=dtype)
        else:
            places[label] = torch.zeros(shape, dtype=dtype)
    _load(places, directory)
    model.load_state_tensors({k: v for k, v in places.items() if not _is_weight(k)})


def saved_weights(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """The whole weights of a model's ``directory`` in a checkpoint, one after the other, without
    a process group.

    Raises:
        FileNotFoundError: there are none.
    """
    if not (directory / SHARDS_DIR).is_dir():
        yield from read_safetensors(str(directory / WEIGHTS_FILE))
        return
    found = _metadata(directory / SHARDS_DIR)
    batch: dict[str, Tensor] = {}
    labels = [label for label in found if _is_weight(label)]
    for label in labels:
        batch[label] = torch.empty(found[label][0], dtype=found[label][1])
        if label == labels[-1] or sum(t.nbytes for t in batch.values()) >= READ_BYTES:
            _load(batch, directory / SHARDS_DIR)
            for key in list(batch):
                yield key.split("|")[1], batch.pop(key)


def assemble(directory: Path) -> Path:
    """The safetensors file of a model's ``directory``, made from its shards if need be."""
    file, shards = directory / WEIGHTS_FILE, directory / SHARDS_DIR
    if not file.is_file() and shards.is_dir():
        meta = [
            TensorMeta(label.split("|")[1], str(dtype).removeprefix("torch."), tuple(shape))
            for label, (shape, dtype) in _metadata(shards).items()
            if _is_weight(label)
        ]
        write_safetensors(str(file), saved_weights(directory), durable=True, meta=meta)
    return file


def _is_weight(label: str) -> bool:
    return label.startswith(f"{WEIGHT}|")


def _metadata(directory: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    from torch.distributed.checkpoint import FileSystemReader

    found: dict[str, Any] = FileSystemReader(directory).read_metadata().state_dict_metadata
    return {label: (entry.size, entry.properties.dtype) for label, entry in found.items()}


def _load(places: dict[str, Tensor], directory: Path) -> None:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():  # that there is no process group, which is meant
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        # each process reads for itself: nobody plans for the others
        dcp.load(places, storage_reader=dcp.FileSystemReader(directory), no_dist=True)
