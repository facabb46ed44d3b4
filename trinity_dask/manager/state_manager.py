"""Small JSON files that say how far a job is: stage, explorer, trainer.

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
    _fsync_directory(path.parent)


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


def _fsync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class StateManager:
    """Load and save the progress files of one job directory.

    File names follow Trinity-RFT: ``<explorer>_meta.json`` and ``<explorer>_server_url.txt``
    for each explorer, ``<trainer>_meta.json``, ``stage_meta.json``. Calls that take
    ``explorer_name`` are about the manager's own explorer by default.
    """

    def __init__(
        self, path: str | Path, explorer_name: str = "explorer", trainer_name: str = "trainer"
    ) -> None:
        self.path = Path(path)
        self.explorer_name = explorer_name
        self.trainer_file = self.path / f"{trainer_name}_meta.json"
        self.stage_file = self.path / "stage_meta.json"

    # explorers ------------------------------------------------------------------------
    @property
    def explorer_file(self) -> Path:
        return self._explorer_file(None)

    @property
    def server_url_file(self) -> Path:
        return self._url_file(None)

    def _explorer_file(self, name: str | None) -> Path:
        return self.path / f"{name or self.explorer_name}_meta.json"

    def _url_file(self, name: str | None) -> Path:
        return self.path / f"{name or self.explorer_name}_server_url.txt"

    def save_explorer(
        self,
        current_step: int,
        taskset_states: list[dict[str, Any]],
        explorer_name: str | None = None,
    ) -> None:
        write_json(
            self._explorer_file(explorer_name),
            {"latest_iteration": current_step, "taskset_states": taskset_states},
        )

    def load_explorer(self, explorer_name: str | None = None) -> dict[str, Any]:
        return read_json(self._explorer_file(explorer_name)) or {}

    def save_explorer_server_url(self, url: str, explorer_name: str | None = None) -> None:
        write_text(self._url_file(explorer_name), url)

    def load_explorer_server_url(self, explorer_name: str | None = None) -> str | None:
        try:
            return self._url_file(explorer_name).read_text(encoding="utf-8").strip() or None
        except FileNotFoundError:
            return None

    # trainer and stage ----------------------------------------------------------------
    def save_trainer(self, current_step: int, sample_strategy_state: dict[str, Any]) -> None:
        write_json(
            self.trainer_file,
            {"latest_iteration": current_step, "sample_strategy_state": sample_strategy_state},
        )

    def load_trainer(self) -> dict[str, Any]:
        return read_json(self.trainer_file) or {}

    def save_stage(self, latest_stage: int, finished: bool = False) -> None:
        """Stage ``latest_stage`` is the one to run (or, when finished, the last one done)."""
        write_json(self.stage_file, {"latest_stage": latest_stage, "finished": finished})

    def load_stage(self) -> dict[str, Any]:
        return read_json(self.stage_file) or {}
