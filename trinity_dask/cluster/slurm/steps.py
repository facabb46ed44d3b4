"""One worker as one step of the allocation that this process is in.

Invariant: the end of its ``srun`` is the end of the worker, known at once; closing asks the worker
first and kills only what does not answer.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex

from distributed.deploy.spec import ProcessInterface

from trinity_dask.cluster.slots import group_config
from trinity_dask.cluster.slurm.jobs import LEFT, Place, resources, worker_command
from trinity_dask.cluster.slurm.queue import JobState
from trinity_dask.config.schema import ClusterConfig

END_S = 10.0
# what the allocation says of its tasks; a step of one task is not to take it over
_OF_ALL_TASKS = re.compile(
    r"SLURM_(CPU_BIND|NTASKS|NPROCS|TASKS_PER_NODE|MEM_PER)|SLURM_CPUS_PER_TASK"
)


class WorkerStep(ProcessInterface):
    """A worker of one group, on whichever node of the allocation has room for it."""

    error = ""
    job_id = None

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
        self.log = f"{place.logs}/{group}-{index}.job.log"
        cores, options = resources(cfg, group)
        if not any(option.startswith("--gres") for option in options):
            options = ["--gres=none", *options]
        if not any(option.startswith("--mem") for option in options):
            options = ["--mem=0", *options]  # what the allocation has is everybody's
        command = [
            word.replace("{scheduler}", str(scheduler))
            for word in worker_command(group, index, place)
        ]
        if cfg.prologue:
            command = ["bash", "-c", "\n".join([*cfg.prologue, f"exec {shlex.join(command)}"])]
        self._command = [
            *("srun", "--ntasks=1", "--nodes=1", "--exact", f"--cpus-per-task={cores}"),
            *(f"--job-name={run}-{group}-{index}", f"--output={self.log}", "--open-mode=append"),
            *options,
            *group_config(cfg, group).directives,
            *command,
        ]
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        env = {k: v for k, v in os.environ.items() if not _OF_ALL_TASKS.match(k)}
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.DEVNULL, env=env, start_new_session=True
        )
        await super().start()

    @property
    def state(self) -> JobState:
        code = None if self._process is None else self._process.returncode
        if code is None:
            return JobState("RUNNING")
        state = "COMPLETED" if code in (0, LEFT) else "FAILED"
        return JobState(state, f"srun ended with {code}")

    async def close(self) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            process.terminate()  # srun passes it on to the worker
            try:
                await asyncio.wait_for(process.wait(), END_S)
            except TimeoutError:
                process.kill()
                await process.wait()
        await super().close()
