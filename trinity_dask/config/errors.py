"""The one exception of a bad configuration, and the hint in its message.

Invariant: the message names the key, the value, what is allowed and the fix; a command
that sees it exits with :data:`EXIT_CODE`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Optional

EXIT_CODE = 2


class ConfigError(ValueError):
    """A configuration that cannot run; one problem per line."""

    exit_code = EXIT_CODE


class ConfigWarning(UserWarning):
    """A configuration that runs, but probably not as meant."""


def raise_if(problems: Sequence[str]) -> None:
    """Raise one error that lists all ``problems``, if there are any."""
    if problems:
        raise ConfigError("\n".join(problems))


def nearest(name: str, valid: Iterable[str]) -> Optional[str]:
    """The valid name a user most likely meant, or None; case and hyphens make no difference."""
    plain = {item.lower().replace("-", "_"): item for item in valid}
    word = name.lower().replace("-", "_")
    cutoff = 0.6 if len(word) > 3 else 0.5  # one slip is much in a short word
    close = difflib.get_close_matches(word, plain, n=5, cutoff=cutoff)
    # a letter that was doubled, dropped or swapped is likelier than a wrong one
    ratio = {item: difflib.SequenceMatcher(None, item, word).ratio() for item in close}
    in_place = {item: sum(a == b for a, b in zip(item, word, strict=False)) for item in close}
    close.sort(key=lambda k: (-ratio[k], len(set(word) ^ set(k)), -in_place[k], k))
    begun = [item for item in plain if len(word) > 2 and item.startswith(word)]
    return plain[(close or begun)[0]] if close or begun else None


def hint(name: str, valid: Sequence[str], shown: int = 20) -> str:
    """``did you mean 'x'?``, or the list of what is allowed."""
    found = nearest(name, valid)
    if found is not None:
        return f"did you mean {found!r}?"
    rest = f", ... ({len(valid)} in all)" if len(valid) > shown else ""
    return f"allowed: {', '.join(valid[:shown])}{rest}"
