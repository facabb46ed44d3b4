"""What the end-to-end tests share: one cluster, and the data of a tiny job.

Invariant: the cluster is nobody's. A test leaves it without live runs, roles and stuck threads;
what cannot do that starts a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster
from small_jobs import SmallJobs

from trinity_dask.config import Config
from trinity_dask.demo.sort_digits import prepare


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    """Workers without roles, as a notebook user has them; they import torch once."""
    with LocalCluster(
        n_workers=4, threads_per_worker=4, dashboard_address="127.0.0.1:0", memory_limit=0
    ) as started:
        yield started


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster) as client:
        yield client


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights, and what it is asked."""
    path = tmp_path_factory.mktemp("data")
    prepare(Config(), dir=str(path), n_digits=2, n_train=32, n_eval=8)
    return path


@pytest.fixture
def jobs(client: Client, tmp_path: Path, data: Path) -> Iterator[SmallJobs]:
    found = SmallJobs(client, tmp_path, data)
    yield found
    found.close()


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, Any]]:
    """``storage_options`` of an S3 server without buckets."""
    from moto.server import ThreadedMotoServer  # large, and few tests need it

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as env:
        env.setenv("AWS_DEFAULT_REGION", "us-east-1")
        yield {"key": "k", "secret": "s", "endpoint_url": f"http://{host}:{port}"}
    server.stop()
