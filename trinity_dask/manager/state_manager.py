"""Trinity-RFT's names for the small JSON files that say how far a job is.

Invariant: a file is replaced as a whole (:mod:`trinity_dask.files`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trinity_dask.files import read_json, write_json, write_text


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
