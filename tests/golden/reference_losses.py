"""Policy losses, corrections and divergences in plain Python, with gradients by hand.

Invariant: nothing is imported from the product. A loss is a loop over the tokens, and each
token gives its loss and the derivative of that loss by its own log-prob, written down from
the formula; what a formula treats as a constant contributes no derivative.
"""

from __future__ import annotations

import math

import numpy as np


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def weights(mask: np.ndarray, mode: str, width: float | None = None) -> np.ndarray:
    """What each token's loss is multiplied by in the loss of the whole batch."""
    out = np.zeros(mask.shape)
    rows = [i for i in range(len(mask)) if mask[i].any()]
    width = mask.shape[1] if width is None else width
    for i in rows:
        n = mask[i].sum()
        for t in np.flatnonzero(mask[i]):
            out[i, t] = {
                "token-mean": 1 / mask.sum(),
                "seq-mean-token-sum": 1 / len(rows),
                "seq-mean-token-mean": 1 / (len(rows) * n),
                "seq-mean-token-sum-norm": 1 / (len(rows) * width),
                "dr-grpo": 1 / (len(rows) * width),
            }[mode]
    return out


# one token: (loss, derivative by log π) ---------------------------------------------------
def ppo(lp, old, a, low=0.2, high=0.2, dual=3.0):
    ratio = math.exp(clip(lp - old, -20, 20))
    free, bound = -a * ratio, -a * clip(ratio, 1 - low, 1 + high)
    loss, slope = (free, free) if free >= bound else (bound, 0.0)
    if dual is not None and a < 0 and loss > -a * dual:
        return -a * dual, 0.0
    return loss, slope


def importance_sampling(lp, old, a):
    loss = -a * math.exp(clip(lp - old, -20, 20))
    return loss, loss


def cispo(lp, old, a, low=1.0, high=0.28, mask_clip=False, mask_low=1.0, mask_high=0.28):
    ratio = math.exp(lp - old)
    if mask_clip and ((ratio > 1 + mask_high and a > 0) or (ratio < 1 - mask_low and a < 0)):
        return 0.0, 0.0
    slope = -a * clip(ratio, 1 - low, 1 + high)
    return slope * lp, slope


def sapo(lp, old, a, tau_pos=1.0, tau_neg=1.05):
    ratio = math.exp(lp - old)
    tau = tau_pos if a > 0 else tau_neg
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    return -a * gate * 4 / tau, -a * 4 * gate * (1 - gate) * ratio


def topr(lp, ratio, a, threshold=0.0):
    """``ratio``: the whole answer's π/π_old, or the token's own."""
    alpha = clip(ratio, 0, 1) if a <= threshold else 1.0
    return -a * alpha * lp, -a * alpha


def opmd(lp, a, tau=1.0):
    return -a * lp / (1 + tau), -a / (1 + tau)


def sppo(lp, old, a, epsilon=0.3):
    ratio = math.exp(lp - old)
    if not 1 / (1 + epsilon) <= ratio <= 1 + epsilon:
        return 0.0, 0.0
    return -a * (lp - old), -a


def sft(lp, kind="sft", cutoff=1.0):
    p = math.exp(lp)
    if kind == "sft":
        return -lp, -1.0
    if kind == "sft_is":
        return -lp * p, -p
    phi = p * (1 - p)
    return -min(lp, math.log(cutoff)) * phi, -phi if lp < math.log(cutoff) else 0.0


def gspo(lp, old, a, of_row, low=3e-4, high=4e-4):
    free, bound = -a * of_row, -a * clip(of_row, 1 - low, 1 + high)
    return (free, free) if free >= bound else (bound, 0.0)


def rec(lp, old, a, of_row, clip_mode="none", weight="none", regularizer="none", c=0.0, temp=1.0):
    low, high, low_p, high_p = 0.2, 0.2, 0.6, 2.0
    r = of_row if clip_mode == "gspo-one-side" else math.exp(lp - old)
    two = 1 - low <= r <= 1 + high
    one = (a >= 0 and r <= 1 + high) or (a <= 0 and r >= 1 - low)
    ring = two or (a >= 0 and r <= 1 - low_p) or (a <= 0 and r >= 1 + high_p)
    kept = {"none": True, "two-side": two, "one-side": one, "gspo-one-side": one, "ring": ring}
    scaled = (
        a
        * {
            "none": 1.0,
            "importance_sampling": r,
            "gspo_importance_sampling": of_row,
            "advantage": math.exp(a / temp),
        }[weight]
    )
    slope = -scaled if kept[clip_mode] else 0.0
    loss = slope * lp
    if regularizer == "k2":
        return loss + c * (lp - old) ** 2, slope + 2 * c * (lp - old)
    if regularizer == "forward-kl":
        return loss - c * lp, slope - c
    return loss, slope


def row_ratio(lp: np.ndarray, old: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """exp of the mean log-ratio over each row's valid tokens; 1 for an empty row."""
    means = [(lp[i] - old[i])[mask[i]].mean() if mask[i].any() else 0.0 for i in range(len(lp))]
    return np.exp(np.array(means))


def row_product(lp: np.ndarray, old: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Product of the ratios of each row's valid tokens; 1 for an empty row."""
    return np.array([math.prod(np.exp((lp[i] - old[i])[mask[i]])) for i in range(len(lp))])


def mu(step: int, warmup: int, decay: int, peak: float, valley: float) -> float:
    if step < warmup:
        return peak * step / warmup
    if step >= warmup + decay:
        return valley
    return valley + (peak - valley) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / decay))


def dpo_pair(chosen: float, rejected: float, beta: float, smoothing: float) -> float:
    """Of the two sums of log-ratios to the reference."""

    def log_sigmoid(x):
        return -math.log1p(math.exp(-x))

    z = beta * (chosen - rejected)
    return -(1 - smoothing) * log_sigmoid(z) - smoothing * log_sigmoid(-z)


# importance correction ----------------------------------------------------------------------
def correction(w: np.ndarray, mode: str, cap: float, floor: float | None = None) -> np.ndarray:
    """Weights of one sequence's tokens from their raw ratios."""
    level, _, kind = mode.partition("_")
    if level == "sequence":
        w = np.full_like(w, np.prod(w))
    elif level == "geometric":
        w = np.full_like(w, np.prod(w) ** (1 / len(w)))
    low = -math.inf if floor is None else floor
    if kind == "tis":
        return np.clip(w, low, cap)
    return np.where((w >= low) & (w <= cap), w, 0.0)


# whole distributions -------------------------------------------------------------------------
def kl_divergence(a: np.ndarray, b: np.ndarray) -> float:
    return float(sum(x * math.log(x / y) for x, y in zip(a, b, strict=True) if x > 0))


def jsd(teacher: np.ndarray, student: np.ndarray, beta: float) -> float:
    if beta == 0:
        return kl_divergence(teacher, student)
    if beta == 1:
        return kl_divergence(student, teacher)
    mixture = beta * teacher + (1 - beta) * student
    return beta * kl_divergence(teacher, mixture) + (1 - beta) * kl_divergence(student, mixture)


def kl_estimate(name: str, delta: float) -> float:
    k3 = math.exp(-delta) + delta - 1
    return {
        "k1": delta,
        "k2": delta**2 / 2,
        "k3": k3,
        "abs": abs(delta),
        "corrected_k3": k3,
        "low_var_kl": clip(math.exp(-clip(delta, -20, 20)) + clip(delta, -20, 20) - 1, -10, 10),
    }[name]


def value_token(v: float, old: float, ret: float, eps: float) -> float:
    held = clip(v, old - eps, old + eps)
    return 0.5 * max((v - ret) ** 2, (held - ret) ** 2)


def necs(p: np.ndarray) -> float:
    entropy = -sum(x * math.log(x) for x in p)
    return float(sum(x * x * (entropy + math.log(x)) for x in p))
