"""One cluster object for a run, whoever started the workers.

Invariant: an open :class:`RunCluster` has every worker that the configuration asks for, with
its slot and the plugins; closing it ends exactly what it started, within a bounded time.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from distributed import Client

from trinity_dask.cluster import claims, plugins
from trinity_dask.cluster.local import LocalGroups, dashboard_of
from trinity_dask.cluster.placement import scheduler_of
from trinity_dask.cluster.slots import ROLLOUT, RUNNER
from trinity_dask.cluster.specs import ClusterError, needed_workers
from trinity_dask.config.errors import ConfigError
from trinity_dask.config.schema import Config

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 20.0
POLL_S = 0.1
ELASTIC = (ROLLOUT, RUNNER)


@dataclass(frozen=True)
class Watch:
    """Whoever waits for a cluster: ``tell`` is given what is waited for; ``stopped`` says why
    not to wait any longer (None: go on); ``failed`` hears why the cluster cannot go on later."""

    tell: Callable[[str], object] = logger.info
    stopped: Callable[[], str | None] = lambda: None
    failed: Callable[[str], object] = logger.error


class RunCluster:
    """The client of a run, and the cluster under it.

    Attributes:
        client: synchronous ``distributed.Client``; not the process's default client.
        scheduler_address: where other drivers and workers join.
        dashboard_link: URL, or ``None`` without a dashboard.
        owns_workers: whether closing ends the workers.
        certificate: directory of the certificate that others need who join, or ``None``.
    """

    def __init__(
        self,
        client: Client,
        *,
        local: LocalGroups | None = None,
        owns_client: bool = True,
        run_id: str = "",
    ):
        self.client = client
        self.run_id = run_id
        self.shared = False  # other runs of the job are on the cluster when this one leaves
        self.scheduler_address: str = scheduler_of(client).address
        self.dashboard_link = local.dashboard_link if local else dashboard_of(client)
        self.owns_workers = local is not None
        self.certificate = local.certificate if local else None
        self._local, self._owns_client = local, owns_client
        self._closed = False
        atexit.register(self.close)

    def scale(self, group: str, n_workers: int) -> None:
        """Have ``n_workers`` workers of an elastic group (rollout or runner) from now on.

        Engines of new workers join a live run and are given the current weights before their
        first token; those of workers that leave are missed by nobody.

        Raises:
            ClusterError: the group is not elastic, or the workers are not ours to start.
        """
        if group not in ELASTIC:
            raise ClusterError(f"group {group!r} is not elastic; {' and '.join(ELASTIC)} are")
        if n_workers < 1:
            raise ClusterError(f"a run needs a {group} worker (asked for {n_workers})")
        if self._local is None:
            raise ClusterError(
                f"the workers at {self.scheduler_address} were started by others: start more with "
                f"`trinity-dask worker {self.scheduler_address} --group {group} --index N`, or "
                "end some of them"
            )
        self._local.scale(group, n_workers)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """End what was started. Bounded by about ``timeout_s``; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        try:
            if not self.owns_workers:
                _bounded(self._give_back, timeout_s / 2, "giving the workers back")
            if self._owns_client:
                _bounded(lambda: self.client.close(timeout_s / 4), timeout_s / 2, "the client")
        finally:
            if self._local is not None:
                self._local.close(timeout_s / 2)

    def _give_back(self) -> None:
        """Leave a cluster that is not ours as it was, or as the other runs need it."""
        claims.unclaim(self.client, self.run_id, keep_control=self.shared)
        if not self.shared:
            plugins.unregister_plugins(self.client)

    def __enter__(self) -> RunCluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def open_cluster(
    cfg: Config,
    client: Client | None = None,
    before_joining: Callable[[Client], object] | None = None,
    run_id: str = "",
    watch: Watch | None = None,
) -> RunCluster:
    """Build the cluster that ``cfg`` describes, or join the one of ``client``.

    ``before_joining`` is called with the client of a cluster that is joined, before any of its
    workers is taken; ``run_id`` tells this run's claims from those of others. ``watch`` is told
    what is waited for.

    A given client is used as it is and stays open. Otherwise ``cluster.type`` decides:
    ``local`` starts processes here, ``slurm`` has Slurm start them, ``address`` joins a running
    scheduler. In a cluster
    that is joined, workers with slot labels keep their role and unlabelled ones are claimed.

    Raises:
        ClusterError: a port in use, nobody at the address, or not enough workers.
        ConfigError: Slurm refuses a job.
        StartStopped: ``watch`` says so.
    """
    if client is not None:
        if client.asynchronous or client.status != "running":
            raise ClusterError(
                "the given client is "
                f"{'asynchronous' if client.asynchronous else client.status}; pass a connected "
                "synchronous distributed.Client"
            )
        return _join(cfg, client, False, before_joining, run_id)
    if cfg.cluster.type == "address":
        return _join(cfg, _connect(cfg.cluster.address), True, before_joining, run_id)
    if cfg.cluster.type == "local":
        return _build(LocalGroups(cfg))
    if cfg.cluster.type == "slurm":
        return _build(_slurm_groups(cfg, watch or Watch()))
    raise ClusterError(
        f"cluster.type={cfg.cluster.type!r} is unknown; it is one of: local, address, slurm"
    )


def _slurm_groups(cfg: Config, watch: Watch) -> LocalGroups:
    try:
        from trinity_dask.cluster.slurm.groups import SlurmGroups
    except ImportError as error:
        raise ConfigError(
            f"cluster=slurm needs the package dask-jobqueue ({error}): pip install "
            "'trinity-dask[slurm]'"
        ) from error
    return SlurmGroups(cfg, watch.tell, watch.stopped, watch.failed)


def _build(local: LocalGroups) -> RunCluster:
    try:
        local.start()
        client = Client(
            local.scheduler_address,
            set_as_default=False,
            direct_to_workers=True,
            timeout=CONNECT_TIMEOUT_S,
            security=local.security,
        )
        cluster = RunCluster(client, local=local)
    except BaseException:  # also an interrupt: nothing may be left behind
        local.close(CLOSE_TIMEOUT_S / 2)
        raise
    return _ready(cluster)


def _ready(cluster: RunCluster) -> RunCluster:
    try:
        plugins.register_plugins(cluster.client)
    except BaseException:
        cluster.close()
        raise
    return cluster


def _connect(address: str | None) -> Client:
    if not address:
        raise ClusterError("cluster.type=address needs cluster.address=tcp://host:port")
    try:
        return Client(
            address, set_as_default=False, direct_to_workers=True, timeout=CONNECT_TIMEOUT_S
        )
    except (OSError, ValueError) as error:
        raise ClusterError(
            f"no Dask scheduler answers at cluster.address={address!r} ({error}); start one with "
            "`dask scheduler`, or use cluster=local"
        ) from error


def _join(
    cfg: Config,
    client: Client,
    owns_client: bool,
    before: Callable[[Client], object] | None,
    run_id: str,
) -> RunCluster:
    try:
        if before is not None:
            before(client)
        _wait_for_workers(cfg, client, run_id)
        cluster = RunCluster(client, owns_client=owns_client, run_id=run_id)
    except BaseException:
        if owns_client:
            client.close()
        raise
    return _ready(cluster)


def _wait_for_workers(cfg: Config, client: Client, run_id: str) -> claims.Plan:
    """Wait until the cluster has enough workers, since they may still be joining, and claim."""
    deadline = time.monotonic() + cfg.cluster.start_timeout_s
    needed, told = needed_workers(cfg), False
    while True:
        with claims.one_at_a_time(client):
            plan = claims.plan_claims(claims.members(client), needed, cfg.cluster)
            if plan.complete:
                if plan.claims:
                    claims.claim(client, plan.claims, run_id)
                return plan
        if not told:
            logger.warning("waiting for workers at %s: %s", scheduler_of(client).address, plan)
            told = True
        if time.monotonic() > deadline:
            raise ClusterError(_too_few(client, plan, cfg.cluster.start_timeout_s))
        time.sleep(POLL_S)


def _too_few(client: Client, plan: claims.Plan, waited_s: float) -> str:
    address = scheduler_of(client).address
    group = next(g for g, n in plan.needed.items() if plan.present[g] < n)
    return (
        f"not enough workers at {address} after {waited_s:g} s; present: {plan}. Add workers "
        f"(`trinity-dask worker {address} --group {group} --index {plan.present[group]}`, or "
        "plain Dask workers), or lower cluster.<group>.n_workers"
    )


def _bounded(job: Callable[[], object], timeout_s: float, what: str) -> None:
    """Run a blocking step of the close in a thread and go on without it at the deadline."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            job()
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="trinity-close", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive() or failed:
        reason = repr(failed[0]) if failed else f"no answer within {timeout_s:g} s"
        logger.warning("closing the cluster, %s: %s", what, reason)
