"""The valid name a user most likely meant.

Invariant: pure; the distance counts inserted, dropped, changed and swapped neighbouring
letters (Damerau-Levenshtein, optimal string alignment), so every single slip is at
distance 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Optional


def distance(left: str, right: str) -> int:
    """Number of single slips between two words."""
    before: list[int] = []
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        older, before, row = before, row, [i] + [0] * len(right)
        for j, b in enumerate(right, 1):
            row[j] = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (a != b))
            if i > 1 and j > 1 and a == right[j - 2] and left[i - 2] == b:
                row[j] = min(row[j], older[j - 2] + 1)
    return row[-1]


def slips_allowed(name: str) -> int:
    """Beyond this many slips, two words count as unrelated."""
    return max(1, len(name) // 3)


def nearest(name: str, valid: Iterable[str]) -> Optional[str]:
    """The valid name within a plausible number of slips, or None."""
    word = _plain(name)
    # a letter that was doubled, dropped or swapped is likelier than a wrong one
    ranked = sorted(
        (distance(word, _plain(item)), len(set(word) ^ set(_plain(item))), item) for item in valid
    )
    if ranked and ranked[0][0] <= slips_allowed(name):
        return ranked[0][2]
    extended = [item for _, _, item in ranked if _plain(item).startswith(word) and len(word) > 2]
    return extended[0] if extended else None


def hint(name: str, valid: Sequence[str], shown: int = 20) -> str:
    """``did you mean 'x'?``, or the list of what is allowed."""
    found = nearest(name, valid)
    if found is not None:
        return f"did you mean {found!r}?"
    rest = f", ... ({len(valid)} in all)" if len(valid) > shown else ""
    return f"allowed: {', '.join(valid[:shown])}{rest}"


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")
