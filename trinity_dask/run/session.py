"""A run as an object: start it, watch it, stop it, find it again.

Invariant: ``start`` returns at once and exactly one launcher actor exists per ``Run``; every
way a run can end (done, failed, interrupted, cluster lost) ends ``wait`` with that state.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Generator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Optional

from trinity_dask.cluster import plugins
from trinity_dask.cluster.actors import ActorRef, start_actor, stop_actor
from trinity_dask.cluster.build import RunCluster, Watch, open_cluster
from trinity_dask.cluster.local import dashboard_of
from trinity_dask.cluster.rpc import ActorHandle, ActorLost, call
from trinity_dask.cluster.slots import CONTROL
from trinity_dask.cluster.slurm import allocation
from trinity_dask.cluster.specs import ClusterError, StartStopped, away_s
from trinity_dask.config import Config, resolve, split_stages, validate
from trinity_dask.dashboard import plugin as dashboard
from trinity_dask.launcher.job_files import finished_message
from trinity_dask.launcher.job_lock import claims_of, wait_unlocked
from trinity_dask.launcher.launcher import Launcher
from trinity_dask.launcher.status import FINAL_STATES
from trinity_dask.run import card, joining, live
from trinity_dask.run.joining import CALL_TIMEOUT_S, PUBLISHED, ClusterBusy
from trinity_dask.run.names import check_names, check_start_model

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd
    from distributed import Client

    from trinity_dask.run.trace import Trace

log = logging.getLogger("trinity_dask.run")

__all__ = ["ClusterBusy", "Run", "RunFailed"]

CARD_S = 1.0  # the card of a notebook is drawn anew no more often
POLL_S = 2.0  # one long-poll of the launcher's status
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 120.0
LEAVE_S = 4.0  # for the workers of a run that is left without its state
LOCK_WAIT_S = 20.0  # the workers of a killed driver need a moment to end
MAX_RELAUNCHES = 2
ATTACH_POLL_S = 0.5  # between two looks for a run that is being started
MAX_UNANSWERED = 10  # polls of CALL_TIMEOUT_S each


class RunFailed(RuntimeError):
    """The run ended in state ``failed``; the message is the run's own."""


class Run:
    """One job: its stages on a cluster.

    ``client`` (a ``distributed.Client``) runs the job on a cluster that already exists;
    otherwise ``cfg.cluster`` says what to build. ``checked``: ``cfg`` is resolved, valid,
    and its names are known to exist. Usable as a context manager.

    Raises:
        ConfigError: ``cfg`` cannot run.
    """

    def __init__(
        self, cfg: Config | Any, client: Optional[Client] = None, *, checked: bool = False
    ) -> None:
        self.cfg = cfg if checked else resolve(cfg)
        if not checked:
            validate(self.cfg)
            check_names(self.cfg)
        self.stages = split_stages(self.cfg)
        self.job_dirs = [str(stage.job_dir) for stage in self.stages]
        self.run_id = f"{self.cfg.name}-{uuid.uuid4().hex[:6]}"
        self.base_dir = str(self.cfg.job_dir)
        self._given_client = client
        self._cluster: Optional[RunCluster] = None
        self._client: Optional[Client] = client
        self._ref: Optional[ActorRef] = None
        self._handle: Optional[ActorHandle] = None
        self._announced: Optional[Client] = None  # the client of this run's entry
        self._owner = True
        self._has_page = False
        self._relaunches = 0
        self._status: dict[str, Any] = {"state": "starting", "version": 0, "message": ""}
        self._thread: Optional[threading.Thread] = None
        self._ended = threading.Event()
        self._changed = threading.Condition()
        self._stop_reason: Optional[str] = None
        self.error: Optional[BaseException] = None  # why it could not be started

    # life ----------------------------------------------------------------------------
    def start(self) -> Run:
        """Begin in the background. A second call changes nothing.

        Raises:
            JobInUse: another ``Run`` of this process is running the job.
        """
        if self._thread is None:
            live.enter(self)
            self._thread = threading.Thread(target=self._drive, name="trinity-run", daemon=True)
            self._thread.start()
            if allocation.in_allocation():
                allocation.watch(
                    self.cfg.cluster.signal_lead_s,
                    lambda: float(self._status.get("save_s", 0.0)),
                    self.stop,
                    self._ended,
                )
        return self

    def wait(self, timeout: Optional[float] = None) -> dict[str, Any]:
        """Block until the run has ended; returns the final status.

        An interrupt (the stop button of a notebook) ends the waiting, not the run.

        Raises:
            RuntimeError: not started; or called on the event loop of an asynchronous client, which
                would stand still meanwhile: there ``await run``.
            TimeoutError: still running after ``timeout`` seconds (it goes on).
            RunFailed: the run failed.
        """
        if self._thread is None:
            raise RuntimeError("the run has not been started; call start() first")
        given = self._given_client
        if given is not None and given.asynchronous:  # here, on its loop
            raise RuntimeError(
                "waiting here would stop the event loop that the given client lives on; "
                "write `await run`"
            )
        if not self._ended.wait(timeout):
            raise TimeoutError(f"the run is still {self.state} after {timeout} s; it goes on")
        if self.state == "failed":
            raise RunFailed(str(self._status.get("message")))
        return self.status

    def __await__(self) -> Generator[Any, None, dict[str, Any]]:
        """``await run``: as :meth:`wait`, without blocking the event loop."""
        return asyncio.to_thread(self.wait).__await__()

    def stop(self, reason: str = "stop requested") -> None:
        """Ask the run to save its state and end; ``wait`` then returns ``interrupted``."""
        self._stop_reason = reason
        if self._handle is not None and not self._ended.is_set():
            self._call("stop", reason)

    def close(self, wait_s: float = STOP_TIMEOUT_S) -> None:
        """Stop if need be, and take down what this object started.

        ``wait_s`` is how long the state may take to be saved; 0: leave at once, without it.
        """
        running = self._thread is not None and not self._ended.is_set()
        if running and self._owner and wait_s > 0:
            self.stop("closed")
            self._ended.wait(wait_s)
        if running and wait_s <= 0 and self._cluster is not None and self._cluster.owns_workers:
            self._cluster.close(LEAVE_S)
        else:
            self._release()
        live.leave(self)

    def __enter__(self) -> Run:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # what it does now ------------------------------------------------------------------
    @property
    def status(self) -> dict[str, Any]:
        """A copy of the newest status (see docs/architecture.md for the keys)."""
        return dict(self._status)

    @property
    def state(self) -> str:
        return str(self._status["state"])

    @property
    def dashboard_link(self) -> Optional[str]:
        if self._cluster is not None:
            return self._cluster.dashboard_link
        if self._owner or self._client is None or self._client.status != "running":
            return None
        return dashboard_of(self._client)

    @property
    def page_link(self) -> Optional[str]:
        """Of the page that shows this run, in the dashboard; None where there is none."""
        link = self.dashboard_link
        return dashboard.page_of(link) if link is not None and self._has_page else None

    def scale(self, group: str, n_workers: int) -> None:
        """Have ``n_workers`` rollout (or runner) workers from now on, in a cluster that this
        run has started. Returns when the workers are there; their engines join by themselves.

        Raises:
            ClusterError: no cluster, not one of ours, or a group that is not elastic.
        """
        if self._cluster is None:
            raise ClusterError("the run has no cluster (yet, or any more) that could be scaled")
        self._cluster.scale(group, n_workers)

    def wait_for_change(self, seen: int, timeout: float) -> dict[str, Any]:
        """The status as soon as its version exceeds ``seen``, the run ends, or time is up."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._status["version"] > seen or self._ended.is_set(), timeout
            )
        return self.status

    @property
    def metrics(self) -> pd.DataFrame:
        """All metrics of all stages so far: one row per (stage, role, step)."""
        from trinity_dask.monitor.history import load_metrics

        return load_metrics(self.base_dir)

    def samples(self, step: int, stage: Optional[str] = None, **which: Any) -> pd.DataFrame:
        """The experiences committed at explorer step ``step``, one row each.

        ``group="batch/task"`` takes one group; ``failed=True``, ``filtered=True``, ``eval=True``
        give failed runs, filtered rows, answers of evaluations instead. See docs/records.md.
        """
        from trinity_dask.run.results import load_samples

        return load_samples(self.stages, step, stage, **which)

    def trace(
        self, task: int | Mapping[str, Any] = 0, *, stage: Optional[str] = None, **how: Any
    ) -> Trace:
        """One task through the workflow of ``stage`` (None: the last that samples), turn by turn,
        with an engine in this process: for writers of workflows and rewards.

        The run need not be started, and takes no notice. ``checkpoint``, ``runs``, ``taskset``
        and errors as in :func:`trinity_dask.run.trace.trace`.
        """
        from trinity_dask.run.trace import stage_to_try, trace

        return trace(stage_to_try(self.stages, stage), task, **how)

    def __repr__(self) -> str:
        return card.line(self)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """How Jupyter shows a run: the card, and in plain text the ``repr``."""
        return {"text/html": card.card(self), "text/plain": repr(self)}

    def show(self, every_s: float = CARD_S) -> None:
        """Show the card below this cell and keep it up to date until the run ends, at most
        every ``every_s`` seconds. Needs IPython.

        Raises:
            RuntimeError: not in a notebook.
        """
        try:
            from IPython.display import display
        except ImportError as error:
            raise RuntimeError("show() needs IPython; print(run) tells where it stands") from error
        handle = display(self, display_id=True)
        if handle is not None:  # None: IPython is there and no frontend
            update = partial(card.keep_showing, self, handle, every_s)
            threading.Thread(target=update, name="trinity-card", daemon=True).start()

    # finding a run again ---------------------------------------------------------------
    @classmethod
    def current(cls, name: Optional[str] = None) -> Run:
        """The live run that this process started last (whose id or job name is ``name``).

        Raises:
            LookupError: there is none (lists those that are).
        """
        return live.newest(name)

    @classmethod
    def attach(cls, address: str, name: Optional[str] = None, wait_s: float = 0.0) -> Run:
        """The live run on the scheduler at ``address``, or of the job directory ``address``
        (the newest, or the one whose id or job name is ``name``). Closing an attached run leaves
        it running. ``wait_s``: how long to look for a run that is only just being started.

        Raises:
            LookupError: no such run there (lists those that are).
            OSError: no scheduler answers there.
        """
        deadline = time.monotonic() + wait_s
        while True:
            try:
                return cls._from_entry(*joining.find(address, name))
            except (LookupError, OSError):
                if time.monotonic() >= deadline:
                    raise
            time.sleep(ATTACH_POLL_S)

    @classmethod
    def _from_entry(cls, entry: dict[str, Any], client: Client) -> Run:
        run = cls(entry["config"], client, checked=True)
        run.run_id, run._owner = entry["run_id"], False
        run._handle, run._has_page = entry["handle"], bool(entry.get("has_page"))
        run._set(**run._call("status", 0, 0.0))
        run._thread = threading.Thread(target=run._watch, name="trinity-watch", daemon=True)
        run._thread.start()
        return run

    # background thread -----------------------------------------------------------------
    def _drive(self) -> None:
        try:
            finished = finished_message(self.base_dir, self.stages)
            if finished is not None:
                self._end("done", finished)
                return
            self._open()
            self._launch()
        except BaseException as error:
            if isinstance(error, StartStopped):
                self._end("interrupted", str(error))
                return
            self.error = error
            if self._cluster is None and self._announced is not None:
                self._withdraw(self._announced)
            self._end("failed", f"{type(error).__name__}: {error}")
            return
        self._watch()

    def _open(self) -> None:
        wait_unlocked(self.base_dir, LOCK_WAIT_S, claims_of(self.stages))
        if self._given_client is None and self.cfg.cluster.type == "local":
            check_start_model(self.stages)
        self._set(message="starting the cluster")
        watch = Watch(
            tell=lambda message: self._set(message=message),
            stopped=lambda: self._stop_reason,
            failed=partial(self._end, "failed"),
        )
        self._cluster = open_cluster(
            self.cfg, self._given_client, self._announce, self.run_id, watch
        )
        self._client = self._cluster.client
        plugins.send_cells(self._client)
        self._has_page = dashboard.join(self._client, self.cfg.cluster.dashboard_origins)

    def _announce(self, client: Client) -> None:
        """Enter this run on a cluster that is not its own, before it takes any worker."""
        joining.announce(client, self.cfg, self.run_id, self.base_dir)
        self._announced = client
        for stage in self.stages:
            stage.cluster.rollout.first_index = self.cfg.cluster.rollout.first_index

    def _launch(self) -> None:
        assert self._client is not None
        self._ref = start_actor(
            self._client,
            Launcher,
            self.stages,
            self.base_dir,
            self.run_id,
            {"host": socket.gethostname(), "pid": os.getpid()},
            self._relaunches,
            slot=CONTROL,
            key=f"{self.run_id}-launcher-{self._relaunches}",
            timeout=away_s(self.cfg.cluster, START_TIMEOUT_S),
        )
        self._handle = self._ref.handle
        # before it runs: one whose driver is killed in between must be found and can be stopped
        self._publish()
        self._call("start")
        if self._stop_reason is not None:
            self._call("stop", self._stop_reason)

    def _watch(self) -> None:
        silent = 0
        try:
            while not self._ended.is_set():
                try:
                    seen = int(self._status["version"])
                    status = self._call("status", seen, POLL_S)
                except ActorLost as error:
                    self._lost(error)
                    continue
                except TimeoutError as error:
                    # busy, stopped, or we were suspended: ask again, but not for ever
                    silent += 1
                    log.warning("the control worker does not answer (%s)", error)
                    if self._is_lost():
                        self._lost(error)
                        continue
                    self._set(message="the control worker does not answer")
                    if silent >= MAX_UNANSWERED:
                        self._end("failed", f"the control worker does not answer: {error}")
                    continue
                silent = 0
                self._set(**status)
                if status["state"] in FINAL_STATES:
                    self._end(status["state"], status.get("message", ""))
        except BaseException as error:
            self._end("failed", f"{type(error).__name__}: {error}")

    def _is_lost(self) -> bool:
        """Whether the scheduler has lost the launcher, which then will never answer."""
        assert self._handle is not None
        assert self._client is not None
        with suppress(OSError, TimeoutError):
            return not joining.is_held(self._client, self._handle)
        return False

    def _lost(self, error: BaseException) -> None:
        """The control worker died: its state is on disk, so start the launcher again.

        Unless only the connection to it broke, and it answers on another.
        """
        assert self._handle is not None
        assert self._client is not None
        with suppress(ActorLost, OSError):
            if joining.is_held(self._client, self._handle):
                with suppress(TimeoutError):  # busy: it is asked again
                    self._set(**self._call("status", 0, 0.0))
                return
        allowed = MAX_RELAUNCHES
        if self.cfg.cluster.type == "slurm":
            allowed = self.cfg.cluster.max_resubmits
        if not self._owner or self._relaunches >= allowed or self._stop_reason:
            self._end("failed", f"the control worker was lost: {error}")
            return
        self._relaunches += 1
        log.warning("the control worker was lost (%s); resuming from the saved state", error)
        self._set(message="control worker lost; resuming from the saved state", version=0)
        self.stages = [replace(s, continue_from_checkpoint=True) for s in self.stages]
        self._launch()

    # plumbing --------------------------------------------------------------------------
    def _call(self, method: str, *args: Any) -> Any:
        assert self._handle is not None
        return call(self._client, self._handle, method, *args, timeout=CALL_TIMEOUT_S)

    def _publish(self) -> None:
        assert self._client is not None
        assert self._ref is not None
        self._client.publish_dataset(
            **{f"{PUBLISHED}{self.run_id}/actor": self._ref.future}, override=True
        )
        if self._announced is None:
            joining.announce(self._client, self.cfg, self.run_id, self.base_dir)
        self._announced = self._client
        assert self._cluster is not None
        if self.cfg.mode != "bench":  # which leaves the job to the run that it may stand beside
            address, certificate = self._cluster.scheduler_address, self._cluster.certificate
            joining.leave_word(self.base_dir, self.run_id, address, certificate)
        joining.publish(self._client, self.run_id, handle=self._handle, has_page=self._has_page)

    def _set(self, **changes: Any) -> None:
        with self._changed:
            self._status = {**self._status, **changes}
            self._changed.notify_all()

    def _end(self, state: str, message: str) -> None:
        if self._ended.is_set():
            return
        if self._given_client is not None and self._owner and self._cluster is not None:
            self._release()  # a cluster that is not ours is given back as soon as we are done
        self._set(state=state, message=message, version=int(self._status["version"]) + 1)
        with self._changed:
            self._ended.set()
            self._changed.notify_all()
        live.leave(self)

    def _release(self) -> None:
        if self._owner and self._announced is not None:
            self._withdraw(self._announced)
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None
        elif not self._owner and self._client is not None:
            self._client.close()

    def _withdraw(self, client: Client) -> None:
        """Leave the cluster; to the last run of a job falls what they had in common."""
        self._announced = None
        if client.status != "running":  # the entry of a driver that is gone counts for nothing
            return
        try:
            if self._ref is not None:
                stop_actor(self._ref)
            with joining.exclusive(client):
                joining.withdraw(client, self.run_id)
                if self._cluster is not None:
                    self._cluster.shared = bool(joining.live_entries(client))
        except Exception as error:
            log.info("the run's entry was not removed from the scheduler: %s", error)
