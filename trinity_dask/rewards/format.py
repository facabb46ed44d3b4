"""Whether a response has the asked-for form.

Invariant: the form is judged alone; a well-formed wrong answer earns it in full. The default
form is judged in linear time, because a slow match holds the interpreter lock.
"""

from __future__ import annotations

import re
from typing import Any, Optional

from trinity_dask.rewards.text import opens_thought

_TURN = re.compile(r"</think>\s*<answer>")


class FormatReward:
    """``format_score``: ``score`` when the response contains ``pattern``, else ``-score``.

    The default form is a think block followed by an answer block at the end. Where the prompt
    already ends in ``<think>``, the response goes on from there.
    """

    def __init__(self, pattern: Optional[str] = None, score: float = 0.1) -> None:
        self._pattern = re.compile(pattern, re.DOTALL) if pattern else None
        self._score = score

    def __call__(self, response: str, prompt: Any = None, **_: Any) -> dict[str, float]:
        text = response if isinstance(response, str) else ""
        whole = "<think>" + text if opens_thought(prompt) else text
        if self._pattern is None:
            fits = _thinks_then_answers(whole)
        else:
            fits = any(self._pattern.search(form) for form in {text, whole})
        return {"format_score": self._score if fits else -self._score}


def _thinks_then_answers(text: str) -> bool:
    """``<think>...</think> <answer>...</answer>``, and nothing behind it."""
    thought = text.find("<think>")
    turn = _TURN.search(text, thought + len("<think>")) if thought >= 0 else None
    text = text.rstrip()
    return bool(turn and text.endswith("</answer>") and len(text) - len("</answer>") >= turn.end())
