"""Trinity-RFT's names for the small JSON files that say how far a job is.

Invariant: a file is replaced as a whole (:mod:`trinity_dask.files`), and none is written under
a name that nobody gave.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Optional

from trinity_dask.config.schema import Config
from trinity_dask.config.secrets import shown
from trinity_dask.files import read_json, write_json, write_text


class StateManager:
    """Loads and saves the progress files of the job directory ``path``.

    ``<explorer_name>_meta.json``, ``<explorer_name>_server_url.txt``, ``<trainer_name>_meta.json``
    and ``stage_meta.json``. A name that is not given is that of ``config``. With ``check_config``
    the first ``config`` is kept as ``config.json``, and a later one has to be equal to it.

    Raises:
        ValueError: ``config`` differs from the one that the directory was used with (says where).
    """

    def __init__(
        self,
        path: str,
        trainer_name: Optional[str] = None,
        explorer_name: Optional[str] = None,
        config: Optional[Config] = None,
        check_config: bool = False,
    ) -> None:
        self.cache_dir = path
        os.makedirs(path, exist_ok=True)
        self._trainer_name = trainer_name or (config.trainer.name if config else None)
        self._explorer_name = explorer_name or (config.explorer.name if config else None)
        self.stage_state_path = os.path.join(path, "stage_meta.json")
        if check_config and config is not None:
            self._check_config(config)

    @property
    def explorer_state_path(self) -> str:
        return self._named("explorer", self._explorer_name, "meta.json")

    @property
    def explorer_server_url_path(self) -> str:
        return self._named("explorer", self._explorer_name, "server_url.txt")

    @property
    def trainer_state_path(self) -> str:
        return self._named("trainer", self._trainer_name, "meta.json")

    def _named(self, role: str, name: Optional[str], what: str) -> str:
        if not name:
            raise ValueError(
                f"this StateManager was made without {role}_name, so it has no <{role}>_{what}; "
                f"pass {role}_name= or config="
            )
        return os.path.join(self.cache_dir, f"{name}_{what}")

    def _check_config(self, config: Config) -> None:
        path = Path(self.cache_dir, "config.json")
        now = json.loads(json.dumps(shown(config)))
        before = read_json(path)
        if before is None:
            write_json(path, now)
        elif before != now:
            differing = [key for key in now if before.get(key) != now[key]]
            raise ValueError(
                f"the configuration is not the one of {path} (different: {', '.join(differing)}); "
                "use that one, or another directory"
            )

    def save_explorer(self, current_step: int, taskset_states: list[dict[str, Any]]) -> None:
        meta = {"latest_iteration": current_step, "taskset_states": taskset_states}
        write_json(Path(self.explorer_state_path), meta)

    def load_explorer(self) -> dict[str, Any]:
        """What was saved, ``{}`` when nothing was. Raises ValueError for a damaged file."""
        return read_json(Path(self.explorer_state_path)) or {}

    def save_explorer_server_url(self, url: str) -> None:
        write_text(Path(self.explorer_server_url_path), url)

    def load_explorer_server_url(self) -> Optional[str]:
        path = Path(self.explorer_server_url_path)
        return path.read_text(encoding="utf-8").strip() or None if path.exists() else None

    def save_trainer(self, current_step: int, sample_strategy_state: dict[str, Any]) -> None:
        meta = {"latest_iteration": current_step, "sample_strategy_state": sample_strategy_state}
        write_json(Path(self.trainer_state_path), meta)

    def load_trainer(self) -> dict[str, Any]:
        """As :meth:`load_explorer`."""
        return read_json(Path(self.trainer_state_path)) or {}

    def save_stage(self, current_stage: int) -> None:
        """Stage ``current_stage`` is the one that runs."""
        write_json(Path(self.stage_state_path), {"latest_stage": current_stage})

    def load_stage(self) -> dict[str, Any]:
        """As :meth:`load_explorer`."""
        return read_json(Path(self.stage_state_path)) or {}
