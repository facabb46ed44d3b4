"""A step that fails ends the run with its error, and the last good checkpoint stays the last."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from test_trainer_loop import run, weights_of
from trainer_support import grpo_config, rows, save_tiny_model

from trinity_dask.buffer.experience_buffer import ExperienceBuffer
from trinity_dask.experience.schema import to_table
from trinity_dask.trainer.checkpoints.checkpoint import complete_checkpoints


@pytest.mark.parametrize(
    ("damage", "error"),
    [("advantages", FloatingPointError), ("logprobs", ValueError)],
    ids=["not finite", "a tensor is missing"],
)
def test_a_failed_step_raises_and_saves_nothing(tmp_path, damage, error):
    cfg = grpo_config(tmp_path, save_tiny_model(tmp_path / "model"))
    batches = [rows(4, seed=seed) for seed in range(4)]
    if damage == "advantages":
        batches[2][1].advantages = np.full_like(batches[2][1].advantages, np.nan)
    else:
        batches[2][1].logprobs = None

    async def main():
        buffer = ExperienceBuffer(cfg.buffer.trainer_input.experience_buffer)
        await buffer.prepare(None)
        for batch_id, batch in enumerate(batches, 1):
            await buffer.commit(batch_id, to_table(batch), {})
        with pytest.raises(error):
            await run(cfg, buffer)
        return await buffer.stats()

    stats = asyncio.run(main())
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["global_step_2"]
    assert stats["consumed_rows"] == 8  # the rows of the failed step are not trained
    assert all(np.isfinite(tensor.numpy()).all() for tensor in weights_of(tmp_path, 2).values())
