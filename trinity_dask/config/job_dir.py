"""Which directory a job runs in: an old one that goes on, or a new one beside it.

Invariant: the answer depends on the disk only through the directories of this job's name;
a directory that holds a run is never given to another one.
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path

from trinity_dask.config.schema import Config

STAGE_FILE = "stage_meta.json"
STAMP = "_%Y%m%d%H%M%S"
_STAMPED = re.compile(r"_\d{14}$")
# in the job directory before a run has written anything
_NOT_A_RUN = {".hydra"}


def choose(config: Config) -> tuple[str, str]:
    """Name and directory (``<root>/<project>/<group>/<name>``) of the run to start or go on.

    ``continue_from_checkpoint=false`` always gives a new one. With ``rerun_finished`` the
    newest run of this name goes on while it is unfinished, and a new one starts after it.
    """
    if config.mode == "bench":  # over the runs that there are
        name = _newest(config) if config.rerun_finished else config.name
        return name, job_dir(config, name)
    name, path = config.name, job_dir(config, config.name)
    if not _has_run(path):
        return name, path
    if config.continue_from_checkpoint:
        if not config.rerun_finished:
            return name, path
        name = _newest(config)
        path = job_dir(config, name)
        if not is_finished(path, max(len(config.stages), 1), stage_file(config)):
            return name, path
    name = config.name + datetime.now().strftime(STAMP)
    return name, job_dir(config, name)


def job_dir(config: Config, name: str) -> str:
    parts = (config.checkpoint_root_dir, config.project, config.group, name)
    return "/".join(part.rstrip("/") for part in parts if part)


def stage_file(config: Config) -> str:
    """Name of the file that says which stage is reached: an explorer alone has its own."""
    return f"{config.explorer.name}_stage_meta.json" if config.mode == "explore" else STAGE_FILE


def is_finished(path: str, n_stages: int, file: str = STAGE_FILE) -> bool:
    """Whether the last stage of the job at ``path`` has ended as done."""
    try:
        meta = json.loads((Path(path) / file).read_text(encoding="utf-8"))
        return bool(meta["finished"]) and int(meta["latest_stage"]) + 1 >= n_stages
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _newest(config: Config) -> str:
    """The plain name, or the latest of its time-stamped successors that hold a run."""
    home = Path(job_dir(config, config.name)).parent
    stamped = [
        found.name
        for found in home.glob(f"{config.name}_*")
        if _STAMPED.fullmatch(found.name.removeprefix(config.name)) and _has_run(str(found))
    ]
    return max(stamped, default=config.name)


def _has_run(path: str) -> bool:
    directory = Path(path)
    return directory.is_dir() and any(i.name not in _NOT_A_RUN for i in directory.iterdir())
