"""Tiny models and made-up rows for the tests of the trainer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from trinity_dask.algorithm import resolve_algorithm
from trinity_dask.config.schema import Config, OptimizerConfig
from trinity_dask.experience import EID, Experience
from trinity_dask.experience.schema import to_table
from trinity_dask.trainer.model.frozen import FrozenModel
from trinity_dask.trainer.step.batching import Cut, Planner, collate
from trinity_dask.trainer.step.engine import StepEngine

VOCAB = 40
GRPO = {
    "algorithm_type": "grpo",
    "kl_loss_fn": "none",
    "entropy_loss_fn": "none",
    "policy_loss_fn_args": {"clip_range_low": 0.2, "clip_range_high": 0.28},
    "rollout_correction": {"mode": "token_tis", "cap": 2.0},
}


def tiny_model(seed: int = 0, dropout: float = 0.0):
    """A two-layer Qwen2 of a few thousand parameters, spread wide enough to have opinions."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.3,
        attention_dropout=dropout,
    )
    return Qwen2ForCausalLM(config).eval()


def save_tiny_model(directory: Path, seed: int = 0) -> str:
    tiny_model(seed).save_pretrained(directory)
    return str(directory)


def rows(n: int, seed: int = 0, equal_prompts: bool = False, model=None, temperature: float = 1.0):
    """``n`` experiences of unequal lengths with advantages.

    ``logprobs`` are those of ``model`` at ``temperature``, or noise without one.
    """
    generator = np.random.default_rng(seed)
    made = []
    for k in range(n):
        prompt = 4 if equal_prompts else int(generator.integers(1, 7))
        response = int(generator.integers(1, 9))
        tokens = generator.integers(0, VOCAB, prompt + response)
        noise = -generator.random(response).astype(np.float32) * 3
        behaviour = noise if model is None else logprobs(model, tokens, prompt, temperature)
        made.append(
            Experience(
                tokens=tokens,
                prompt_length=prompt,
                eid=EID(batch=1, task=k // 4, run=k % 4),
                reward=float(generator.random() > 0.5),
                logprobs=behaviour,
                versions=np.zeros(response, np.int32),
                advantages=np.full(response, generator.normal(), np.float32),
                action_mask=generator.random(response) > 0.1 if response > 2 else None,
            )
        )
    return made


@torch.no_grad()
def logprobs(model, tokens, prompt: int, temperature: float = 1.0) -> np.ndarray:
    """Log-probs of the response by the plainest route: one row, no padding, no mask."""
    ids = torch.as_tensor(np.asarray(tokens, dtype=np.int64))[None]
    logits = model(ids).logits.double() / (temperature or 1.0)
    all_logprobs = torch.log_softmax(logits, dim=-1)[0, :-1]
    chosen = all_logprobs.gather(-1, ids[0, 1:, None])[:, 0]
    return chosen[prompt - 1 :].float().numpy()


def batch_of(experiences):
    return collate(to_table(experiences), pad_token_id=0)


def engine(algorithm=None, model=None, group=None, reference=None, **settings) -> StepEngine:
    spec = resolve_algorithm(algorithm or GRPO)
    frozen = None if reference is None else FrozenModel(reference)
    return StepEngine(step_config(**settings), spec, model or tiny_model(), group, frozen)


def plan_updates(lengths, *, seed, step, rank=0, world_size=1, unit=1, groups=None, **cut):
    """One rank's plan; ``cut`` are fields of :class:`Cut`."""
    planner = Planner(Cut(**cut), seed=seed, unit=unit, by_groups=groups is not None)
    return planner.plan(lengths, step, rank, world_size, groups)


def step_config(optimizer=None, critic=None, **settings) -> Config:
    """A config of a train step; ``settings`` are keys of ``model`` or ``trainer``."""
    cfg = Config()
    cfg.algorithm.optimizer = optimizer or OptimizerConfig(
        lr=1e-2, betas=[0.9, 0.95], weight_decay=0.0
    )
    cfg.critic = critic or cfg.critic
    for name, value in settings.items():
        (section,) = (s for s in (cfg.model, cfg.trainer) if hasattr(s, name))
        setattr(section, name, value)
    return cfg


def gradients(trained: StepEngine) -> dict[str, torch.Tensor]:
    """The gradient of the last update, as it was handed to the optimizer."""
    named = trained.policy.module.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def weights(trained: StepEngine) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trained.policy.module.named_parameters()}


def grpo_config(job_dir: Path, model_path: str, **trainer) -> Config:
    """A stage that trains with grpo and saves every second step."""
    cfg = Config()
    cfg.job_dir = str(job_dir)
    cfg.model.model_path = model_path
    cfg.algorithm.kl_loss_fn = "none"
    cfg.algorithm.entropy_loss_fn = "none"
    cfg.algorithm.optimizer = OptimizerConfig(lr=1e-2, betas=[0.9, 0.95], weight_decay=0.0)
    cfg.algorithm.rollout_correction.mode = "token_tis"
    cfg.buffer.trainer_input.experience_buffer.path = str(Path(job_dir) / "buffer/experience")
    cfg.trainer.save_interval = 2
    cfg.trainer.step_timeout_s = 120.0
    for name, value in trainer.items():
        assert hasattr(cfg.trainer, name)
        setattr(cfg.trainer, name, value)
    return cfg
