"""What the rows of a train step look like, before anything is computed on them.

Invariant: every number covers *all* rows of the step, whatever the ranks, and only tokens
that the policy chose where it speaks about advantages and returns; a share of groups counts
each task once; a reward is that of a rollout, finite, never that of a demonstration.
"""

from __future__ import annotations

import resource

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from trinity_dask.experience.experience import PROMPT_TRUNCATED, RESPONSE_TRUNCATED
from trinity_dask.monitor.curves import AGES
from trinity_dask.trainer.step.batching import flagged

TASK = ["batch", "task"]
OLDEST = 32  # whatever is older is counted with it


def row_lengths(table: pa.Table) -> np.ndarray:
    """Tokens of each row: int64 ``[rows]``."""
    return pc.list_value_length(table["tokens"]).to_numpy().astype(np.int64)


def available_fields(table: pa.Table) -> set[str]:
    """Names of the optional batch tensors that every row has."""
    names = {
        "advantages": "advantages",
        "rollout_logprobs": "logprobs",
        "teacher_logprobs": "teacher_logprobs",
    }
    return {tensor for tensor, column in names.items() if table[column].null_count == 0}


def describe_rows(table: pa.Table, step: int) -> dict[str, float]:
    """Metrics ``sample/*``, ``prompt_length/*``, ``response_length/*`` and ``critic/*`` of the
    rows of train step ``step``, which changes the weights of version ``step`` - 1.

    ``critic/score`` is the reward of a row; ``critic/advantages`` and ``critic/returns``,
    where the rows bring them, are over action tokens.
    """
    if table.num_rows == 0:
        return {"sample/rows": 0.0, "sample/tokens": 0.0}
    # null where there is no finite reward, or the row is a demonstration: a placeholder
    rewards = table["reward"]
    keep = pc.and_(pc.is_finite(rewards), pa.array(~flagged(table, "is_expert")))
    rewards = pc.if_else(keep, rewards, pa.scalar(None, rewards.type))
    tokens = row_lengths(table)
    prompt = table["prompt_length"].to_numpy().astype(np.int64)
    truncated = _share(table, RESPONSE_TRUNCATED)
    return {
        "sample/rows": float(table.num_rows),
        "sample/tokens": float(tokens.sum()),
        "sample/truncated_share": truncated,
        **bounds("response_length", tokens - prompt),
        "response_length/clip_ratio": truncated,
        **bounds("prompt_length", prompt),
        "prompt_length/clip_ratio": _share(table, PROMPT_TRUNCATED),
        **_groups(table, rewards),
        **_rewards(rewards),
        **_token_columns(table),
        **_versions(table, step),
    }


def bounds(name: str, values: np.ndarray) -> dict[str, float]:
    """``name/mean``, ``/max`` and ``/min``; nothing of no values."""
    if len(values) == 0:
        return {}
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


def max_memory_gb(device: str) -> float:
    """Most memory this process has had so far: on the GPU, or resident on the CPU; in GB."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated() / 1e9
    # kilobytes on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def _share(table: pa.Table, status: str) -> float:
    found = pc.sum(pc.equal(table["truncate_status"], status)).as_py() or 0
    return found / table.num_rows


def _groups(table: pa.Table, rewards: pa.ChunkedArray) -> dict[str, float]:
    """Tasks, and the share of those with two rewards or more whose rewards are all equal."""
    of_task = table.select(TASK).append_column("reward", rewards).group_by(TASK)
    groups = of_task.aggregate([("reward", "min"), ("reward", "max"), ("reward", "count")])
    metrics = {"sample/task_count": float(groups.num_rows)}
    several = pc.greater(groups["reward_count"], 1)
    n_several = pc.sum(several).as_py() or 0
    if n_several:
        flat = pc.and_(several, pc.equal(groups["reward_min"], groups["reward_max"]))
        metrics["sample/zero_variance_share"] = (pc.sum(flat).as_py() or 0) / n_several
    return metrics


def _rewards(column: pa.ChunkedArray) -> dict[str, float]:
    rewards = column.drop_null().to_numpy()
    if len(rewards) == 0:
        return {}
    score = bounds("critic/score", rewards)
    # the mean of equal numbers is rounded, and their std with it not 0
    same = rewards.min() == rewards.max()
    return score | {
        "sample/reward/mean": float(rewards.mean()),
        "sample/reward/std": 0.0 if same else float(rewards.std()),
        "sample/reward/count": float(len(rewards)),
    }


def _token_columns(table: pa.Table) -> dict[str, float]:
    metrics: dict[str, float] = {}
    mask = pc.list_flatten(table["action_mask"]).to_numpy()
    for name in ("advantages", "returns"):
        if table[name].null_count == 0 and table["action_mask"].null_count == 0:
            values = pc.list_flatten(table[name]).to_numpy()
            metrics |= bounds(f"critic/{name}", values[mask])
    return metrics


def _versions(table: pa.Table, step: int) -> dict[str, float]:
    """The weights that sampled the tokens, how far they differ inside a row, and how many tokens
    are how many versions behind the weights that they change."""
    versions = table["versions"].drop_null()
    flat = pc.list_flatten(versions).to_numpy()
    rows = pc.list_parent_indices(versions).to_numpy()[flat >= 0]
    flat = flat[flat >= 0]  # the others no model sampled
    if len(flat) == 0:
        return {}
    starts = np.flatnonzero(np.diff(rows, prepend=-1))
    drift = np.maximum.reduceat(flat, starts) - np.minimum.reduceat(flat, starts)
    ages, tokens = np.unique(np.clip(step - 1 - flat, 0, OLDEST), return_counts=True)
    return {
        **{f"{AGES}{age}": float(n) for age, n in zip(ages, tokens, strict=True)},
        **bounds("sample/model_version", flat),
        **bounds("sample/model_version_drift", drift),
    }
