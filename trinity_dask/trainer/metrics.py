"""One dictionary of metrics per train step out of one per rank.

Invariant: a number that every rank computed over the global mini-batch is taken as it is;
one that covers a rank's own rows is weighted by the rank's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

GLOBAL = ("actor/", "critic/", "advantage/", "variance_proxy/")


def merge_rank_metrics(ranks: Sequence[dict[str, float]], seconds: float) -> dict[str, float]:
    """Metrics of the step; ``seconds`` is its wall time at the caller.

    Adds ``tokens_per_s`` over all ranks and ``time/train_step``.
    """
    tokens = [metrics["tokens"] for metrics in ranks]
    merged: dict[str, float] = {}
    for name in {name: None for metrics in ranks for name in metrics}:
        values = [(m[name], t) for m, t in zip(ranks, tokens, strict=True) if name in m]
        merged[name] = _merge(name, values)
    total = sum(tokens)
    return merged | {
        "tokens": total,
        "global_seqlen/mean": total / len(tokens),  # tokens of a rank: are they balanced?
        "global_seqlen/min": min(tokens),
        "global_seqlen/max": max(tokens),
        "tokens_per_s": total / max(seconds, 1e-9),
        "time/train_step": seconds,
    }


def _merge(name: str, values: list[tuple[float, float]]) -> float:
    if name.startswith(("time/", "perf/max_")) or name.endswith("_max"):
        return max(value for value, _ in values)
    if name.endswith("_min"):
        return min(value for value, _ in values)
    weight = sum(tokens for _, tokens in values)
    if name.startswith(GLOBAL) or weight == 0:
        return values[0][0]
    return sum(value * tokens for value, tokens in values) / weight
