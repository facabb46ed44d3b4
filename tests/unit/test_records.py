"""Records: written within bounds, counted, read as one table with the rows that were kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from records_support import a_batch, a_job, experiences, filtered, trained

import trinity_dask
from trinity_dask.config.schema import Config
from trinity_dask.records.layout import FILTERED, Source
from trinity_dask.records.writer import Recorder


@pytest.fixture
def cfg(tmp_path: Path) -> Config:
    return a_job(tmp_path)


def test_every_row_of_a_job_is_one_row_of_the_index(cfg: Config) -> None:
    recorder, rows = Recorder(cfg), a_batch(cfg, 1)
    a_batch(cfg, 2)
    recorder.evaluation(2, 7, "held/out", experiences("2/held/out", 1), 9)
    recorder.train_step(1, 0, 1, trained(rows, -0.25), 99)
    found = trinity_dask.rollouts(cfg.job_dir)
    table = found.table()
    counts = dict(table.group_by("status").aggregate([("row", "count")]).to_pandas().values)
    assert counts == {"trained": 4, "kept": 4, "filtered": 6, "failed": 2, "eval": 2}
    assert len(set(table["id"].drop_null().to_pylist())) == 16
    one = found.where(step=1, group="1/1", status="trained").table().to_pylist()[1]
    assert (one["run"], one["reward"], one["parts"]) == (1, 1.0, '{"accuracy":1.0}')
    assert (one["length"], one["finish"], one["explorer"]) == (4, "stop", "ex")
    assert (one["version_min"], one["version_max"]) == (3, 4)
    assert (one["train_step"], one["uses"]) == (1, 1)
    (bad,) = found.where(step=2, status="failed").table(["error", "earlier", "group"]).to_pylist()
    assert bad == {"error": "ValueError: no", "earlier": ["WorkerLost: gone"], "group": "2/5"}
    dropped = found.where(step=2, status="filtered").to_pandas(["operator", "response_text"])
    assert dropped.values.tolist() == [["reward_filter", f"answer {run}"] for run in range(3)]
    (answer, _) = found.where(status="eval").table(["eval", "step", "tokens"]).to_pylist()
    assert answer == {"eval": "held/out", "step": 2, "tokens": [0, 1, 2, 3, 4, 5]}
    assert found.accounts() == {
        "filtered": {"recorded": 6, "left_out": 0, "counted": 6},
        "failed": {"recorded": 2, "left_out": 0, "counted": 2},
    }


def test_a_row_that_is_trained_twice_is_one_row(cfg: Config) -> None:
    recorder, rows = Recorder(cfg), a_batch(cfg, 1)
    recorder.train_step(1, 0, 1, trained(rows, -0.25), 99)
    recorder.train_step(2, 0, 1, trained(rows.slice(0, 1), -0.125), 99)
    names = ["train_step", "uses", "train_logprobs", "train_entropy", "train_mask"]
    found = trinity_dask.rollouts(cfg.job_dir).where(status="trained").table(names).to_pylist()
    assert [(r["train_step"], r["uses"], r["train_logprobs"][0]) for r in found] == [
        (2, 2, -0.125),
        *[(1, 1, -0.25)] * 3,
    ]
    assert all(r["train_entropy"] is None and r["train_mask"] == [True] * 4 for r in found)


def test_a_step_that_is_done_again_is_there_once(cfg: Config) -> None:
    """By as many ranks as before, or by fewer."""
    recorder, rows = Recorder(cfg), a_batch(cfg, 1)
    for rank in range(2):
        recorder.train_step(1, rank, 2, trained(rows.slice(2 * rank, 2), -1.0), 99)
    found = trinity_dask.rollouts(cfg.job_dir)
    assert found.table(["uses"])["uses"].drop_null().to_pylist() == [1] * 4
    recorder.train_step(1, 0, 1, trained(rows, -2.0), 99)
    again = found.where(status="trained").table(["uses", "train_logprobs"]).to_pylist()
    assert again == [{"uses": 1, "train_logprobs": [-2.0] * 4}] * 4


def test_a_batch_that_is_not_committed_has_no_records(cfg: Config) -> None:
    """And when another writer's commit won, only that one's exist; the rest is swept."""
    recorder = Recorder(cfg)
    recorder.of_batch(FILTERED, 1, lambda: filtered(1), 3)  # killed before its commit
    assert len(trinity_dask.rollouts(cfg.job_dir)) == 0
    a_batch(cfg, 1)
    recorder.of_batch(FILTERED, 2, lambda: filtered(2), 3)  # another explorer's, at this moment
    found = trinity_dask.rollouts(cfg.job_dir)
    assert len(found.where(status="filtered")) == 3
    store = Source.of(cfg).store
    assert store is not None
    assert recorder.sweep(store.manifests()) == 1
    assert len(list(Path(recorder.url, FILTERED).iterdir())) == 2
    assert len(found.where(status="filtered")) == 3


def test_what_is_beyond_a_bound_is_counted(cfg: Config) -> None:
    cfg.monitor.record_mb = 0.001  # MB: less than three rows
    a_batch(cfg, 1, n_filtered=40, n_failed=0)
    found = trinity_dask.rollouts(cfg.job_dir)
    written = len(found.where(status="filtered"))
    assert 0 < written < 40
    assert found.left_out() == {"filtered": 40 - written, "failed": 0}
    assert found.accounts()["filtered"]["counted"] == 40


def test_a_record_that_cannot_be_written_is_left_out(
    cfg: Config, caplog: pytest.LogCaptureFixture
) -> None:
    Path(cfg.job_dir or "", "buffer").mkdir(exist_ok=True)
    Path(cfg.job_dir or "", "buffer", "records").write_text("in the way")
    entry = Recorder(cfg).of_batch(FILTERED, 1, lambda: filtered(1), 3)
    assert (entry.path, entry.rows, entry.left_out) == ("", 0, 3)
    assert "3 rows are not recorded" in caplog.text


def test_what_is_asked_for_wrongly_is_told(cfg: Config, tmp_path: Path) -> None:
    a_batch(cfg, 1)
    with pytest.raises(ValueError, match=r"no column rewrd; there are status.*train_logprobs"):
        trinity_dask.rollouts(cfg.job_dir).table(["rewrd"])
    with pytest.raises(ValueError, match="status lost is unknown; use trained, kept"):
        trinity_dask.rollouts(cfg.job_dir, status="lost")
    with pytest.raises(LookupError, match="has no stage 'sft'; it has rft"):
        trinity_dask.rollouts(cfg.job_dir, stage="sft")
    with pytest.raises(LookupError, match="holds no run"):
        trinity_dask.rollouts(tmp_path / "nowhere")
