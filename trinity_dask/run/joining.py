"""Runs that share one Dask scheduler: which of them may, and which engines each one has.

Invariant: a run announces itself on the scheduler before it takes any worker, under a lock, so
two drivers never take the same slot. Only the trainer and the explorers of one job share a
cluster; every other run has it for itself. Entries of dead runs are removed by the next one; a run
is dead when the scheduler has lost its launcher, not when it does not answer.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from trinity_dask.cluster import claims
from trinity_dask.cluster.placement import scheduler_of
from trinity_dask.cluster.rpc import ActorHandle, ActorLost, call, refused
from trinity_dask.config import Config, modes
from trinity_dask.files import read_json, write_json
from trinity_dask.launcher.status import FINAL_STATES

if TYPE_CHECKING:
    from distributed import Client

log = logging.getLogger("trinity_dask.run")

PUBLISHED = "trinity-dask/"
LOCK_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 30.0

WHERE = "where.json"  # in the job directory: the scheduler of its newest run

Entry = dict[str, Any]


class ClusterBusy(RuntimeError):
    """Another live run holds the cluster; slot labels are the cluster's, not a run's."""


@contextmanager
def exclusive(client: Client) -> Iterator[None]:
    """One driver at a time looks at the entries and changes them.

    Raises:
        TimeoutError: another driver holds the lock for too long.
    """
    from distributed import Lock

    with client.as_current():
        lock = Lock(PUBLISHED + "join")
        if not lock.acquire(timeout=LOCK_TIMEOUT_S):
            raise TimeoutError(
                f"another run is joining or leaving this cluster for more than {LOCK_TIMEOUT_S:g} s"
            )
        try:
            yield
        finally:
            lock.release()


def announce(client: Client, cfg: Config, run_id: str, base_dir: str) -> None:
    """Enter this run, and choose its engines (``cluster.rollout.first_index``).

    Raises:
        ClusterBusy: a live run is there that this one cannot join.
    """
    with exclusive(client):
        live = live_entries(client, but=run_id)
        for entry in live:
            _require_joinable(cfg, base_dir, entry)
        if not live:  # nobody is there whose role it could be
            claims.unclaim(client)
        engines = _free_engines(cfg, live)
        if live or modes.meets(cfg.mode):
            cfg.cluster.rollout.first_index = engines.start
        entry = {
            "run_id": run_id,
            "name": cfg.name,
            "base_dir": base_dir,
            "member": modes.member_of(cfg),
            "engines": (engines.start, engines.stop),
            "client": client.id,
            "handle": None,
            "config": cfg,
            "started": time.time(),
        }
        client.publish_dataset(**{PUBLISHED + run_id: entry}, override=True)


def leave_word(base_dir: str, run_id: str, address: str, certificate: Optional[Path]) -> None:
    """Write where the run is, for those who know its job directory only."""
    where = {"run_id": run_id, "scheduler": address}
    write_json(Path(base_dir) / WHERE, {**where, "certificate": certificate and str(certificate)})


def connect(where: str) -> Client:
    """A client of the scheduler at an address, or of the one of a job directory's newest run.

    Raises:
        LookupError: the directory holds no word of a run, or there is none.
        OSError: nobody answers (any more); at once where nobody listens.
    """
    from distributed import Client

    from trinity_dask.cluster.tls import load_certificate

    address, certificate, hint = where, None, ""
    if Path(where).is_dir():
        word = read_json(Path(where) / WHERE)
        if word is None:
            raise LookupError(f"{where} does not say where its run is: it has not begun yet")
        address, certificate = word["scheduler"], word["certificate"]
        hint = (
            f", where the newest run of {where} was: it has ended, or its machine is out of reach. "
            "trinity_dask.rollouts(...) and trinity-dask view show what a run has left"
        )
    elif "://" not in where and os.sep in where:
        raise LookupError(f"there is no directory {where}, and so no run of it (yet)")
    security = None if certificate is None else load_certificate(Path(certificate))
    try:
        # Dask would try for half a minute; what listens for TLS would warn of a mere look
        if not address.startswith("tls://"):
            with ThreadPoolExecutor(1) as apart:  # this thread may have a loop: a notebook's cell
                if apart.submit(asyncio.run, refused(address)).result():
                    raise ConnectionRefusedError(f"nobody listens at {address}")
        return Client(address, security=security, set_as_default=False)
    except OSError as error:
        raise ConnectionError(f"{error}{hint}") from error


def find(where: str, name: Optional[str] = None) -> tuple[Entry, Client]:
    """The entry of the newest launched run there (whose id or job name is ``name``), and a client.

    Raises:
        LookupError: no such run there (lists those that are).
        OSError: nobody answers (any more).
    """
    client = connect(where)
    launched = [e for e in entries(client) if e["handle"] is not None]
    found = [e for e in launched if name is None or name in (e["run_id"], e["name"])]
    if not found:
        known = ", ".join(e["run_id"] for e in launched) or "none"
        client.close()
        raise LookupError(f"no run {name or ''!r} on {where}; live runs: {known}")
    return max(found, key=lambda e: e["started"]), client


def publish(client: Client, run_id: str, **values: Any) -> None:
    """Add ``values`` to this run's entry."""
    entry = {**client.get_dataset(PUBLISHED + run_id), **values}
    client.publish_dataset(**{PUBLISHED + run_id: entry}, override=True)


def withdraw(client: Client, run_id: str) -> None:
    """Remove this run's entry and what keeps its launcher alive."""
    names = client.list_datasets()
    for name in (PUBLISHED + run_id, f"{PUBLISHED}{run_id}/actor"):
        if name in names:
            client.unpublish_dataset(name)


def entries(client: Client) -> list[Entry]:
    """Every run that announced itself and did not withdraw, dead ones included."""
    names = [n for n in client.list_datasets() if str(n).startswith(PUBLISHED)]
    return [client.get_dataset(n) for n in names if not str(n).endswith("/actor")]


def live_entries(client: Client, but: str = "") -> list[Entry]:
    """Entries of runs that are at work, without run ``but``; the others are removed, and the
    roles that they gave to workers are taken back: their drivers are not there to do it."""
    live = []
    for entry in entries(client):
        if entry["run_id"] == but:
            continue
        state = _state(client, entry)
        if state is None:
            withdraw(client, entry["run_id"])
            claims.unclaim(client, entry["run_id"], keep_control=True)
        else:
            live.append({**entry, "state": state})
    return live


def _state(client: Client, entry: Entry) -> Optional[str]:
    """The state of a live run, or None."""
    if entry["handle"] is None:  # not launched yet; it lives as long as its driver
        known = client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.clients))
        return "starting" if entry["client"] in known else None
    try:
        status = call(client, entry["handle"], "status", timeout=CALL_TIMEOUT_S)
    except (ActorLost, TimeoutError):
        # a broken connection or a silent half minute is no death: the scheduler knows
        return "does not answer" if is_held(client, entry["handle"]) else None
    return None if status["state"] in FINAL_STATES else str(status["state"])


def is_held(client: Client, handle: ActorHandle) -> bool:
    """Whether the actor's worker is alive and holds it, as the scheduler knows."""
    scheduler = scheduler_of(client)
    holders = client.sync(scheduler.who_has, keys=[handle.key], asynchronous=False)
    return handle.address in (holders.get(handle.key) or ())


def _require_joinable(cfg: Config, base_dir: str, entry: Entry) -> None:
    mine, theirs = modes.member_of(cfg), entry["member"]
    if mine is not None and theirs is not None and entry["base_dir"] == base_dir:
        if mine != theirs:
            return
        raise ClusterBusy(
            f"{mine!r} of {base_dir} is live on this cluster already (run {entry['run_id']}); "
            "another explorer needs a name of its own, as explorer.name=explorer2"
        )
    raise ClusterBusy(
        f"run {entry['run_id']} is live on this cluster ({entry['state']}); wait for "
        "it, stop it (Run.attach(...).stop()), or use another cluster. Only mode=train and "
        "mode=explore runs of one name share a cluster"
    )


def _free_engines(cfg: Config, live: list[Entry]) -> range:
    """The first gap between the engines of other runs that is wide enough."""
    wanted = cfg.cluster.rollout.n_workers if modes.samples(cfg.mode) or cfg.stages else 0
    taken = sorted(tuple(entry["engines"]) for entry in live)
    start = 0
    for first, last in taken:
        if last > first and start + wanted > first and last > start:
            start = last
    return range(start, start + wanted)
