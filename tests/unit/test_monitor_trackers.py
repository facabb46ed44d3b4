"""The real trackers, offline."""

from pathlib import Path

import pytest

from trinity_dask.config.schema import MonitorConfig
from trinity_dask.monitor import Monitor
from trinity_dask.monitor.trackers import _flatten, _mlflow_name

CONFIG = {"project": "demo", "model": {"dtype": "float32"}, "stages": []}


def run_twice(tmp_path: Path, sink: str, args: dict) -> None:
    """A role that logs steps 1-3, and its second incarnation, which goes back to step 2."""
    for steps, value in (((1, 2, 3), 1.0), ((2, 3), 9.0)):
        cfg = MonitorConfig(sinks=["jsonl", sink], sink_args={sink: args})
        monitor = Monitor(cfg, str(tmp_path / "job"), "trainer", "run", CONFIG)
        for step in steps:
            monitor.log(step, {"eval/acc/mean@4": value})
        monitor.log_table("samples", [{"text": "a", "ids": [1]}, {"reward": 0.5}], 3)
        assert sink in monitor.active_sinks
        monitor.close()


@pytest.fixture(autouse=True)
def _no_warning(caplog):
    yield
    assert "failed" not in caplog.text


def test_tensorboard_shows_the_resumed_values(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_twice(tmp_path, "tensorboard", {})
    events = EventAccumulator(str(tmp_path / "job/monitor/tensorboard/trainer"))
    events.Reload()
    values = {event.step: event.value for event in events.Scalars("eval/acc/mean@4")}
    assert values == {1: 1.0, 2: 9.0, 3: 9.0}


def test_wandb_offline_writes_one_run_per_incarnation_with_one_id(tmp_path):
    pytest.importorskip("wandb")
    run_twice(tmp_path, "wandb", {"mode": "offline"})
    runs = list((tmp_path / "job/monitor/wandb").glob("offline-run-*/run-*.wandb"))
    assert runs
    assert len({path.name for path in runs}) == 1
    assert (tmp_path / "job/monitor/run_id").read_text() in runs[0].name


def test_mlflow_continues_the_same_run(tmp_path, monkeypatch):
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    run_twice(tmp_path, "mlflow", {"tracking_uri": uri})
    client = tracking.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("demo")
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "eval/acc/mean_at_4")
    assert [(point.step, point.value) for point in history] == [
        (1, 1.0),
        (2, 1.0),
        (3, 1.0),
        (2, 9.0),
        (3, 9.0),
    ]
    assert run.data.params["model.dtype"] == "float32"


def test_a_name_that_mlflow_refuses_is_spelled_otherwise():
    assert _mlflow_name("eval/acc/best@4 (x)") == "eval/acc/best_at_4 _x_"


def test_nested_configuration_becomes_dotted_keys():
    assert _flatten({"a": {"b": {"c": 1}, "d": []}, "e": {}}) == [
        ("a.b.c", 1),
        ("a.d", []),
        ("e", {}),
    ]
