"""Start small jobs as a user does, in a process group of their own, and read what they left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from trinity_dask.buffer.store.experience_store import ExperienceStore
from trinity_dask.launcher.accounts import BatchAccounts
from trinity_dask.trainer.checkpoints.checkpoint import latest_complete, read_state

ID = ["batch", "task", "run", "step"]  # the suffix is random and could hide a run done twice
END_S = 20.0  # a killed driver's processes are gone by then


@dataclass
class Job:
    """One run of the command line."""

    process: subprocess.Popen[str]
    before: int = 0  # characters of output that the runs before it left

    def processes(self) -> list[psutil.Process]:
        """Living processes of this job (the driver included).

        Found by their session, which the driver leads: neither a new process group nor a
        changed title hides one.
        """
        found = []
        for process in psutil.process_iter():
            try:
                alive = process.status() != psutil.STATUS_ZOMBIE
                if alive and os.getsid(process.pid) == self.process.pid:
                    found.append(process)
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
        return found

    def wait_gone(self, timeout_s: float = END_S) -> list[psutil.Process]:
        """Those that are still alive after ``timeout_s``."""
        _, alive = psutil.wait_procs(self.processes(), timeout=timeout_s)
        return [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]

    def kill_all(self) -> None:
        for process in self.processes():
            process.kill()


def start(root: Path, *overrides: str) -> Job:
    """``python -m trinity_dask run`` of the miniature job under ``root``."""
    command = [
        sys.executable, "-m", "trinity_dask", "run", "+experiment=sort_digits_tiny",
        "engine=torch", f"checkpoint_root_dir={root}", "monitor.progress=plain", *overrides,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    path = root.with_name(root.name + ".out")
    before = len(output(root)) if path.exists() else 0
    with open(path, "a", encoding="utf-8") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            text=True,
        )
    return Job(process, before)


def output(root: Path) -> str:
    return root.with_name(root.name + ".out").read_text(encoding="utf-8")


def wait_for_step(job: Job, root: Path, step: int, timeout_s: float = 240.0) -> None:
    """Until stage 2 of ``job`` has printed ``step`` or a later one (not every step gets a line)."""
    deadline = time.monotonic() + timeout_s
    line = re.compile(r"grpo \(2/2\)  step (\d+)/")
    while not any(int(s) >= step for s in line.findall(output(root)[job.before :])):
        assert job.process.poll() is None, f"the job ended first: {output(root)[-2000:]}"
        assert time.monotonic() < deadline, f"no step {step} in: {output(root)[-2000:]}"
        time.sleep(0.05)  # the output is a file: it has no wake-up


def shape(steps: int) -> list[str]:
    """Overrides that give stage 2 this many steps."""
    return [f"stages.1.buffer.total_steps={steps}", f"stages.1.trainer.total_steps={steps}"]


def interrupt(job: Job) -> None:
    """Ctrl-C in a terminal: SIGINT to the whole foreground group."""
    os.killpg(job.process.pid, signal.SIGINT)


def stage_dir(root: Path, stage: str) -> Path:
    return next(root.glob(f"trinity-dask/*/{stage}"))


def lineage(stage: Path) -> dict[str, Any]:
    """What the store and the last checkpoint say, read independently of the run."""
    store = ExperienceStore(str(stage / "buffer" / "experience"))
    manifests = store.manifests()
    total = sum((BatchAccounts.from_meta(m.meta) for m in manifests), BatchAccounts())
    checkpoint = latest_complete(stage)
    assert checkpoint is not None
    state = read_state(checkpoint)
    rows = [store.read([m.ref(0, m.rows)]) for m in manifests]
    return {
        "batches": [m.batch_id for m in manifests],
        "errors": total.errors("lineage"),
        "committed": total.committed,
        "rows_in_files": sum(t.num_rows for t in rows),
        "ids": [tuple(row.values()) for t in rows for row in t.select(ID).to_pylist()],
        "trained_rows": state["trained_rows"],
        "step": state["step"],
        "corrupt": store.verify(),
    }


def check_lineage(stage: Path, steps: int) -> None:
    """Every batch once, every row trained once, every step logged."""
    found = lineage(stage)
    assert found["batches"] == list(range(1, steps + 1))
    assert found["errors"] == []
    assert found["corrupt"] == []
    assert found["step"] == steps
    assert found["committed"] == found["rows_in_files"] == found["trained_rows"]
    assert len(set(found["ids"])) == len(found["ids"])
    assert set(range(1, steps + 1)) <= set(logged_steps(stage, "trainer"))


def logged_steps(stage: Path, role: str) -> list[int]:
    """Steps of a role in the metrics file, in order of first appearance."""
    seen: dict[int, None] = {}
    with open(stage / "monitor" / "metrics.jsonl", encoding="utf-8") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue  # the last line of a killed process
            if record["role"] == role:
                seen.setdefault(record["step"])
    return list(seen)
