"""One ``srun`` starts driver and workers: each of its tasks takes its role by its rank.

Invariant: rank 0 is the driver; the others are the workers in the order of the groups. They meet
through a directory that no other step, and no earlier start of a requeued one, has. A worker ends
with its scheduler and never by itself: signals that ``srun`` passes to all tasks are the driver's.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from distributed.deploy.spec import ProcessInterface

from trinity_dask.cluster.slots import GROUPS
from trinity_dask.cluster.slurm.jobs import Place
from trinity_dask.cluster.slurm.queue import JobState
from trinity_dask.cluster.specs import ClusterError, needed_workers
from trinity_dask.cluster.tls import load_certificate
from trinity_dask.cluster.worker_cli import run_worker
from trinity_dask.config.compose import from_yaml
from trinity_dask.config.errors import ConfigError
from trinity_dask.config.schema import ClusterConfig, Config
from trinity_dask.files import write_text

POLL_S = 0.2
ADDRESS = "address"


def rank() -> int | None:
    """The number of this process among the tasks of its step; None: it is not in one."""
    return int(os.environ["SLURM_PROCID"]) if "SLURM_STEP_ID" in os.environ else None


def step_name() -> str:
    """Of this step and start alone; a requeued job has the same number."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return "tasks-" + ".".join(os.environ.get(name, "0") for name in names)


def meeting_place(cfg: Config) -> Path:
    assert cfg.job_dir is not None
    return Path(cfg.job_dir).absolute() / "slurm" / step_name()


def roles(cfg: Config) -> list[tuple[str, int]]:
    """Group and index of the workers, by rank from 1 on."""
    counts = needed_workers(cfg)
    return [(group, index) for group in GROUPS for index in range(counts.get(group, 0))]


def check_tasks(cfg: Config) -> None:
    """Refuse another number of tasks than there are roles.

    Raises:
        ConfigError: says how many are needed.
    """
    needed = 1 + len(roles(cfg))
    groups = ", ".join(f"{count} {group}" for group, count in needed_workers(cfg).items())
    if rank() is None:
        raise ConfigError(
            f"cluster=srun: start it by srun -n {needed} (the driver, {groups}), or use "
            "cluster=slurm, which starts the workers by itself"
        )
    started = int(os.environ.get("SLURM_STEP_NUM_TASKS", needed))
    if started != needed:
        raise ConfigError(
            f"cluster=srun has {started} tasks and needs {needed}: srun -n {needed} (the driver, "
            f"{groups})"
        )


def serve(cfg: Config, number: int) -> int:
    """Be the worker of rank ``number`` until the run has ended; the exit code.

    Raises:
        ClusterError: the driver was not there in time.
    """
    try:
        check_tasks(cfg)
    except ConfigError as error:  # which the driver says
        return error.exit_code
    group, index = roles(cfg)[number - 1]
    place = meeting_place(cfg)
    deadline = time.monotonic() + cfg.cluster.start_timeout_s
    while not (place / ADDRESS).exists():
        if time.monotonic() > deadline:
            raise ClusterError(
                f"{group}-{index}: no driver wrote {place / ADDRESS} within "
                f"cluster.start_timeout_s={cfg.cluster.start_timeout_s:g}: did task 0 fail, and "
                "does this node see the job directory?"
            )
        time.sleep(POLL_S)
    address = (place / ADDRESS).read_text(encoding="utf-8")
    if not address:
        return 1
    config = from_yaml(Place(place, place).configuration)
    return run_worker(address, group, index, config, load_certificate(place), leaves=False)


def announce(place: Path, address: str) -> None:
    """Tell the workers where the scheduler is; all else that they read is there before."""
    place.mkdir(parents=True, exist_ok=True)
    write_text(place / ADDRESS, address)


def release(cfg: Config) -> None:
    """Of a driver that ends: workers need not wait for one that never had a scheduler."""
    if not (meeting_place(cfg) / ADDRESS).exists():
        announce(meeting_place(cfg), "")


class WorkerTask(ProcessInterface):
    """A worker that ``srun`` has started, or is about to; nobody here can start it again."""

    error = ""
    job_id = None
    state = JobState("RUNNING", "a task of this step")

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
        super().__init__(scheduler, name)

    async def close(self) -> None:
        await asyncio.sleep(0)  # it ends with the scheduler
        await super().close()
