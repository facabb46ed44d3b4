"""A run as a user starts it where Slurm is, and what a test asks of it.

Invariant: a driver that a test leaves is killed, and with it everything that it had in the queue.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slurm_stand import Slurm, until

START_S = 120.0
RUN_S = 240.0


class Driver:
    """``trinity-dask run`` with cluster=slurm, as a user starts it on a login node."""

    def __init__(
        self,
        slurm: Slurm,
        root: Path,
        *overrides: str,
        within: Sequence[str] = (),
        command: str = "run",
        name: str = "job",
        cluster: str = "slurm",
    ) -> None:
        self.slurm, self.root, self.name = slurm, root, name
        self._out = root / f"{name}.out"
        words = [
            *(command, "+experiment=sort_task", "engine=torch", f"cluster={cluster}"),
            *(
                f"name={name}",
                "monitor.progress=plain",
                "monitor.sinks=[jsonl]",
                "monitor.curves=false",
            ),
            *("algorithm.repeat_times=4", "buffer.batch_size=4", "explorer.eval_interval=0"),
            *("explorer.eval_on_startup=false", "explorer.eval_at_end=false"),
            f"checkpoint_root_dir={root}",
            *overrides,
        ]
        environment = {**slurm.env, "OMP_NUM_THREADS": "1"}
        with open(self._out, "w", encoding="utf-8") as out:
            self.process = subprocess.Popen(
                [*within, sys.executable, "-m", "trinity_dask", *words],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._out.read_text(encoding="utf-8")

    @property
    def job(self) -> Path:
        return self.root / "trinity-dask" / self.name

    def says(self, text: str, timeout_s: float = START_S) -> None:
        until(lambda: text in self.output or self._ended(), f"{text!r}", timeout_s)
        assert text in self.output, self.output[-3000:]

    def _ended(self) -> bool:
        return self.process.poll() is not None

    def step(self) -> int:
        """The newest train step that is on disk."""
        try:
            lines = (self.job / "monitor" / "metrics.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return 0
        rows = [json.loads(line) for line in lines if line.endswith("}")]
        return max((row["step"] for row in rows if row["role"] == "trainer"), default=0)

    def until_step(self, step: int) -> None:
        until(lambda: self.step() >= step or self._ended(), f"step {step}", RUN_S)
        assert not self._ended() or self.step() >= step, self.output[-3000:]

    def running(self, worker: str) -> str:
        """The job of a worker, as soon as it runs."""
        until(lambda: self.slurm.job_of(worker) or self._ended(), f"job of {worker}", START_S)
        job = self.slurm.job_of(worker)
        assert job is not None, self.output[-3000:]
        return job

    def lose(self, worker: str, end: Callable[[str], Any]) -> Any:
        """Have Slurm end the job of a worker in mid-run, and wait until another one runs."""
        self.until_step(self.step() + 1)
        job = self.running(worker)
        answer = end(job)
        until(lambda: self.slurm.job_of(worker) != job or self._ended(), f"end of {worker}", 60)
        return answer

    def end(self, timeout_s: float = RUN_S) -> int:
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        if not self._ended():
            self.process.kill()
            self.process.wait()
