"""A cluster on this machine: scheduler and nannies in this process, one process per worker.

Invariant: :meth:`LocalGroups.close` ends everything that was started, within its time, even
when it was interrupted half-way through the start.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import dask
import psutil
from distributed import Client, Scheduler, Security, SpecCluster
from distributed.utils import LoopRunner, sync

from trinity_dask.cluster.addresses import listening_host
from trinity_dask.cluster.logs import driver_log
from trinity_dask.cluster.placement import LEAVING, TOPIC
from trinity_dask.cluster.specs import (
    DASHBOARD_ORIGINS,
    SETTINGS,
    ClusterError,
    GroupNanny,
    log_dir,
    needed_workers,
    worker_options,
)
from trinity_dask.config.schema import ClusterConfig, Config

logger = logging.getLogger(__name__)

PLAIN_LINK = "{scheme}://{host}:{port}/status"


class LocalGroups:
    """Scheduler and workers of all groups, with their event loop in a thread of its own."""

    def __init__(self, cfg: Config):
        host = listening_host(cfg.cluster.host, cfg.cluster.interface)
        self._cfg = replace(cfg, cluster=replace(cfg.cluster, host=host))
        self._stack = contextlib.ExitStack()
        self._runner = LoopRunner(asynchronous=False)
        self._cluster: SpecCluster | None = None
        self.security: Security | None = None  # of every connection; None: they are plain TCP
        self.certificate: Path | None = None  # the directory that ``security`` is from
        directory, self._scratch_is_ours = cfg.cluster.local_directory, False
        if directory is None and cfg.job_dir is not None:
            directory = f"{cfg.job_dir}/dask"
        if directory is None:
            directory, self._scratch_is_ours = tempfile.mkdtemp(prefix="trinity-dask-"), True
        self._scratch = str(Path(directory).absolute())

    @property
    def scheduler_address(self) -> str:
        assert self._cluster is not None
        return self._cluster.scheduler_address

    @property
    def dashboard_link(self) -> str | None:
        address = self._cfg.cluster.dashboard_address
        if self._cluster is None or address is None:
            return None
        link = dashboard_of(self._cluster)
        return link and at_host(link, self._cluster.scheduler_address, address)

    def start(self) -> None:
        """Start everything.

        Raises:
            ClusterError: a port is in use, or a worker did not start in time.
        """
        check_ports(self._cfg.cluster)
        self._start_cluster()

    def _start_cluster(self) -> None:
        timeout = self._cfg.cluster.start_timeout_s
        origins = {DASHBOARD_ORIGINS: list(self._cfg.cluster.dashboard_origins)}
        self._stack.enter_context(dask.config.set(SETTINGS | origins))
        self._stack.enter_context(driver_log(log_dir(self._cfg)))
        self._runner.start()
        try:
            sync(self._runner.loop, self._start, callback_timeout=timeout)
        except TimeoutError as error:
            raise ClusterError(
                f"the workers did not start within {timeout:g} s; raise cluster.start_timeout_s "
                "or start fewer workers"
            ) from error
        except (OSError, RuntimeError) as error:
            raise ClusterError(f"the cluster did not start: {error}") from error

    async def _start(self) -> None:
        workers = {
            f"{group}-{index}": self._worker(group, index)
            for group, count in needed_workers(self._cfg).items()
            for index in range(count)
        }
        self._cluster = SpecCluster(
            workers=workers,
            scheduler={"cls": Scheduler, "options": self._scheduler_options()},
            asynchronous=True,
            silence_logs=False,
            security=self.security,
            name=f"trinity-{self._cfg.name}",
        )
        await self._cluster

    def _worker(self, group: str, index: int) -> dict[str, Any]:
        """What Dask starts as the ``index``-th worker of ``group``."""
        return {
            "cls": GroupNanny,
            "options": worker_options(self._cfg, group, index, self._scratch),
        }

    def _scheduler_options(self) -> dict[str, Any]:
        return scheduler_options(self._cfg.cluster)

    def scale(self, group: str, n_workers: int) -> None:
        """Have workers 0 to ``n_workers`` - 1 of ``group``; the last ones go first.

        Raises:
            ClusterError: a new worker did not start in time.
        """
        timeout = self._cfg.cluster.start_timeout_s
        try:
            sync(self._runner.loop, self._scale, group, n_workers, callback_timeout=timeout)
        except (TimeoutError, OSError, RuntimeError) as error:
            raise ClusterError(f"{group} was not scaled to {n_workers}: {error!r}") from error

    async def _scale(self, group: str, n_workers: int) -> None:
        assert self._cluster is not None
        spec = self._cluster.worker_spec
        indices = {int(name.rpartition("-")[2]) for name in spec if name.startswith(f"{group}-")}
        leaving = [f"{group}-{index}" for index in sorted(indices) if index >= n_workers]
        for name in leaving:
            del spec[name]
        announce_leaving(self._cluster, leaving)
        nannies = [
            self._cluster.workers.pop(name) for name in leaving if name in self._cluster.workers
        ]
        # not by Dask's own way, which first tries to move what they hold: actors cannot move
        await asyncio.gather(*(nanny.close() for nanny in nannies))
        for index in set(range(n_workers)) - indices:
            spec[f"{group}-{index}"] = self._worker(group, index)
        await self._cluster._correct_state()

    def close(self, timeout_s: float) -> None:
        """End all processes: politely within ``timeout_s``, then by force."""
        before = self._worker_processes()
        try:
            if self._cluster is not None:
                sync(self._runner.loop, self._close, callback_timeout=timeout_s)
        except (TimeoutError, AssertionError, OSError, RuntimeError) as error:
            logger.warning("the cluster did not close within %g s: %r", timeout_s, error)
        finally:
            survivors = {*before, *self._worker_processes()}
            for worker in survivors:  # their wardens end what they started
                with contextlib.suppress(psutil.NoSuchProcess):
                    worker.send_signal(signal.SIGKILL)
            psutil.wait_procs(survivors, timeout=5)
            self._cluster = None
            self._runner.stop()
            self._stack.close()
            if self._scratch_is_ours:
                shutil.rmtree(self._scratch, ignore_errors=True)

    async def _close(self) -> None:
        assert self._cluster is not None
        # workers first: a nanny must not restart a worker that the scheduler has ended
        nannies = list(self._cluster._created)
        await asyncio.gather(*(nanny.close() for nanny in nannies), return_exceptions=True)
        await self._cluster._close()

    def _worker_processes(self) -> set[psutil.Process]:
        """The worker processes that exist right now."""
        nannies = [] if self._cluster is None else list(self._cluster._created)
        found = set()
        for pid in [nanny.pid for nanny in nannies if nanny.pid]:
            with contextlib.suppress(psutil.NoSuchProcess):
                found.add(psutil.Process(pid))
        return found


def announce_leaving(cluster: SpecCluster, names: Sequence[str]) -> None:
    """Say of workers that they are about to leave: what they do is handed back, not lost."""
    scheduler = cluster.scheduler
    assert scheduler is not None
    for address, worker in scheduler.workers.items():
        if worker.name in names:
            scheduler.log_event(TOPIC, {"action": LEAVING, "worker": address})


def dashboard_of(owner: SpecCluster | Client) -> str | None:
    """The URL of the dashboard, by the site's template where that can be filled in here.

    A site's ``distributed.dashboard.link`` may name variables of its JupyterHub, which a batch
    job does not have; Dask raises when it reads the link then.
    """
    try:
        return owner.dashboard_link or None
    except (KeyError, IndexError, ValueError, AttributeError):
        with dask.config.set({"distributed.dashboard.link": PLAIN_LINK}):
            return owner.dashboard_link or None


def at_host(link: str, scheduler: str, listens: str) -> str:
    """``link`` with the host at which the dashboard listens (``host:port``), where Dask has put
    that of the scheduler; a site's template may name neither."""
    parts, host = urlsplit(link), listens.rpartition(":")[0]
    if host in ("", "0.0.0.0", "[::]") or parts.hostname != urlsplit(scheduler).hostname:
        return link
    return parts._replace(netloc=f"{host}:{parts.port}").geturl()


def scheduler_options(cfg: ClusterConfig) -> dict[str, Any]:
    dashboard = cfg.dashboard_address is not None
    return {
        "host": cfg.host,
        "port": cfg.scheduler_port,
        "dashboard": dashboard,
        "dashboard_address": cfg.dashboard_address if dashboard else None,
    }


def check_ports(cfg: ClusterConfig) -> None:
    """Raise ClusterError where a fixed port is taken; Dask would take another, or hang."""
    wanted = [("cluster.scheduler_port", cfg.host, cfg.scheduler_port)]
    if cfg.dashboard_address is not None:
        address, _, digits = cfg.dashboard_address.rpartition(":")
        if not digits.isdigit():
            raise ClusterError(
                f"cluster.dashboard_address={cfg.dashboard_address!r} is not host:port; "
                "use for example 127.0.0.1:8787, or null for no dashboard"
            )
        wanted.append(("cluster.dashboard_address", address or "0.0.0.0", int(digits)))
    for key, host, port in wanted:
        if port:
            _check_port(key, host, port)


def _check_port(key: str, host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ClusterError(
                f"{key}: cannot listen on port {port} of {host} ({os.strerror(error.errno or 0)}); "
                "end the process that uses it, choose another port, or 0 for any free one"
            ) from error
