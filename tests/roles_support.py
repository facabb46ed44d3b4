"""Rows and models for every algorithm type, and ranks that meet over gloo in this process."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace

import numpy as np
import torch
from trainer_support import VOCAB, batch_of, rows, step_config, tiny_model

from trinity_dask.algorithm import ALGORITHM, resolve_algorithm
from trinity_dask.config.schema import CriticConfig, OptimizerConfig
from trinity_dask.experience.schema import to_table
from trinity_dask.models.protocol import WeightGroupSpec
from trinity_dask.trainer.model.frozen import FrozenModel
from trinity_dask.trainer.ranks.gradients import GradientGroup
from trinity_dask.trainer.step.batching import collate
from trinity_dask.trainer.step.engine import StepEngine
from trinity_dask.trainer.step.row_metrics import row_lengths
from trinity_dask.weights.broadcast import make_group

SGD = OptimizerConfig(optimizer_type="sgd", lr=0.0)
TYPES = sorted(ALGORITHM.names())
RESPONSE_TOKENS = 16
MAKING = threading.Lock()


def tiny_critic(seed: int = 3):
    """A value model of the tiny policy's size whose head has opinions."""
    from transformers import AutoModelForTokenClassification

    config = tiny_model().config
    config.num_labels = 1
    torch.manual_seed(seed)
    return AutoModelForTokenClassification.from_config(config).eval()


def rows_for(kind: str, n: int = 16, seed: int = 0):
    """``n`` rows of unequal lengths with all that type ``kind`` reads."""
    spec = resolve_algorithm({"algorithm_type": kind})
    if spec.schema == "dpo":
        return pairs(n // 2, seed)
    made = rows(n, seed=seed)
    generator = np.random.default_rng(seed + 1)
    for k, row in enumerate(made):
        row.info["reward_baseline"] = 0.5
        if spec.sample_strategy == "mix" and k % 3 == 0:
            row.info |= {"is_expert": True, "step": 1}
            row.logprobs[:] = 0.0
            row.advantages[:] = 0.0
        if spec.uses_teacher:
            row.teacher_logprobs = -generator.random(row.response_length).astype(np.float32) * 3
    return made


def pairs(n: int, seed: int = 0):
    """Chosen and rejected answers to ``n`` prompts, one after the other."""
    generator = np.random.default_rng(seed)
    made = []
    for task, chosen in enumerate(rows(n, seed=seed)):
        prompt = chosen.tokens[: chosen.prompt_length]
        answer = generator.integers(0, VOCAB, int(generator.integers(1, 9))).astype(np.int32)
        rejected = replace(
            chosen, tokens=np.concatenate([prompt, answer]), logprobs=None, versions=None,
            advantages=None, action_mask=None,
        )  # fmt: skip
        for run, row in enumerate((chosen, rejected)):
            row.eid = replace(row.eid, task=task, run=run)
        chosen.logprobs = chosen.versions = chosen.advantages = chosen.action_mask = None
        chosen.check()
        made += [chosen, rejected]
    return made


def role_engine(algorithm, group=None, **settings) -> StepEngine:
    """An engine with every model that the algorithm uses."""
    spec = resolve_algorithm(algorithm)
    of_critic = CriticConfig(optimizer=SGD, grad_clip=0.0)
    defaults = {"grad_clip": 0.0, "max_response_tokens": RESPONSE_TOKENS}
    cfg = step_config(**{"optimizer": SGD, "critic": of_critic, **defaults, **settings})
    reference = FrozenModel(tiny_model(seed=1)) if spec.uses_reference else None
    return StepEngine(
        cfg,
        spec,
        tiny_model(),
        group,
        reference=reference,
        critic=tiny_critic() if spec.uses_critic else None,
    )


def gradients_of(engine: StepEngine) -> dict[str, torch.Tensor]:
    """Of the policy and the critic, as they were handed to the optimizers."""
    return {
        f"{name}/{key}": p.grad.clone()
        for name, model in engine.trainables.items()
        for key, p in model.module.named_parameters()
        if p.grad is not None
    }


def train_alone(algorithm, experiences, step=1, **settings):
    engine = role_engine(algorithm, **settings)
    metrics = engine.train_step(batch_of(experiences), step)
    return engine, metrics


def train_on_ranks(algorithm, experiences, world=2, step=1, **settings):
    """The same step on ``world`` ranks in threads; engines and metrics by rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results: list = [None] * world

    def rank(index: int) -> None:
        spec = WeightGroupSpec("127.0.0.1", port, world, index, 1, "gloo", 60.0)
        group = make_group(spec, index, is_master=index == 0)
        try:
            with MAKING:  # models are made with the process's one generator
                engine = role_engine(algorithm, GradientGroup(group.backend), **settings)
            plan = engine.planner.plan(row_lengths(to_table(experiences)), step, index, world)
            mine = collate(to_table([experiences[k] for k in plan.rows]), 0, to_table(experiences))
            metrics = engine.train_step(mine, step, plan, batch_of(experiences))
            results[index] = (engine, metrics)
        finally:
            group.close()

    threads = [threading.Thread(target=rank, args=(k,)) for k in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert all(results), "a rank failed; its traceback is above"
    return results
