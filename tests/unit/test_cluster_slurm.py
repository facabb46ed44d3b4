"""What Slurm prints is read, and what a job must not inherit is taken away."""

from __future__ import annotations

import pytest

from trinity_dask.cluster.slurm import queue
from trinity_dask.cluster.slurm.jobs import job_options, lead_s, resources
from trinity_dask.cluster.tls import load_certificate, make_certificate
from trinity_dask.config.schema import ClusterConfig, GroupConfig
from trinity_dask.explorer.schedule.policy import Cancel, SchedulePolicy, Submit
from trinity_dask.explorer.schedule.state import SchedulerState
from trinity_dask.workflows import Task


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5", 300.0),
        ("5:07", 307.0),
        ("1:00:00", 3600.0),
        ("2-1", 176400.0),
        ("2-01:00:10", 176410.0),
        ("UNLIMITED", None),
        ("", None),
    ],
)
def test_times_of_slurm_are_read(text: str, seconds: float | None) -> None:
    assert queue.parse_walltime(text) == seconds


def test_a_short_job_is_not_told_to_leave_as_soon_as_it_is_there() -> None:
    cfg = ClusterConfig(walltime="4:00:00", signal_lead_s=300.0)
    cfg.rollout = GroupConfig(walltime="4")
    assert lead_s(cfg, "control") == 300
    assert lead_s(cfg, "rollout") == 60


def test_states_and_reasons_are_read() -> None:
    found = queue.parse_states("7|PENDING|Resources\n8|RUNNING|None\n9|PREEMPTED|None\n")
    assert [found[job].waiting for job in "789"] == [True, False, False]
    assert [found[job].over for job in "789"] == [False, False, True]
    assert found["9"].blameless
    assert str(found["7"]) == "PENDING (Resources)"
    assert queue.UNKNOWN.over


def test_a_complaint_is_one_line_without_repetition() -> None:
    text = "sbatch: error: invalid partition\nsbatch: error: invalid partition\nsbatch: error: no\n"
    assert queue.complaint(text) == "invalid partition; no"


def test_a_command_does_not_inherit_the_options_of_the_job_it_is_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "100")
    monkeypatch.setenv("SBATCH_PARTITION", "low")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    found = queue.clean_env()
    assert "SLURM_MEM_PER_CPU" not in found
    assert "SBATCH_PARTITION" not in found
    assert found["SLURM_CONF"] == "/etc/slurm.conf"


def test_a_group_has_its_own_options_over_those_of_all() -> None:
    cfg = ClusterConfig(partition="cpu", walltime="1:00:00", directives=["--exclusive"])
    cfg.rollout = GroupConfig(partition="gpu", gpus_per_worker=2, mem="32G", omp_threads=4)
    assert job_options(cfg, "rollout") == [
        "--gres=gpu:2", "--mem=32G", "--partition=gpu", "--time=1:00:00", "--exclusive",
    ]  # fmt: skip
    assert "--partition=cpu" in job_options(cfg, "control")
    assert resources(cfg, "rollout")[0] == 4


def test_the_certificate_of_a_run_is_its_owners_alone(tmp_path) -> None:
    made = make_certificate(tmp_path)
    files = list((tmp_path / "tls").iterdir())
    assert len(files) == 2
    assert all(file.stat().st_mode & 0o077 == 0 for file in files)
    assert made.require_encryption
    assert load_certificate(tmp_path / "other") is None


def test_what_a_leaving_worker_does_is_done_elsewhere_at_no_cost() -> None:
    state = SchedulerState(SchedulePolicy(max_attempts=1))
    state.worker_up("engine-0", 1, 0.0)
    [first] = [
        i for i in state.schedule(1, [Task("w", repeat_times=1)], 0.0) if isinstance(i, Submit)
    ]
    assert state.worker_left("engine-0", 1.0) == [Cancel(first.attempt_id)]
    again = state.worker_up("engine-1", 1, 2.0)
    assert [i.sub_task for i in again if isinstance(i, Submit)] == [first.sub_task]
    assert first.sub_task.attempts == 1
