"""A driver of the process tests: a real program with a cluster, an actor and grandchildren.

Usage: ``cluster_driver.py JOB_DIR HOW``. Prints one JSON line with the pids of everything,
then ends in the way ``HOW``: ``success`` closes, ``error`` raises, ``exit`` leaves without
closing, ``wait`` waits for a signal and after Ctrl-C calls the actor once more.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

from cluster_actors import Counter

from trinity_dask.cluster import RunCluster, call, open_cluster, start_actor
from trinity_dask.config.schema import Config, GroupConfig


def config(job_dir: str) -> Config:
    cfg = Config(mode="explore", job_dir=job_dir)
    cfg.cluster.dashboard_address = None
    cfg.cluster.rollout = GroupConfig(nthreads=4)
    return cfg


def main(job_dir: str, how: str) -> None:
    if how == "exit":
        serve(open_cluster(config(job_dir)), how)
        return
    with open_cluster(config(job_dir)) as cluster:
        serve(cluster, how)
    Path(job_dir, "closed").touch()


def serve(cluster: RunCluster, how: str) -> None:
    ref = start_actor(cluster.client, Counter, slot="engine-0", key="counter", timeout=60)
    workers = cluster.client.run(lambda: __import__("os").getpid()).values()
    grandchildren = [
        call(cluster.client, ref.handle, "start_grandchild", own, timeout=60)
        for own in (False, True)
    ]
    seen = json.dumps({"workers": list(workers), "grandchildren": grandchildren})
    if how == "wait":
        wait_for_interrupt(seen)
        print(call(cluster.client, ref.handle, "add", 1, timeout=60), flush=True)
        return
    print(seen, flush=True)
    if how == "error":
        raise RuntimeError("the run failed")


def wait_for_interrupt(seen: str) -> None:
    try:
        print(seen, flush=True)  # the signal may come at once
        signal.pause()
    except KeyboardInterrupt:
        return


if __name__ == "__main__":
    main(*sys.argv[1:])
