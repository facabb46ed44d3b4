"""The one exception of a bad configuration.

Invariant: the message names the key, the value, what is allowed and the fix; a command
that sees it exits with :data:`EXIT_CODE`.
"""

from __future__ import annotations

from collections.abc import Sequence

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
