"""Dask settings for workers that live long, hold an engine, and start processes.

Invariant: they are in force before the first process is started, and as long as processes
may be restarted: nannies read some of them at each start of a worker.
"""

from __future__ import annotations

from typing import Any

SETTINGS: dict[str, Any] = {
    # engines start processes of their own
    "distributed.worker.daemon": False,
    # a statistical profiler every 10 ms is no use for native code
    "distributed.worker.profile.enabled": False,
    # never spill, pause or kill a worker that holds an engine
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": False,
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
