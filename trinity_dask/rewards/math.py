r"""Mathematical equality of an answer and the truth.

Invariant: every comparison ends. The library's own time limits work (they need SIGALRM, and
so a main thread): where there is none to be had, a helper process lends its own, and it is
killed if even that does not help. Text that is no mathematics is compared as text.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any, Optional

from math_verify import parse, verify
from math_verify.errors import TimeoutException

from trinity_dask.rewards.format import FormatReward
from trinity_dask.rewards.process import call_in_process
from trinity_dask.rewards.text import boxed_answer, tagged_answer

STEP_LIMIT_S = 5
CALL_LIMIT_S = 3 * STEP_LIMIT_S + 5.0


def math_equal(answer: str, truth: str) -> bool:
    r"""Whether two pieces of mathematics are equivalent (``1/2``, ``0.5``, ``\frac{1}{2}``).

    Raises:
        ProcessCallError: they cannot be compared; the message says why.
        TimeoutError: not within 20 s.
    """
    if _normal(answer) == _normal(truth):
        return True
    if _may_use_alarm():
        return equal_here(answer, truth)
    return bool(call_in_process(f"{__name__}:equal_here", (answer, truth), CALL_LIMIT_S))


def _may_use_alarm() -> bool:
    in_main = threading.current_thread() is threading.main_thread()
    return in_main and signal.getsignal(signal.SIGALRM) == signal.SIG_DFL


def equal_here(answer: str, truth: str, limit_s: int = STEP_LIMIT_S) -> bool:
    """The comparison itself; only where SIGALRM is free to be used.

    ``limit_s`` is of each parsing and of the comparison.
    """
    try:
        gold = _parse(truth, limit_s)
    except TimeoutException as error:
        raise TimeoutError(f"the truth {truth[:80]!r} cannot be parsed: {error}") from None
    if not gold:
        return _normal(answer) == _normal(truth)
    # an internal failure is raised: a checker that is broken must not look like wrong answers
    try:
        found = _parse(answer, limit_s)
        return bool(verify(gold, found, timeout_seconds=limit_s, raise_on_error=True))
    except TimeoutException as error:  # no Exception, so nobody else would expect it
        raise TimeoutError(f"{answer[:80]!r} cannot be compared: {error}") from None


def _parse(text: str, limit_s: int) -> list[Any]:
    marked = any(mark in text for mark in ("$", "\\boxed", "\\(", "\\["))
    marked_text = text if marked else f"${text}$"
    return parse(marked_text, parsing_timeout=limit_s, raise_on_error=True)


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
