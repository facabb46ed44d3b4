"""Slots: the label resources by which actors and tasks find their worker.

Invariant: a slot label belongs to exactly one worker spec, so a worker that is born again
after a crash carries the same label on a new port. Worker names and addresses are never
used for placement: Dask resolves them to a port at submit time, and after a restart the
task would wait for a port that nobody listens on.
"""

from __future__ import annotations

from trinity_dask.config.schema import DEFAULT_THREADS, ClusterConfig, GroupConfig

CONTROL = "control"
ROLLOUT = "rollout"
TRAINER = "trainer"
RUNNER = "runner"
# the order in which unlabelled workers of a joined cluster are claimed
GROUPS = (CONTROL, TRAINER, ROLLOUT, RUNNER)

PREFIX = "slot:"
# A label is an address, not a quantity: creating an actor takes one unit for the time its
# ``__init__`` runs, and that must never make the next one wait.
LABEL_AMOUNT = 1e6


def slot_resource(slot: str) -> str:
    """The resource name of a slot: ``engine-0`` -> ``slot:engine-0``."""
    return PREFIX + slot


def engine_slot(index: int) -> str:
    return f"engine-{index}"


def own_engine_slots(cluster: ClusterConfig) -> tuple[str, ...] | None:
    """The engines of a run that shares its cluster; None: all that there are."""
    first = cluster.rollout.first_index
    if first is None:
        return None
    return tuple(engine_slot(first + i) for i in range(cluster.rollout.n_workers))


def trainer_slot(rank: int) -> str:
    return f"trainer-{rank}"


def runner_slot(index: int) -> str:
    return f"runner-{index}"


def slot_of(group: str, index: int) -> str:
    """The slot of the ``index``-th worker of a group.

    Raises:
        ValueError: ``group`` is not one of :data:`GROUPS`.
    """
    if group not in GROUPS:
        raise ValueError(f"unknown worker group {group!r}; it is one of {', '.join(GROUPS)}")
    if group == CONTROL:
        return CONTROL
    if group == ROLLOUT:
        return engine_slot(index)
    return trainer_slot(index) if group == TRAINER else runner_slot(index)


def group_threads(group: str, cfg: GroupConfig) -> int:
    """Dask threads of a worker of the group (for rollout workers: its task slots)."""
    return DEFAULT_THREADS[group] if cfg.nthreads is None else cfg.nthreads


def group_resources(group: str, index: int, cfg: GroupConfig) -> dict[str, float]:
    """Resources of the ``index``-th worker of a group: its slot label, its tasks, its GPUs."""
    resources = {slot_resource(slot_of(group, index)): LABEL_AMOUNT}
    per_thread = group in (ROLLOUT, RUNNER)
    resources[group] = float(group_threads(group, cfg)) if per_thread else 1.0
    if cfg.gpus_per_worker:
        resources["GPU"] = float(cfg.gpus_per_worker)
    return resources


def group_config(cluster: ClusterConfig, group: str) -> GroupConfig:
    """The section of the cluster configuration that describes a group."""
    configs = {
        CONTROL: cluster.control,
        TRAINER: cluster.trainer,
        ROLLOUT: cluster.rollout,
        RUNNER: cluster.runner,
    }
    return configs[group]
