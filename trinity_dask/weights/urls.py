"""Weights at an fsspec URL: an object with the tensors, and a marker that names it.

Invariant: the marker is written after the object that it names is whole, and an object's name
is never used twice. So whoever reads by the marker sees one whole version, also while another
one is being written to the same URL; what a marker named last stays until the one after it is
replaced, for readers that are under way. Without a marker there is nothing at the URL,
whatever objects lie there.

A path without a scheme, and ``file://``, is a file as :mod:`weight_files` writes it.
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Optional

from trinity_dask.models.protocol import WeightUpdate
from trinity_dask.weights.checksum import Digest
from trinity_dask.weights.files import SUFFIX, write_safetensors
from trinity_dask.weights.shared_memory import looking_at

if TYPE_CHECKING:
    import torch

MARKER_SUFFIX = ".complete.json"
OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oci", "oss", "memory"}
READ_ATTEMPTS = 3  # how often an object may be replaced while it is about to be read
Options = Optional[Mapping[str, Any]]


class IncompleteWeights(OSError):
    """An object is not as long as its marker says."""


def is_url(path: str) -> bool:
    """Whether ``path`` is reached through fsspec; a local path or ``file://`` is not."""
    scheme, separator, _ = path.partition("://")
    return bool(separator) and scheme not in ("file", "local")


def local_path(path: str) -> str:
    """``path`` without the scheme of local files."""
    return path.partition("://")[2] if "://" in path and not is_url(path) else path


def write_weights(
    path: str,
    named: Iterable[tuple[str, torch.Tensor]],
    options: Options = None,
    durable: bool = False,
) -> Digest:
    """Publish ``named`` at ``path``, a URL (with fsspec's ``options``) or a file.

    Raises:
        OSError: it cannot be written; what was at ``path`` before is still there.
    """
    if not is_url(path):
        return write_safetensors(local_path(path), named, durable)
    with tempfile.TemporaryDirectory(prefix="trinity-weights-") as here:
        file = os.path.join(here, f"weights{SUFFIX}")
        digest = write_safetensors(file, named)
        _upload(file, path, options, digest)
    return digest


def _upload(file: str, url: str, options: Options, digest: Digest) -> None:
    fs, root = _open(url, options)
    old = _marker(fs, root)
    target = f"{root.removesuffix(SUFFIX)}-{secrets.token_hex(4)}{SUFFIX}"
    if not _is_object_store(fs):
        fs.makedirs(target.rpartition("/")[0], exist_ok=True)
    marker = {
        "object": target,
        "n_bytes": os.path.getsize(file),
        "checksum": f"{digest.value:#x}",
        "replaced": old.get("object"),
    }
    try:
        fs.put_file(file, target)
        fs.pipe_file(root + MARKER_SUFFIX, json.dumps(marker).encode())
    except BaseException as error:
        _discard(fs, target)
        if isinstance(error, OSError):
            raise OSError(f"the weights could not be written to {url!r}: {error}") from error
        raise
    _discard(fs, old.get("replaced"))


@contextmanager
def fetched(update: WeightUpdate) -> Iterator[WeightUpdate]:
    """``update`` with a path of this machine, which is there until the end of the block.

    Raises:
        FileNotFoundError: there are no complete weights at the URL.
        IncompleteWeights: the object is shorter or longer than it was written.
    """
    if not update.path or not is_url(update.path):
        with looking_at(str(update.path)) if _may_be_rewritten(update) else nullcontext():
            yield replace(update, path=local_path(update.path)) if update.path else update
        return
    with tempfile.TemporaryDirectory(prefix="trinity-weights-") as here:
        file = os.path.join(here, f"weights{SUFFIX}")
        download(update.path, file, update.storage_options)
        yield replace(update, path=file)


def _may_be_rewritten(update: WeightUpdate) -> bool:
    return update.method == "memory" and os.path.isfile(str(update.path))


def download(url: str, file: str, options: Options = None) -> None:
    """Copy the version at ``url`` to ``file``. Raises what :func:`fetched` raises."""
    fs, root = _open(url, options)
    for _ in range(READ_ATTEMPTS):
        marker = _marker(fs, root)
        if not marker:
            raise FileNotFoundError(
                f"no complete weights at {url!r}: its marker {MARKER_SUFFIX!r} is not there; "
                "a writer puts it there when all bytes are"
            )
        with suppress(FileNotFoundError):  # replaced twice meanwhile: the marker names a new one
            fs.get_file(marker["object"], file)
            _check_size(url, marker, os.path.getsize(file))
            return
    raise FileNotFoundError(f"{url!r} was replaced {READ_ATTEMPTS} times while it was being read")


def _check_size(url: str, marker: Mapping[str, Any], n_bytes: int) -> None:
    if n_bytes != marker["n_bytes"]:
        raise IncompleteWeights(
            f"{marker['object']} has {n_bytes} bytes and the marker of {url!r} says "
            f"{marker['n_bytes']}; it was changed or cut after it was written"
        )


def remove_weights(path: str, options: Options = None) -> None:
    """Remove what :func:`write_weights` left at ``path``; nothing there is no error."""
    if not is_url(path):
        with suppress(FileNotFoundError):
            os.unlink(local_path(path))
        return
    fs, root = _open(path, options)
    marker = _marker(fs, root)
    for name in (root + MARKER_SUFFIX, marker.get("object"), marker.get("replaced")):
        _discard(fs, name)


def _open(url: str, options: Options) -> tuple[Any, str]:
    import fsspec

    fs, root = fsspec.url_to_fs(url, **(options or {}))
    fs.invalidate_cache()  # a listing from before another process wrote
    return fs, root


def _is_object_store(fs: Any) -> bool:
    """Whether a name needs no directory. There ``makedirs`` would make a misspelt bucket."""
    protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
    return bool(protocols & OBJECT_STORES)


def _marker(fs: Any, root: str) -> dict[str, Any]:
    """The marker's content, empty when there is none."""
    try:
        return json.loads(fs.cat_file(root + MARKER_SUFFIX))
    except FileNotFoundError:
        return {}


def _discard(fs: Any, name: Optional[str]) -> None:
    if name:
        with suppress(FileNotFoundError):
            fs.rm_file(name)
