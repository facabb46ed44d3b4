"""Records of real runs: filtered rows, failed runs, evaluations and train steps over a resume."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from small_jobs import SmallJobs

import trinity_dask

REWARD = """
def reward(response: str, truth: str) -> float:
    if sum(map(ord, response)) % 4 == 0:
        raise ValueError(f"cannot be scored: {response!r}")
    return float(sum(map(ord, response)) % 3)
"""


@pytest.mark.parametrize("style", ["fixed", "fully_async"])
def test_every_row_is_accounted_for_over_a_resume(
    jobs: SmallJobs, tmp_path: Path, style: str
) -> None:
    (tmp_path / "scored.py").write_text(REWARD)
    settings = [
        f"buffer.explorer_input.taskset.reward_fn={tmp_path}/scored.py:reward",
        "buffer.operators=[{name: reward_filter, args: {threshold: 1.0}}]",
        "explorer.max_retry_times=1",
        "explorer.max_repeat_times_per_runner=1",
        "explorer.eval_interval=2",
        f"synchronizer.sync_style={style}",
        "monitor.record_failed=1",
    ]
    run = jobs.finish(*settings)
    more = jobs.finish(*settings, "buffer.total_steps=6")
    accounts = more.status["accounts"]
    found = trinity_dask.rollouts(run.base_dir)
    told = found.accounts()
    for kind in ("filtered", "failed"):
        counts = told[kind]
        assert counts["recorded"] + counts["left_out"] == counts["counted"] == accounts[kind] > 0
    assert told["filtered"]["left_out"] == 0
    assert 1 <= told["failed"]["recorded"] <= accounts["batches"]  # one of each batch at most
    table = found.to_pandas(["id", "status", "step", "train_logprobs", "logprobs", "error", "run"])
    counts = table.groupby("status").size()
    assert counts["filtered"] == accounts["filtered"]
    assert counts["trained"] + counts.get("kept", 0) == accounts["committed"]
    assert counts["trained"] == accounts["trained"]
    assert table["id"].dropna().is_unique
    trained = table[table["status"] == "trained"]
    if style == "fixed":  # sampled by the weights that the step began with
        pairs = zip(trained["logprobs"], trained["train_logprobs"], strict=True)
        assert all(np.allclose(a, b, atol=1e-3) for a, b in pairs)
    failed = table[table["status"] == "failed"]
    assert failed["error"].str.startswith("ValueError: cannot be scored: ").all()
    assert failed["run"].between(0, 3).all()
    assert set(table[table["status"] == "eval"]["step"]) >= {2, 4, 6}
    rows = more.samples(1, filtered=True)
    assert set(rows["operator"]) == {"reward_filter"}


def test_a_replayed_row_is_recorded_as_often_as_it_is_trained(jobs: SmallJobs) -> None:
    buffer = "buffer.trainer_input.experience_buffer.replay_buffer"
    run = jobs.finish(
        f"{buffer}.enable=true",
        f"{buffer}.reuse_cooldown_time_s=0",
        "buffer.train_batch_size=16",
        "synchronizer.sync_style=fully_async",
        "trainer.total_steps=8",
    )
    accounts = run.status["accounts"]
    table = trinity_dask.rollouts(run.base_dir).to_pandas(["id", "uses", "train_step", "status"])
    assert table["id"].is_unique
    assert table["uses"].fillna(0).sum() == accounts["trained"]
    assert (table["uses"] - 1).clip(lower=0).sum() == accounts["reused"]
    assert table["train_step"].max() == run.status["step"]
