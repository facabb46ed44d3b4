"""Workers of a running cluster take a role of the run.

Invariant: a claimed worker keeps its role when it is born again (its nanny's address is its
identity), and gives it back when the run closes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from distributed import Client, Lock, Scheduler, SchedulerPlugin, Worker, WorkerPlugin

from trinity_dask.cluster.slots import (
    CONTROL,
    GROUPS,
    PREFIX,
    group_config,
    group_resources,
    slot_of,
)
from trinity_dask.cluster.slots import slot_resource as label
from trinity_dask.config.schema import ClusterConfig

CLAIMS = "trinity-claims"
LOCK_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Member:
    """A worker as the scheduler describes it."""

    identity: str  # the nanny's address, or the worker's where it has none
    name: str
    nthreads: int
    resources: dict[str, float]

    @property
    def labelled(self) -> bool:
        return any(r.startswith(PREFIX) or r in GROUPS for r in self.resources)


@dataclass(frozen=True)
class Plan:
    """Who takes which role, and what is missing.

    ``present`` counts the workers of each group that have their role already or are
    claimed by ``claims`` (identity -> resources).
    """

    claims: dict[str, dict[str, float]]
    needed: dict[str, int]
    present: dict[str, int]

    @property
    def complete(self) -> bool:
        return self.present == self.needed

    def __str__(self) -> str:
        return ", ".join(f"{g} {self.present[g]} of {n}" for g, n in self.needed.items())


def members(client: Client) -> list[Member]:
    """The running workers, in the order of their names."""
    workers = client.scheduler_info(n_workers=-1)["workers"]
    found = [
        Member(
            identity=w.get("nanny") or address,
            name=str(w["name"]),
            nthreads=w["nthreads"],
            # a role that was given back stays behind with the amount 0
            resources={name: amount for name, amount in w["resources"].items() if amount > 0},
        )
        for address, w in workers.items()
    ]
    return sorted(found, key=lambda m: (len(m.name), m.name))


def plan_claims(found: list[Member], needed: dict[str, int], cfg: ClusterConfig) -> Plan:
    """Give each missing role to an unlabelled worker, in the order of ``GROUPS``."""
    free = [member for member in found if not member.labelled]
    claims: dict[str, dict[str, float]] = {}
    present = dict.fromkeys(needed, 0)
    for group in (g for g in GROUPS if g in needed):
        section = group_config(cfg, group)
        first = section.first_index or 0
        roles = range(first, first + needed[group])  # those of this run
        for index in _missing(found, group, roles):
            if not free:
                break
            member = free.pop(0)
            resources = group_resources(group, index, section)
            # threads and GPUs of a worker that exists already cannot be changed
            resources.pop("GPU", None)
            if resources[group] > 1:
                resources[group] = float(member.nthreads)
            claims[member.identity] = resources
            present[group] += 1
        present[group] += needed[group] - len(_missing(found, group, roles))
    return Plan(claims, needed, present)


def _missing(found: list[Member], group: str, roles: range) -> list[int]:
    """Indices of the group's roles that no worker has yet."""
    have = {name for member in found for name in member.resources}
    return [i for i in roles if label(slot_of(group, i)) not in have]


class Recheck(SchedulerPlugin):
    """Lets the scheduler place waiting tasks after a worker got its role.

    A role is given after the worker has joined, and the scheduler looks at waiting tasks
    only when a worker joins.
    """

    name = "trinity-recheck"
    idempotent = True

    async def start(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        scheduler.handlers["trinity_recheck"] = self.recheck

    def recheck(self, worker: str) -> str:
        state = self.scheduler.workers[worker]
        found = self.scheduler.bulk_schedule_unrunnable_after_adding_worker(state)
        self.scheduler.transitions(found, stimulus_id="trinity-recheck")
        return "OK"


class SlotClaims(WorkerPlugin):
    """Carries the roles to the workers, also to those that are born again."""

    def __init__(self, claims: dict[str, dict[str, float]], name: str):
        self.claims = claims
        self.name = name

    async def setup(self, worker: Worker) -> None:
        resources = self.claims.get(str(worker.nanny or worker.address))
        if resources:
            await self._set(worker, resources)

    async def teardown(self, worker: Worker) -> None:
        resources = self.claims.get(str(worker.nanny or worker.address))
        if resources and worker.status.name == "running":
            await self._set(worker, dict.fromkeys(resources, 0.0))

    async def _set(self, worker: Worker, resources: dict[str, float]) -> None:
        await worker.set_resources(**resources)
        await worker.scheduler.trinity_recheck(worker=worker.address)


@contextmanager
def one_at_a_time(client: Client) -> Iterator[None]:
    """Two runs that join at once must not claim the same worker.

    Raises:
        TimeoutError: another run holds the lock for too long.
    """
    with client.as_current():
        lock = Lock(f"{CLAIMS}-lock")
        if not lock.acquire(timeout=LOCK_TIMEOUT_S):
            raise TimeoutError(f"another run is claiming workers for {LOCK_TIMEOUT_S:g} s")
        try:
            yield
        finally:
            lock.release()


def claim(client: Client, claims: dict[str, dict[str, float]], run_id: str = "") -> None:
    """Give the workers their roles. The control role is apart: other runs may need it longer."""
    client.register_plugin(Recheck())
    for kind in (CONTROL, "others"):
        mine = {w: r for w, r in claims.items() if (CONTROL in r) == (kind == CONTROL)}
        if mine:
            client.register_plugin(SlotClaims(mine, f"{CLAIMS}-{kind}-{run_id}"))


def unclaim(client: Client, run_id: str = "", keep_control: bool = False) -> None:
    """Take this run's roles back. Without ``keep_control`` nobody else is on the cluster, and
    whatever earlier runs left is taken back as well."""
    for name in client.run_on_scheduler(lambda dask_scheduler: [*dask_scheduler.worker_plugins]):
        if not str(name).startswith(CLAIMS):
            continue
        if not keep_control or name == f"{CLAIMS}-others-{run_id}":
            with suppress(ValueError):  # another run has taken it away already
                client.unregister_worker_plugin(name)
