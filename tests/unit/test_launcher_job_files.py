"""Whether a finished job is what was asked for, told without touching its files."""

from __future__ import annotations

from pathlib import Path

import pytest

import trinity_dask
from trinity_dask.config import Config, ConfigError
from trinity_dask.config import save as save_config
from trinity_dask.config.job_dir import stage_file
from trinity_dask.files import write_json
from trinity_dask.launcher.job_files import config_file, finished_message, is_given_more


def job(root: Path, *overrides: str) -> Config:
    return trinity_dask.load_config(
        "engine=fake",
        f"checkpoint_root_dir={root}",
        f"model.model_path={root}",
        "name=x",
        "model.max_model_len=16",
        "model.max_prompt_tokens=8",
        "trainer.total_steps=4",
        f"buffer.explorer_input.taskset.path={root}/tasks.jsonl",
        "buffer.explorer_input.taskset.reward_fn=accuracy_reward",
        *overrides,
    )


@pytest.fixture
def finished(tmp_path: Path) -> Config:
    cfg = job(tmp_path)
    Path(str(cfg.job_dir)).mkdir(parents=True)
    save_config(cfg, config_file(cfg))
    write_json(Path(str(cfg.job_dir)) / stage_file(cfg), {"latest_stage": 0, "finished": True})
    return cfg


def test_asking_changes_nothing_because_another_run_may_hold_the_lock(
    finished: Config, tmp_path: Path
) -> None:
    meta = Path(str(finished.job_dir)) / stage_file(finished)
    before = meta.read_bytes()
    longer = job(tmp_path, "trainer.total_steps=8")
    assert finished_message(str(longer.job_dir), [longer]) is None
    assert is_given_more([longer])
    assert meta.read_bytes() == before


def test_the_same_and_less_and_something_else_are_not_more(
    finished: Config, tmp_path: Path
) -> None:
    assert not is_given_more([finished])
    assert "finished already" in str(finished_message(str(finished.job_dir), [finished]))
    for change in ("trainer.total_steps=2", "trainer.grad_clip=0.5"):
        other = job(tmp_path, "trainer.total_steps=8", change)
        assert not is_given_more([other])
        with pytest.raises(ConfigError, match=change.partition("=")[0]):
            finished_message(str(other.job_dir), [other])
