r"""The value of expressions, and whether two are the same.

Invariant: computing is bounded whatever is written. Rational values are exact; others are
compared at a few fixed points, with real numbers where both sides are defined there, else with
complex ones.
"""

from __future__ import annotations

import cmath
import math
import random
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from itertools import combinations, permutations
from typing import Any, Optional

from trinity_dask.rewards.answers.grammar import Node

MAX_BITS = 20_000  # of an exact power
MAX_FACTORIAL = 2500
PRINTED = 12  # digits of a decimal that stands for the number it was rounded from
POINTS = 8
RELATIVE = 1e-11
CANCELLED = 1e-13  # of what was added up: all that is left of a difference of equals

_CONSTANTS = {"pi": math.pi, "e": math.e, "infty": math.inf}


def variables(node: Node) -> frozenset[str]:
    """Names of its variables."""
    if node[0] == "var":
        return frozenset([node[1]])
    names: frozenset[str] = frozenset()
    for part in node[1:]:
        if isinstance(part, tuple):
            names |= variables(part)
    return names


def exact(node: Node) -> Optional[Fraction]:
    """Its value when it is rational and can be had exactly, else None.

    Raises:
        ZeroDivisionError: it divides by zero.
    """
    kind = node[0]
    if kind == "num":
        return node[1]
    if kind in ("var", "const"):
        return None
    parts = [exact(part) for part in node[1:] if isinstance(part, tuple)]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    if kind == "+":
        return sum(known, Fraction(0))
    if kind == "*":
        return math.prod(known, start=Fraction(1))
    if kind == "neg":
        return -known[0]
    if kind == "inv":
        return 1 / known[0]
    if kind == "^":
        return _exact_power(*known)
    if kind == "factorial":
        whole = known[0].denominator == 1 and 0 <= known[0] <= MAX_FACTORIAL
        return Fraction(math.factorial(int(known[0]))) if whole else None
    return _exact_function(node[1], known)


def _exact_power(base: Fraction, power: Fraction) -> Optional[Fraction]:
    if power.denominator != 1:
        if power.denominator > 6 or base < 0:
            return None
        root = _exact_root(base, power.denominator)
        return None if root is None else _exact_power(root, Fraction(power.numerator))
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits > 1 and bits * abs(power) > MAX_BITS:
        return None
    return Fraction(base**power.numerator)


def _exact_root(value: Fraction, degree: int) -> Optional[Fraction]:
    def root(number: int) -> Optional[int]:
        if number.bit_length() > 900:
            return None
        guess = math.isqrt(number) if degree == 2 else round(number ** (1 / degree))
        return guess if guess**degree == number else None

    if value < 0:
        if degree % 2 == 0:
            return None
        positive = _exact_root(-value, degree)
        return None if positive is None else -positive
    top, bottom = root(value.numerator), root(value.denominator)
    return None if top is None or bottom is None else Fraction(top, bottom)


def _exact_function(name: str, values: list[Fraction]) -> Optional[Fraction]:
    first = values[0]
    whole = all(value.denominator == 1 and abs(value) < 10**30 for value in values)
    if name == "abs":
        return abs(first)
    if name == "floor":
        return Fraction(math.floor(first))
    if name == "ceil":
        return Fraction(math.ceil(first))
    if name in ("max", "min"):
        return max(values) if name == "max" else min(values)
    if name in ("gcd", "lcm") and whole:
        return Fraction((math.gcd if name == "gcd" else math.lcm)(*map(int, values)))
    if name == "binom" and whole and 0 <= values[1] <= first <= MAX_FACTORIAL:
        return Fraction(math.comb(int(first), int(values[1])))
    if name in ("sqrt", "cbrt"):
        degree = 3 if name == "cbrt" else values[1] if len(values) > 1 else Fraction(2)
        small = Fraction(degree).denominator == 1 and 2 <= degree <= 6
        return _exact_root(first, int(degree)) if small else None
    return None


def _real_power(base: float, power: float) -> float:
    result = base**power
    if isinstance(result, complex):
        raise ValueError("not real")
    return result


def _real_root(value: float, degree: float = 2.0) -> float:
    if value < 0 and degree % 2 == 1:
        return -((-value) ** (1 / degree))
    return math.sqrt(value) if degree == 2 else _real_power(value, 1 / degree)


def _real_binomial(n: float, k: float) -> float:
    return math.gamma(n + 1) / math.gamma(k + 1) / math.gamma(n - k + 1)


_REAL: dict[str, Callable[..., Any]] = {
    **{name: getattr(math, name) for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh", "exp")},
    "arcsin": math.asin, "arccos": math.acos, "arctan": math.atan,
    "ln": math.log, "log": math.log, "lg": math.log10, "abs": abs,
    "sqrt": _real_root, "cbrt": lambda x: _real_root(x, 3.0), "max": max, "min": min,
    "binom": _real_binomial,
    "floor": math.floor, "ceil": math.ceil,
}  # fmt: skip
_COMPLEX: dict[str, Callable[..., Any]] = {
    **{name: getattr(cmath, name) for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh", "exp")},
    "arcsin": cmath.asin, "arccos": cmath.acos, "arctan": cmath.atan,
    "ln": cmath.log, "log": cmath.log, "lg": cmath.log10, "abs": abs,
    "sqrt": lambda x, n=2: cmath.sqrt(x) if n == 2 else x ** (1 / n),
    "cbrt": lambda x: x ** (1 / 3),
}  # fmt: skip
_RECIPROCAL = {"cot": "tan", "sec": "cos", "csc": "sin"}


class _Computation:
    """The value of trees at one point. ``scale`` is the largest number that was added up."""

    def __init__(self, point: dict[str, float], is_complex: bool) -> None:
        self._point, self._complex = point, is_complex
        self._functions = _COMPLEX if is_complex else _REAL
        self.scale = 0.0

    def value(self, node: Node) -> Any:
        kind = node[0]
        if kind == "num":
            return float(node[1])
        if kind == "var":
            return self._point[node[1]]
        if kind == "const":
            if node[1] == "i":
                if not self._complex:
                    raise ValueError("not real")
                return 1j
            return _CONSTANTS[node[1]]
        if kind == "fn":
            return self._call(node[1], [self.value(part) for part in node[2:]])
        parts = [self.value(part) for part in node[1:]]
        if kind == "+":
            self.scale = max(self.scale, *(abs(part) for part in parts))
            return sum(parts)
        if kind == "*":
            return math.prod(parts)
        if kind == "neg":
            return -parts[0]
        if kind == "inv":
            return 1 / parts[0]
        if kind == "^":
            return parts[0] ** parts[1] if self._complex else _real_power(*parts)
        return math.gamma(parts[0] + 1)  # the factorial

    def _call(self, name: str, values: list[Any]) -> Any:
        if name in _RECIPROCAL:
            return 1 / self._call(_RECIPROCAL[name], values)
        if name in ("sin", "cos", "tan"):
            self.scale = max(self.scale, 1.0)
        if name not in self._functions:
            raise ValueError(f"{name} of such values")
        return self._functions[name](*values)


def _points(names: Iterable[str]) -> list[dict[str, float]]:
    """Fixed places to compare at: positive ones, then ones of either sign."""
    points: list[dict[str, float]] = []
    for index in range(POINTS):
        lowest = 0.3 if index < POINTS // 2 else -2.9
        draw = {name: random.Random(f"{name}/{index}").uniform(lowest, 3.1) for name in names}
        points.append(draw)
    return points


def _close(one: Any, two: Any, scale: float) -> bool:
    if one == two or cmath.isinf(one) or cmath.isinf(two):
        return bool(one == two)
    difference = abs(one - two)
    return bool(difference <= RELATIVE * max(abs(one), abs(two)) or difference <= CANCELLED * scale)


def _both(one: Node, two: Node, point: dict[str, float], is_complex: bool) -> Optional[Any]:
    """Their values and the scale, or None where one of them is not defined."""
    computation = _Computation(point, is_complex)
    try:
        values = computation.value(one), computation.value(two)
    except (ValueError, ArithmeticError, TypeError):
        return None
    if any(value != value for value in values):
        return None
    return (*values, computation.scale)


def _compared(one: Node, two: Node) -> list[Any]:
    names = variables(one) | variables(two)
    points = _points(sorted(names)) if names else [{}]
    for is_complex in (False, True):
        found = [_both(one, two, point, is_complex) for point in points]
        defined = [pair for pair in found if pair is not None]
        if defined:
            return defined
    return []


def equal(one: Node, two: Node) -> bool:
    """Whether they have the same value wherever both have one."""
    try:
        left, right = exact(one), exact(two)
    except ZeroDivisionError:
        return False
    if left is not None and right is not None:
        return left == right or _printed(one, right) or _printed(two, left)
    defined = _compared(one, two)
    return bool(defined) and all(_close(*pair) for pair in defined)


def _printed(node: Node, value: Fraction) -> bool:
    """Whether it is ``value`` as a computer prints it, to twelve digits or more."""
    node = node[1] if node[0] == "neg" else node
    if node[0] != "num" or value.denominator == 1:
        return False
    number: Fraction = node[1]
    digits = len(str(number.numerator))
    if digits < PRINTED or number.denominator < 10 or 10**30 % number.denominator:
        return False
    return abs(number - abs(value)) * 10 ** (digits - 1) <= number


def proportion(one: Node, two: Node) -> Optional[float]:
    """The constant ``one / two``, or None when there is none. Both must have variables."""
    if not variables(one) or variables(one) != variables(two):
        return None
    ratios = [
        left / right
        for left, right, _ in _compared(one, two)
        if abs(left) > 1e-9 and abs(right) > 1e-9
    ]
    first = ratios[0] if len(ratios) > 1 else 0.0
    if isinstance(first, complex) or not first:
        return None
    return first if all(_close(first, ratio, abs(first) * 100) for ratio in ratios) else None


def number(node: Node) -> Optional[float]:
    """Its real value (infinite ones too), or None."""
    try:
        value = exact(node)
        if value is not None:
            return float(value)
    except ArithmeticError:
        return None
    pair = None if variables(node) else _both(node, node, {}, False)
    return None if pair is None else float(pair[0])


def determinant(rows: Sequence[Sequence[Optional[Node]]]) -> Optional[Node]:
    """That of a square table of up to four rows, by the Leibniz formula; else None."""
    size = len(rows)
    if not 0 < size < 5 or any(len(row) != size or None in row for row in rows):
        return None
    terms: list[Node] = []
    for order in permutations(range(size)):
        term: Node = ("*", *(rows[place][column] for place, column in enumerate(order)))
        crossings = sum(one > two for one, two in combinations(order, 2))
        terms.append(("neg", term) if crossings % 2 else term)
    return ("+", *terms)
