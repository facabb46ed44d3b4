"""Small jobs: as runs on a cluster that is there, or as a user's command.

Invariant: a job of four short steps of one stage; on a cluster it costs no start of processes.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

from trinity_dask import Config, Run, load_config
from trinity_dask.cli import main

WAIT_S = 240.0
STEPS = 4


def overrides(root: Path, data: Path, name: str = "job") -> list[str]:
    """The job, with the data of the fixture ``data``."""
    return [
        "+experiment=sort_task",
        "engine=torch",
        f"checkpoint_root_dir={root}",
        f"name={name}",
        "prepare=null",
        f"prepare_args.dir={data}",
        "algorithm.repeat_times=4",
        "buffer.batch_size=4",
        f"buffer.total_steps={STEPS}",
        "explorer.eval_interval=0",
        "explorer.eval_on_startup=false",
        "explorer.eval_at_end=false",
        "monitor.sinks=[jsonl]",
    ]


class SmallJobs:
    """Runs of small jobs on the cluster of ``client``, under ``root``."""

    def __init__(self, client: Client, root: Path, data: Path) -> None:
        self.client, self.root, self.data = client, root, data
        self._runs: list[Run] = []

    def config(self, *more: str, name: str = "job") -> Config:
        return load_config(*overrides(self.root, self.data, name), *more)

    def start(self, *more: str, name: str = "job") -> Run:
        run = Run(self.config(*more, name=name), self.client)
        self._runs.append(run)
        return run.start()

    def finish(self, *more: str, name: str = "job") -> Run:
        """Run to the end; raises RunFailed."""
        run = self.start(*more, name=name)
        assert run.wait(timeout=WAIT_S)["state"] == "done", run.status
        return run

    def dir(self, name: str = "job") -> Path:
        return self.root / "trinity-dask" / name

    def close(self) -> None:
        for run in self._runs:
            run.close()


def miniature(root: Path, *more: str) -> list[str]:
    """The miniature of the main job, two stages and all."""
    words = ["+experiment=sort_digits_tiny", "engine=torch", f"checkpoint_root_dir={root}"]
    return [*words, "monitor.progress=plain", *more]


def run_words(*words: str, timeout: float = 280.0) -> subprocess.CompletedProcess[Any]:
    """``trinity-dask run`` with these words."""
    line = [sys.executable, "-m", "trinity_dask", "run", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(line, capture_output=True, text=True, timeout=timeout, env=environment)


def in_process(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """The same without a new process: exit code, standard output and error."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        code = main(["run", *words])
    finally:  # Hydra's handler would outlive the captured stream
        root.handlers[:], root.level = handlers, level
    return code, *capsys.readouterr()
