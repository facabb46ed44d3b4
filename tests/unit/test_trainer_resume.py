"""A run that is resumed continues bit for bit, demonstrations in its batches included."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from loop_support import Monitor, assert_equal, filled_buffer, run, weights_of
from trainer_support import grpo_config

from trinity_dask.buffer.experience_buffer import ExperienceBuffer
from trinity_dask.config.schema import Config, ExperienceBufferConfig, FormatConfig
from trinity_dask.demo import sort_digits

SIZES = [8, 8, 8, 8, 8]  # rows of the policy in each step; the file gives four more


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("demo")
    tiny = {"hidden_size": 16, "n_layers": 1, "intermediate_size": 16, "n_digits": 2}
    sort_digits.prepare(Config(), dir=str(root), n_train=10, n_eval=2, **tiny)
    return root


def config(job_dir: Path, demo: Path, kind: str) -> Config:
    cfg = grpo_config(job_dir, str(demo / "model"), max_checkpoints_to_keep=0)
    cfg.algorithm.algorithm_type = kind
    cfg.algorithm.sample_strategy_args = {"expert_data_ratio": 0.3, "sft_dataset_name": "shown"}
    if kind == "mix_chord":  # its weight moves with every step
        cfg.algorithm.policy_loss_fn_args = {"mu_warmup_steps": 2, "mu_decay_steps": 4}
    cfg.buffer.train_batch_size = 12
    cfg.buffer.trainer_input.auxiliary_buffers = [
        ExperienceBufferConfig(
            name="shown",
            storage_type="file",
            path=str(demo / "train.jsonl"),  # 10 rows: its second epoch begins in step 3
            format=FormatConfig(prompt_type="plaintext", apply_chat_template=False),
        )
    ]
    return cfg


@pytest.mark.parametrize("kind", ["mix", "mix_chord"])
def test_mixed_batches_resume_bit_for_bit(kind: str, tmp_path: Path, demo: Path) -> None:
    whole, parts = (config(tmp_path / name, demo, kind) for name in ("whole", "parts"))
    expected, got = Monitor(), Monitor()

    async def main() -> None:
        await run(whole, await filled_buffer(whole, SIZES), monitor=expected)
        parts.trainer.total_steps = 2
        await run(parts, await filled_buffer(parts, SIZES), monitor=got)
        parts.trainer.total_steps = None
        again = ExperienceBuffer(parts.buffer.trainer_input.experience_buffer)
        await run(parts, again, monitor=got)

    asyncio.run(main())
    assert sorted(got.steps) == sorted(expected.steps) == [1, 2, 3, 4, 5]
    for step, metrics in expected.steps.items():
        names = [name for name in metrics if name.startswith("actor/")]
        assert any(name.startswith("actor/expert/") for name in names)
        for name in names:
            assert got.steps[step][name] == metrics[name], (step, name)
        assert metrics["sample/expert_rows"] == 4
    assert_equal(weights_of(whole.job_dir, 5), weights_of(parts.job_dir, 5))
