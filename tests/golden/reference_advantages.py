"""Advantages in plain Python: one loop per definition.

Invariant: nothing is imported from the product. Tokens and rows that are masked are left
out of every list before anything is computed, so they cannot matter.
"""

from __future__ import annotations

import math


def mean(values):
    return sum(values) / len(values)


def std(values, ddof=1):
    m = mean(values)
    return math.sqrt(sum((v - m) ** 2 for v in values) / (len(values) - ddof))


def grpo(rewards, epsilon=1e-6, scale=None):
    """scale: None for the group's std, else the divisor itself (without epsilon)."""
    if len(rewards) < 2 or len(set(rewards)) == 1:
        return [0.0] * len(rewards)
    divisor = std(rewards) + epsilon if scale is None else scale
    return [(r - mean(rewards)) / divisor for r in rewards]


def leave_one_out(rewards):
    if len(rewards) < 2:
        return [0.0] * len(rewards)
    return [r - mean(rewards[:k] + rewards[k + 1 :]) for k, r in enumerate(rewards)]


def opmd(rewards, kind="mean", tau=1.0):
    if len(rewards) < 2:
        return [0.0] * len(rewards)
    if kind == "mean":
        baseline = mean(rewards)
    else:
        baseline = tau * math.log(mean([math.exp(r / tau) for r in rewards]))
    return [r - baseline for r in rewards]


def asymre(rewards, shift=-0.1):
    return [0.0] if len(rewards) == 1 else [r - mean(rewards) - shift for r in rewards]


def rec(rewards, epsilon=1e-6, normalise=False):
    if len(rewards) < 2 or len(set(rewards)) == 1:
        return [0.0] * len(rewards)
    divisor = std(rewards, ddof=0) + epsilon if normalise else 1.0
    return [(r - mean(rewards)) / divisor for r in rewards]


def rank_penalty(rewards, logprobs, p):
    order = sorted(range(len(rewards)), key=lambda k: logprobs[k])
    rank = {k: place for place, k in enumerate(order)}
    return [r * (1 - p * rank[k] / len(rewards)) for k, r in enumerate(rewards)]


# sequences of one row: lists over all places, mask of the same length ---------------------------
def valid_rewards(rewards, mask):
    """Rewards over the valid places only; others' go to the valid place before them."""
    places = [t for t, m in enumerate(mask) if m]
    out = [0.0] * len(places)
    for t, r in enumerate(rewards):
        before = [k for k, place in enumerate(places) if place <= t]
        out[before[-1] if before else 0] += r
    return places, out


def returns(rewards, mask, gamma=1.0):
    places, of_valid = valid_rewards(rewards, mask)
    out = [0.0] * len(mask)
    for k, place in enumerate(places):
        out[place] = sum(gamma**j * r for j, r in enumerate(of_valid[k:]))
    return out


def gae(rewards, values, mask, gamma=1.0, lam=1.0):
    places, of_valid = valid_rewards(rewards, mask)
    v = [values[t] for t in places] + [0.0]
    deltas = [of_valid[k] + gamma * v[k + 1] - v[k] for k in range(len(places))]
    out = [0.0] * len(mask)
    for k, place in enumerate(places):
        out[place] = sum((gamma * lam) ** j * d for j, d in enumerate(deltas[k:]))
    return out


def whiten(rows, masks):
    chosen = [
        x
        for row, mask in zip(rows, masks, strict=True)
        for x, m in zip(row, mask, strict=True)
        if m
    ]
    m, s = mean(chosen), math.sqrt(std(chosen) ** 2 + 1e-8)
    return [
        [(x - m) / s if keep else 0.0 for x, keep in zip(row, mask, strict=True)]
        for row, mask in zip(rows, masks, strict=True)
    ]


def jsd_advantage(student, teacher, beta, k):
    """−k(1−β)·log(q/m) from log-probs of one token."""
    if beta == 1:
        return k * (teacher - student)
    q, p = math.exp(student), math.exp(teacher)
    if beta == 0:
        return k * (min(p / q, 10.0) - 1)
    return -k * (1 - beta) * math.log(q / (beta * p + (1 - beta) * q))


def gigpo(task_runs, omega=1.0, gamma=1.0, norm="none", epsilon=1e-6):
    """Runs of one task, each a list of (step reward, state)."""

    def compare(values):
        if len(values) < 2 or len(set(values)) == 1:
            return [0.0] * len(values)
        d = (1.0 if norm == "none" else std(values)) + epsilon
        return [(v - mean(values)) / d for v in values]

    episode = compare([sum(r for r, _ in run) for run in task_runs])
    steps = [
        (state, sum(gamma**j * r for j, (r, _) in enumerate(run[t:])))
        for run in task_runs
        for t, (_, state) in enumerate(run)
    ]
    scores = []
    for index, (state, value) in enumerate(steps):
        peers = [k for k, (other, _) in enumerate(steps) if other == state]
        of_peers = compare([steps[k][1] for k in peers])
        scores.append(of_peers[peers.index(index)] if value is not None else 0.0)
    owner = [k for k, run in enumerate(task_runs) for _ in run]
    return [episode[k] + omega * s for k, s in zip(owner, scores, strict=True)]
