"""Runs on a cluster of the user's: one at a time, and the cluster is left as it was."""

from __future__ import annotations

import pytest
from small_jobs import SmallJobs

from trinity_dask.run import RunFailed


@pytest.mark.timeout(600)
def test_one_run_after_another_but_not_two_at_once(jobs: SmallJobs) -> None:
    first = jobs.start("buffer.total_steps=8", name="first")
    while first.status.get("stage") is None:
        first.wait_for_change(int(first.status["version"]), 60.0)
        assert first.state != "failed", first.status
    with pytest.raises(RunFailed, match="is live on this cluster"):
        jobs.start(name="second").wait(timeout=60)
    assert first.wait(timeout=280)["state"] == "done"
    second = jobs.finish(name="second")
    first.close()
    second.close()
    workers = jobs.client.scheduler_info(n_workers=-1)["workers"].values()
    assert not any(amount for worker in workers for amount in worker["resources"].values())
    assert jobs.client.submit(sum, [1, 2]).result(timeout=30) == 3
