"""Workflow and reward for the end-to-end test of every algorithm: answers earn different
rewards even from a model that knows nothing."""

from __future__ import annotations

import hashlib

from trinity_dask.experience import Experience
from trinity_dask.workflows import Workflow

STEPS = 3


def spread(tokens: list[int]) -> float:
    """A number in [0, 1] that depends on the sampled tokens alone."""
    return float(sum(int(t) for t in tokens) % 7) / 6


class Walk(Workflow):
    """Three steps; the position after each is one of two, so that runs meet again."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        position = str(self.task.task_desc)
        steps: list[Experience] = []
        for number in range(STEPS):
            (step,) = await self.model.generate_async(position, max_tokens=2)
            step.eid.step = number
            step.reward = spread(step.tokens[step.prompt_length :].tolist())
            step.info["env_state_hash"] = hashlib.sha256(position.encode()).hexdigest()[:8]
            step.info["step_reward"] = step.reward
            steps.append(step)
            position = f"{self.task.task_desc}{int(step.tokens[-1]) % 2}"
        steps[-1].metrics = {"reward": float(steps[-1].reward or 0.0)}
        return steps
