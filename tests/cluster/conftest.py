"""What several modules of cluster tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from trinity_dask.cluster import RunCluster, open_cluster
from trinity_dask.config.schema import Config, GroupConfig


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunCluster]:
    """Two rollout workers and a trainer worker, for modules that need no other."""
    cfg = Config(mode="both", job_dir=str(tmp_path_factory.mktemp("cluster")))
    cfg.cluster.dashboard_address = None
    cfg.cluster.rollout = GroupConfig(n_workers=2, nthreads=4)
    with open_cluster(cfg) as opened:
        yield opened
