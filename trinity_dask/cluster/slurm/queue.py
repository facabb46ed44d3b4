"""What Slurm says of jobs, and how it is asked.

Invariant: a command of Slurm never inherits the options of the job that this process is in, and
never waits without a bound. Asking changes nothing; all jobs are asked for in one call, since a
controller serves a whole site.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

COMMAND_TIMEOUT_S = 30.0
# what a command reads as its options; where Slurm's own configuration is must stay
_INHERITED = re.compile(r"(SLURM|SBATCH|SRUN|SALLOC|PMI|PMIX)_")
_KEPT = ("SLURM_CONF",)
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED")
_RUNNING = ("RUNNING", "COMPLETING", "STOPPED", "SIGNALING", "STAGE_OUT")
# ends that say nothing against the job: its time was over, or somebody else's turn came
_BLAMELESS = ("COMPLETED", "TIMEOUT", "PREEMPTED")
_FORMAT = "%i|%T|%r"


class SlurmError(RuntimeError):
    """A command of Slurm failed; the message is Slurm's own."""


@dataclass(frozen=True)
class JobState:
    """A job as ``squeue`` shows it; ``reason`` is why it waits, or how it ended."""

    state: str
    reason: str = ""

    @property
    def waiting(self) -> bool:
        return self.state in _WAITING

    @property
    def running(self) -> bool:
        return self.state in _RUNNING

    @property
    def over(self) -> bool:
        return not (self.waiting or self.running)

    @property
    def blameless(self) -> bool:
        return self.state in _BLAMELESS

    def __str__(self) -> str:
        return f"{self.state} ({self.reason})" if self.reason not in ("", "None") else self.state


#: of a job that Slurm has forgotten
UNKNOWN = JobState("UNKNOWN", "no job of this number")


def clean_env() -> dict[str, str]:
    """This process's environment without what a job of Slurm finds in its own.

    ``sbatch`` within a job takes its memory and tasks from there, and the steps of the new job
    are then refused.
    """
    keep = (k for k in os.environ if k in _KEPT or not _INHERITED.match(k))
    return {key: os.environ[key] for key in keep}


def ask(*words: str, env: dict[str, str] | None = None) -> str:
    """The output of a command of Slurm.

    Raises:
        SlurmError: there is no such command, it fails, or it does not answer in time.
    """
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            env=clean_env() if env is None else env,
        )
    except FileNotFoundError as error:
        raise SlurmError(f"there is no {words[0]} on this machine: is Slurm installed?") from error
    except subprocess.TimeoutExpired as error:
        raise SlurmError(f"{words[0]} did not answer within {COMMAND_TIMEOUT_S:g} s") from error
    if done.returncode:
        raise SlurmError(complaint(done.stderr) or f"{words[0]} ended with {done.returncode}")
    return done.stdout


def complaint(text: str) -> str:
    """What a command complains of, in one line, without the names of the programs."""
    lines = [re.sub(r"^\w+: (error|fatal): ", "", line).strip() for line in text.splitlines()]
    return "; ".join(dict.fromkeys(line for line in lines if line))


def parse_states(text: str) -> dict[str, JobState]:
    """Job number -> state, of the lines that ``squeue`` prints in our format."""
    found = {}
    for line in text.splitlines():
        job, state, reason = line.split("|", 2)
        found[job] = JobState(state, reason)
    return found


async def states(jobs: Sequence[str]) -> dict[str, JobState]:
    """The state of each of ``jobs``; one that Slurm has forgotten is over.

    Raises:
        SlurmError: the controller does not answer.
    """
    if not jobs:
        return {}
    command = ("squeue", "-h", "-t", "all", "-j", ",".join(jobs), "-o", _FORMAT)
    try:
        found = parse_states(await asyncio.to_thread(ask, *command))
    except SlurmError as error:
        if "Invalid job id" not in str(error):  # of a single one that is forgotten
            raise
        found = {}
    return {job: found.get(job, UNKNOWN) for job in jobs}


def cancel(jobs: Iterable[str]) -> None:
    """End jobs; those that are over already do not matter.

    Raises:
        SlurmError: the controller does not answer.
    """
    jobs = list(jobs)
    if jobs:
        ask("scancel", "--quiet", *jobs)


def parse_walltime(text: str) -> float | None:
    """A time limit as ``sbatch --time`` reads it, in seconds; None for words as UNLIMITED.

    Minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]].
    """
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", text):
        return None
    days, _, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if days or len(parts) == 3:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    else:
        hours, (minutes, seconds) = 0, [*parts, 0][:2]
    return float(((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds)


def tail(path: str, lines: int = 8) -> str:
    """The last lines of a log, indented; empty where there is none."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            last = [line.rstrip() for line in file if line.strip()][-lines:]
    except OSError:
        return ""
    return "".join(f"\n    {line}" for line in last)
