"""A run's metrics after crashes and resumes."""

from pathlib import Path

from trinity_dask.config.schema import MonitorConfig
from trinity_dask.monitor import Monitor, load_metrics
from trinity_dask.monitor.history import metrics_path

CFG = MonitorConfig(sinks=["jsonl"])


def open_monitor(job_dir: Path, role: str = "trainer") -> Monitor:
    return Monitor(CFG, str(job_dir), role, "run", {})


def log_steps(monitor: Monitor, steps: range, value: float) -> None:
    for step in steps:
        monitor.log(step, {"loss": value, "other": step})


def test_metrics_of_one_step_and_role_are_one_row(tmp_path):
    explorer, trainer = open_monitor(tmp_path, "explorer"), open_monitor(tmp_path)
    explorer.log(1, {"reward": 0.5})
    trainer.log(1, {"loss": 2.0})
    explorer.log(1, {"eval/acc": 0.25, "reward": 0.75})
    frame = load_metrics(tmp_path)
    assert len(frame) == 2
    row = frame[frame["role"] == "explorer"].iloc[0]
    assert (row["reward"], row["eval/acc"]) == (0.75, 0.25)
    assert frame[frame["role"] == "trainer"].iloc[0]["loss"] == 2.0


def test_a_resumed_run_replaces_the_steps_it_went_back_behind(tmp_path):
    log_steps(open_monitor(tmp_path), range(1, 10), value=1.0)
    explorer = open_monitor(tmp_path, "explorer")
    log_steps(explorer, range(1, 12), value=5.0)
    log_steps(open_monitor(tmp_path), range(5, 7), value=2.0)
    frame = load_metrics(tmp_path)
    trainer = frame[frame["role"] == "trainer"]
    assert trainer["step"].tolist() == [1, 2, 3, 4, 5, 6]
    assert trainer["loss"].tolist() == [1.0] * 4 + [2.0] * 2
    assert trainer["incarnation"].tolist() == [1] * 4 + [2] * 2
    assert (frame["role"] == "explorer").sum() == 11


def test_a_line_cut_by_a_kill_is_skipped_counted_and_does_not_spoil_the_next(tmp_path):
    log_steps(open_monitor(tmp_path), range(1, 4), value=1.0)
    path = metrics_path(tmp_path)
    path.write_bytes(path.read_bytes()[:-9])
    frame = load_metrics(tmp_path)
    assert frame["step"].tolist() == [1, 2]
    assert frame.attrs["skipped_lines"] == 1
    log_steps(open_monitor(tmp_path), range(3, 5), value=2.0)
    frame = load_metrics(tmp_path)
    assert frame["step"].tolist() == [1, 2, 3, 4]
    assert frame["loss"].tolist() == [1.0, 1.0, 2.0, 2.0]
    assert frame.attrs["skipped_lines"] == 1


def test_stages_come_in_the_order_they_began(tmp_path):
    log_steps(open_monitor(tmp_path / "sft"), range(1, 3), value=1.0)
    log_steps(open_monitor(tmp_path / "grpo"), range(1, 3), value=2.0)
    frame = load_metrics(tmp_path)
    assert frame["stage"].tolist() == ["sft", "sft", "grpo", "grpo"]


def test_a_job_without_metrics_is_an_empty_table(tmp_path):
    frame = load_metrics(tmp_path)
    assert frame.empty
    assert {"stage", "role", "step", "incarnation", "time"} == set(frame.columns)
