"""Runs on a cluster of the user's: one at a time, and the cluster is left as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
from distributed import Client, LocalCluster

from trinity_dask import Config, Run, load_config
from trinity_dask.run import RunFailed


def job(root: Path, name: str) -> Config:
    cfg = load_config(
        "+experiment=sort_digits_tiny",
        "engine=torch",
        f"checkpoint_root_dir={root}",
        f"name={name}",
        "explorer.eval_on_startup=false",
    )
    return cfg


@pytest.mark.timeout(600)
def test_one_run_after_another_but_not_two_at_once(tmp_path: Path) -> None:
    with (
        LocalCluster(n_workers=3, threads_per_worker=4, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        first = Run(job(tmp_path, "first"), client).start()
        while first.status.get("stage") is None:
            first.wait_for_change(int(first.status["version"]), 60.0)
            assert first.state != "failed", first.status
        with pytest.raises(RunFailed, match="is live on this cluster"):
            Run(job(tmp_path, "second"), client).start().wait(timeout=60)
        assert first.wait(timeout=280)["state"] == "done"
        second = Run(job(tmp_path, "second"), client).start()
        assert second.wait(timeout=280)["state"] == "done"
        first.close()
        second.close()
        workers = client.scheduler_info(n_workers=-1)["workers"].values()
        assert not any(amount for worker in workers for amount in worker["resources"].values())
        assert client.submit(sum, [1, 2]).result(timeout=30) == 3
