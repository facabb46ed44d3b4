"""``trinity-dask samples``: every kind of row, and text that cannot do anything."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from records_support import a_batch, a_job, experiences
from rich.console import Console

from trinity_dask.cli import main
from trinity_dask.cli.samples import readable
from trinity_dask.records.writer import Recorder
from trinity_dask.run.trace import visible


@pytest.fixture
def job(tmp_path: Path) -> str:
    cfg = a_job(tmp_path)
    a_batch(cfg, 1)
    a_batch(cfg, 2)
    Recorder(cfg).evaluation(1, 7, "heldout", experiences("1/heldout", 3, 1), 3)
    return str(tmp_path)


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert main(["samples", *words]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_rows_of_every_kind_are_shown(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert [row["step"] for row in printed(capsys, job)] == [2] * 4
    assert [row["reward"] for row in printed(capsys, job, "--group", "1/1", "--step", "1")] == [
        0,
        1,
    ]
    (failed,) = printed(capsys, job, "--failed")
    assert (failed["group"], failed["error"]) == ("2/5", "ValueError: no")
    assert (failed["earlier"], failed["attempts"]) == (["WorkerLost: gone"], 2)
    filtered = printed(capsys, job, "--filtered", "--step", "1", "-n", "1")
    assert [(row["operator"], row["reason"]) for row in filtered] == [
        ("reward_filter", "reward 0 < 1")
    ]
    answers = printed(capsys, job, "--eval")
    assert [(row["step"], row["eval"], row["version_max"]) for row in answers] == [
        (1, "heldout", 4)
    ] * 3


def test_a_step_without_rows_is_told(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["samples", job, "--step", "99"]) == 1
    assert "no committed batch 99" in capsys.readouterr().err
    assert main(["samples", job, "--step", "2", "--eval"]) == 1
    assert "no evaluation at step 2" in capsys.readouterr().err


def test_nothing_in_a_text_is_markup_or_moves_the_terminal() -> None:
    text = "[red]x[/red] [link=file:///]y[/link] \x1b[2J\x1b]0;t\x07 \u202eabc\r\n\tz \ud800"
    shown = io.StringIO()
    Console(file=shown, force_terminal=True, width=200).print(readable({"response_text": text}))
    said = shown.getvalue()
    assert "[red]x[/red] [link=file:///]y[/link]" in said
    assert r"\x1b[2J\x1b]0;t\x07 \u202eabc\r" in said
    assert "\x1b[2J" not in said
    assert not set("\x07\u202e\r") & set(said)
    assert visible("ä\n\t你🙂") == "ä\n\t你🙂"


def test_tables_of_records_hold_any_text() -> None:
    """A message may quote what is no Unicode."""
    from trinity_dask.explorer.schedule.tasks import FailedRun, RunError
    from trinity_dask.records.batch import failed_table

    run = FailedRun(1, 0, None, 1, RunError("E", "a\ud800b", "t\udcff"))
    table = failed_table([run])
    assert table["error"].to_pylist() == ["E: a\\ud800b"]
    assert table.schema.field("run").type == pa.int64()
