r"""Equality by math-verify, for what the package's own readers leave open.

Invariant: it runs in the main thread of a helper process, where the library's time limits work.
A failure inside the library says that the two are not equal.
"""

from __future__ import annotations

from math_verify import parse, verify
from math_verify.errors import TimeoutException


def equal_by_library(answer: str, truth: str, limit_s: int) -> bool:
    """Whether the library finds them equal; ``limit_s`` is of each step."""
    try:
        gold = parse(f"${truth.replace('$', '')}$", parsing_timeout=limit_s)
        found = parse(f"${answer.replace('$', '')}$", parsing_timeout=limit_s)
        # only expressions: where it cannot parse, the library compares pieces of text
        gold, found = ([e for e in side if not isinstance(e, str)] for side in (gold, found))
        return bool(gold and found and verify(gold, found, timeout_seconds=limit_s))
    except (Exception, TimeoutException):
        return False
