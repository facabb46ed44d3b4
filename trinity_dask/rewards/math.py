r"""Mathematical equality of an answer and the truth.

Invariant: every comparison ends, with 0 for whatever cannot be understood. What an answer says
is read and compared here, in bounded time; what that leaves open (integrals, series, ...) is
math-verify's to decide, in a helper process, because its time limits need a main thread and
because it may never return.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Optional

from trinity_dask.rewards.answers.comparison import compare
from trinity_dask.rewards.format import FormatReward
from trinity_dask.rewards.process import HelperDied, ProcessCallError, call_in_process
from trinity_dask.rewards.prose import candidates, is_words
from trinity_dask.rewards.text import Found, final_answer

log = logging.getLogger("trinity_dask.rewards")

STEP_LIMIT_S = 2
CALL_LIMIT_S = 3 * STEP_LIMIT_S + 4.0
MAX_FOR_LIBRARY = 400


def math_equal(answer: str, truth: str) -> bool:
    r"""Whether two answers are equivalent (``1/2``, ``0.5``, ``\frac{1}{2}``).

    False for what cannot be compared, or not within 10 s.

    Raises:
        ProcessCallError: math-verify is needed and cannot be loaded.
    """
    verdict = compare(answer, truth)
    if verdict is not None:
        return verdict
    if max(len(answer), len(truth)) > MAX_FOR_LIBRARY:
        return False
    try:
        target = "trinity_dask.rewards.library:equal_by_library"
        return bool(call_in_process(target, (answer, truth, STEP_LIMIT_S), CALL_LIMIT_S))
    except (TimeoutError, HelperDied) as error:
        log.info("%r cannot be compared with %r: %s", answer[:80], truth[:80], error)
        return False


class AccuracyReward:
    r"""``accuracy``: 1 when the answer equals the truth, else 0.

    The answer is what ``answer_parser`` finds in the response (None: no answer); by default
    what :func:`trinity_dask.rewards.text.final_answer` finds. The truth may be a whole solution
    with ``####`` or ``\boxed{}``.
    """

    def __init__(self, answer_parser: Optional[Callable[[str], Optional[str]]] = None) -> None:
        self._parser = answer_parser

    def __call__(
        self, response: str, truth: Any, prompt: Any = None, finish_reason: str = "stop", **_: Any
    ) -> dict[str, float]:
        if not isinstance(response, str) or truth is None:
            return {"accuracy": 0.0}
        if self._parser is None:
            answer = final_answer(response, prompt, cut_off=finish_reason == "length")
        else:
            parsed = self._parser(response)
            answer = None if parsed is None else Found(str(parsed), exact=True)
        return {"accuracy": float(answer is not None and _earns(answer, truth))}


def _earns(answer: Found, truth: Any) -> bool:
    try:
        return _is_right(answer, truth)
    except ProcessCallError:
        raise  # math-verify cannot be loaded: nothing that an answer could be blamed for
    except Exception:
        # a failed run would take the odd answers out of their group
        log.warning("%r cannot be compared with %r", answer.text[:80], truth, exc_info=True)
        return False


def _is_right(answer: Found, truth: Any) -> bool:
    marked = final_answer(str(truth))
    if marked is None:
        return False
    if answer.exact:
        return math_equal(answer.text, marked.text)
    if compare(answer.text, marked.text):
        return True
    found = candidates(answer.text, is_words(marked.text), answer.said)
    return any(math_equal(text, marked.text) for text in found)


class MathReward:
    """Accuracy (0 or 1) plus format (±0.1)."""

    def __init__(
        self,
        answer_parser: Optional[Callable[[str], Optional[str]]] = None,
        pattern: Optional[str] = None,
    ) -> None:
        self._accuracy = AccuracyReward(answer_parser)
        self._format = FormatReward(pattern)

    def __call__(self, response: str, truth: Any, **facts: Any) -> dict[str, float]:
        return {**self._accuracy(response, truth, **facts), **self._format(response, **facts)}
