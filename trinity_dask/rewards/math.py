r"""Mathematical equality of an answer and the truth.

Invariant: no signals and no time limits in here, so every function works in any thread; the
caller bounds the time. Text that is no mathematics is compared as text.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Optional

from math_verify import parse, verify

from trinity_dask.rewards.format import FormatReward
from trinity_dask.rewards.text import boxed_answer, tagged_answer

# every call without a time limit would log the same warning; the limit is the caller's here
for _name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_name).addFilter(lambda r: not r.getMessage().startswith("Timeout is dis"))


def math_equal(answer: str, truth: str) -> bool:
    r"""Whether two pieces of mathematics are equivalent (``1/2``, ``0.5``, ``\frac{1}{2}``)."""
    gold = _parse(truth)
    if not gold:
        return _normal(answer) == _normal(truth)
    # the library's own limits use SIGALRM, which exists only in a main thread
    return bool(verify(gold, _parse(answer), timeout_seconds=None, raise_on_error=True))


def _parse(text: str) -> list[Any]:
    marked = any(mark in text for mark in ("$", "\\boxed", "\\(", "\\["))
    marked_text = text if marked else f"${text}$"
    # an internal failure is raised: a checker that is broken must not look like wrong answers
    return parse(marked_text, parsing_timeout=None, raise_on_error=True)


def _normal(text: str) -> str:
    return " ".join(text.split()).strip(" .$").casefold()


class AccuracyReward:
    r"""``accuracy``: 1 when the answer equals the truth, else 0.

    The answer is what ``answer_parser`` finds in the response; by default the last
    ``<answer>`` block, else the last ``\boxed{}``, else the whole response.
    """

    def __init__(self, answer_parser: Optional[Callable[[str], Optional[str]]] = None) -> None:
        self._parser = answer_parser or _find_answer

    def __call__(self, response: str, truth: Any, **_: Any) -> dict[str, float]:
        answer = self._parser(response)
        right = answer is not None and math_equal(str(answer), str(truth))
        return {"accuracy": float(right)}


def _find_answer(response: str) -> str:
    inner = tagged_answer(response)
    text = response if inner is None else inner
    return boxed_answer(text) or text


class MathReward:
    """Accuracy (0 or 1) plus format (±0.1)."""

    def __init__(
        self,
        answer_parser: Optional[Callable[[str], Optional[str]]] = None,
        pattern: Optional[str] = None,
    ) -> None:
        self._accuracy = AccuracyReward(answer_parser)
        self._format = FormatReward(pattern)

    def __call__(self, response: str, truth: Any, **_: Any) -> dict[str, float]:
        return {**self._accuracy(response, truth), **self._format(response)}
