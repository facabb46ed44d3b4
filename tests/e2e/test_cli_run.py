"""``trinity-dask run``: what is refused before anything starts, and what a job leaves."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from trinity_dask.cli import main
from trinity_dask.cli import run as run_command
from trinity_dask.cli.jobs import best_column, final_score
from trinity_dask.cli.run import MAX_LABEL, job_label
from trinity_dask.config import Config
from trinity_dask.run import Run

TINY = "+experiment=sort_digits_tiny"
# the smallest sound job: one stage
ROWS = (
    "algorithm=sft",
    "model.model_path=m",
    "buffer.train_batch_size=4",
    "buffer.trainer_input.experience_buffer.path=rows.jsonl",
)


def errors(capsys) -> list[str]:
    return capsys.readouterr().err.splitlines()


@pytest.fixture(autouse=True)
def _logging_as_before():
    """Hydra gives the root logger a handler; here it would outlive the captured stream."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


@pytest.fixture
def jobs(monkeypatch, tmp_path):
    """Runs that only note their configuration; ``codes`` says how each one ends."""
    monkeypatch.chdir(tmp_path)
    seen: list[Config] = []
    codes: list[int] = []

    def note(run: Run) -> int:
        seen.append(run.cfg)
        return codes.pop(0) if codes else 0

    monkeypatch.setattr(run_command, "follow", note)
    seen_and_codes = seen, codes
    return seen_and_codes


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["buffer.batch_sise=3"], "did you mean 'buffer.batch_size'?"),
        (["+buffer.batch_sise=3"], "did you mean 'buffer.batch_size'?"),
        (["--multirun", "buffer.batch_sise=3,4"], "did you mean 'buffer.batch_size'?"),
        (["seed=1,2", "bufer.batch_size=3", "-m"], "did you mean 'buffer.batch_size'?"),
        (["--multirun", "engine=torch,torhc"], "did you mean 'torch'?"),
        (["--multirun", "seed=1,-1"], "seed=-1 is out of range"),
        (["--multirun", "seed=range(-1,3)"], "seed=-1 is out of range"),
        (["++stages.0.trainer.save_intervall=3"], "'stages.0.trainer.save_interval'?"),
        (["--multirun", "++stages.0.trainer.save_intervall=3,4"], "save_interval'?"),
        (["+experimet=x"], "'+experiment=...'?"),
        (["--cfg", "job", "buffer.batch_sise=3"], "did you mean 'buffer.batch_size'?"),
        (["--info", "defaults", "engin=torch"], "'+engine=...'?"),
        (["buffer.batch_size=abc"], "the value must be a whole number"),
        (["buffer.batch_size=0"], "is out of range: it must be >= 1"),
        (["seed=1,2"], "add --multirun to sweep"),
        (["--config-path", "x"], "add a directory of your own with --config-dir"),
        (["--config-dir", "/no/such"], "there is no such directory"),
        (["buffer.explorer_input.taskset.workflow=simple_workflw"], "'simple_workflow'"),
        (["++stages.1.algorithm.policy_loss_fn_args.clip_rnge=1"], "'clip_range'"),
        (["++stages.1.algorithm.policy_loss_fn_args.clip_range=null"], "clip_range=null"),
        (
            [
                "++stages.1.algorithm.sample_strategy=staleness_control",
                "++stages.1.algorithm.sample_strategy_args.max_stalenes=1",
            ],
            "did you mean 'max_staleness'",
        ),
        (["++stages.1.buffer.operators=[{name: reward_std_filtr}]"], "'reward_std_filter'"),
        (["prepare=trinity_dask.demo.sort_digits:prepre"], "prepare"),
        (["plugin_dirs=[/no/such]"], "is not a directory"),
    ],
)
def test_fault_40_it_is_refused_in_one_line_with_code_2(capsys, jobs, args, message):
    assert main(["run", TINY, *args]) == 2
    (line,) = errors(capsys)
    assert line.startswith("error: ")
    assert message in line
    assert jobs[0] == []
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("dpo", "preference pairs"),
        ("jsd", "set model.teacher_model_path"),
        ("no.py:f", "there is no file"),
    ],
)
def test_fault_40_a_loss_that_the_run_cannot_feed_is_refused(capsys, jobs, loss, message):
    assert main(["run", *ROWS, f"algorithm.policy_loss_fn={loss}"]) == 2
    (line,) = errors(capsys)
    assert message in line


def test_a_job_gets_its_config_and_leaves_what_made_it(jobs):
    overrides = [*ROWS, "seed=7", "++model.dtype=bfloat16"]
    assert main(["run", *overrides]) == 0
    (config,) = jobs[0]
    assert (config.seed, config.model.dtype) == (7, "bfloat16")
    folder = Path(str(config.job_dir)) / ".hydra"
    assert OmegaConf.load(folder / "overrides.yaml") == overrides
    assert OmegaConf.load(folder / "config.yaml").seed == 7
    assert OmegaConf.load(folder / "hydra.yaml").hydra.job.name == "trinity-dask"
    assert [path.name for path in Path.cwd().iterdir()] == ["runs"]


@pytest.mark.parametrize("code", [1, 130])
def test_the_exit_code_is_that_of_the_run(jobs, code):
    jobs[1].append(code)
    assert main(["run", *ROWS]) == code


def test_a_sweep_runs_every_value_in_its_own_directory(jobs):
    assert main(["run", *ROWS, "seed=1,2", "--multirun", "engine=fake"]) == 0
    first, second = jobs[0]
    assert (first.seed, second.seed) == (1, 2)
    assert Path(str(first.job_dir)).name == "0_seed=1"
    assert Path(str(second.job_dir)).name == "1_seed=2"
    assert len(list(Path.cwd().glob("runs/multirun/*/*/multirun.yaml"))) == 1


def test_what_a_sweep_does_not_vary_is_in_no_directorys_name(jobs):
    """Hydra writes overrides in a form of its own: false as False, a colon with a backslash."""
    same = ["monitor.curves=false", "++cluster.trainer.env={A: 'c:d'}"]
    assert main(["run", *ROWS, *same, "seed=1,2", "--multirun", "engine=fake"]) == 0
    names = {Path(str(config.job_dir)).name for config in jobs[0]}
    assert names == {"0_seed=1", "1_seed=2"}


def test_a_failed_job_of_a_sweep_does_not_stop_the_others(capsys, jobs):
    jobs[1].extend([0, 1, 0])
    assert main(["run", *ROWS, "seed=1,2,3", "--multirun"]) == 1
    assert [config.seed for config in jobs[0]] == [1, 2, 3]
    assert "1_seed=2 ended with exit code 1" in errors(capsys)[-1]


def test_an_interrupt_ends_the_sweep(jobs):
    jobs[1].extend([130])
    assert main(["run", *ROWS, "seed=1,2,3", "--multirun"]) == 130
    assert len(jobs[0]) == 1


def test_the_configuration_can_be_shown_without_being_complete(capsys, jobs):
    assert main(["run", "--cfg", "job", "seed=7"]) == 0
    assert "seed: 7\n" in capsys.readouterr().out
    assert main(["run", "--info", "defaults"]) == 0
    assert "experiment" not in capsys.readouterr().out
    assert jobs[0] == []
    assert main(["run"]) == 2


def test_validate_shows_what_a_run_would_use(capsys, jobs):
    assert main(["validate", TINY, "--show"]) == 0
    shown = capsys.readouterr().out
    assert "batch_timeout_s: 5460.0" in shown
    assert main(["validate", TINY, "seed=-1"]) == 2
    assert "seed=-1 is out of range" in errors(capsys)[0]


@pytest.mark.parametrize(
    ("swept", "label"),
    [
        (["seed=1"], "3_seed=1"),
        (["+a.b=c", "x=1"], "3_a.b=c,x=1"),
        ([], "3"),
    ],
)
def test_a_jobs_directory_names_its_values(swept, label):
    assert job_label(3, swept) == label


def test_a_jobs_directory_is_a_plain_name_of_bounded_length():
    one, other = job_label(0, ["path=/a/b c"]), job_label(0, ["path=/a/b d"])
    assert "/" not in one
    assert " " not in one
    assert one != other
    assert len(job_label(0, ["x=" + "y" * 500])) < MAX_LABEL + 12
    assert job_label(0, ["path=/a/b_c"]) != job_label(0, ["path=/a_b/c"])


@pytest.mark.parametrize(
    ("columns", "best"),
    [
        (["loss", "eval/h/reward/mean@1", "eval/h/accuracy/mean@1"], "eval/h/accuracy/mean@1"),
        (["eval/h/reward/std@4", "eval/h/reward/mean@4"], "eval/h/reward/mean@4"),
        (["eval/h/time/run_execution", "rollout/reward/mean"], "rollout/reward/mean"),
        (["eval/h/time/run_execution", "eval/h/score"], "eval/h/score"),
        (["loss"], None),
    ],
)
def test_what_a_sweeper_optimises_is_the_most_telling_metric(columns, best):
    assert best_column(columns) == best


def test_the_score_of_a_job_is_the_last_value_on_disk(tmp_path):
    for number, stage in enumerate(("sft", "grpo")):
        folder = tmp_path / stage / "monitor"
        folder.mkdir(parents=True)
        lines = [
            {"time": 10.0 * number + step, "role": "explorer", "step": step, "incarnation": 1}
            | {"eval/h/accuracy/mean@1": 0.1 * (10 * number + step)}
            for step in (1, 2)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert final_score(str(tmp_path)) == pytest.approx(1.2)
    assert final_score(str(tmp_path / "sft")) == pytest.approx(0.2)
    assert final_score(str(tmp_path / "nothing")) is None
