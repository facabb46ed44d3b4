"""Jobs as the viewer reads them: kept, trained, filtered, failed, evaluated rows as they come."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from records_support import a_batch, a_job, commit, experiences, trained

import trinity_dask
from trinity_dask.records.writer import Recorder
from trinity_dask.view import job as module
from trinity_dask.view.job import Job
from trinity_dask.view.query import Query, QueryError


def read(job: Job) -> Job:
    """Everything there is, taken in."""
    job._next_look = 0.0
    job.look()
    while job.work(time.monotonic() + 1):
        pass
    return job


def found(job: Job, **asked: object) -> list[dict]:
    job.find(Query.parse(asked))
    while job.work(time.monotonic() + 1):
        pass
    page = job.page(Query.parse(asked), 0, 500)
    assert page["looked"] == 1.0
    return page["rows"]


def statuses(job: Job) -> list[str]:
    return [row["status"] for row in found(job)]


def test_every_row_of_a_job_is_there_as_the_records_tell_it(tmp_path: Path) -> None:
    cfg = a_job(tmp_path)
    rows = a_batch(cfg, 1)
    a_batch(cfg, 2)
    Recorder(cfg).train_step(7, 0, 1, trained(rows, -0.25), rows.num_rows)
    Recorder(cfg).evaluation(2, 3, "held out", experiences("eval"), 4)
    job = read(Job(str(tmp_path)))
    told = trinity_dask.rollouts(tmp_path).table().to_pylist()
    mine = found(job)
    assert len(mine) == len(told) == 20
    names = ["status", "step", "group", "run", "reward", "length", "train_step", "uses", "operator"]
    for mine_row, row in zip(mine, told, strict=True):
        assert [mine_row.get(n) for n in names] == [row[n] for n in names]
    assert job.errors == {}


def test_a_row_in_full_has_what_the_trainer_saw(tmp_path: Path) -> None:
    cfg = a_job(tmp_path)
    rows = a_batch(cfg, 1)
    Recorder(cfg).train_step(7, 0, 1, trained(rows, -0.25), rows.num_rows)
    job = read(Job(str(tmp_path)))
    (key,) = [row["key"] for row in found(job, where={"status": "trained", "group": "=1/1"})][:1]
    whole = job.whole(key)
    assert whole["parts"] == {"accuracy": 1.0}
    assert "difference" in whole["numbers"]
    tokens = job.tokens(key, 0, 99)
    assert tokens["ids"] == list(range(6))
    np.testing.assert_allclose(tokens["numbers"]["difference"], 0.25)
    assert tokens["numbers"]["version"] == [3, 4, -1, 3]
    assert "no tokenizer.json" in tokens["without"]


def test_failed_and_filtered_rows_say_why(tmp_path: Path) -> None:
    a_batch(a_job(tmp_path), 1)
    job = read(Job(str(tmp_path)))
    (failed,) = found(job, where={"status": "failed"})
    whole = job.whole(failed["key"])
    assert whole["error"] == "ValueError: no"
    assert whole["traceback"].startswith("Traceback")
    assert whole["earlier"] == ["WorkerLost: gone"]
    assert whole["tokens"] == 0
    assert {r["reason"] for r in found(job, where={"operator": "any"})} == {"reward 0 < 1"}


def test_what_a_live_job_adds_is_seen_and_rows_keep_their_names(tmp_path: Path) -> None:
    cfg = a_job(tmp_path)
    first = a_batch(cfg, 1)
    job = read(Job(str(tmp_path)))
    before = found(job)
    a_batch(cfg, 2)
    Recorder(cfg).train_step(1, 0, 1, trained(first, -1.0), first.num_rows)
    read(job)
    after = found(job)
    assert [row["key"] for row in after][: len(before)] == [row["key"] for row in before]
    assert len(after) == 2 * len(before)
    assert [row["status"] for row in after][:4] == ["trained"] * 4


def test_a_step_that_is_trained_again_counts_once(tmp_path: Path) -> None:
    cfg = a_job(tmp_path)
    rows = a_batch(cfg, 1)
    recorder = Recorder(cfg)
    recorder.train_step(3, 0, 1, trained(rows, -1.0), rows.num_rows)
    job = read(Job(str(tmp_path)))
    assert [row["uses"] for row in found(job, where={"status": "trained"})] == [1] * 4
    path = next((Path(recorder.url) / "trainer").glob("*.arrow"))
    stamp = path.stat().st_mtime_ns + 5_000_000_000
    recorder.train_step(3, 0, 1, trained(rows.slice(0, 2), -1.0), 2)
    import os

    os.utime(path, ns=(stamp, stamp))
    read(job)
    assert [row.get("uses") for row in found(job, where={"group": "/"})][:4] == [1, 1, None, None]
    recorder.train_step(5, 0, 1, trained(rows, -1.0), rows.num_rows)
    read(job)
    assert [row["uses"] for row in found(job, where={"status": "trained"})] == [2, 2, 1, 1]
    path.unlink()
    read(job)
    assert [row["uses"] for row in found(job, where={"status": "trained"})] == [1] * 4


def test_a_text_is_found_in_answers_errors_and_tracebacks(tmp_path: Path) -> None:
    a_batch(a_job(tmp_path), 1)
    job = read(Job(str(tmp_path)))
    assert {row["run"] for row in found(job, text="ANSWER 1")} == {1}
    assert [row["status"] for row in found(job, text="line 3")] == ["failed"]
    assert [row["status"] for row in found(job, text="/^ValueError: n.$/")] == ["failed"]
    assert found(job, text="nowhere to be seen") == []
    with pytest.raises(QueryError, match="no regular expression"):
        job.find(Query(text="/(/"))


def test_a_search_goes_on_in_what_comes_later(tmp_path: Path) -> None:
    cfg = a_job(tmp_path)
    a_batch(cfg, 1)
    job = read(Job(str(tmp_path)))
    n = len(found(job, text="answer"))
    a_batch(cfg, 2)
    read(job)
    assert len(found(job, text="answer")) == 2 * n


def test_rows_of_a_task_beside_each_other_best_first(tmp_path: Path) -> None:
    commit(a_job(tmp_path), 1, experiences(1, n_tasks=3, n_runs=4), step=1)
    job = read(Job(str(tmp_path)))
    key = found(job, where={"group": "=1/2"})[0]["key"]
    rewards = [job.whole(name)["reward"] for name in job.group(key)]
    assert rewards == [3.0, 2.0, 1.0, 0.0]


def test_rows_of_a_prompt_are_found_by_its_text_or_its_tokens(tmp_path: Path) -> None:
    table = experiences(1, n_tasks=2, n_runs=2)
    at = table.column_names.index("prompt_text")
    texts = pa.array(["a", "b", "a", None])
    commit(a_job(tmp_path), 1, table.set_column(at, table.schema.field(at), texts), step=1)
    job = read(Job(str(tmp_path)))
    keys = [row["key"] for row in found(job)]

    def same(key: str) -> list[int]:
        query = Query(same=job.same(key))
        job.find(query)
        while job.work(time.monotonic() + 1):
            pass
        return job.find(query)[0].tolist()

    assert same(keys[0]) == [0, 2]
    assert same(keys[3]) == [3]


def test_a_file_that_cannot_be_read_is_named_and_the_others_are_there(tmp_path: Path) -> None:
    cfg = a_job(tmp_path)
    a_batch(cfg, 1)
    a_batch(cfg, 2)
    broken = sorted((tmp_path / "buffer" / "experience" / "data").glob("1-*.arrow"))[0]
    broken.write_bytes(broken.read_bytes()[:100])
    job = read(Job(str(tmp_path)))
    assert [name.rpartition("/")[2] for name in job.errors] == [broken.name]
    assert statuses(job).count("kept") == 4


def test_files_that_are_gone_take_their_rows_with_them(tmp_path: Path) -> None:
    cfg = a_job(tmp_path)
    Recorder(cfg).evaluation(1, 1, "a", experiences("e"), 4)
    Recorder(cfg).evaluation(2, 1, "a", experiences("e"), 4)
    job = read(Job(str(tmp_path)))
    key = found(job)[0]["key"]
    next((Path(Recorder(cfg).url) / "eval").glob("1.*.arrow")).unlink()
    read(job)
    assert [row["step"] for row in found(job)] == [2] * 4
    with pytest.raises(QueryError, match="no row"):
        job.whole(key)


def test_no_job_is_told(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="holds no run"):
        Job(str(tmp_path)).look()


def test_looking_for_files_takes_a_small_share_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_batch(a_job(tmp_path), 1)
    job, looks = Job(str(tmp_path)), []
    monkeypatch.setattr(module.Source, "parts", lambda self: looks.append(1) or [])
    monkeypatch.setattr(module, "REFRESH_S", 3600.0)
    for _ in range(50):
        job.look()
    assert len(looks) == 1
