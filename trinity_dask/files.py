"""Files that are whole or not there: the one way this project replaces and reads them.

Invariant: a reader sees the old content or the new content, never a part (temporary file,
fsync, rename, fsync of the directory).
"""

from __future__ import annotations

import json
import os
import uuid
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
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_directory(path.parent)


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


def fsync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
