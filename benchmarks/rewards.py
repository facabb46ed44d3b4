"""How many labelled answers are judged right, and how long a judgement takes.

Every reply of ``tests/golden/answers.jsonl`` is judged by ``accuracy_reward`` and by plain
math-verify (``verify(parse(truth), parse(reply))``, as its documentation shows; an error there is
a wrong judgement). A call's time is that of the processor, so that neighbours on the machine have
no say; calls that a helper process had a part in are only counted.

    python benchmarks/rewards.py

Prints a table and writes ``benchmarks/results/rewards.json``. Floors: 99 % judged right, 50 ms
for a call without the helper process.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from math_verify import parse, verify

from trinity_dask.rewards import math as rewards_math

LABELLED = Path(__file__).parents[1] / "tests" / "golden" / "answers.jsonl"
RIGHT_FLOOR = 0.99
LONGEST_MS = 50.0


def plain_math_verify(reply: str, truth: str) -> float:
    try:
        return float(verify(parse(truth), parse(reply)))
    except Exception:
        return -1.0


def judge(name: str, rows: list[dict], reward: Callable[[str, str], float]) -> dict[str, Any]:
    """Judge every row; processor times in ms, of the calls without a helper."""
    helped: list[bool] = []
    in_process = rewards_math.call_in_process

    def noted(*args: Any, **kwargs: Any) -> Any:
        helped[-1] = True
        return in_process(*args, **kwargs)

    rewards_math.call_in_process = noted
    times, wrong = [], []
    try:
        for row in rows:
            helped.append(False)
            started = time.thread_time()
            given = reward(row["reply"], row["truth"])
            times.append((time.thread_time() - started) * 1e3)
            if given != row["reward"]:
                wrong.append(row["kind"])
    finally:
        rewards_math.call_in_process = in_process
    alone = [t for t, by_helper in zip(times, helped, strict=True) if not by_helper]
    return {
        "judge": name,
        "right": 1 - len(wrong) / len(rows),
        "wrong_by_kind": {kind: wrong.count(kind) for kind in sorted(set(wrong))},
        "median_ms": statistics.median(alone),
        "max_ms": max(alone),
        "with_helper": sum(helped),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="smallest form; judges nothing")
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # math-verify tells of every limit
    rows = [json.loads(line) for line in LABELLED.read_text().splitlines()]
    if args.smoke:
        rows = rows[::40]
    ours = rewards_math.AccuracyReward()
    rewards: dict[str, Callable[[str, str], float]] = {
        "accuracy_reward": lambda reply, truth: ours(reply, truth)["accuracy"],
        "math-verify": plain_math_verify,
    }
    for reward in rewards.values():
        reward("<answer>x + 1</answer>", "1 + x")  # what is made at the first call
    results = [judge(name, rows, reward) for name, reward in rewards.items()]
    print(f"{len(rows)} labelled replies")
    print(f"{'':17}{'right':>9}{'median ms':>11}{'max ms':>9}{'with a helper':>15}")
    for result in results:
        print(
            f"{result['judge']:17}{result['right']:9.1%}{result['median_ms']:11.2f}"
            f"{result['max_ms']:9.1f}{result['with_helper']:15}"
        )
    if args.smoke:
        return 0
    path = Path(__file__).parent / "results" / "rewards.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    good = results[0]["right"] >= RIGHT_FLOOR and results[0]["max_ms"] <= LONGEST_MS
    print(
        f"right >= {RIGHT_FLOOR:.0%} and a call <= {LONGEST_MS:g} ms: "
        f"{'reached' if good else 'NOT reached'}"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
