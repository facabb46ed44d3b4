"""Whether a response has the asked-for form.

Invariant: the form is judged alone; a well-formed wrong answer earns it in full.
"""

from __future__ import annotations

import re
from typing import Any, Optional

THINK_ANSWER = r"<think>.*?</think>\s*<answer>.*?</answer>\s*$"


class FormatReward:
    """``format_score``: ``score`` when the response contains ``pattern``, else ``-score``.

    The default pattern is a think block followed by an answer block at the end.
    """

    def __init__(self, pattern: Optional[str] = None, score: float = 0.1) -> None:
        self._pattern = re.compile(pattern or THINK_ANSWER, re.DOTALL)
        self._score = score

    def __call__(self, response: str, **_: Any) -> dict[str, float]:
        fits = self._pattern.search(response) is not None
        return {"format_score": self._score if fits else -self._score}
