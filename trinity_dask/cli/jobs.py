"""A job directory as its stages' configurations.

Invariant: read only; a directory that holds no run is named in the error.
"""

from __future__ import annotations

from pathlib import Path

from trinity_dask.cli import CommandError
from trinity_dask.config.files import from_yaml
from trinity_dask.config.schema import Config


def saved_stages(job_dir: str | Path) -> list[Config]:
    """The saved configurations of the stages that have begun, in their order.

    ``job_dir`` is a job's directory or that of one stage.

    Raises:
        CommandError: there is no run in it.
    """
    root = Path(job_dir)
    own = root / "config.yaml"
    files = [own] if own.is_file() else list(root.glob("[!.]*/config.yaml"))
    if not files:
        raise CommandError(f"{root} holds no run: no config.yaml in it or directly below it")
    return [_at(path) for path in sorted(files, key=lambda path: path.stat().st_mtime)]


def _at(path: Path) -> Config:
    """The configuration saved at ``path``, with the paths of a directory that was moved."""
    config = from_yaml(path)
    before, now = str(config.job_dir), str(path.parent)
    config.job_dir = now
    store = config.buffer.trainer_input.experience_buffer
    if store.path is not None and store.path.startswith(before):
        store.path = now + store.path[len(before) :]
    return config
