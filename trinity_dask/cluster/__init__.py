"""Clusters, and everything that makes actors on them findable, callable and mortal."""

from trinity_dask.cluster.actors import (
    ActorRef,
    create_actor,
    on_lost,
    recreate_actor,
    release_actor,
    start_actor,
    stop_actor,
)
from trinity_dask.cluster.build import RunCluster, Watch, open_cluster
from trinity_dask.cluster.context import current_worker, worker_client
from trinity_dask.cluster.rpc import ActorHandle, ActorLost, call, local_actor, rpc
from trinity_dask.cluster.specs import ClusterError

__all__ = [
    "ActorHandle",
    "ActorLost",
    "ActorRef",
    "ClusterError",
    "RunCluster",
    "Watch",
    "call",
    "create_actor",
    "current_worker",
    "local_actor",
    "on_lost",
    "open_cluster",
    "recreate_actor",
    "release_actor",
    "rpc",
    "start_actor",
    "stop_actor",
    "worker_client",
]
