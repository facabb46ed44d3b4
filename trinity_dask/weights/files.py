"""Weights as one safetensors file, or as an object at an fsspec URL with a marker that names it.

Invariant: a path holds either the whole old file or the whole new one. The writer never
touches an existing file; it renames a finished one over it, so a reader that still maps
the old file keeps reading the old weights. At a URL the marker is written after the object that
it names is whole, and an object's name is never used twice: whoever reads by the marker sees one
whole version, also while another one is being written; what a marker named last stays until the
one after it is replaced, for readers that are under way. Without a marker nothing is there.

The tensors lie in the file in the order in which they were given, without gaps: the parts of
a layer that an engine fuses lie side by side, and it need not copy them together.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Optional

from trinity_dask.files import replacing
from trinity_dask.models.protocol import TensorMeta, WeightUpdate
from trinity_dask.weights.checksum import Digest

if TYPE_CHECKING:
    import torch

SUFFIX = ".safetensors"
ALIGN_BYTES = 64  # the first tensor starts on a cache line
# the names of the format for torch's dtypes
DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
MARKER_SUFFIX = ".complete.json"
OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oci", "oss", "memory"}
COPY_BYTES = 1 << 24
READ_ATTEMPTS = 3  # how often an object may be replaced while it is about to be read
Options = Optional[Mapping[str, Any]]


# --------------------------------------------------------------------------- writing
def write_safetensors(
    path: str,
    named: Iterable[tuple[str, torch.Tensor]],
    durable: bool = False,
    meta: Optional[Sequence[TensorMeta]] = None,
) -> Digest:
    """Write ``(name, tensor)`` pairs to ``path`` and return their digest.

    ``durable`` waits until the bytes are on the disk; a file in memory needs no such wait. With
    ``meta`` of all pairs each tensor is taken when the one before is written; without it all of
    them exist at once.

    Raises:
        OSError: the directory cannot be written or is full; ``path`` is then unchanged.
        ValueError: a tensor's dtype has no name in the format.
    """
    if meta is not None:
        return _write_in_turn(path, named, durable, meta)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in named}
    header = layout_of(tensors).header
    with (
        replacing(Path(path), durable) as partial,
        ThreadPoolExecutor(1, "digest") as beside,  # the kernel copies meanwhile
    ):
        digest = beside.submit(_digest, tensors)
        with open(partial, "xb") as file:
            file.write(header)
            for tensor in tensors.values():
                _write_bytes(file, tensor)
    return digest.result()


def _write_in_turn(
    path: str, named: Iterable[tuple[str, torch.Tensor]], durable: bool, meta: Sequence[TensorMeta]
) -> Digest:
    digest = Digest()
    layout = layout_of_meta(meta)
    with replacing(Path(path), durable) as partial, open(partial, "xb") as file:
        file.write(layout.header)
        for each, (name, tensor) in zip(meta, named, strict=True):
            own = tensor.detach().cpu().contiguous()
            if (name, tuple(own.shape), own.nbytes) != (each.name, each.shape, each.n_bytes):
                raise ValueError(f"expected tensor {each}, got {name!r}: metadata is stale")
            _write_bytes(file, own)
            digest.add(name, own)
    return digest


def write_one_by_one(path: Path, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write ``(name, tensor)`` pairs of which nothing is known before they come, and of which no
    two exist at once: their bytes wait in a file of their own until all places are known.

    Raises:
        OSError, ValueError: as :func:`write_safetensors`.
    """
    found = []
    with tempfile.TemporaryFile(dir=path.parent) as body:
        for name, tensor in named:
            own = tensor.detach().cpu().contiguous()
            found.append((name, _dtype_of(name, own), tuple(own.shape), own.nbytes))
            _write_bytes(body, own)
            del tensor, own
        body.seek(0)
        with open(path, "xb") as file:
            file.write(_layout(tuple(found)).header)
            shutil.copyfileobj(body, file, COPY_BYTES)


def _write_bytes(file: IO[bytes], tensor: torch.Tensor) -> None:
    import torch

    if tensor.numel():
        own_memory: Any = tensor.view(-1).view(torch.uint8).numpy()
        file.write(own_memory)


def _digest(tensors: Mapping[str, torch.Tensor]) -> Digest:
    digest = Digest()
    for name, tensor in tensors.items():
        digest.add(name, tensor)
    return digest


@dataclass(frozen=True)
class Layout:
    """A file's beginning, and ``(name, start, end)`` of every tensor in it, in bytes."""

    header: bytes
    places: list[tuple[str, int, int]]

    @property
    def n_bytes(self) -> int:
        """Of the whole file."""
        return self.places[-1][2] if self.places else len(self.header)


def layout_of(tensors: Mapping[str, torch.Tensor]) -> Layout:
    """The format's beginning is the length of a JSON text, and the text.

    Raises:
        ValueError: a tensor's dtype has no name in the format.
    """
    found = []
    for name, tensor in tensors.items():
        found.append((name, _dtype_of(name, tensor), tuple(tensor.shape), tensor.nbytes))
    return _layout(tuple(found))


def layout_of_meta(meta: Sequence[TensorMeta]) -> Layout:
    """As :func:`layout_of`, of tensors that are still to come."""
    return _layout(tuple((each.name, each.dtype, each.shape, each.n_bytes) for each in meta))


def _dtype_of(name: str, tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ValueError(f"{name} is {dtype}; a weight file holds {', '.join(DTYPES)}")
    return dtype


@lru_cache(maxsize=4)  # a model's tensors are the same at each version
def _layout(tensors: tuple[tuple[str, str, tuple[int, ...], int], ...]) -> Layout:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end, places = 0, []
    for name, dtype, shape, n_bytes in tensors:
        start, end = end, end + n_bytes
        places.append((name, start, end))
        entries[name] = {
            "dtype": DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGN_BYTES)
    header = len(text).to_bytes(8, "little") + text
    return Layout(header, [(n, a + len(header), b + len(header)) for n, a, b in places])


def read_layout(memory: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """``(name, tensor)`` of a file that lies in ``memory`` (uint8), as views of it."""
    text = _header_of(memory)
    begin = 8 + len(text)
    return [
        (meta.name, memory[begin + start : begin + end].view(dtype).view(meta.shape))
        for meta, dtype, start, end in _entries(text)
    ]


def meta_of(memory: torch.Tensor) -> tuple[TensorMeta, ...]:
    """Metadata of the tensors of a file that lies in ``memory`` (uint8), in its order."""
    return tuple(meta for meta, *_ in _entries(_header_of(memory)))


def _header_of(memory: torch.Tensor) -> bytes:
    n_bytes = int.from_bytes(memory[:8].numpy().tobytes(), "little")
    return memory[8 : 8 + n_bytes].numpy().tobytes()


@lru_cache(maxsize=4)
def _entries(header: bytes) -> list[tuple[TensorMeta, torch.dtype, int, int]]:
    """``(meta, dtype, start, end)`` in the order of the file."""
    import torch

    entries = json.loads(header)
    entries.pop("__metadata__", None)
    names = {code: name for name, code in DTYPES.items()}
    found = []
    for name, entry in entries.items():
        meta = TensorMeta(name, names[entry["dtype"]], tuple(entry["shape"]))
        found.append((meta, getattr(torch, meta.dtype), *entry["data_offsets"]))
    return sorted(found, key=lambda entry: entry[2:])


# --------------------------------------------------------------------------- reading
def read_safetensors(path: str, digest: Digest | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of the file (or of every ``*.safetensors`` in the directory) at ``path``.

    They are views of the mapped file, which stays readable as long as one of them lives,
    even if its name is gone or names another file by then (but a file of method ``memory`` is
    written again, see :mod:`~trinity_dask.weights.memory`). Opens the path anew at each
    call, so an overwritten file is seen. Every tensor is added to ``digest`` when one is
    given.

    Raises:
        FileNotFoundError: there is no such file, or the directory holds none.
    """
    from safetensors import safe_open

    for file in weight_files(path):
        with safe_open(file, framework="pt") as handle:
            for name in handle.offset_keys():
                tensor = handle.get_tensor(name)
                if digest is not None:
                    digest.add(name, tensor)
                yield name, tensor


class TensorFile(Mapping[str, "torch.Tensor"]):
    """The tensors of one safetensors file by name, each read when it is asked for.

    Raises:
        FileNotFoundError: there is no such file.
    """

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        self._file: Any = safe_open(path, framework="pt")

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.keys())

    def __len__(self) -> int:
        return len(self._file.keys())


def file_meta(path: str) -> tuple[TensorMeta, ...]:
    """Names, dtypes and shapes of the tensors at ``path``, in the order of reading."""
    from safetensors import safe_open

    names = {code: dtype for dtype, code in DTYPES.items()}
    found = []
    for file in weight_files(path):
        with safe_open(file, framework="pt") as handle:
            for name in handle.offset_keys():
                part = handle.get_slice(name)
                found.append(TensorMeta(name, names[part.get_dtype()], tuple(part.get_shape())))
    return tuple(found)


def weight_files(path: str) -> list[str]:
    """The safetensors files behind ``path``, sorted by name."""
    if os.path.isdir(path):
        files = [os.path.join(path, f) for f in sorted(os.listdir(path))]
        files = [f for f in files if f.endswith(SUFFIX)]
    else:
        files = [path] if os.path.isfile(path) else []
    if not files:
        raise FileNotFoundError(
            f"no weights at {path!r}: expected a .safetensors file, or a directory with one"
        )
    return files


@contextmanager
def looking_at(path: str) -> Iterator[None]:
    """Within it the file at ``path`` is not written again."""
    fd = open_locked(path)
    try:
        yield
    finally:
        os.close(fd)


def open_locked(path: str) -> int:
    """An open file that holds the kernel's lock shared, and still has the name ``path``."""
    while True:
        fd = os.open(path, os.O_RDONLY)
        try:
            # its writer holds the lock until the file has its name
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.fstat(fd).st_ino == os.stat(path).st_ino:
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # the name went to another file between the two calls


# --------------------------------------------------------------------------- at a URL
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
    meta: Optional[Sequence[TensorMeta]] = None,
) -> Digest:
    """Publish ``named`` at ``path``, a URL (with fsspec's ``options``) or a file; ``meta`` as in
    :func:`write_safetensors`.

    Raises:
        OSError: it cannot be written; what was at ``path`` before is still there.
    """
    if not is_url(path):
        return write_safetensors(local_path(path), named, durable, meta)
    with tempfile.TemporaryDirectory(prefix="trinity-weights-") as here:
        file = os.path.join(here, f"weights{SUFFIX}")
        digest = write_safetensors(file, named, meta=meta)
        _upload(file, path, options, digest)
    return digest


def _upload(file: str, url: str, options: Options, digest: Digest) -> None:
    fs, root = _open(url, options)
    old = _marker(fs, root)
    target = f"{root.removesuffix(SUFFIX)}-{secrets.token_hex(4)}{SUFFIX}"
    protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
    if not protocols & OBJECT_STORES:  # there a misspelt bucket would be made
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
        # a file of method memory is written again
        rewritten = update.method == "memory" and os.path.isfile(str(update.path))
        with looking_at(str(update.path)) if rewritten else nullcontext():
            yield replace(update, path=local_path(update.path)) if update.path else update
        return
    with tempfile.TemporaryDirectory(prefix="trinity-weights-") as here:
        file = os.path.join(here, f"weights{SUFFIX}")
        download(update.path, file, update.storage_options)
        yield replace(update, path=file)


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
            n_bytes = os.path.getsize(file)
            if n_bytes != marker["n_bytes"]:
                raise IncompleteWeights(
                    f"{marker['object']} has {n_bytes} bytes and the marker of {url!r} says "
                    f"{marker['n_bytes']}; it was changed or cut after it was written"
                )
            return
    raise FileNotFoundError(f"{url!r} was replaced {READ_ATTEMPTS} times while it was being read")


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
