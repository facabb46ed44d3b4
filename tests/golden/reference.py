"""Plain numpy versions of the formulas, written from the definitions alone.

Invariant: nothing here is imported from the product, and loops are preferred over tricks,
so that each line can be checked against its formula by eye.
"""

from __future__ import annotations

import math

import numpy as np


def group_scores(rewards: list[float], epsilon: float) -> list[float]:
    """(r − mean) / (s + epsilon), s the sample standard deviation; a single row gets 0."""
    n = len(rewards)
    if n < 2:
        return [0.0] * n
    mean = sum(rewards) / n
    spread = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (n - 1))
    return [(r - mean) / (spread + epsilon) for r in rewards]


def aggregate(values: np.ndarray, mask: np.ndarray, mode: str) -> float:
    """Loss of a whole batch; rows without a valid token are not there at all."""
    rows = [[v for v, m in zip(r, k, strict=True) if m] for r, k in zip(values, mask, strict=True)]
    rows = [row for row in rows if row]
    if mode == "token-mean":
        tokens = [v for row in rows for v in row]
        return sum(tokens) / len(tokens)
    if mode == "seq-mean-token-mean":
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    assert mode == "seq-mean-token-sum"
    return sum(sum(row) for row in rows) / len(rows)


def ppo_token_loss(
    log_ratio: float, advantage: float, low: float, high: float, dual: float | None
) -> float:
    ratio = math.exp(min(max(log_ratio, -20.0), 20.0))
    clipped = min(max(ratio, 1.0 - low), 1.0 + high)
    loss = max(-advantage * ratio, -advantage * clipped)
    if dual is not None and advantage < 0:
        loss = min(loss, -advantage * dual)
    return loss


def ppo_losses(
    logprob: np.ndarray,
    old: np.ndarray,
    advantages: np.ndarray,
    low: float = 0.2,
    high: float = 0.2,
    dual: float | None = 3.0,
    weights: np.ndarray | None = None,
) -> np.ndarray:
    losses = np.zeros_like(logprob, dtype=np.float64)
    for place in np.ndindex(logprob.shape):
        losses[place] = ppo_token_loss(
            float(logprob[place] - old[place]), float(advantages[place]), low, high, dual
        )
    return losses if weights is None else losses * weights


def token_tis(old: np.ndarray, behaviour: np.ndarray, cap: float) -> np.ndarray:
    return np.minimum(np.exp(old.astype(np.float64) - behaviour), cap)


def kl(name: str, delta: float) -> float:
    """Value at δ = log π − log π_ref."""
    if name == "k1":
        return delta
    if name == "k2":
        return delta * delta / 2
    return math.exp(-delta) + delta - 1


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def entropy(logits: np.ndarray) -> np.ndarray:
    logp = log_softmax(logits)
    return -(np.exp(logp) * logp).sum(axis=-1)


def lr_factor(kind: str, step: int, warmup: int, total: int | None, floor: float) -> float:
    """Linear to 1 at ``warmup``; then constant, or down to ``floor`` at ``total``."""
    if warmup > 0 and step < warmup:
        return step / warmup
    if kind == "constant":
        return 1.0
    begin = max(warmup, 1)
    assert total is not None
    x = min(max(step - begin, 0) / max(total - begin, 1), 1.0)
    shape = 1.0 - x if kind == "linear" else (1.0 + math.cos(math.pi * x)) / 2.0
    return floor + (1.0 - floor) * shape
