"""Every style of synchronisation, in one run and in two that find each other."""

from __future__ import annotations

import pytest
from small_jobs import STEPS, WAIT_S, SmallJobs

ROWS = STEPS * 4 * 4  # steps x tasks x runs
STYLES = [
    ("trainer_driven", "nccl"),
    ("explorer_driven", "memory"),
    ("fully_async", "checkpoint"),
]


def words(style: str, method: str) -> list[str]:
    return [
        f"synchronizer={method}",
        f"synchronizer.sync_style={style}",
        "synchronizer.sync_interval=2",
        "synchronizer.peer_timeout_s=200",
    ]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("style", "method"), STYLES)
def test_explorer_and_trainer_in_one_run(jobs: SmallJobs, style: str, method: str) -> None:
    status = jobs.finish(*words(style, method)).status
    assert status["step"] == status["explorer_step"] == STEPS
    assert status["model_version"] == STEPS  # the last weights reached the engine
    accounts = status["accounts"]
    assert accounts["trained"] == accounts["committed"] == ROWS


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("style", "method"), STYLES)
def test_explorer_and_trainer_as_two_runs(jobs: SmallJobs, style: str, method: str) -> None:
    runs = [jobs.start(f"mode={mode}", *words(style, method)) for mode in ("train", "explore")]
    trainer, explorer = [run.wait(timeout=WAIT_S) for run in runs]
    assert [trainer["state"], explorer["state"]] == ["done", "done"]
    assert trainer["step"] == explorer["explorer_step"] == STEPS
    assert explorer["model_version"] == STEPS
    for end in (trainer, explorer):
        assert end["accounts"]["trained"] == end["accounts"]["committed"] == ROWS
