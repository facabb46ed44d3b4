"""The countdown game: reach a target from given numbers, each used exactly once.

Invariant: an expression is computed from its syntax tree, with exact fractions; nothing of
a response is ever executed.
"""

from __future__ import annotations

import ast
import json
import operator
from collections import Counter
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from trinity_dask.rewards.text import tagged_answer

NO_ANSWER, WRONG, RIGHT = 0.0, 0.1, 1.0

_OPERATORS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def countdown_reward(response: str, truth: Any, **_: Any) -> dict[str, float]:
    """``score``: 0 without an ``<answer>`` block, 0.1 for a wrong one, 1 for a right one.

    ``truth`` is ``{"target": number, "numbers": [..]}`` or that as JSON (``nums`` works too).

    Raises:
        ValueError: the truth has no target or numbers.
    """
    target, numbers = _goal(truth)
    answer = tagged_answer(response)
    if answer is None:
        return {"score": NO_ANSWER}
    return {"score": RIGHT if _reaches(answer.split("=")[0], target, numbers) else WRONG}


def _goal(truth: Any) -> tuple[Fraction, list[int]]:
    goal = json.loads(truth) if isinstance(truth, str) else truth
    numbers = goal.get("numbers", goal.get("nums")) if isinstance(goal, Mapping) else None
    if numbers is None or "target" not in goal:
        raise ValueError(f"countdown truth needs 'target' and 'numbers' (got {truth!r})")
    return Fraction(str(goal["target"])), [int(n) for n in numbers]


def _reaches(expression: str, target: Fraction, numbers: list[int]) -> bool:
    try:
        value, used = _compute(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return False  # no arithmetic expression: a wrong answer, not a broken reward
    return value == target and Counter(used) == Counter(numbers)


def _compute(node: ast.AST) -> tuple[Fraction, list[int]]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value), [node.value]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, used_left = _compute(node.left)
        right, used_right = _compute(node.right)
        return _OPERATORS[type(node.op)](left, right), used_left + used_right
    raise ValueError(f"not allowed in an answer: {ast.dump(node)}")
