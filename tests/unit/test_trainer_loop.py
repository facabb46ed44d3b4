"""The trainer's loop: order, ends, resume, and ranks that die.

The ranks are real and live in this process; only their placement on workers is left out
(tests/cluster has that).
"""

from __future__ import annotations

import asyncio

import pytest
from loop_support import LocalPool, Monitor, assert_equal, filled_buffer, run, weights_of
from trainer_support import grpo_config, rows, save_tiny_model

from trinity_dask.buffer.experience_buffer import ExperienceBuffer
from trinity_dask.experience.schema import to_table
from trinity_dask.trainer.checkpoints.checkpoint import (
    complete_checkpoints,
    latest_hf_export,
    read_state,
)
from trinity_dask.trainer.ranks.rank import RanksFailed
from trinity_dask.trainer.trainer import NoUsableRows, Trainer


class Synchronizer:
    """Writes down what it is told; the first ``trainer_starved`` may bring a new batch."""

    def __init__(self, on_starved=None):
        self.story = []
        self.on_starved = on_starved

    def set_trainer_rank0(self, handle):
        self.story.append(("rank0", handle.slot))

    async def trainer_sync(self, step, progress):
        self.story.append(("sync", step, progress))

    async def trainer_starved(self, step):
        self.story.append(("starved", step))
        if self.on_starved is not None:
            await self.on_starved()

    async def trainer_resumed(self):
        self.story.append(("resumed",))

    async def trainer_stopped(self, step, progress):
        self.story.append(("stopped", step, progress))


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def test_a_step_is_train_acknowledge_synchronise_save_log(tmp_path, model_path):
    cfg = grpo_config(tmp_path, model_path, max_checkpoints_to_keep=0)
    synchronizer, monitor = Synchronizer(), Monitor()

    async def main():
        buffer = await filled_buffer(cfg, [4, 6, 8])
        result, trainer = await run(cfg, buffer, synchronizer, monitor)
        return result, trainer, await buffer.stats()

    result, trainer, stats = asyncio.run(main())
    assert result["step"] == 3
    assert result["trained_rows"] == trainer.trained_rows == 18 == stats["consumed_rows"]
    assert synchronizer.story == [
        ("rank0", "trainer-0"),
        ("sync", 1, 1),
        ("sync", 2, 2),
        ("sync", 3, 3),
        ("stopped", 3, 3),
    ]
    assert [p.name for p in complete_checkpoints(tmp_path)] == ["global_step_2", "global_step_3"]
    assert latest_hf_export(tmp_path).parent.name == "global_step_3"
    state = read_state(tmp_path / "global_step_2")
    assert (state["step"], state["trained_rows"], state["progress"]) == (2, 10, 2)
    assert state["source"]["consumed_rows"] == 10
    assert sorted(monitor.steps) == [1, 2, 3]
    assert "time/save_checkpoint" in monitor.steps[2]
    assert "time/save_checkpoint" not in monitor.steps[1]
    for name in ("time/wait_data", "time/train_step", "time/sync_weight", "tokens_per_s"):
        assert monitor.steps[1][name] >= 0


def test_a_step_is_logged_before_it_is_saved(tmp_path, model_path):
    """A run that is killed after its checkpoint goes on behind the step, and logs it no more."""
    cfg = grpo_config(tmp_path, model_path, save_interval=1)
    saved = {}

    class Watching(Monitor):
        def log(self, step, metrics):
            super().log(step, metrics)
            names = [path.name for path in complete_checkpoints(tmp_path)]
            saved.setdefault(step, f"global_step_{step}" in names)

    async def main():
        await run(cfg, await filled_buffer(cfg, [4, 4, 4]), monitor=Watching())

    asyncio.run(main())
    assert saved == {1: False, 2: False, 3: False}


def test_total_steps_end_the_run_before_the_data(tmp_path, model_path):
    cfg = grpo_config(tmp_path, model_path, total_steps=2)

    async def main():
        buffer = await filled_buffer(cfg, [4, 4, 4])
        return (await run(cfg, buffer))[0], await buffer.stats()

    result, stats = asyncio.run(main())
    assert result["step"] == 2
    assert stats["queued_rows"] == 4


def test_rows_too_few_for_a_step_are_reported(tmp_path, model_path):
    cfg = grpo_config(tmp_path, model_path)
    cfg.buffer.train_batch_size = 5

    async def main():
        return (await run(cfg, await filled_buffer(cfg, [4, 4, 4])))[0]

    result = asyncio.run(main())
    assert (result["step"], result["trained_rows"], result["left_rows"]) == (2, 10, 2)


def test_resume_continues_bit_for_bit_and_trains_no_row_twice(tmp_path, model_path):
    sizes = [4, 6, 8, 5, 7]
    whole = grpo_config(tmp_path / "whole", model_path, max_checkpoints_to_keep=0)
    parts = grpo_config(tmp_path / "parts", model_path, max_checkpoints_to_keep=0)

    async def main():
        await run(whole, await filled_buffer(whole, sizes))
        parts.trainer.total_steps = 2
        await run(parts, await filled_buffer(parts, sizes))
        parts.trainer.total_steps = None
        buffer = ExperienceBuffer(parts.buffer.trainer_input.experience_buffer)
        result, trainer = await run(parts, buffer)
        return result, trainer, await buffer.stats()

    result, trainer, stats = asyncio.run(main())
    assert result["step"] == 5
    assert trainer.trained_rows == sum(sizes) == stats["consumed_rows"]
    assert_equal(weights_of(whole.job_dir, 5), weights_of(parts.job_dir, 5))


def test_a_finished_run_is_left_as_it_is(tmp_path, model_path):
    cfg = grpo_config(tmp_path, model_path, total_steps=2)

    async def main():
        await run(cfg, await filled_buffer(cfg, [4, 4]))
        before = (tmp_path / "global_step_2" / "COMPLETE").stat().st_mtime_ns
        buffer = ExperienceBuffer(cfg.buffer.trainer_input.experience_buffer)
        result, _ = await run(cfg, buffer)
        return before, result

    before, result = asyncio.run(main())
    assert result["step"] == 2
    assert (tmp_path / "global_step_2" / "COMPLETE").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    "losses",
    [
        [("train_step", 1)],  # before any checkpoint: from the initial model
        [("train_step", 4)],  # one step after the checkpoint of step 2, which is repeated
        [("train_step", 4), ("train_step", 5)],  # and again while catching up
        [("save_checkpoint", 2)],
        [("train_step", 3), ("prepare", 2)],
    ],
    ids=str,
)
def test_lost_ranks_catch_up_to_the_same_weights(tmp_path, model_path, losses):
    sizes = [4, 6, 8, 5]
    quiet = grpo_config(tmp_path / "quiet", model_path, max_checkpoints_to_keep=0)
    lossy = grpo_config(tmp_path / "lossy", model_path, max_checkpoints_to_keep=0)
    synchronizer = Synchronizer()

    async def main():
        await run(quiet, await filled_buffer(quiet, sizes))
        return await run(lossy, await filled_buffer(lossy, sizes), synchronizer, losses=losses)

    result, trainer = asyncio.run(main())
    assert result["step"] == 4
    assert trainer.trained_rows == sum(sizes)
    assert_equal(weights_of(quiet.job_dir, 4), weights_of(lossy.job_dir, 4))
    synced = [event[1] for event in synchronizer.story if event[0] == "sync"]
    assert synced == [1, 2, 3, 4]
    assert synchronizer.story.count(("rank0", "trainer-0")) == 2


def test_ranks_that_keep_dying_end_the_run_with_its_state(tmp_path, model_path):
    cfg = grpo_config(tmp_path, model_path, max_rank_restarts=2)
    losses = [("train_step", k) for k in (3, 4, 5, 6)]

    async def main():
        await run(cfg, await filled_buffer(cfg, [4, 4, 4, 4]), losses=losses)

    with pytest.raises(RanksFailed, match=r"rebuilt 2 times.*max_rank_restarts = 2"):
        asyncio.run(main())
    assert complete_checkpoints(tmp_path)[-1].name == "global_step_2"


def test_fault_38_batches_without_rows_are_steps_and_too_many_end_the_run(tmp_path, model_path):
    cfg = grpo_config(tmp_path, model_path, max_empty_batches=3)
    synchronizer, monitor = Synchronizer(), Monitor()

    async def main():
        await run(cfg, await filled_buffer(cfg, [4, 0, 4, 0, 0, 0, 4]), synchronizer, monitor)

    with pytest.raises(NoUsableRows, match=r"3 batches in a row.*max_empty_batches = 3"):
        asyncio.run(main())
    assert [e for e in synchronizer.story if e[0] == "sync"] == [
        ("sync", s, s) for s in range(1, 7)
    ]
    assert [monitor.steps[s]["trainer/empty_batch"] for s in range(1, 7)] == [0, 1, 0, 1, 1, 1]
    state = read_state(complete_checkpoints(tmp_path)[-1])
    assert (state["step"], state["trained_rows"], state["progress"]) == (6, 8, 6)


def test_fault_41_mostly_truncated_answers_are_said_once(tmp_path, model_path, caplog):
    cfg = grpo_config(tmp_path, model_path)

    async def main():
        buffer = await filled_buffer(cfg, [], close=False)
        for batch_id in (1, 2):
            cut = rows(4)
            for experience in cut[:3]:
                experience.truncate_status = "response_truncated"
            await buffer.commit(batch_id, to_table(cut), {})
        monitor = Monitor()
        await run(cfg, buffer, None, monitor)
        return monitor

    monitor = asyncio.run(main())
    assert monitor.steps[1]["sample/truncated_share"] == 0.75
    assert caplog.text.count("75% of the answers") == 1


def test_starvation_is_announced_once_and_ends_with_rows(tmp_path, model_path):
    cfg = grpo_config(tmp_path, model_path, total_steps=2)

    async def main():
        buffer = await filled_buffer(cfg, [4], close=False)

        async def commit():
            await asyncio.sleep(1.5)  # so that more than one slice passes
            await buffer.commit(2, to_table(rows(4)), {})

        late = []

        async def later():
            late.append(asyncio.create_task(commit()))

        synchronizer = Synchronizer(on_starved=later)
        trainer = Trainer(cfg, "t", buffer, synchronizer, None, LocalPool(cfg))
        await trainer.prepare()
        result = await asyncio.wait_for(trainer.train(), 60)
        await trainer.close()
        return result, synchronizer.story

    result, story = asyncio.run(main())
    assert result["step"] == 2
    assert story[1:] == [
        ("sync", 1, 1),
        ("starved", 1),
        ("resumed",),
        ("sync", 2, 2),
        ("stopped", 2, 2),
    ]


def test_rows_that_never_come_end_the_wait(tmp_path, model_path):
    cfg = grpo_config(tmp_path, model_path)
    cfg.buffer.trainer_input.experience_buffer.max_read_timeout_s = 0.5

    async def main():
        buffer = await filled_buffer(cfg, [], close=False)
        trainer = Trainer(cfg, "t", buffer, None, None, LocalPool(cfg))
        await trainer.prepare()
        try:
            await asyncio.wait_for(trainer.train(), 60)
        finally:
            await trainer.close()

    with pytest.raises(TimeoutError, match="max_read_timeout_s"):
        asyncio.run(main())


def test_stop_saves_and_says_that_it_stopped(tmp_path, model_path):
    cfg = grpo_config(tmp_path, model_path, save_interval=0)

    async def main():
        buffer = await filled_buffer(cfg, [4], close=False)
        trainer = Trainer(cfg, "t", buffer, None, None, LocalPool(cfg))
        await trainer.prepare()
        training = asyncio.create_task(trainer.train())
        while trainer.trained_rows == 0:
            await asyncio.sleep(0.01)
        await trainer.stop()
        result = await asyncio.wait_for(training, 60)
        await trainer.close()
        return result

    result = asyncio.run(main())
    assert result["stopped"]
    assert read_state(complete_checkpoints(tmp_path)[-1])["step"] == 1


def test_without_a_buffer_the_committed_batches_of_an_earlier_run_are_trained(tmp_path, model_path):
    cfg = grpo_config(tmp_path, model_path)

    async def main():
        await filled_buffer(cfg, [4, 6])
        return (await run(cfg, None))[0]

    result = asyncio.run(main())
    assert (result["step"], result["trained_rows"]) == (2, 10)


def test_fault_39_a_cut_checkpoint_is_not_resumed_from(tmp_path, model_path):
    cfg = grpo_config(tmp_path, model_path, save_interval=1, max_checkpoints_to_keep=0)

    async def main():
        await run(cfg, await filled_buffer(cfg, [4, 4, 4]))
        (tmp_path / "global_step_3" / "actor" / "optimizer.safetensors").unlink()
        buffer = ExperienceBuffer(cfg.buffer.trainer_input.experience_buffer)
        trainer = Trainer(cfg, "t", buffer, None, None, LocalPool(cfg))
        facts = await trainer.prepare()
        queued = (await buffer.stats())["queued_rows"]
        await trainer.close()
        return facts, queued

    facts, queued = asyncio.run(main())
    assert facts["step"] == 2
    assert facts["checkpoint"].endswith("global_step_2")
    assert queued == 4
