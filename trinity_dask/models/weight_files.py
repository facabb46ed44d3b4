"""Weights as one safetensors file: the transport of the ``memory`` and ``checkpoint`` methods.

Invariant: a path holds either the whole old file or the whole new one. The writer never
touches an existing file; it renames a finished one over it, so a reader that still maps
the old file keeps reading the old weights.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from trinity_dask.models.checksum import Digest
from trinity_dask.models.protocol import TensorMeta

if TYPE_CHECKING:
    import torch


def write_safetensors(
    path: str, named: Iterable[tuple[str, torch.Tensor]], durable: bool = False
) -> Digest:
    """Write ``(name, tensor)`` pairs to ``path`` and return their digest.

    ``durable`` waits until the bytes are on the disk; a file in memory needs no such wait.

    Raises:
        OSError: the directory cannot be written or is full; ``path`` is then unchanged.
    """
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    digest = Digest()
    for name, tensor in named:
        tensors[name] = tensor.detach().cpu().contiguous()
        digest.add(name, tensors[name])
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    partial = f"{path}.{secrets.token_hex(4)}.partial"
    try:
        save_file(tensors, partial, metadata={"format": "pt"})
        if durable:
            _fsync(partial)
        os.replace(partial, path)
    except BaseException:
        if os.path.exists(partial):
            os.unlink(partial)
        raise
    return digest


def read_safetensors(path: str, digest: Digest | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of the file (or of every ``*.safetensors`` in the directory) at ``path``.

    Opens the path anew at each call, so an overwritten file is seen. Every tensor is added
    to ``digest`` when one is given.

    Raises:
        FileNotFoundError: there is no such file, or the directory holds none.
    """
    from safetensors import safe_open

    for file in weight_files(path):
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118 (not a mapping)
                tensor = handle.get_tensor(name)
                if digest is not None:
                    digest.add(name, tensor)
                yield name, tensor


def file_meta(path: str) -> tuple[TensorMeta, ...]:
    """Names, dtypes and shapes of the tensors at ``path``, in the order of reading."""
    from safetensors import safe_open

    found = []
    for file in weight_files(path):
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118 (not a mapping)
                part = handle.get_tensor(name)
                found.append(TensorMeta(name, str(part.dtype)[6:], tuple(part.shape)))
    return tuple(found)


def weight_files(path: str) -> list[str]:
    """The safetensors files behind ``path``, sorted by name."""
    if os.path.isdir(path):
        files = [os.path.join(path, f) for f in sorted(os.listdir(path))]
        files = [f for f in files if f.endswith(".safetensors")]
    else:
        files = [path] if os.path.isfile(path) else []
    if not files:
        raise FileNotFoundError(
            f"no weights at {path!r}: expected a .safetensors file, or a directory with one"
        )
    return files


def _fsync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
