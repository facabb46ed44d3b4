"""Weights in memory: in a process's own, and in shared files that are written again.

Invariant: a shared file is written only while its writer alone holds its lock, and whoever looks
at one holds the lock shared; so no file changes under a reader. The lock is the kernel's: a
process that dies gives it back.

A page that is new to a file, or to a process, costs more than the copy into it. So versions take
turns in a few shared files, which both sides keep mapped; a process that replaces all its weights
at every update keeps what it frees, and large buffers lie on huge pages.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import shutil
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from trinity_dask.models.protocol import TensorMeta
from trinity_dask.weights.checksum import Digest, in_threads
from trinity_dask.weights.files import (
    layout_of,
    layout_of_meta,
    meta_of,
    open_locked,
    read_layout,
)

if TYPE_CHECKING:
    import torch

FREE = "free-"  # begins the name of a file that holds no version
KEPT_MAPPINGS = 3  # the newest version, the one before, and one that a slow reader keeps
KEPT_FREE = 2
HUGE_PAGE_BYTES = 1 << 21
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4


def keep_freed_memory() -> bool:
    """Have this process reuse what it frees, for the rest of its life.

    Returns False where the C library has no ``mallopt`` (musl, macOS); nothing changes then.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, 2**31 - 1))


SHARED = Path("/dev/shm")
OWNER = ".owner"  # ends the name of the file beside a directory that its owner holds locked


def own(base: str) -> int | None:
    """Hold the directory ``base`` of shared memory for as long as this process lives.

    Directories whose owner is dead are removed: nobody else knows that they are there. Returns the
    descriptor that holds it; None where another process of the same run does.
    """
    prefix = f"trinity-dask-{os.getuid()}-"
    for lock in Path(base).parent.glob(f"{prefix}*{OWNER}"):
        if str(lock) == base + OWNER:
            continue
        with suppress(OSError):  # it lives, or another process has just removed it
            fd = os.open(lock, os.O_RDWR)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(str(lock).removesuffix(OWNER), ignore_errors=True)
                lock.unlink()
            finally:
                os.close(fd)
    while True:
        fd = os.open(base + OWNER, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_ino == os.stat(base + OWNER).st_ino:
                return fd
        except BlockingIOError:
            os.close(fd)
            return None
        except FileNotFoundError:  # taken for a dead one's in this moment
            pass
        os.close(fd)


def disown(base: str, fd: int) -> None:
    """Give back what :func:`own` returned."""
    with suppress(FileNotFoundError):
        os.unlink(base + OWNER)
    os.close(fd)


def large_buffer(n_bytes: int, device: Any = "cpu") -> torch.Tensor:
    """Uninitialised uint8 ``[n_bytes]``; in a CPU's memory on huge pages, where the system has
    some: copying between a socket and memory is faster with them.
    """
    import torch

    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if torch.device(device).type != "cpu" or advice is None or n_bytes < HUGE_PAGE_BYTES:
        return torch.empty(n_bytes, dtype=torch.uint8, device=device)
    pages = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel that was built without
        pages.madvise(advice)
    return torch.frombuffer(pages, dtype=torch.uint8)


class SharedFiles:
    """One process's mappings of such files. Not for several threads at once."""

    def __init__(self) -> None:
        self._maps: dict[tuple[int, int], torch.Tensor] = {}

    # writing --------------------------------------------------------------------------
    def write(
        self,
        path: str,
        named: Iterable[tuple[str, torch.Tensor]],
        meta: Optional[Sequence[TensorMeta]] = None,
    ) -> Digest:
        """Write ``(name, tensor)`` pairs as the safetensors file ``path``; their digest.

        With ``meta`` of all pairs each tensor is taken when the one before is written; without it
        all of them exist at once, and several threads write them.

        Raises:
            OSError: the memory is full; ``path`` is then unchanged.
        """
        import torch

        tensors: dict[str, torch.Tensor] = {}
        if meta is None:
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in named}
        layout = layout_of(tensors) if meta is None else layout_of_meta(meta)
        folder = os.path.dirname(os.path.abspath(path))
        os.makedirs(folder, mode=0o700, exist_ok=True)  # weights are nobody else's
        with _claimed(folder, layout.n_bytes) as (name, fd):
            memory = self._mapped(fd, writable=True)
            head = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
            memory[: len(head)] = head

            def copy(digest: Digest, place: tuple[str, int, int]) -> None:
                key, start, end = place
                digest.add_copying(key, tensors[key], memory[start:end])

            if meta is None:
                sizes = [end - start for _, start, end in layout.places]
                digest = in_threads(copy, layout.places, sizes)
            else:
                digest = Digest()
                for place, (key, tensor) in zip(layout.places, named, strict=True):
                    tensors = {key: tensor.detach().cpu().contiguous()}
                    copy(digest, place)
            os.rename(name, path)
        return digest

    # reading --------------------------------------------------------------------------
    def look(self, path: str) -> Look:
        """The version at ``path``, which stays what it is until the look is ended.

        Raises:
            FileNotFoundError: there is none (any more).
        """
        fd = open_locked(path)
        try:
            return Look(fd, self._mapped(fd, writable=False))
        except BaseException:
            os.close(fd)
            raise

    def _mapped(self, fd: int, writable: bool) -> torch.Tensor:
        """The whole file as uint8."""
        import torch

        status = os.fstat(fd)
        key = status.st_dev, status.st_ino
        if key not in self._maps:
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            pages = mmap.mmap(fd, status.st_size, flags=flags, prot=protection)
            with warnings.catch_warnings():  # that it may not be written to, which nobody does
                warnings.simplefilter("ignore")
                self._maps[key] = torch.frombuffer(pages, dtype=torch.uint8)
            while len(self._maps) > KEPT_MAPPINGS:
                del self._maps[next(iter(self._maps))]
        return self._maps[key]


class Look:
    """A version that is being looked at; its tensors are views of the file."""

    def __init__(self, fd: int, memory: torch.Tensor) -> None:
        self._fd = fd
        self._memory = memory

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """``(name, tensor)`` in the order of the file. They may be read until :meth:`end`."""
        return read_layout(self._memory)

    def meta(self) -> tuple[TensorMeta, ...]:
        """What :meth:`tensors` are."""
        return meta_of(self._memory)

    def end(self) -> None:
        """The file may be written again. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            # unlocked, not only closed: a mapping holds the same open file
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)


@contextmanager
def _claimed(folder: str, n_bytes: int) -> Iterator[tuple[str, int]]:
    """``(name, fd)`` of a file of this size that nobody looks at, locked for writing."""
    name, fd = _free_file(folder, n_bytes) or _new_file(folder, n_bytes)
    try:
        yield name, fd
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def _free_file(folder: str, n_bytes: int) -> tuple[str, int] | None:
    for name in sorted(map(str, Path(folder).glob(f"{FREE}*"))):
        with suppress(OSError):  # looked at, or another writer was faster
            fd = os.open(name, os.O_RDWR)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(fd).st_size == n_bytes and os.path.exists(name):
                    return name, fd
            except OSError:
                os.close(fd)
                raise
            os.close(fd)
    return None


def _new_file(folder: str, n_bytes: int) -> tuple[str, int]:
    name = f"{folder}/{FREE}{secrets.token_hex(4)}"
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        # all of it now: a page that is missing later would end the process, not the call
        os.posix_fallocate(fd, 0, n_bytes)
    except BaseException as error:
        os.close(fd)
        os.unlink(name)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            free = shutil.disk_usage(folder).free
            raise OSError(
                errno.ENOSPC,
                f"{folder} has room for {free / 1e6:.0f} MB, and the weights need "
                f"{n_bytes / 1e6:.0f} MB (two or three times that over a run); make it larger (in "
                "a container: --shm-size), or use synchronizer.sync_method=nccl or checkpoint",
            ) from error
        raise
    return name, fd


def set_free(path: str) -> None:
    """The version at ``path`` is wanted no more; its file may hold another one."""
    folder = os.path.dirname(path)
    with suppress(FileNotFoundError):
        os.rename(path, f"{folder}/{FREE}{secrets.token_hex(4)}")
    for spare in sorted(Path(folder).glob(f"{FREE}*"))[KEPT_FREE:]:
        spare.unlink(missing_ok=True)


def remove_free(folder: str) -> None:
    """Give the memory of all free files back."""
    for spare in Path(folder).glob(f"{FREE}*"):
        spare.unlink(missing_ok=True)
