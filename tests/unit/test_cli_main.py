"""The commands themselves: usage, exit codes, and that nothing heavy is loaded too early."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from trinity_dask import __version__
from trinity_dask.cli import COMMANDS, main
from trinity_dask.config.paths import groups

ROOT = Path(__file__).parents[2]
DEMO = "+experiment=sort_digits"


def errors(capsys) -> list[str]:
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("args", [[], ["-h"], ["--help"], ["help"]])
def test_without_a_command_the_usage_lists_them(capsys, args):
    assert main(args) == 0
    out = capsys.readouterr().out
    assert all(re.search(rf"^  {name} ", out, re.MULTILINE) for name in COMMANDS)


def test_the_version_is_the_packages(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"trinity-dask {__version__}\n"


def test_an_unknown_command_names_the_nearest(capsys):
    assert main(["rnu"]) == 2
    assert errors(capsys) == ["error: unknown command 'rnu'; did you mean 'run'?"]


def test_help_of_run_lists_every_group_and_option(capsys):
    assert main(["run", "--help"]) == 0
    out = capsys.readouterr().out
    for group, options in groups().items():
        assert re.search(rf"^  \+?{group} +{', '.join(options)}$", out, re.MULTILINE)
    assert out.count("trinity-dask run +experiment=sort_digits") >= 3


def test_help_is_fast_and_loads_neither_torch_nor_dask():
    code = (
        "import sys; from trinity_dask.cli import main; main(['run', '--help']); "
        "sys.exit([name for name in ('torch', 'dask', 'pandas') if name in sys.modules] or 0)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    # seconds of processor, not of the wall: a busy machine does not make the command slow
    assert after.ru_utime - before.ru_utime < 2.0


def test_the_package_is_a_command():
    done = subprocess.run(
        [sys.executable, "-m", "trinity_dask", "run", DEMO, "buffer.batch_sise=3"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )
    assert done.returncode == 2
    wanted = "error: unknown key 'buffer.batch_sise'; did you mean 'buffer.batch_size'?\n"
    assert done.stderr == wanted
    assert done.stdout == ""


def test_doctor_says_what_is_there(capsys, tmp_path):
    assert main(["doctor", "--dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "cores, load" in out
    assert "per durable write" in out
    assert list(tmp_path.iterdir()) == []


def test_doctor_warns_where_every_process_would_compile_torch(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))  # nothing is compiled there
    assert main(["doctor", "--dir", str(tmp_path)]) == 0
    assert "torch has no bytecode" in capsys.readouterr().out
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert main(["doctor", "--dir", str(tmp_path)]) == 0
    assert "has no bytecode" not in capsys.readouterr().out


def test_doctor_fails_where_nothing_can_be_written(capsys, tmp_path):
    assert main(["doctor", "--dir", str(tmp_path / "gone")]) == 1
    assert "missing" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["status", "samples"])
def test_a_directory_without_a_run_is_told(capsys, tmp_path, command):
    assert main([command, str(tmp_path)]) == 1
    assert errors(capsys) == [
        f"error: {tmp_path} holds no run: no config.yaml in it or directly below it"
    ]


def test_a_worker_needs_a_group_and_an_index(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["worker", "tcp://127.0.0.1:1", "--group", "rolout"])
    assert ended.value.code == 2
    assert main(["worker", "tcp://127.0.0.1:1", "--group", "rollout", "--index", "-1"]) == 2
