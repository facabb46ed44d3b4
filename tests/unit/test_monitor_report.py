"""The report and the curves of a finished two-stage job."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from trinity_dask.config.schema import MonitorConfig
from trinity_dask.monitor import Monitor
from trinity_dask.monitor.report import bench_table, build_report, print_report, write_curves

CFG = MonitorConfig(sinks=["jsonl"])


@pytest.fixture
def job(tmp_path: Path) -> Path:
    sft = Monitor(CFG, str(tmp_path / "sft"), "trainer")
    for step in range(1, 11):
        sft.log(step, {"actor/sft_loss": 1.0 / step, "actor/final_loss": 1.0 / step})
    explorer = Monitor(CFG, str(tmp_path / "grpo"), "explorer")
    for step in range(1, 21):
        explorer.log(step, {"rollout/reward/mean": step / 20, "rollout/time/mean": 1.0})
    for step, value in ((0, 0.5), (10, 0.75), (20, 1.0)):
        explorer.log(step, {"eval/sort/accuracy": value, "eval/time/x": 3.0})
    explorer.log(
        20, {"eval/sort/failed_runs": 0, "eval/sort/std@1": 1, "eval/sort/model_version": 3}
    )
    for step in (2, 10, 9):
        (tmp_path / f"grpo/global_step_{step}/huggingface").mkdir(parents=True)
    (tmp_path / "grpo/global_step_11").mkdir()
    (tmp_path / "grpo/config.yaml").write_text("mode: both\n")
    return tmp_path


def test_before_and_after_are_the_first_and_last_values_with_their_steps(job):
    changes = build_report(job).changes
    assert [(c.stage, c.metric, c.first_step, c.before, c.last_step, c.after) for c in changes] == [
        ("sft", "actor/sft_loss", 1, 1.0, 10, 0.1),
        ("grpo", "eval/sort/accuracy", 0, 0.5, 20, 1.0),
        ("grpo", "rollout/reward/mean", 1, 0.05, 20, 1.0),
    ]


def test_preferences_and_a_teacher_show_progress_without_a_reward(tmp_path):
    monitor = Monitor(CFG, str(tmp_path), "trainer")
    shown = ("actor/dpo_loss", "actor/accuracy_mean", "advantage/kl/mean")
    for step in (1, 2):
        monitor.log(step, dict.fromkeys(shown, 1.0 / step) | {"actor/final_loss": 1.0})
    changes = build_report(tmp_path).changes
    assert {(c.metric, c.before, c.after) for c in changes} == {(n, 1.0, 0.5) for n in shown}


def test_places_exist_and_name_the_newest_checkpoint_and_model(job):
    places = dict(build_report(job).places)
    assert all(Path(path).exists() for path in places.values())
    assert places["grpo: resolved configuration"].endswith("grpo/config.yaml")
    assert places["grpo: last checkpoint"].endswith("global_step_11")
    assert places["grpo: model (Hugging Face)"].endswith("global_step_10/huggingface")
    assert next(iter(places)) == "sft: metrics (JSONL)"


def test_the_printed_report_shows_the_change(job):
    console = Console(file=io.StringIO(), width=200)
    print_report(build_report(job), console)
    text = console.file.getvalue()
    assert "0.500" in text
    assert "1.000" in text
    assert "+0.500" in text
    assert "0 → 20" in text


def test_an_empty_directory_gives_an_empty_report(tmp_path):
    report = build_report(tmp_path)
    assert report.changes == ()
    assert report.places == ()
    assert write_curves(tmp_path) is None


def test_curves_are_a_png_of_all_stages(job):
    path = write_curves(job)
    assert path == job / "curves.png"
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert path.stat().st_size > 10_000
    assert "curves.png" in dict(build_report(job).places)["curves"]


def test_a_benchmarks_table_has_the_results_of_all_its_calls(job):
    log = Monitor(CFG, str(job / "grpo"), "benchmark")
    log.log(20, {"bench/sort/accuracy": 1.0})  # the newest checkpoint alone
    log = Monitor(CFG, str(job / "grpo"), "benchmark")
    log.log(0, {"bench/sort/accuracy": 0.5})  # then all: the metrics go back behind step 20
    results = {
        "20": {"bench/sort/accuracy": 1.0, "bench/sort/time/mean": 3.0},
        "0": {"bench/sort/accuracy": 0.5},
        "10": {"bench/sort/accuracy": float("nan")},
    }
    (job / "grpo/benchmark_meta.json").write_text(json.dumps({"results": results}))
    (job / "sft/benchmark_meta.json").write_text(json.dumps({"results": {"0": {"bench/b": 0.25}}}))
    table = bench_table(job)
    assert [list(column.cells) for column in table.columns] == [
        ["sft", "grpo", "grpo", "grpo"],
        ["0", "0", "10", "20"],
        ["0.250", "-", "-", "-"],
        ["-", "0.500", "-", "1.000"],
    ]
    assert bench_table(job / "grpo").row_count == 3
    assert bench_table(job / "log") is None
