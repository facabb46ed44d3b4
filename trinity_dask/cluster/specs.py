"""From the configuration to the options of each worker of each group.

Invariant: a worker's name is ``<group>-<index>``, also the name of its log file; its
resources are those of :mod:`trinity_dask.cluster.slots`.
"""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

from distributed import Nanny, Worker

from trinity_dask.cluster.context import remember_worker
from trinity_dask.cluster.guard import LOG_DIR_ENV, guard_process
from trinity_dask.cluster.slots import (
    CONTROL,
    GROUPS,
    ROLLOUT,
    RUNNER,
    TRAINER,
    group_config,
    group_resources,
    group_threads,
)
from trinity_dask.config import modes
from trinity_dask.config.schema import ClusterConfig, Config

FOR_EVER_S = 30 * 24 * 3600.0
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")

# In force before the first process is started, and as long as processes may be restarted: nannies
# read some of them at each start of a worker.
SETTINGS: dict[str, Any] = {
    # engines start processes of their own
    "distributed.worker.daemon": False,
    # a statistical profiler every 10 ms is no use for native code
    "distributed.worker.profile.enabled": False,
    # never spill or pause a worker that holds an engine; end it at cluster.<group>.memory_limit,
    # where one is set, rather than let the machine choose whom to end
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": 1.0,
    "distributed.worker.transfer.message-bytes-limit": "200MB",
    # no heartbeats come while a worker loads a model with the interpreter lock held
    "distributed.scheduler.worker-ttl": "30 minutes",
    # a task survives many deaths of its worker; attempts are counted by the run itself
    "distributed.scheduler.allowed-failures": 1000,
    # in-flight work is bounded by the run, and resource-bound tasks must not wander
    "distributed.scheduler.work-stealing": False,
    "distributed.scheduler.worker-saturation": float("inf"),
    "distributed.scheduler.active-memory-manager.start": False,
    # Dask's own value has glibc return freed memory at once, and switches off its adaptive
    # threshold: every large tensor is then mapped, faulted in and unmapped again
    "distributed.nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_": 1 << 30,
    "distributed.nanny.pre-spawn-environ.MALLOC_MMAP_THRESHOLD_": 32 << 20,
    "distributed.comm.timeouts.connect": "5s",
    "distributed.comm.timeouts.tcp": "30s",
    "distributed.comm.retry.count": 0,
    # Nannies restart their workers. Were this short, a worker that takes longer than that
    # to start again would be given up together with its nanny.
    "distributed.deploy.lost-worker-timeout": "1 hour",
    # of every connection Dask keeps so many messages for debugging, with the task specs in them:
    # with its own 1000 some 25 000 sub-tasks stay in memory for each worker
    "distributed.admin.low-level-log-length": 50,
    "distributed.admin.tick.limit": "10s",
    "distributed.admin.system-monitor.gil.enabled": False,
}


# whose pages may open the websockets of the dashboard, beside the dashboard's own; Dask lets all
DASHBOARD_ORIGINS = "distributed.scheduler.dashboard.bokeh-application.allow_websocket_origin"


class ClusterError(RuntimeError):
    """The cluster cannot be built or joined; the message says what to change."""


class StartStopped(RuntimeError):
    """The caller did not want to wait for the workers any longer; the message is its reason."""


class GroupWorker(Worker):
    """A worker whose process is guarded before the worker exists in it."""

    def __init__(self, *args: Any, **options: Any):
        guard_process(str(options["name"]), has_nanny=bool(options.get("nanny")))
        super().__init__(*args, **options)
        remember_worker(self)


class GroupNanny(Nanny):
    """A nanny whose worker does not see Ctrl-C, from its first moment on."""

    async def instantiate(self) -> Any:
        # The mask is inherited by the thread that forks, and by the worker, which lifts it
        # when its guard is up. The main thread is the driver's and stays open to Ctrl-C.
        if threading.current_thread() is not threading.main_thread():
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        return await super().instantiate()


def needed_workers(cfg: Config) -> dict[str, int]:
    """How many workers of each group the run needs; groups without any are left out."""
    used = {stage.get("mode", cfg.mode) for stage in cfg.stages} or {cfg.mode}
    if cfg.mode == "bench":
        used = {"bench"}
    unused = set[str]()
    if not any(modes.samples(mode) for mode in used):
        unused.update((ROLLOUT, RUNNER))
    if not any(modes.trains(mode) for mode in used):
        unused.add(TRAINER)
    counts = {g: group_config(cfg.cluster, g).n_workers for g in GROUPS if g not in unused}
    counts[CONTROL] = 1
    return {group: count for group, count in counts.items() if count > 0}


def away_s(cluster: ClusterConfig, usual_s: float) -> float:
    """How long a lost worker may stay away: ``usual_s``, and what its new job may wait for."""
    if cluster.type != "slurm":
        return usual_s
    return usual_s + (cluster.pending_timeout_s or FOR_EVER_S)


def log_dir(cfg: Config) -> Path | None:
    """Where worker processes log, or ``None`` where the job has no directory."""
    return None if cfg.job_dir is None else Path(cfg.job_dir).absolute() / "log"


def worker_options(cfg: Config, group: str, index: int, local_directory: str) -> dict[str, Any]:
    """Options of :class:`GroupNanny` for the ``index``-th worker of ``group``."""
    spec = group_config(cfg.cluster, group)
    env = {name: str(spec.omp_threads) for name in THREAD_VARIABLES}
    if cfg.cluster.interface is not None:
        env |= {name: cfg.cluster.interface for name in INTERFACE_VARIABLES}
    directory = log_dir(cfg)
    if directory is not None:
        env[LOG_DIR_ENV] = str(directory)
    return {
        "name": f"{group}-{index}",
        "nthreads": group_threads(group, spec),
        "resources": group_resources(group, index, spec),
        "memory_limit": spec.memory_limit,
        "env": env | dict(spec.env),
        "host": cfg.cluster.host,  # of a worker of this machine
        "local_directory": local_directory,
        "worker_class": GroupWorker,
        "dashboard": False,
    }
