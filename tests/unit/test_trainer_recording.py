"""What a train step records of its rows: the trainer's numbers, once, within bounds."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from records_support import a_job, commit
from trainer_support import GRPO, engine, logprobs, plan_updates, rows, tiny_model

import trinity_dask
from trinity_dask.config.schema import Config
from trinity_dask.experience.schema import from_table, to_table
from trinity_dask.trainer.step.batching import collate
from trinity_dask.trainer.step.recording import StepRecorder

NAMES = ("train_logprobs", "train_entropy", "train_advantages", "train_mask")


@pytest.fixture
def cfg(tmp_path: Path) -> Config:
    return a_job(tmp_path)


def stepped(cfg: Config, table: pa.Table, step: int = 1, rank: int = 0, ranks: int = 1) -> None:
    """One rank's train step over a committed table, with two mini-batches."""
    recorder = StepRecorder(cfg, rank, ranks)
    lengths = np.array([len(tokens) for tokens in table["tokens"]])
    plan = plan_updates(lengths, seed=1, step=step, rank=rank, world_size=ranks, mini_batches=2)
    mine = table.take(pa.array(plan.rows))
    # the second mini-batch is scored before the first update
    spec = {**GRPO, "entropy_loss_fn": "default", "bypass_old_logprobs": False}
    trained = engine(spec, tiny_model(), micro_batch_tokens=64)
    trained.train_step(collate(mine, 0, table), step, plan, look=partial(recorder.take, mine, step))
    recorder.close()


def test_the_numbers_are_those_of_the_weights_at_the_start_of_the_step(cfg: Config) -> None:
    table = to_table(rows(12, model=tiny_model()))
    commit(cfg, 1, table, step=1)
    stepped(cfg, table)
    found = trinity_dask.rollouts(cfg.job_dir).table(
        ["status", "advantages", "action_mask", *NAMES]
    )
    assert found["status"].to_pylist() == ["trained"] * 12
    for exp, row in zip(from_table(table), found.to_pylist(), strict=True):
        own = logprobs(tiny_model(), exp.tokens, exp.prompt_length)
        np.testing.assert_allclose(row["train_logprobs"], own, atol=1e-5)
        assert row["train_advantages"] == row["advantages"]
        assert row["train_mask"] == row["action_mask"]


def test_ranks_record_each_row_once(cfg: Config) -> None:
    table = to_table(rows(10))
    commit(cfg, 1, table, step=1)
    for rank in range(3):
        stepped(cfg, table, rank=rank, ranks=3)
    found = trinity_dask.rollouts(cfg.job_dir).table(["uses", *NAMES])
    assert found["uses"].to_pylist() == [1] * 10
    lengths = [len(e.advantages) for e in from_table(table) if e.advantages is not None]
    assert [len(row) for row in found["train_logprobs"].to_pylist()] == lengths


def test_beyond_the_bounds_rows_are_named_without_numbers(cfg: Config) -> None:
    table = to_table(rows(9))
    commit(cfg, 1, table, step=1)
    cfg.monitor.record_trainer = 4
    stepped(cfg, table)
    found = trinity_dask.rollouts(cfg.job_dir).table(["uses", "train_mask"])
    assert found["uses"].to_pylist() == [1] * 9
    assert found["train_mask"].null_count == 5
    cfg.monitor.record_mb = 1e-6
    stepped(cfg, table)
    found = trinity_dask.rollouts(cfg.job_dir).table(["uses", "train_mask"])
    assert found["uses"].to_pylist() == [1] * 9
    assert found["train_mask"].null_count == 9


def test_recording_changes_no_weight(cfg: Config) -> None:
    table, after = to_table(rows(8)), []
    for limit in (0, 100):
        cfg.monitor.record_trainer = limit
        trained, recorder = engine(), StepRecorder(cfg, 0, 1)
        trained.train_step(collate(table, 0), 1, look=partial(recorder.take, table, 1))
        recorder.close()
        after.append(torch.cat([p.flatten() for p in trained.policy.module.parameters()]))
    assert torch.equal(*after)
    assert len(list(Path(cfg.job_dir or "").rglob("*.arrow"))) == 1


def test_rows_that_are_in_no_store_are_recorded_whole(cfg: Config) -> None:
    """Those of a file: supervised steps have no batches."""
    cfg.buffer.trainer_input.experience_buffer.storage_type = "file"
    from trinity_dask.config import save

    save(cfg, Path(cfg.job_dir or "", "config.yaml"))
    table, recorder = to_table(rows(4)), StepRecorder(cfg, 0, 1)
    engine().train_step(collate(table, 0), 3, look=partial(recorder.take, table, 3, whole=True))
    recorder.close()
    found = trinity_dask.rollouts(cfg.job_dir, step=3).table(["status", "tokens", "train_mask"])
    assert found["status"].to_pylist() == ["trained"] * 4
    assert found["tokens"].to_pylist() == table["tokens"].to_pylist()


def test_a_step_that_cannot_be_recorded_is_trained(
    cfg: Config, caplog: pytest.LogCaptureFixture
) -> None:
    table, recorder = to_table(rows(4)), StepRecorder(cfg, 0, 1)
    other = table.slice(0, 2)  # not the rows of the step
    engine().train_step(collate(table, 0), 1, look=partial(recorder.take, other, 1))
    recorder.close()
    assert "a train step is not recorded: " in caplog.text
