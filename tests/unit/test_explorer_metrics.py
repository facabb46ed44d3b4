"""Metric aggregation against values computed elsewhere."""

from __future__ import annotations

import math

import numpy as np
import pytest

from trinity_dask.explorer.metrics import (
    batch_metrics,
    eval_batch_metrics,
    reduce_metrics,
    repeated_statistics,
    task_metrics,
)

ACCURACY = [0, 1, 1, 0, 0.5]
GOLDEN = {
    "mean@5": 0.5,
    "std@5": 0.4472136,
    "best@2": 0.729,
    "worst@2": 0.2555,
    "best@4": 0.9115,
    "worst@4": 0.0675,
    "best@5": 0.951,
    "worst@5": 0.042,
}


def test_golden_statistics_of_repeated_runs():
    found = repeated_statistics(ACCURACY)
    assert list(found) == list(GOLDEN)
    for key, value in GOLDEN.items():
        assert found[key] == pytest.approx(value, abs=1e-7)


def test_one_run_has_a_mean_and_no_best():
    assert repeated_statistics([3.0]) == {"mean@1": 3.0, "std@1": 0.0}


def test_golden_train_task():
    runs = [{"acc": a, "n:sum": n} for a, n in zip(ACCURACY, [1, 2, 3, 4, 0], strict=True)]
    found = task_metrics(runs, [2.0, 4.0], is_eval=False)
    assert found == {"acc": 0.5, "n:sum": 10.0, "time/task_execution": 3.0}


def test_eval_keeps_suffixes_and_times_plain():
    runs = [{"acc": 1.0, "n:max": 2.0, "time/run_execution": 1.0}] * 2
    found = task_metrics(runs, [5.0], is_eval=True)
    assert found["acc/mean@2"] == 1.0
    assert found["n:max"] == 2.0
    assert found["time/run_execution"] == 1.0
    assert found["time/task_execution"] == 5.0


def test_only_numbers_count_and_an_unknown_suffix_is_part_of_the_name():
    runs = [{"a": True, "b:median": 2, "c": "text", "d": None, "e": np.float32(1.5)}, {"a": False}]
    assert reduce_metrics(runs) == {"a": 0.5, "b:median": 2.0, "e": 1.5}


@pytest.mark.parametrize(
    ("suffix", "value"), [("mean", 2.0), ("sum", 6.0), ("max", 3.0), ("min", 1.0), ("last", 2.0)]
)
def test_suffixes(suffix, value):
    dicts = [{f"x:{suffix}": v} for v in (1.0, 3.0, 2.0)]
    assert reduce_metrics(dicts) == {f"x:{suffix}": value}


def test_train_batch_spreads_means_and_keeps_the_rest():
    found = batch_metrics([{"r": 1.0, "n:sum": 2.0}, {"r": 3.0, "n:sum": 5.0}], "rollout")
    assert found == {
        "rollout/r/mean": 2.0,
        "rollout/r/max": 3.0,
        "rollout/r/min": 1.0,
        "rollout/n/sum": 7.0,
    }


def test_eval_batch_is_plain_or_detailed():
    tasks = [{"acc/mean@4": 0.0}, {"acc/mean@4": 1.0}]
    assert eval_batch_metrics(tasks, "eval/x") == {"eval/x/acc/mean@4": 0.5}
    detailed = eval_batch_metrics(tasks, "eval/x", detailed=True)
    assert detailed["eval/x/acc/mean@4/std"] == 0.5
    assert set(detailed) == {f"eval/x/acc/mean@4/{h}" for h in ("mean", "max", "min", "std")}


def test_repeatable_and_single_runs_of_the_dummy_workflow():
    # ids of tasks 0..3 with runs 0..3: run mean 1.5; the same over two sub-tasks is unchanged
    runs = [{"run": float(r), "rest": float(r + 2)} for r in range(4)]
    found = task_metrics(runs, [0.0, 0.0], is_eval=False)
    assert (found["run"], found["rest"]) == (1.5, 3.5)


def test_no_metrics_give_none():
    assert reduce_metrics([]) == {}
    assert not any(math.isnan(v) for v in task_metrics([], [1.0], is_eval=True).values())
