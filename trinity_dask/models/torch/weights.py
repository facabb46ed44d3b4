"""Loading a received version into a Hugging Face model.

Invariant: all of a version is received and compared with the model's names before the
first parameter changes, so a transfer that breaks leaves the old weights whole.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from trinity_dask.models.lora import has_adapter, load_adapter
from trinity_dask.models.protocol import WeightReceipt, WeightUpdate
from trinity_dask.weights.buckets import WeightGroup, recv
from trinity_dask.weights.checksum import Digest
from trinity_dask.weights.files import read_safetensors, weight_files
from trinity_dask.weights.urls import fetched


def check_update(update: WeightUpdate, group: WeightGroup | None) -> None:
    """Raises unless the tensors of ``update`` can be asked for.

    Raises:
        ValueError: unknown method, or a file method without a path.
        FileNotFoundError: there are no weights at its path.
        RuntimeError: method ``nccl`` and no group of the update's generation.
    """
    if update.method == "nccl":
        if group is None or group.generation != update.generation:
            have = "none" if group is None else f"generation {group.generation}"
            raise RuntimeError(
                f"version {update.version} comes over weight group generation "
                f"{update.generation}, but this engine is in {have}"
            )
    elif update.method in ("memory", "checkpoint") and update.path:
        weight_files(update.path)
    else:
        raise ValueError(
            f"weight update method {update.method!r} with path {update.path!r}: use 'nccl', or "
            "'memory' or 'checkpoint' with a path"
        )


def incoming(
    update: WeightUpdate,
    group: WeightGroup | None,
    digest: Digest,
    memory: torch.Tensor | None = None,
    own: Mapping[str, torch.Tensor] | None = None,
) -> Iterable[tuple[str, torch.Tensor]]:
    """The tensors of ``update``, from the group (see :func:`recv`) or from its file, which is
    one of this machine (see :func:`fetched`).

    Raises what :func:`check_update` raises.
    """
    check_update(update, group)
    if group is not None and update.method == "nccl":
        return recv(group, update.meta, update.bucket_bytes, digest, memory, own)
    return read_safetensors(str(update.path), digest)


def load_update(model: Any, update: WeightUpdate, group: WeightGroup | None) -> WeightReceipt:
    """Receive ``update`` and copy it into ``model`` in place.

    Raises:
        ValueError: names or shapes do not fit the model; it is unchanged then.
    """
    start = time.perf_counter()
    digest = Digest()
    with fetched(update) as here:
        staged = dict(incoming(here, group, digest))
        if has_adapter(model):
            load_adapter(model, staged)
        else:
            assign(model, staged)
    return WeightReceipt(update.version, digest.value, digest.n_bytes, time.perf_counter() - start)


@torch.no_grad()
def assign(model: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Copy ``tensors`` into the parameters of the same names; a tied alias may be present."""
    known = model.state_dict()  # shares storage with the parameters; lists aliases too
    needed = {name for name, _ in model.named_parameters()}
    missing, unknown = sorted(needed - set(tensors)), sorted(set(tensors) - set(known))
    if missing or unknown:
        raise ValueError(
            f"the weights do not fit the model: missing {missing[:3]}, unknown {unknown[:3]} "
            f"({len(missing)} and {len(unknown)} names)"
        )
    for name, tensor in tensors.items():
        if known[name].shape != tensor.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; the model's is {tuple(known[name].shape)}"
            )
    for name, tensor in tensors.items():
        known[name].copy_(tensor)
