r"""Intervals and unions of them: read from brackets or inequalities, cut and shared.

Invariant: a region is only made of ends that are expressions; what is not of this kind is None.
"""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Optional

from trinity_dask.rewards.answers import expression
from trinity_dask.rewards.answers.grammar import Node, parsed
from trinity_dask.rewards.answers.kinds import EMPTY, Form, Interval, Many, Region, Relation, Value
from trinity_dask.rewards.answers.notation import joined_thousands, split_top

INFINITE: Node = ("const", "infty")
_FLIPPED = {"<": ">", ">": "<", "\\leq": "\\geq", "\\geq": "\\leq", "=": "=", "\\neq": "\\neq"}


def interval(text: str, must_differ: bool = False) -> Optional[Region]:
    r"""``(1, 2]``. With ``must_differ`` only what can be no tuple: unequal brackets, infinity."""
    text = text.strip()
    if len(text) < 5 or text[0] not in "([]" or text[-1] not in ")][":
        return None
    ends = split_top(text[1:-1], re.compile("[,;]"))
    has_low, has_high = text[0] == "[", text[-1] == "]"
    same = has_low == has_high and text[0] != "]"
    if len(ends) != 2 or (must_differ and same and "\\infty" not in text):
        return None
    low, high = parsed(joined_thousands(ends[0])), parsed(joined_thousands(ends[1]))
    if low is None or high is None:
        return None
    return Region((Interval(low, high, has_low, has_high),))


def inequality(nodes: list[Node], signs: list[str]) -> Form:
    if len(nodes) == 3 and nodes[1][0] == "var" and len({s in ("<", "\\leq") for s in signs}) == 1:
        low, high, ends = nodes[0], nodes[2], [sign in ("\\leq", "\\geq") for sign in signs]
        if signs[0] in (">", "\\geq"):
            low, high, ends = high, low, ends[::-1]
        return Region((Interval(low, high, *ends),), nodes[1][1])
    if len(nodes) != 2:
        return None
    (left, right), sign = nodes, signs[0]
    if right[0] == "var" and not expression.variables(left):
        left, right, sign = right, left, _FLIPPED[sign]
    if left[0] == "fn" and left[1] == "abs" and not expression.variables(right):
        return _distance(left[2], sign, right) or Relation(sign, left, right)
    if left[0] != "var" or expression.variables(right):
        return Relation(sign, left, right)
    below = Interval(("neg", INFINITE), right, False, sign == "\\leq")
    above = Interval(right, INFINITE, sign == "\\geq", False)
    parts = {"<": (below,), "\\leq": (below,), ">": (above,), "\\geq": (above,)}
    return Region(parts.get(sign, (below, above)), left[1])


def _distance(inside: Node, sign: str, radius: Node) -> Optional[Region]:
    """``|x - a| < b``"""
    terms = inside[1:] if inside[0] == "+" else (inside,)
    if terms[0][0] != "var" or any(map(expression.variables, terms[1:])) or sign in "=\\neq":
        return None
    center: Node = ("neg", ("+", *terms[1:], ("num", Fraction(0))))
    low, high = ("+", center, ("neg", radius)), ("+", center, radius)
    closed = sign in ("\\leq", "\\geq")
    if sign in ("<", "\\leq"):
        return Region((Interval(low, high, closed, closed),), terms[0][1])
    below = Interval(("neg", INFINITE), low, False, closed)
    return Region((below, Interval(high, INFINITE, closed, False)), terms[0][1])


def overlap(forms: list[Region]) -> Optional[Region]:
    """``x > 1, x < 3`` is what both allow, because either would be everything."""
    if len(forms) != 2 or any(len(form.parts) != 1 for form in forms):
        return None
    one, two = forms[0].parts[0], forms[1].parts[0]
    if not isinstance(one, Interval) or not isinstance(two, Interval):
        return None
    if two.high == INFINITE:
        one, two = two, one
    if one.high != INFINITE or two.low != ("neg", INFINITE):
        return None
    low, high = expression.number(one.low), expression.number(two.high)
    if low is None or high is None or low >= high:
        return None
    return Region((Interval(one.low, two.high, one.has_low, two.has_high),), forms[0].of)


def common(regions: list[Optional[Region]]) -> Form:
    """What two intervals share."""
    sides: list[tuple[float, float, Interval]] = []
    for region in regions:
        if region is None:
            return None
        side: Interval = region.parts[0]
        low, high = expression.number(side.low), expression.number(side.high)
        if low is None or high is None:
            return None
        sides.append((low, high, side))
    below = max(sides, key=lambda side: (side[0], not side[2].has_low))
    above = min(sides, key=lambda side: (side[1], side[2].has_high))
    if below[0] >= above[1]:
        return EMPTY if below[0] > above[1] else None
    return Region((Interval(below[2].low, above[2].high, below[2].has_low, above[2].has_high),))


def interval_without(whole: Interval, form: Form) -> Optional[Region]:
    """An interval without points inside of it."""
    items = form.items if isinstance(form, Many) else (form,)
    nodes = [item.nodes[0] for item in items if isinstance(item, Value)]
    ends = [expression.number(node) for node in (whole.low, *nodes, whole.high)]
    if len(nodes) < len(items) or None in ends:
        return None
    places = [end for end in ends if end is not None]
    if not all(places[0] < place < places[-1] for place in places[1:-1]):
        return None
    order = sorted(range(len(nodes)), key=lambda index: places[index + 1])
    cuts = [whole.low, *(nodes[index] for index in order), whole.high]
    parts = [Interval(low, high, False, False) for low, high in pairwise(cuts)]
    parts[0] = replace(parts[0], has_low=whole.has_low)
    parts[-1] = replace(parts[-1], has_high=whole.has_high)
    return Region(tuple(parts))


def reals_without(form: Form) -> Form:
    items = form.items if isinstance(form, Many) else (form,)
    points = [item.nodes[0] for item in items if isinstance(item, Value)]
    if len(points) < len(items):
        return None
    points.sort(key=lambda node: expression.number(node) or 0.0)
    ends = [("neg", INFINITE), *points, INFINITE]
    pairs = pairwise(ends)
    return Region(tuple(Interval(low, high, False, False) for low, high in pairs))
