"""The half of ``vs_trl.py`` that runs in TRL's own environment: GRPOTrainer on sort_digits.

Takes one JSON object on the command line (``model``, ``rows``, ``steps``, ``seed``,
``threads``, ``out``) and writes the seconds per step and the rewards to ``out``. Imports
nothing of trinity-dask.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

PROMPTS, GROUP, MINI_BATCHES = 64, 32, 4
ROWS = PROMPTS * GROUP
WARMUP, FLOOR, LR = 10, 0.1, 1e-3
UNTIMED_STEPS = 2  # first calls compile and allocate


def main(arguments: dict[str, Any]) -> None:
    torch.set_num_threads(arguments["threads"])
    tokenizer = AutoTokenizer.from_pretrained(arguments["model"])
    rows = [json.loads(line) for line in Path(arguments["rows"]).read_text().splitlines()]
    clock = Clock()
    model = AutoModelForCausalLM.from_pretrained(arguments["model"], dtype=torch.float32)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward_for(tokenizer.eos_token_id),
        args=config(arguments),
        train_dataset=Dataset.from_list(
            [{"prompt": r["prompt"], "truth": r["response"]} for r in rows]
        ),
        processing_class=tokenizer,
        callbacks=[clock],
        optimizers=optimise(model, arguments["steps"]),
    )
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    result = {"step_s": clock.per_step(), "rewards": rewards, "steps": len(clock.ends)}
    Path(arguments["out"]).write_text(json.dumps(result))


def config(arguments: dict[str, Any]) -> GRPOConfig:
    """The demo's recipe: 64 prompts x 32 samples, 4 mini-batches, token mean, no KL."""
    return GRPOConfig(
        output_dir=str(Path(arguments["out"]).parent / "trl"),
        per_device_train_batch_size=ROWS // MINI_BATCHES,
        gradient_accumulation_steps=1,
        steps_per_generation=MINI_BATCHES,
        num_generations=GROUP,
        max_completion_length=7,
        max_steps=arguments["steps"] * MINI_BATCHES,
        temperature=1.0,
        loss_type="dapo",  # token mean over the mini-batch
        scale_rewards="group",
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        max_grad_norm=1.0,
        gradient_checkpointing=False,  # on by default; it would cost a forward pass
        bf16=False,
        use_cpu=True,
        seed=arguments["seed"],
        logging_steps=MINI_BATCHES,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def optimise(model: torch.nn.Module, steps: int) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """The demo's optimizer and schedule."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )

    def factor(update: int) -> float:
        step = update // MINI_BATCHES + 1  # all updates of a step share its rate
        if step < WARMUP:
            return step / WARMUP
        return 1.0 - (1.0 - FLOOR) * min((step - WARMUP) / max(steps - WARMUP, 1), 1.0)

    return optimizer, LambdaLR(optimizer, factor)


def reward_for(eos: int) -> Callable[..., list[float]]:
    def exact(
        completion_ids: list[list[int]], completions: list[str], truth: list[str], **_: Any
    ) -> list[float]:
        """1 if the text is the sorted digits and the model ended it itself."""
        return [
            float(text == wanted and ids[-1] == eos)
            for ids, text, wanted in zip(completion_ids, completions, truth, strict=True)
        ]

    return exact


class Clock(TrainerCallback):
    """When each train step (all updates on one generation) ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % MINI_BATCHES == 0:
            self.ends.append(time.perf_counter())

    def per_step(self) -> float:
        timed = self.ends[UNTIMED_STEPS - 1 :]
        return (timed[-1] - timed[0]) / (len(timed) - 1)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
