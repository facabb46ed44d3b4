"""One row in full: its facts, its conversation, its tokens with what was recorded of each; and how
answers differ.

Invariant: what a row is too long for is cut where it says so (``MAX_TEXT`` characters of a text,
``MAX_TOKENS`` tokens at a time), and numbers that JSON has no word for are null. Pure.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any, Optional

from trinity_dask.records.pieces import pieces

MAX_TEXT = 200_000  # characters
MAX_TOKENS = 2000  # in one slice
MAX_MESSAGES = 500
MAX_PAIRS = 250_000  # of tokens that are compared one by one; longer middles differ as a whole
COLUMNS = (
    *("tokens", "prompt_text", "response_text", "messages", "tools", "info", "parts"),
    *("traceback", "earlier", "source"),
)
#: what is recorded of a token of the answer: name on the page -> column
NUMBERS = {
    "logprob": "logprobs",
    "train_logprob": "train_logprobs",
    "entropy": "train_entropy",
    "advantage": "advantages",
    "train_advantage": "train_advantages",
    "teacher_logprob": "teacher_logprobs",
    "reward": "token_level_reward",
    "version": "versions",
    "mask": "action_mask",
    "train_mask": "train_mask",
}
DIFFERENCE = "difference"  # of the trainer's log-prob and the sampler's


def detail(row: Mapping[str, Any]) -> dict[str, Any]:
    """What is shown of a row beside its index; ``row`` holds ``COLUMNS``, or some of them."""
    found: dict[str, Any] = {
        "prompt": cut(row.get("prompt_text")),
        "answer": cut(row.get("response_text")),
        "messages": messages(row.get("messages")),
        "tools": parsed(row.get("tools")),
        "info": parsed(row.get("info")),
        "parts": parsed(row.get("parts")),
        "traceback": cut(row.get("traceback")),
        "earlier": [cut(text) for text in row.get("earlier") or []],
        "source": cut(row.get("source")),
        "tokens": len(row.get("tokens") or ()),
        "numbers": [name for name, column in NUMBERS.items() if row.get(column) is not None],
    }
    if {"logprob", "train_logprob"} <= set(found["numbers"]):
        found["numbers"].append(DIFFERENCE)
    return found


def tokens(
    row: Mapping[str, Any], prompt_length: int, start: int, stop: int, decoder: Any
) -> dict[str, Any]:
    """A slice of a row's tokens: ids, their texts (null without a ``decoder``) and numbers.

    Numbers belong to the answer: a list of them begins at the first token of the answer that is
    in the slice. ``row`` holds ``tokens`` and the columns of :data:`NUMBERS`.
    """
    ids = list(row.get("tokens") or ())
    start, stop = max(start, 0), min(stop, len(ids), max(start, 0) + MAX_TOKENS)
    first = max(start - prompt_length, 0)
    last = max(stop - prompt_length, 0)
    numbers: dict[str, list[Any]] = {}
    for name, column in NUMBERS.items():
        if (values := row.get(column)) is not None:
            numbers[name] = [finite(v) for v in values[first:last]]
    if {"logprob", "train_logprob"} <= set(numbers):
        pairs = zip(numbers["train_logprob"], numbers["logprob"], strict=False)
        numbers[DIFFERENCE] = [None if a is None or b is None else a - b for a, b in pairs]
    told = ids[start:stop]
    return {
        "start": start,
        "stop": stop,
        "total": len(ids),
        "prompt_length": prompt_length,
        "ids": told,
        "pieces": None if decoder is None else pieces(decoder, told),
        "numbers": numbers,
    }


def messages(text: Optional[str]) -> Optional[list[dict[str, Any]]]:
    """Role, text and tool calls of each message; None where there are none."""
    told = parsed(text)
    if not isinstance(told, list):
        return None
    return [_message(message) for message in told[:MAX_MESSAGES]]


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        return {"role": "?", "text": _as_text(message), "calls": []}
    calls = message.get("tool_calls")
    return {
        "role": str(message.get("role", "?")),
        "name": message.get("name") or message.get("tool_call_id"),
        "text": _as_text(message.get("content")),
        "reasoning": _as_text(message.get("reasoning_content") or message.get("reasoning")),
        "calls": [_call(call) for call in calls] if isinstance(calls, list) else [],
    }


def _call(call: Any) -> dict[str, str]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return {"name": "?", "arguments": _as_text(call) or ""}
    name, arguments = str(function.get("name", "?")), _as_text(function.get("arguments"))
    return {"name": name, "arguments": arguments or ""}


def _as_text(content: Any) -> Optional[str]:
    """A text, the texts of a list of parts, or JSON of anything else."""
    if content is None or isinstance(content, str):
        return cut(content)
    if isinstance(content, list) and all(isinstance(p, dict) and "text" in p for p in content):
        return cut("\n".join(str(p["text"]) for p in content))
    return cut(json.dumps(content, ensure_ascii=False, indent=1))


def cut(text: Optional[str]) -> Optional[str]:
    """A text, with the number of characters that are left out of a long one."""
    if text is None or len(text) <= MAX_TEXT:
        return text
    return f"{text[:MAX_TEXT]}\n[{len(text) - MAX_TEXT} more characters]"


def parsed(text: Optional[str]) -> Any:
    """What JSON says, its numbers as a page can read them; the text itself where it is none."""
    if text is None:
        return None
    try:
        return json.loads(text, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return cut(text)


def finite(value: Any) -> Any:
    """Null for what JSON has no number for."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def differences(base: Sequence[int], other: Sequence[int]) -> list[tuple[int, int]]:
    """The parts ``[start, stop)`` of ``other`` that are not as in ``base``, in order; where only
    something is left out, an empty one. The time is bounded by ``MAX_PAIRS``."""
    low, most = 0, min(len(base), len(other))
    while low < most and base[low] == other[low]:
        low += 1
    end = 0
    while end < most - low and base[-1 - end] == other[-1 - end]:
        end += 1
    a, b = base[low : len(base) - end], other[low : len(other) - end]
    if not a and not b:
        return []
    if len(a) * len(b) > MAX_PAIRS or not a or not b:
        return [(low, low + len(b))]
    matched = SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
    return [(low + j, low + k) for tag, _, _, j, k in matched if tag != "equal"]
