"""The workers of a run in Slurm: started, waited for, replaced when they are lost, and ended.

Invariant: nothing is asked for for ever: a job that Slurm refuses, that waits too long or that dies
while it starts ends the start with Slurm's reason; later losses are replaced a bounded number of
times for each worker. No job outlives the run, even when the driver is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distributed.utils import sync

from trinity_dask.cluster.addresses import is_loopback
from trinity_dask.cluster.local import LocalGroups, announce_leaving
from trinity_dask.cluster.slots import ROLLOUT, RUNNER
from trinity_dask.cluster.slurm import jobs, queue, reaper, steps, tasks
from trinity_dask.cluster.slurm.allocation import in_allocation
from trinity_dask.cluster.slurm.queue import JobState, SlurmError
from trinity_dask.cluster.specs import ClusterError, StartStopped
from trinity_dask.cluster.tls import make_certificate
from trinity_dask.config.compose import save
from trinity_dask.config.errors import ConfigError
from trinity_dask.config.schema import Config

logger = logging.getLogger(__name__)

LOOK_S = (0.3, 5.0)  # between two looks at the queue, at first and after a while
HEAL_S = 0.2  # between two looks at the workers; only when one is missing is the queue looked at
GOODBYE_S = 8.0  # for workers to leave by themselves
REFUSED = "REFUSED"
ELASTIC = (ROLLOUT, RUNNER)


class SlurmGroups(LocalGroups):
    """Scheduler here; each worker is a job, or a step of this process's allocation.

    ``tell`` is given what is waited for, ``stopped`` says why not to wait any longer (None: go
    on), ``failed`` is told of a worker that does not come back and that the run cannot do without.
    """

    def __init__(
        self,
        cfg: Config,
        tell: Callable[[str], object],
        stopped: Callable[[], str | None],
        failed: Callable[[str], object],
    ) -> None:
        super().__init__(cfg)
        self._tell, self._stopped, self._failed = tell, stopped, failed
        self._run = f"td-{uuid.uuid4().hex[:8]}"
        base = Path(self._scratch).parent if cfg.job_dir is None else Path(cfg.job_dir)
        base = base.absolute()
        where = cfg.cluster.where
        self.tasks = where == "tasks"
        self.steps = where == "allocation" or (where == "auto" and in_allocation())
        name = tasks.step_name() if self.tasks else self._run
        self.place = jobs.Place(base / "slurm" / name, base / "log")
        self._lost: Counter[str] = Counter()  # worker -> jobs that were lost
        self._gone: dict[str, float] = {}  # tasks that are not there, since when
        self._joined: set[str] = set()  # workers that were there since their last job began
        self._healer: asyncio.Task[None] | None = None

    # start --------------------------------------------------------------------------------
    def start(self) -> None:
        """Ask for all workers and wait until they are there.

        Raises:
            ConfigError: Slurm refuses a job (says why); no job is left. Or as
                :func:`~trinity_dask.cluster.slurm.tasks.check_tasks`.
            ClusterError: a job waits too long, or died while it started.
            StartStopped: the caller does not want to wait any longer.
        """
        if self.tasks:
            tasks.check_tasks(self._cfg)
        self.place.directory.mkdir(parents=True, exist_ok=True)
        self.place.logs.mkdir(parents=True, exist_ok=True)
        cluster = self._cfg.cluster
        if cluster.tls if cluster.tls is not None else not is_loopback(cluster.host):
            self.security = make_certificate(self.place.directory)
            self.certificate = self.place.directory
        save(self._cfg, self.place.configuration)
        if not (self.steps or self.tasks):
            self._start_reaper()
        super().start()
        if self.tasks:
            tasks.announce(self.place.directory, self.scheduler_address)
        self._wait_for_workers()
        self._healer = sync(self._runner.loop, self._begin_healing)

    def _start_reaper(self) -> None:
        subprocess.Popen(
            [sys.executable, "-I", "-S", reaper.__file__, str(os.getpid()), f"{self._run}-"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=queue.clean_env(),
        )

    def _worker(self, group: str, index: int) -> dict[str, Any]:
        cls: type = steps.WorkerStep if self.steps else jobs.WorkerJob
        cls = tasks.WorkerTask if self.tasks else cls
        options = {"cfg": self._cfg.cluster, "run": self._run, "place": self.place}
        name = f"{group}-{index}"
        return {"cls": cls, "options": {"name": name, **options, "group": group, "index": index}}

    def _scheduler_options(self) -> dict[str, Any]:
        options = super()._scheduler_options()
        if self.security is not None:
            options |= {"security": self.security, "protocol": "tls://"}
        return options

    def _wait_for_workers(self) -> None:
        cluster = self._cfg.cluster
        begun = time.monotonic()
        since: dict[str, float] = {}  # worker -> when its job was first seen running
        while True:
            states = sync(self._runner.loop, self._states_of_missing)
            refused = {n: s.reason for n, s in states.items() if s.state == REFUSED}
            if refused:
                raise ConfigError(self._refusal(refused))
            if not states:
                return
            now = time.monotonic()
            for name, state in states.items():
                if state.over:
                    raise ClusterError(self._ended(name, state))
                if state.running:
                    since.setdefault(name, now)
                waited = now - since.get(name, now)
                if waited > cluster.start_timeout_s:
                    told = "" if self.tasks else self._log(name)
                    raise ClusterError(
                        f"{name} did not join within {waited:.0f} s of its job's start; raise "
                        f"cluster.start_timeout_s{told}"
                    )
            waiting = {n: s for n, s in states.items() if s.waiting}
            if waiting and cluster.pending_timeout_s and now - begun > cluster.pending_timeout_s:
                raise ClusterError(
                    f"{len(waiting)} jobs still wait after cluster.pending_timeout_s="
                    f"{cluster.pending_timeout_s:g}: {_summary(waiting)}"
                )
            self._tell(f"waiting for {_summary(states)}")
            if (reason := self._stopped()) is not None:
                raise StartStopped(reason)
            first, last = LOOK_S
            time.sleep(min(max(first, (now - begun) / 10), last))

    def _refusal(self, refused: dict[str, str]) -> str:
        """One line for each reason, with the workers that share it."""
        reasons: dict[str, list[str]] = {}
        for name, reason in refused.items():
            reasons.setdefault(reason, []).append(name)
        return "\n".join(
            f"Slurm refuses the jobs of {', '.join(names)}: {reason} (see cluster.partition, "
            "account, qos, walltime, and gpus_per_worker, gres, mem, cpus of the group)"
            for reason, names in reasons.items()
        )

    def _ended(self, name: str, state: JobState) -> str:
        return f"the job of {name} ended while it started: {state}{self._log(name)}"

    def _log(self, name: str) -> str:
        path = f"{self.place.logs}/{name}.job.log"
        return f"; {path} ends with:{queue.tail(path)}"

    # what there is ------------------------------------------------------------------------
    async def _states_of_missing(self) -> dict[str, JobState]:
        """Of the workers that have not joined, or are gone: the states of their jobs."""
        assert self._cluster is not None
        assert self._cluster.scheduler is not None
        present = {worker.name for worker in self._cluster.scheduler.workers.values()}
        self._joined |= present
        missing = {n: job for n, job in self._cluster.workers.items() if n not in present}
        found = {n: JobState(REFUSED, job.error) for n, job in missing.items() if job.error}
        own = (steps.WorkerStep, tasks.WorkerTask)
        found |= {n: job.state for n, job in missing.items() if isinstance(job, own)}
        ids = {n: job.job_id for n, job in missing.items() if job.job_id is not None}
        known = await queue.states(list(ids.values()))
        return found | {name: known[job] for name, job in ids.items()}

    # losses -------------------------------------------------------------------------------
    async def _begin_healing(self) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(self._heal())

    async def _heal(self) -> None:
        while True:
            await asyncio.sleep(HEAL_S)
            try:
                await self._replace_lost()
            except SlurmError as error:  # a controller that is away comes back
                logger.warning("the queue could not be looked at: %s", error)
                await asyncio.sleep(LOOK_S[1])
            except Exception:
                logger.exception("lost workers could not be replaced; trying again")
                await asyncio.sleep(LOOK_S[1])

    async def _replace_lost(self) -> None:
        assert self._cluster is not None
        states = await self._states_of_missing()
        if self.tasks:
            self._give_up_tasks(states)
            return
        over = {n: s for n, s in states.items() if s.over}
        for name, state in over.items():
            job = self._cluster.workers.pop(name)
            job.job_id = None
            # one whose time is over before it has joined would be asked for without end
            self._lost[name] += not (state.blameless and name in self._joined)
            self._joined.discard(name)
            logger.warning("the job of %s is over: %s", name, state)
            if self._lost[name] > self._cfg.cluster.max_resubmits:
                self._give_up(name, state)
        if over:
            if any(state.state == REFUSED for state in over.values()):
                await asyncio.sleep(LOOK_S[1])
            await self._cluster._correct_state()

    def _give_up_tasks(self, missing: dict[str, JobState]) -> None:
        """Of workers that are tasks of this step: nobody can start one again whose node is lost."""
        assert self._cluster is not None
        now, patience_s = time.monotonic(), self._cfg.cluster.start_timeout_s
        self._gone = {name: self._gone.get(name, now) for name in missing}
        for name in [n for n, since in self._gone.items() if now - since > patience_s]:
            del self._gone[name]
            state = JobState("LOST", f"its task was not back within {patience_s:g} s")
            self._lost[name] += 1
            self._give_up(name, state)
            self._cluster.workers.pop(name, None)

    def _give_up(self, name: str, state: JobState) -> None:
        assert self._cluster is not None
        self._cluster.worker_spec.pop(name, None)
        group = name.rpartition("-")[0]
        others = [n for n in self._cluster.worker_spec if n.startswith(f"{group}-")]
        message = (
            f"{name} was lost {self._lost[name]} times (cluster.max_resubmits="
            f"{self._cfg.cluster.max_resubmits}), last: {state}"
            f"{'' if self.tasks else self._log(name)}"
        )
        if group in ELASTIC and others:
            logger.warning("%s; going on with %s", message, ", ".join(others))
        else:
            self._failed(message)

    # growth and end -----------------------------------------------------------------------
    async def _scale(self, group: str, n_workers: int) -> None:
        if self.tasks:
            raise RuntimeError(
                "srun has started all tasks of this run; only cluster=slurm can grow"
            )
        await super()._scale(group, n_workers)
        assert self._cluster is not None
        refused = {n: job.error for n, job in self._cluster.workers.items() if job.error}
        for name in refused:
            del self._cluster.worker_spec[name], self._cluster.workers[name]
        if refused:
            raise RuntimeError(self._refusal(refused))

    async def _close(self) -> None:
        assert self._cluster is not None
        assert self._cluster.scheduler is not None
        if self._healer is not None:
            self._healer.cancel()
        scheduler, workers = self._cluster.scheduler, list(self._cluster._created)
        announce_leaving(self._cluster, list(self._cluster.workers))
        ids = [job.job_id for job in workers if job.job_id is not None]
        for job in workers:
            job.job_id = None
        try:
            await asyncio.to_thread(queue.cancel, ids)
        except SlurmError as error:  # the reaper goes on trying
            logger.warning("the jobs could not be cancelled: %s", error)
        await asyncio.gather(*(job.close() for job in workers), return_exceptions=True)
        deadline = time.monotonic() + GOODBYE_S
        while scheduler.workers and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        # or Dask would first try to move what they hold
        self._cluster.worker_spec.clear()
        self._cluster.workers.clear()
        await self._cluster._close()

    def _worker_processes(self) -> set[Any]:
        return set()  # not of this machine, or srun's

    def close(self, timeout_s: float) -> None:
        super().close(timeout_s)
        with contextlib.suppress(OSError):
            (self.place.configuration).unlink()


def _summary(states: dict[str, JobState]) -> str:
    """``3 workers: rollout-0 PENDING (Resources), ...``, the first few by name."""
    shown = [f"{name} {state}" for name, state in sorted(states.items())[:4]]
    more = [f"{len(states) - 4} more"] if len(states) > 4 else []
    return f"{len(states)} workers: {', '.join([*shown, *more])}"
