"""The script of a driver's job: its options, its command, and what is refused before."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trinity_dask.cli import main
from trinity_dask.cli.submit import SCRIPT
from trinity_dask.cluster.slurm.allocation import TIME_OVER

JOB = ["+experiment=sort_digits_tiny", "engine=torch", "cluster=slurm"]


def test_the_dry_run_prints_the_script_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = [*JOB, f"checkpoint_root_dir={tmp_path}", "cluster.driver.walltime=2:00:00"]
    assert main(["submit", "--dry-run", *words, "cluster.partition=cpu", "name=a b"]) == 0
    script = capsys.readouterr().out
    directives = [line.split()[1] for line in script.splitlines() if line.startswith("#SBATCH")]
    assert {"--time=2:00:00", "--partition=cpu", "--requeue"} <= set(directives)
    assert "--signal=B:USR1@300" in directives
    command = next(line for line in script.splitlines() if line.endswith(" &"))
    assert shlex.split(command)[1:] == ["-m", "trinity_dask", "run", "$@", "&"]
    [given] = [shlex.split(line) for line in script.splitlines() if line.startswith("set -- ")]
    assert {"name=a b", "cluster.where=login"} <= set(given)
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_is_an_array_with_the_directories_of_a_multirun(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = [
        *JOB,
        f"checkpoint_root_dir={tmp_path}",
        "name=many",
        "seed=1,2",
        "monitor.curves=true,false",
    ]
    assert main(["submit", "--dry-run", "--multirun", "--at-once", "3", *words]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --array=0-3%3" in script
    assert "#SBATCH --job-name=many" in script
    path = tmp_path / "script.sh"
    start = script.index("case $SLURM_ARRAY_TASK_ID"), script.index("# made by the driver")
    path.write_text(script[slice(*start)] + '\nprintf "%s\\n" "$@"\n')
    seen = []
    for task in range(4):
        environment = {**os.environ, "SLURM_ARRAY_TASK_ID": str(task)}
        given = subprocess.check_output(["bash", path], env=environment, text=True).splitlines()
        assert {"cluster.where=login", JOB[0]} <= set(given)
        named = [word for word in given if word.startswith("name='many/")]
        seen.append(([w for w in given if w.startswith(("seed=", "monitor."))], named))
    assert seen == [
        (["seed=1", "monitor.curves=True"], ["name='many/0_seed=1,monitor.curves=True'"]),
        (["seed=1", "monitor.curves=False"], ["name='many/1_seed=1,monitor.curves=False'"]),
        (["seed=2", "monitor.curves=True"], ["name='many/2_seed=2,monitor.curves=True'"]),
        (["seed=2", "monitor.curves=False"], ["name='many/3_seed=2,monitor.curves=False'"]),
    ]


def test_a_sweep_with_a_value_that_cannot_run_submits_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = [*JOB, f"checkpoint_root_dir={tmp_path}", "algorithm.repeat_times=4,0"]
    assert main(["submit", "--dry-run", "-m", *words]) == 2
    assert "algorithm.repeat_times=0" in capsys.readouterr().err


def test_submit_is_for_slurm(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", *JOB[:2]]) == 2
    assert "submit is for cluster=slurm" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("driver_ends_with", "number", "requeued"),
    [
        (130, signal.SIGUSR1, True),
        (1, signal.SIGUSR1, False),
        (130, signal.SIGTERM, False),
        (130, None, True),  # by itself: its time is over
        (1, None, False),
    ],
)
def test_only_a_driver_that_saved_before_its_time_was_over_is_queued_again(
    tmp_path: Path, driver_ends_with: int, number: int | None, requeued: bool
) -> None:
    driver = (
        "import os, signal, sys, pathlib; signal.signal(signal.SIGTERM, lambda *_: "
        f"sys.exit({driver_ends_with})); pathlib.Path('up').touch(); "
    )
    over = f"pathlib.Path(os.environ['{TIME_OVER}']).touch(); sys.exit({driver_ends_with})"
    driver += over if number is None else "signal.pause()"
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/bash\necho $* > requeued\n")
    scontrol.chmod(0o755)
    path = tmp_path / "job.sh"
    command = shlex.join([sys.executable, "-c", driver])
    path.write_text(
        SCRIPT.format(
            directives="", prologue="", words="", command=command, script=path, time_over=TIME_OVER
        )
    )
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    job = subprocess.Popen(["bash", str(path)], cwd=tmp_path, env=environment)
    deadline = time.monotonic() + 60
    while not (tmp_path / "up").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    if number is not None:
        job.send_signal(number)
    assert job.wait(60) == driver_ends_with
    assert list(tmp_path.glob("*.over.*")) == [] or driver_ends_with == 1
    assert (tmp_path / "requeued").exists() == requeued
    if requeued:
        assert (tmp_path / "requeued").read_text() == "requeue 7\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_command_that_is_stopped_while_it_loads_ends_as_interrupted(number: int) -> None:
    words = ["validate", *JOB[:2]]
    command = subprocess.Popen(
        [sys.executable, "-m", "trinity_dask", *words], stdout=subprocess.DEVNULL
    )
    status = Path(f"/proc/{command.pid}/status")

    def catches() -> bool:
        line = next(x for x in status.read_text().splitlines() if x.startswith("SigCgt"))
        return bool(int(line.split()[1], 16) >> (number - 1) & 1)

    while not catches():
        assert command.poll() is None
        time.sleep(0.002)
    command.send_signal(number)
    assert command.wait(60) == 130
