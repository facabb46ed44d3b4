"""What the driver shows: only what is in the status, only when it changed."""

import io
import time
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from trinity_dask.monitor.progress import Progress, duration, number, panel, plain_line

STATUS = {
    "state": "running",
    "stage": "grpo",
    "stage_index": 1,
    "n_stages": 2,
    "mode": "both",
    "step": 7,
    "total_steps": 60,
    "explorer_step": 8,
    "model_version": 7,
    "reward": 0.25,
    "eval": {"sort_digits/accuracy": 0.74},
    "tokens_per_s": 12345.6,
    "in_flight": 64,
    "queue_batches": 1,
    "queue_rows": 2048,
    "accounts": {"scheduled": 100, "failed": 3},
    "failures": {"reward raised": 3},
    "workers": {"rollout": 1},
    "message": "",
    "elapsed_s": 75.2,
    "version": 1,
}


def show(status) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(panel(status))
    return console.file.getvalue()


def test_plain_mode_prints_a_line_per_change_and_none_without():
    stream = io.StringIO()
    with closing(Progress("auto", stream)) as progress:
        progress.update(STATUS)
        progress.update({**STATUS, "version": 2, "in_flight": 3, "tokens_per_s": 1.0})
        progress.update({**STATUS, "step": 8})
        progress.update({**STATUS, "step": 8, "state": "failed", "message": "no space left"})
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert "step 7/60" in lines[0]
    assert "grpo (2/2)" in lines[0]
    assert "12,346" in lines[0]
    assert lines[2].endswith("no space left")
    assert "failed" in lines[2]


def test_the_live_picture_shows_who_is_at_what_and_who_is_late():
    runner = {
        "runner_id": 3,
        "worker": "runner-0",
        "workflow_id": "12/5/0",
        "model_version": 7,
        "repeat_cnt": 8,
        "begin_time": time.time() - 75,
        "terminate_time": None,
        "phase": "calling a tool",
    }
    text = show({**STATUS, "runners": [runner], "late_workers": {"rollout-1": 3.2}})
    (line,) = [line for line in text.splitlines() if "12/5/0" in line]
    assert line.split()[:6] == ["3", "runner-0", "12/5/0", "7", "8", "1:15"]
    assert "phase calling a tool" in line
    assert "rollout-1 3.2" in text
    assert "12/5/0" not in plain_line({**STATUS, "runners": [runner]})


def test_text_of_others_is_printed_as_it_is():
    stream = io.StringIO()
    with closing(Progress("plain", stream)) as progress:
        progress.update({**STATUS, "message": "reward [bold]x[/bold] [/oops]"})
    assert "[bold]x[/bold] [/oops]" in stream.getvalue()


def test_live_mode_shows_the_figures_and_leaves_the_last_picture():
    stream = io.StringIO()
    progress = Progress("live", stream)
    progress.update(STATUS)
    progress.update({**STATUS, "step": 8, "reward": 0.5, "message": "sync [x"})
    progress.close()
    progress.close()
    text = stream.getvalue()
    assert "step 8/60" in text
    assert "\n" in text[text.rindex("━") : text.rindex("explorer step")]
    assert "sync [x" in text


def test_the_picture_names_everything_the_status_knows():
    text = show(STATUS)
    for part in ("grpo (2/2)", "0.25", "0.74", "64", "2,048 rows", "failed 3", "reward raised 3"):
        assert part in text


def test_off_prints_nothing_and_a_wrong_mode_says_what_there_is():
    stream = io.StringIO()
    Progress("off", stream).update(STATUS)
    assert stream.getvalue() == ""
    with pytest.raises(ValueError, match=r"auto.*live.*plain.*off"):
        Progress("fancy")


@given(st.sets(st.sampled_from(sorted(STATUS))), st.booleans())
def test_any_part_may_be_unknown(known, as_none):
    status = {key: STATUS[key] for key in known}
    if as_none:
        status = {key: status.get(key) for key in STATUS}
    assert isinstance(plain_line(status), str)
    assert isinstance(show(status), str)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (3, "3"),
        (2048, "2,048"),
        (0.12345, "0.1235"),
        (12345.6, "12,346"),
        (True, "True"),
    ],
)
def test_number(value, text):
    assert number(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(None, "-"), (75.9, "1:15"), (3700, "1:01:40")])
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_without_a_trainer_the_explorers_steps_are_lines():
    stream = io.StringIO()
    alone = {"state": "running", "mode": "explore", "step": None, "explorer_step": 1}
    with closing(Progress("plain", stream)) as progress:
        for step in (1, 2, 2, 3):
            progress.update({**alone, "explorer_step": step})
    lines = stream.getvalue().splitlines()
    assert [f"explorer step {n}" in line for n, line in enumerate(lines, 1)] == [True] * 3


def test_the_dashboard_is_named_once_when_it_is_there():
    stream = io.StringIO()
    progress = Progress("plain", stream)
    status = {"state": "starting", "message": "starting the cluster"}
    progress.update({**status, "dashboard": None})
    link = "http://127.0.0.1:8787/trinity"
    for step in (1, 2):
        progress.update({**status, "dashboard": link, "step": step})
    assert stream.getvalue().count(f"dashboard: {link}\n") == 1
    assert link in show({**status, "dashboard": link})
