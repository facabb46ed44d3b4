"""Files that are whole or not there: the one way this project makes, replaces and reads them.

Invariant: a reader sees the old content or the new content, never a part, and what was
written durably is there after a power cut (temporary name, fsync, rename or link, fsync of
the directory).
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Any) -> None:
    """Replace ``path`` with ``value`` as JSON, atomically and durably.

    Raises:
        OSError: the disk is full or the directory cannot be written; ``path`` is unchanged.
        TypeError: ``value`` is not JSON; ``path`` is unchanged.
    """
    write_text(path, json.dumps(value, indent=1, sort_keys=True))


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` with ``text``, atomically and durably. Raises as :func:`write_json`."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in ``path``, or None when there is no such file.

    Raises:
        ValueError: the file is not a JSON object (names it).
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except json.JSONDecodeError as error:
        raise ValueError(
            f"state file {path} is not JSON ({error}); remove it to start over"
        ) from error
    if not isinstance(value, dict):
        raise ValueError(f"state file {path} holds a {type(value).__name__}, not an object")
    return value


@contextmanager
def replacing(path: Path, durable: bool = True) -> Iterator[Path]:
    """A name to write a file or make a directory at, which then takes the place of ``path``.

    A file that is there is replaced at once; a directory is removed before, so a kill in
    between leaves none. After an error ``path`` is unchanged and the part is gone.
    ``durable`` waits until a file's bytes and its name are on the disk.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        yield partial
        if durable:
            fsync(partial)
        if partial.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        os.replace(partial, path)
    except BaseException:
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        partial.unlink(missing_ok=True)
        raise
    if durable:
        fsync(path.parent)


def write_durably(path: str | os.PathLike[str], data: Any) -> None:
    """Write a new file of ``data`` (a buffer) and fsync it; on any error nothing is left.

    Its name is durable after an fsync of its directory.

    Raises:
        FileExistsError: ``path`` is there already.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        with os.fdopen(fd, "wb", buffering=0) as file:
            view = memoryview(data).cast("B")
            while view:
                view = view[file.write(view) :]
            os.fsync(fd)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(path)
        raise


def create_durably(path: Path, data: bytes) -> bool:
    """Make ``path`` with ``data`` for exactly one of any number of callers; whether it was this."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{uuid.uuid4().hex}")
    write_durably(temporary, data)
    try:
        # a link either makes the name with its whole content or fails: no reader can
        # see half a file, and no second writer can replace the first
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        os.unlink(temporary)
    fsync(path.parent)
    return True


def fsync(path: Path, tree: bool = False) -> None:
    """Make a file's bytes, or the names in a directory, durable; ``tree``: all below it too."""
    for each in [*path.rglob("*"), path] if tree else [path]:
        descriptor = os.open(each, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
