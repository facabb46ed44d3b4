"""Finding the answer inside a response.

Invariant: only the last answer counts, as a reader would take it.
"""

from __future__ import annotations

import re
from typing import Optional

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def tagged_answer(response: str) -> Optional[str]:
    """The text of the last ``<answer>`` block, stripped, or None."""
    found = _ANSWER.findall(response)
    return found[-1].strip() if found else None


def boxed_answer(response: str) -> Optional[str]:
    r"""The text of the last ``\boxed{...}`` (braces balanced), or None."""
    start = response.rfind("\\boxed{")
    if start < 0:
        return None
    begin, depth = start + len("\\boxed{"), 1
    for position in range(begin, len(response)):
        depth += {"{": 1, "}": -1}.get(response[position], 0)
        if depth == 0:
            return response[begin:position].strip()
    return None
