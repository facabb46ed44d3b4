"""Times of day and calendar dates.

Invariant: a time is a time only when it is written as one (two digits of minutes, or am and
pm); ``1:2`` is a ratio.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Optional

_HALVES = {"morning": "am", "afternoon": "pm", "evening": "pm", "night": "pm"}
_CLOCK = re.compile(
    r"^(?P<hour>\d{1,2})\s*(?::\s*(?P<minute>[0-5]\d)(?:\s*:\s*(?P<second>[0-5]\d))?)?"
    r"\s*(?P<half>[ap]\.?\s?m\.?|o'?\s?clock)?"
    r"(?:\s+(?:in the|at)\s+(?P<part>morning|afternoon|evening|night))?$",
    re.IGNORECASE,
)
_HOURS = tuple(
    "one two three four five six seven eight nine ten eleven twelve".split()  # noqa: SIM905
)
_PAST = re.compile(
    r"^(?:a )?(half|quarter|\d{1,2}(?= past)) (past|to) (\d{1,2}|" + "|".join(_HOURS) + ")$"
)
_NAMES = {"noon": (12 * 3600, "pm"), "midday": (12 * 3600, "pm"), "midnight": (0, "am")}
_MONTHS = [
    "january", "february", "march", "april", "may", "june", "july", "august", "september",
    "october", "november", "december"
]  # fmt: skip
_MONTH = "(?P<month>" + "|".join(f"{name[:3]}(?:{name[3:]})?" for name in _MONTHS) + "|sept)\\.?"
_DAY = r"(?P<day>\d{1,2})(?:st|nd|rd|th)?"
_WEEKDAY = r"(?:(?:mon|tues|wednes|thurs|fri|satur|sun)day,?\s+)?(?:the\s+)?"
_YEAR = r"(?P<year>\d{4})"
_DATES = tuple(
    re.compile(rf"^{pattern}$", re.IGNORECASE)
    for pattern in (
        rf"{_WEEKDAY}{_MONTH}\s+{_DAY}(?:\s*,?\s+{_YEAR})?",
        rf"{_WEEKDAY}{_DAY}\s+(?:of\s+)?{_MONTH}(?:\s*,?\s+{_YEAR})?",
        rf"{_MONTH}\s*,?\s+{_YEAR}",
        r"(?P<year>\d{4})([-/.])(?P<month>\d{1,2})\2(?P<day>\d{1,2})",
        r"(?P<month>\d{1,2})([-/.])(?P<day>\d{1,2})\2(?P<year>\d{4})",
    )
)


@dataclass(frozen=True)
class Clock:
    """``seconds`` after midnight, as written; ``half`` is ``am``, ``pm`` or empty."""

    seconds: int
    half: str

    def same(self, other: Clock) -> bool:
        """Equal times. Where one says am or pm and the other nothing, that is left out."""
        if bool(self.half) != bool(other.half) and max(self.seconds, other.seconds) < 13 * 3600:
            return (self.seconds - other.seconds) % (12 * 3600) == 0
        return self._absolute() == other._absolute()

    def _absolute(self) -> int:
        if not self.half:
            return self.seconds % (24 * 3600)
        return self.seconds % (12 * 3600) + 12 * 3600 * (self.half == "pm")


@dataclass(frozen=True)
class Date:
    """A day, without a year or a day of the month where none was given."""

    year: Optional[int]
    month: int
    day: Optional[int]


def read_clock(text: str) -> Optional[Clock]:
    """``9:00``, ``9 a.m.``, ``21:30:15``, ``9 o'clock``, ``noon``; None for anything else."""
    if past := _PAST.match(text.lower()):
        minutes = {"half": 30, "quarter": 15}.get(past[1]) or int(past[1])
        hour = int(past[3]) if past[3].isdigit() else _HOURS.index(past[3]) + 1
        seconds = hour * 3600 + minutes * (60 if past[2] == "past" else -60)
        return Clock(seconds, "") if minutes < 60 and hour < 13 else None
    if text.lower() in _NAMES:
        return Clock(*_NAMES[text.lower()])
    found = _CLOCK.match(text)
    if found is None or not (found["minute"] or found["half"] or found["part"]):
        return None
    hour = int(found["hour"])
    half = (found["half"] or "").lower()
    if hour > 24 or (half[:1] in ("a", "p") and not 0 < hour < 13):
        return None
    half = "am" if half[:1] == "a" else "pm" if half[:1] == "p" else ""
    half = half or _HALVES.get((found["part"] or "").lower(), "")
    return Clock(hour * 3600 + int(found["minute"] or 0) * 60 + int(found["second"] or 0), half)


def read_date(text: str) -> Optional[Date]:
    """``July 4, 1776``, ``4 July 1776``, ``1776-07-04``, ``07/04/1776``; None for others."""
    for pattern in _DATES:
        found = pattern.match(text)
        if found is None:
            continue
        groups = found.groupdict()
        day = int(groups["day"]) if groups.get("day") else None
        month = groups["month"].lower()
        number = int(month) if month.isdigit() else _month(month)
        if month.isdigit() and day and number > 12 >= day:
            number, day = day, number
        if number > 12 or (day or 1) > 31 or not number or day == 0:
            return None
        return Date(int(groups["year"]) if groups.get("year") else None, number, day)
    return None


def _month(name: str) -> int:
    return 1 + next(index for index, full in enumerate(_MONTHS) if full.startswith(name[:3]))
