"""One worker as one job of Slurm, submitted by way of dask-jobqueue.

Invariant: the script calls only ``trinity-dask worker``, which brings the worker's name, slot and
limits from the run's own configuration. A job that Slurm refuses is never asked for again: its
``error`` says why.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from distributed.core import Status

from trinity_dask.cluster.slots import group_config
from trinity_dask.cluster.slurm.queue import (
    SlurmError,
    cancel,
    clean_env,
    complaint,
    parse_walltime,
)
from trinity_dask.config.schema import ClusterConfig


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Importing dask_jobqueue takes Ctrl-C away, and fails where it is not the main thread."""
    before = signal.signal
    signal.signal = lambda *_: None
    try:
        yield
    finally:
        signal.signal = before


with _signals_kept():
    from dask_jobqueue.slurm import SLURMJob

LEFT = 130  # how ``trinity-dask worker`` ends when it is told to leave


@dataclass(frozen=True)
class Place:
    """Where the run keeps what its jobs need: a directory that every node sees, and the logs."""

    directory: Path
    logs: Path

    @property
    def configuration(self) -> Path:
        return self.directory / "config.yaml"


def worker_command(group: str, index: int, place: Place) -> list[str]:
    """The command of a worker; ``{scheduler}`` stands for the scheduler's address."""
    python = [sys.executable, "-m", "trinity_dask", "worker", "{scheduler}"]
    flags = ["--config", str(place.configuration), "--group", group, "--index", str(index)]
    return [*python, *flags]


def resources(cfg: ClusterConfig, group: str) -> tuple[int, list[str]]:
    """Cores of a worker of the group, and the options for the rest of what it has."""
    section = group_config(cfg, group) if group != "driver" else cfg.driver
    gpus = f"gpu:{section.gpus_per_worker}" if section.gpus_per_worker else None
    options = [f"--gres={section.gres or gpus}"] if section.gres or gpus else []
    options += [f"--mem={section.mem}"] if section.mem else []
    return section.cpus or section.omp_threads, options


def job_options(cfg: ClusterConfig, group: str) -> list[str]:
    """The options of ``sbatch`` for a job of the group, but for its name, cores and log."""
    section = group_config(cfg, group) if group != "driver" else cfg.driver
    options = resources(cfg, group)[1]
    for name, value in (
        ("partition", section.partition or cfg.partition),
        ("account", cfg.account),
        ("qos", cfg.qos),
        ("time", section.walltime or cfg.walltime),
    ):
        options += [f"--{name}={value}"] if value else []
    return [*options, *cfg.directives, *section.directives]


def lead_s(cfg: ClusterConfig, group: str) -> int:
    """How long before its end a job of the group is warned: ``signal_lead_s``, but at most a
    quarter of its time, or a short job would be told to leave as soon as it is there."""
    section = group_config(cfg, group) if group != "driver" else cfg.driver
    limit = parse_walltime(section.walltime or cfg.walltime or "")
    return int(cfg.signal_lead_s if limit is None else min(cfg.signal_lead_s, limit / 4))


class WorkerJob(SLURMJob):
    """A worker of one group. ``error``: why Slurm refused it."""

    def __init__(
        self,
        scheduler: str | None = None,
        name: str | None = None,
        *,
        cfg: ClusterConfig,
        run: str,
        group: str,
        index: int,
        place: Place,
    ) -> None:
        cores, _ = resources(cfg, group)
        self.log = f"{place.logs}/{group}-{index}.job.log"
        extra = [
            *job_options(cfg, group),
            f"--output={shlex.quote(self.log)}",
            "--open-mode=append",
            "--no-requeue",  # the run submits it again by itself
            f"--signal=USR1@{lead_s(cfg, group)}",  # to the step: it leaves before its time is over
        ]
        super().__init__(
            scheduler,
            name,
            cores=cores,
            processes=1,
            memory="1GB",  # it insists on one; ours is among the options
            job_name=f"{run}-{group}-{index}",
            job_extra_directives=extra,
            job_directives_skip=["#SBATCH --mem=", "#SBATCH -t ", "#SBATCH -p ", "#SBATCH -A "],
            job_script_prologue=list(cfg.prologue),
            worker_extra_args=[],
            log_directory=None,
        )
        command = shlex.join(worker_command(group, index, place))
        command = command.replace(shlex.quote("{scheduler}"), str(scheduler))
        # a step: only steps are warned before they are preempted. Who leaves because it was told
        # to has done what it should: its job is complete, and no loss
        step = f"srun --ntasks=1 --cpus-per-task={cores} {command}"
        self._command_template = f"{step}\ncode=$?; [ $code = {LEFT} ] || exit $code"
        self.group, self.index, self.error = group, index, ""

    async def _submit_job(self, script_filename: str) -> str:
        return await self._call(["sbatch", "--parsable", script_filename], env=clean_env())

    async def start(self) -> None:
        try:
            await super().start()
        except (RuntimeError, OSError) as error:
            said = str(error).partition("stderr:\n")[2] or str(error)
            self.error = complaint(said)
            self.status = Status.running  # or Dask counts it as asked for, for ever

    async def close(self) -> None:
        job, self.job_id = self.job_id, None
        self.status = Status.closed
        self._event_finished.set()
        if job is not None:
            with contextlib.suppress(SlurmError):
                await asyncio.to_thread(cancel, [job])
