"""One line of the metrics file: how a metrics dict becomes strict JSON and comes back.

Invariant: a line is valid JSON for every reader (NaN and infinities are not JSON, so the
value is null and its name is kept under ``nonfinite``), and decoding gives the values
that were logged.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

RESERVED = frozenset({"stage", "time", "role", "step", "incarnation", "nonfinite"})


def as_floats(metrics: Mapping[str, Any]) -> tuple[dict[str, float], list[str]]:
    """The metrics as Python floats, and the names of those that are no numbers.

    Numpy scalars, one-element tensors and booleans count as numbers.
    """
    values: dict[str, float] = {}
    rejected = []
    for name, value in metrics.items():
        number = None if name in RESERVED or isinstance(value, str) else _as_float(value)
        if number is None:
            rejected.append(name)
        else:
            values[name] = number
    return values, rejected


def _as_float(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # torch raises the last one
        return None


def encode_line(
    time_s: float, role: str, step: int, incarnation: int, metrics: Mapping[str, float]
) -> str:
    """One JSON object with a trailing newline; ``metrics`` as made by :func:`as_floats`."""
    line: dict[str, Any] = {"time": time_s, "role": role, "step": step, "incarnation": incarnation}
    nonfinite = {name: repr(value) for name, value in metrics.items() if not math.isfinite(value)}
    line.update({name: None if name in nonfinite else value for name, value in metrics.items()})
    if nonfinite:
        line["nonfinite"] = nonfinite
    return json.dumps(line, allow_nan=False) + "\n"


def decode_line(text: str) -> dict[str, Any]:
    """The line as a flat dict with non-finite values restored.

    Raises:
        ValueError: the text is not a JSON object with ``role`` and ``step``.
    """
    line = json.loads(text)
    if not isinstance(line, dict) or "role" not in line or "step" not in line:
        raise ValueError(f"not a metrics line: {text[:80]!r}")
    for name, spelled in line.pop("nonfinite", {}).items():
        line[name] = float(spelled)
    return line
