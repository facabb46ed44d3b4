"""Checkpoints: complete or not there, whatever killed the save."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from trinity_dask.trainer.checkpoints.checkpoint import (
    MARKER,
    STATE,
    CheckpointGone,
    complete_checkpoints,
    held,
    is_complete,
    latest_complete,
    latest_hf_export,
    prune,
    read_state,
    step_dir,
    write_checkpoint,
)

POINTS = ("created", "filled", "synced", "marked", "retired", "renamed", "pruned")


def fill(directory: Path, content: str = "weights") -> None:
    (directory / "actor").mkdir()
    (directory / "actor" / "model.safetensors").write_text(content)


def save(job, step, content="weights", **options):
    return write_checkpoint(job, step, {"step": step}, lambda d: fill(d, content), **options)


def test_a_checkpoint_is_complete_and_keeps_its_state(tmp_path):
    path = save(tmp_path, 3)
    assert path == step_dir(tmp_path, 3)
    assert is_complete(path)
    assert read_state(path) == {"step": 3}
    assert latest_complete(tmp_path) == path


def test_there_is_none_in_an_empty_or_absent_job(tmp_path):
    assert latest_complete(tmp_path) is None
    assert latest_complete(tmp_path / "nowhere") is None
    assert latest_hf_export(tmp_path) is None


@pytest.mark.parametrize(
    ("point", "again"),
    # nothing is retired when the step is new
    [(point, again) for point in POINTS for again in (False, True) if again or point != "retired"],
)
def test_fault_39_a_kill_at_every_point_leaves_the_last_complete_one(tmp_path, point, again):
    """A real process dies by SIGKILL inside the save; the next one must find its way."""
    save(tmp_path, 2, "old")
    new_step = 2 if again else 4
    script = textwrap.dedent(
        f"""
        import os, signal
        from pathlib import Path
        from trinity_dask.trainer.checkpoints.checkpoint import write_checkpoint

        def fill(directory):
            (directory / "actor").mkdir()
            (directory / "actor" / "model.safetensors").write_text("new")

        def reached(name):
            if name == {point!r}:
                os.kill(os.getpid(), signal.SIGKILL)

        write_checkpoint({str(tmp_path)!r}, {new_step}, {{"step": {new_step}}}, fill, 1, reached)
        """
    )
    killed = subprocess.run([sys.executable, "-c", script], timeout=120, check=False)
    assert killed.returncode == -9
    latest = latest_complete(tmp_path)
    content = (latest / "actor" / "model.safetensors").read_text()
    arrived = POINTS.index(point) >= POINTS.index("renamed")
    assert content == ("new" if arrived else "old")
    # and the next save works on what the killed one left
    save(tmp_path, 6, "after", keep=1)
    assert [p.name for p in complete_checkpoints(tmp_path)] == ["global_step_6"]
    left = {p.name for p in tmp_path.iterdir()}
    assert left <= {"global_step_6", "global_step_2"}


@pytest.mark.parametrize("damage", ["truncate", "remove", "alter", "no marker", "half a marker"])
def test_fault_39_a_damaged_checkpoint_is_skipped(tmp_path, damage, caplog):
    good, bad = save(tmp_path, 1), save(tmp_path, 9)
    weights, marker = bad / "actor" / "model.safetensors", bad / MARKER
    if damage == "truncate":
        os.truncate(weights, 3)
    elif damage == "remove":
        (bad / STATE).unlink()
    elif damage == "alter":
        weights.write_text("WEIGHTS")
    elif damage == "no marker":
        marker.unlink()
    else:
        os.truncate(marker, marker.stat().st_size // 2)
    assert latest_complete(tmp_path) == good
    assert "global_step_9" in caplog.text


def test_a_foreign_marker_is_no_checkpoint(tmp_path):
    path = save(tmp_path, 1)
    for content in ("[]", "{}", '{"files": 3}', '{"files": {"x": {}}}', "nonsense"):
        (path / MARKER).write_text(content)
        assert not is_complete(path)


def test_steps_are_ordered_as_numbers(tmp_path):
    for step in (9, 10, 100):
        save(tmp_path, step)
    (tmp_path / "global_step_x").mkdir()
    (tmp_path / "global_step_7.bak").mkdir()
    assert [int(p.name.split("_")[-1]) for p in complete_checkpoints(tmp_path)] == [9, 10, 100]


def test_retention_counts_what_is_on_disk(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)  # an earlier run that kept all
    (tmp_path / ".global_step_4.0123abcd.partial").mkdir()
    save(tmp_path, 4, keep=2)
    assert [p.name for p in complete_checkpoints(tmp_path)] == ["global_step_3", "global_step_4"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["global_step_3", "global_step_4"]
    prune(tmp_path, 0)
    assert len(complete_checkpoints(tmp_path)) == 2


def test_what_was_just_written_stays_beside_the_higher_steps_of_an_abandoned_run(tmp_path):
    save(tmp_path, 60)
    save(tmp_path, 2, keep=1)
    assert step_dir(tmp_path, 2) in complete_checkpoints(tmp_path)


def test_a_reader_that_was_killed_holds_nothing(tmp_path):
    save(tmp_path, 1)
    code = """
        import sys, time
        from pathlib import Path
        from trinity_dask.trainer.checkpoints.checkpoint import held
        with held(Path(sys.argv[1])):
            print("held", flush=True)
            time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(step_dir(tmp_path, 1))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout.readline() == "held\n"
        save(tmp_path, 2, keep=1)
        assert is_complete(step_dir(tmp_path, 1))
        reader.kill()
    save(tmp_path, 3, keep=1)
    assert complete_checkpoints(tmp_path) == [step_dir(tmp_path, 3)]
    with pytest.raises(CheckpointGone), held(step_dir(tmp_path, 1)):
        pass


def test_a_full_disk_leaves_the_earlier_checkpoint_and_no_litter(tmp_path):
    save(tmp_path, 1)

    def full(directory):
        fill(directory)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_checkpoint(tmp_path, 2, {}, full, keep=1)
    assert [p.name for p in tmp_path.iterdir()] == ["global_step_1"]
    assert latest_complete(tmp_path) is not None


def test_the_newest_export_is_found_behind_checkpoints_without_one(tmp_path):
    def with_export(directory):
        fill(directory)
        (directory / "huggingface").mkdir()
        (directory / "huggingface" / "config.json").write_text("{}")

    exported = write_checkpoint(tmp_path, 1, {}, with_export)
    save(tmp_path, 2)
    assert latest_hf_export(tmp_path) == exported / "huggingface"


def test_state_must_be_json_before_anything_is_visible(tmp_path):
    with pytest.raises(TypeError):
        write_checkpoint(tmp_path, 1, {"x": object()}, fill)
    assert latest_complete(tmp_path) is None
    assert json.loads("[]") == list(tmp_path.iterdir())
