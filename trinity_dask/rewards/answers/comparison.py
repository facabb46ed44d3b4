r"""Whether an answer says the same as the truth.

Invariant: an answer is right as a whole or wrong; of several ones none is picked out, and the
truth decides what may be left open: order in a set, a unit that only one side has, rounding
only where the truth says ``\approx``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, Optional

from trinity_dask.rewards.answers import expression, grammar
from trinity_dask.rewards.answers.dates import Clock
from trinity_dask.rewards.answers.forms import read
from trinity_dask.rewards.answers.grammar import Node, parsed
from trinity_dask.rewards.answers.kinds import (
    Assigned,
    Form,
    Interval,
    Many,
    Matrix,
    Opaque,
    Ratio,
    Region,
    Relation,
    Text,
    Value,
)
from trinity_dask.rewards.answers.notation import clean, split_top
from trinity_dask.rewards.answers.units import CURRENCIES, DEGREE, DOZEN, PERCENT, POUND, Unit
from trinity_dask.rewards.answers.words import text_key

MAX_TEXT = 20_000  # of what is compared as text alone
MAX_PAIRS = 400

_APPROXIMATE = re.compile(
    r"^(?:\\approx|\\sim|~|about|approximately|approx\.?|roughly|around|nearly|almost|circa)\s*",
    re.IGNORECASE,
)
_ROUNDED = re.compile(r"\(?\b(?:rounded|to the nearest|to \w+ decimal).*$", re.IGNORECASE)
# of what has these, math-verify compares a part and takes it for the whole
_FENCED = re.compile(
    r"[=<>,:;&]|\\(?:ldots|equiv|[pb]?mod|cap|cup|subset\w*|begin|forall|exists|neg|lnot|land|lor|"
    r"mid|parallel|perp|cong|triangle|angle)(?![A-Za-z])"
)
_DOMAIN = re.compile(
    r"\s*[,;(]\s*(?:(?:where|for|with)\s+)?[a-z](?:\s*,\s*[a-z])*\s*\\in\s*"
    r"\\mathbb\s*\{?\s*[ZNQRC]\s*\}?(?:\s*\^?\s*\{?[+*]\}?)?\s*\)?\.?$"
)
_SAID = re.compile(r"^(?:the\s+)?(?:final\s+)?answer\s*(?:is|=|:)\s*", re.IGNORECASE)
_BOUNDS = re.compile(r"_\s*\{[^{}]*\}")
# 3,4 is rather a list, and 1,234 a thousand
_DECIMAL_COMMA = re.compile(
    r"^(-?(?:[$€£]\s*)?(?:0(?=,)|\d+(?!,\d(?!\d)|,\d{3}(?!\d)))),(\d+(?:[^\d,;][^,;]*)?)$"
)
_SCALED = re.compile(r"^(-?\$?\d[\d,]*(?:\.\d+)?)(?:(K)|\s*(k|M))\.?$")
_SCALES = {"k": 1000, "K": 1000, "M": 10**6}
_AND_PART = re.compile(
    r"^(-?)(\d+)\s+and\s+(?:(?:an?|one)\s+(half|third|quarter)"
    r"|(\d+)/(\d+)|\\frac\s*\{(\d+)\}\s*\{(\d+)\})\.?$"
)
_PARTS = {"half": 2, "third": 3, "quarter": 4}
_SET_SIGN = re.compile(r"\\(cup|cap)(?![A-Za-z])")
_SET_NAME = re.compile(r"^[A-Z](?:_\{?\w{1,9}\}?)?(?:'|\^\s*\{?[cC]\}?)?$")
_CHOICE = re.compile(
    r"^(?:(?i:option|choice|answer|i choose|i pick|i select|选择|我选|选)\s*:?\s*)?"
    r"(?:\(\s*(?P<both>[A-Za-z])\s*\)|\[(?P<box>[A-J])\]"
    r"|(?P<half>[A-Za-z])\s*\)|(?P<bare>[A-Z]))"
    r"(?P<rest>\s*[.:,)-].*|\s+.*)?$",
    re.DOTALL,
)
_CHOSEN = re.compile(r"^\(\s*[A-J]\s*\)[\s.:]*([^\s,;].*)$")
_LETTER = re.compile(r"^[A-J]$")
_YES_NO = re.compile(r"^(yes|no|true|false)\b\s*(?=$|[,.;:!])", re.IGNORECASE)
_ANOTHER = re.compile(r"\s*(?:,|and\b|or\b|&|/)\s*\(?[A-J]\b(?!\w)")
_LETTERS = re.compile(r"^[A-J](?:\s*(?:,|and|&)?\s*[A-J])+$")


def compare(answer: str, truth: str) -> Optional[bool]:
    """Whether ``answer`` says the same as ``truth``; None when that cannot be told here."""
    if max(len(answer), len(truth)) > grammar.MAX_CHARACTERS:
        return text_key(answer[:MAX_TEXT]) == text_key(truth[:MAX_TEXT])
    plain_answer, plain_truth = clean(answer), clean(truth)
    plain_answer = _SAID.sub("", plain_answer) or plain_answer
    if not plain_answer or not plain_truth:
        return False
    if text_key(plain_answer) == text_key(plain_truth):
        return True
    sets = _sets(plain_answer)
    if sets is not None and sets == _sets(plain_truth):
        return True
    early = _by_words(plain_answer, plain_truth)
    if early is not None:
        return early
    places = _places(plain_truth)
    answer, truth = _APPROXIMATE.sub("", plain_answer), _APPROXIMATE.sub("", plain_truth)
    if places is not None:
        truth = _ROUNDED.sub("", truth)
    answer, truth = (_DOMAIN.sub("", text).strip() or text for text in (answer, truth))
    wanted = read(truth)
    found = read(answer)
    if places is not None and _rounds_to(found, wanted, places):
        return True
    verdict = same(_letters(found, answer, wanted), _letters(wanted, truth, found))
    if verdict is not True and isinstance(wanted, Value):
        loose = _loosely(answer, wanted)
        verdict = loose or verdict
    if verdict is not True and (chosen := _CHOSEN.match(answer)):
        return compare(chosen[1], truth)  # "(A) 12", where the truth is no letter
    if verdict is not True and isinstance(found, Value):
        verdict = _in_parts(truth, found) or verdict
    if verdict is None and any(_FENCED.search(_BOUNDS.sub("", text)) for text in (answer, truth)):
        return False
    return verdict


def _sets(text: str, level: int = 0) -> Optional[tuple[Any, ...]]:
    r"""Equal for unions, or intersections, of the same named sets in any order; else None."""
    signs = set(_SET_SIGN.findall(re.sub(r"\([^()]*\)", "", text)))
    pieces = split_top(text, _SET_SIGN)
    if len(signs) != 1 or len(pieces) < 2 or level > 2:
        return None
    keys: list[str] = []
    for piece in pieces:
        inner = _sets(piece[1:-1], level + 1) if piece[:1] + piece[-1:] == "()" else None
        if inner is None and not _SET_NAME.match(piece):
            return None
        keys.append(repr(inner) if inner else text_key(piece))
    return (*signs, *sorted(keys))


def _letters(form: Form, text: str, other: Form) -> Form:
    """A word of two or three letters is a product where the other side is algebra."""
    short = (
        isinstance(form, Text) and isinstance(other, Value) and re.fullmatch("[A-Za-z]{2,3}", text)
    )
    product = parsed(text) if short and len(variables_of(other)) > 1 else None
    return form if product is None else Value((product,))


def variables_of(value: Value) -> frozenset[str]:
    """Names of the variables in it."""
    return frozenset().union(*map(expression.variables, value.nodes))


def _loosely(answer: str, wanted: Value) -> bool:
    """Whether it is equal with ``12m`` in metres, ``18k`` in thousands, ``0,5`` a decimal."""
    comma = _DECIMAL_COMMA.match(answer)
    if comma is not None:
        value = expression.exact(wanted.nodes[0])
        whole = value is None or value.denominator == 1
        return not whole and bool(same(read(f"{comma[1]}.{comma[2]}"), wanted))
    if any(map(expression.variables, wanted.nodes)) or not answer:
        return False
    if _in_parts(answer, wanted):
        return True
    if not answer[-1].isalnum() and answer[-1] != "}":
        return False
    return bool(same(read(answer, loose=True), wanted))


def _in_parts(text: str, other: Value) -> bool:
    """Whether it is equal with ``18k`` in thousands, or ``3 and 1/2`` a mixed number."""
    if any(map(expression.variables, other.nodes)):
        return False
    bases = () if other.unit is None else other.unit.bases
    if (scaled := _SCALED.match(text)) and {base for base, _ in bases} <= CURRENCIES:
        value = read(scaled[1])
        scale: Node = ("num", Fraction(_SCALES[scaled[2] or scaled[3]]))
        if isinstance(value, Value):
            many = Value(tuple(("*", node, scale) for node in value.nodes), value.unit)
            return bool(same(many, other))
    if (part := _AND_PART.match(text)) is None:
        return False
    half, top, bottom = part[3], part[4] or part[6] or "1", part[5] or part[7]
    below = _PARTS[half] if half else int(bottom)
    return int(top) < below and bool(same(read(f"{part[1]}({part[2]}+{top}/{below})"), other))


def _by_words(answer: str, truth: str) -> Optional[bool]:
    """Multiple choice, and yes or no; None when the truth is neither."""
    if verdict := _YES_NO.match(truth):
        said = _YES_NO.match(answer)
        if said and len(verdict[0]) == len(truth.strip(" .,!")):
            return said[1].lower() == verdict[1].lower()
    if _LETTERS.match(truth) and _LETTERS.match(answer):
        left, right = re.findall("[A-J]", answer), re.findall("[A-J]", truth)
        # without separators it may be a word or an order
        words = [side for side in (answer, truth) if side.isalpha()]
        return sorted(left) == sorted(right) and all(w == "".join(sorted(w)) for w in words)
    choice, chosen = _CHOICE.match(truth), _CHOICE.match(answer)
    if choice is None:
        return None
    if not _is_choice(choice):
        return None
    if chosen is None or not _is_choice(chosen):
        text = (choice["rest"] or "").strip(" .:,)-")
        return None if not text or _LETTER.match(answer) else compare(answer, text)
    return _letter(choice) == _letter(chosen)


def _letter(choice: re.Match[str]) -> str:
    return (choice["both"] or choice["box"] or choice["half"] or choice["bare"]).upper()


def _is_choice(found: re.Match[str]) -> bool:
    """``A`` and ``(A) 12``, but not ``A dog`` or ``x``."""
    rest = found["rest"] or ""
    if _ANOTHER.match(rest):
        return False  # several letters
    words = rest[:1].isspace() and rest.strip()[:1] not in tuple(".:,)-")
    if _letter(found) > "J" or (found["bare"] and words):
        because = rest.strip().lower().startswith(("because", "since", "as ", "is correct"))
        return because and _letter(found) <= "J"
    return bool(found["both"] or found["box"] or found["half"] or "A" <= found["bare"] <= "J")


def _places(truth: str) -> Optional[int]:
    """Decimal places that a truth is rounded to by its own words, else None."""
    approximate = _APPROXIMATE.match(truth) or _ROUNDED.search(truth)
    number = re.search(r"\d+(?:\.(\d+))?", truth) if approximate else None
    return None if number is None else len(number[1] or "")


def _rounds_to(found: Form, wanted: Form, places: int) -> bool:
    if not isinstance(found, Value) or not isinstance(wanted, Value):
        return False
    value, goal = expression.number(found.nodes[0]), expression.number(wanted.nodes[0])
    if value is None or goal is None or math.isinf(value):
        return False
    return abs(value - goal) <= 0.5 * 10**-places * (1 + 1e-9)


def same(found: Form, wanted: Form) -> Optional[bool]:
    """Whether two forms are equal; None when one of them is not read here."""
    if found == wanted and not isinstance(found, Opaque | Value):
        return True
    if isinstance(found, Text) or isinstance(wanted, Text):
        return found == wanted
    if isinstance(found, Assigned) or isinstance(wanted, Assigned):
        return _same_assigned(found, wanted)
    if isinstance(found, Many) and len(found.items) == 1 and not isinstance(wanted, Many):
        return same(found.items[0], wanted)
    if isinstance(wanted, Many) and len(wanted.items) == 1 and not isinstance(found, Many):
        return same(found, wanted.items[0])
    if isinstance(found, Opaque) or isinstance(wanted, Opaque):
        return found == wanted or None
    either, both = (
        (found, wanted),
        lambda *kinds: all(isinstance(f, kinds) for f in (found, wanted)),
    )
    if both(Clock):
        return found.same(wanted)
    if any(isinstance(form, Region) for form in either):
        return _same_region(found, wanted)
    if any(isinstance(form, Relation) for form in either):
        return _same_relation(found, wanted)
    if any(isinstance(form, Ratio) for form in either):
        return both(Ratio, Value, Clock) and _same_ratio(found, wanted)
    if both(Matrix):
        return _same_matrix(found, wanted)
    if both(Value) and len(found.nodes) == len(wanted.nodes):
        return _same_value(found, wanted)
    return both(Value, Many, Matrix) and _same_many(found, wanted)


def _same_assigned(found: Form, wanted: Form) -> Optional[bool]:
    if isinstance(found, Assigned) and isinstance(wanted, Assigned):
        if found.name == wanted.name:
            return same(found.form, wanted.form)
        return _same_relation(found, wanted)
    assigned, other = (found, wanted) if isinstance(found, Assigned) else (wanted, found)
    if isinstance(other, Relation):
        return _same_relation(found, wanted)
    if isinstance(other, Many) and len(other.items) == 1:
        other = other.items[0]
    return same(assigned.form, other) if assigned is found else same(other, assigned.form)


def _same_relation(found: Form, wanted: Form) -> bool:
    left, right = _as_relation(found), _as_relation(wanted)
    if left is None or right is None:
        return False
    flip = {"<": ">", ">": "<", "\\leq": "\\geq", "\\geq": "\\leq"}
    ratio = expression.proportion(_difference(left), _difference(right))
    if ratio is None:
        return False
    return left.sign == right.sign if ratio > 0 else flip.get(left.sign, left.sign) == right.sign


def _as_relation(form: Form) -> Optional[Relation]:
    if isinstance(form, Relation):
        return form
    if isinstance(form, Assigned) and isinstance(form.form, Value) and len(form.form.nodes) == 1:
        try:
            return Relation("=", grammar.parse(form.name), form.form.nodes[0])
        except grammar.Unreadable:
            return None
    return None


def _difference(relation: Relation) -> Node:
    return ("+", relation.left, ("neg", relation.right))


def _same_value(found: Value, wanted: Value) -> bool:
    factors = _factors(found.unit, wanted.unit)
    return any(
        _matched(
            [_times(node, one) for node in found.nodes],
            [_times(node, two) for node in wanted.nodes],
            expression.equal,
        )
        for one, two in factors
    )


def _factors(found: Optional[Unit], wanted: Optional[Unit]) -> list[tuple[Node, Node]]:
    """What to multiply both sides with: one way for units alike, more where one has none."""
    one: Node = ("num", Fraction(1))
    if found is not None and wanted is not None:
        if found.bases == wanted.bases:
            return [(("num", found.factor), ("num", wanted.factor))]
        money = {base for base, _ in found.bases} & {base for base, _ in wanted.bases} & CURRENCIES
        if money and 1 in (len(found.bases), len(wanted.bases)):
            return [(one, one)]  # dollars, and dollars per day
        names = {base for base, _ in (*found.bases, *wanted.bases)}
        alike = names <= {"degree", "celsius", "C"} or names <= {"degree", "fahrenheit"}
        alike |= POUND in (found, wanted) and names == {"kg", "gbp"}
        dollars = names <= {"yen", "jpy"} or names <= {"yen", "cny"}
        return [(one, one)] if alike or dollars or not found.bases or not wanted.bases else []
    ways = [(one, one)]
    twelve: Node = ("num", Fraction(12))
    hundredth: Node = ("num", Fraction(1, 100))
    radians: Node = ("*", ("const", "pi"), ("num", Fraction(1, 180)))
    for unit, factor in ((PERCENT, hundredth), (DEGREE, radians), (DOZEN, twelve)):
        if found == unit:
            ways.append((factor, one))
        if wanted == unit:
            ways.append((one, factor))
    return ways


def _times(node: Node, factor: Node) -> Node:
    return node if factor == ("num", 1) else ("*", node, factor)


def _same_many(found: Form, wanted: Form) -> Optional[bool]:
    one, two = _as_many(found), _as_many(wanted)
    if "set" in (one.kind, two.kind) and {one.kind, two.kind} & {"tuple", "list"}:
        return False
    ordered = {"tuple", "list"} & {one.kind, two.kind}
    if {one.kind, two.kind} == {"bare", "list"}:
        ordered = set()
    if ordered:
        # two in brackets may be an interval
        if len(one.items) == 2 and len({one.kind, two.kind} - {"bare"}) > 1:
            return False
        if len(one.items) != len(two.items):
            return False
        pairs = list(zip(_values_of(one), _values_of(two), strict=True))
        return _all(same(left, right) for left, right in pairs)
    left, right = _distinct(one.items), _distinct(two.items)
    if len(left) != len(right) or len(left) * len(right) > MAX_PAIRS:
        return False
    undecided = any(isinstance(item, Opaque) for item in (*left, *right))
    if _matched(left, right, lambda a, b: same(a, b) is True):
        return True
    return None if undecided else False


def _values_of(many: Many) -> Sequence[Form]:
    """The items; those of ``x = 1, y = 2`` in the order of their names."""
    if all(isinstance(item, Assigned) for item in many.items):
        ordered = sorted(many.items, key=lambda item: str(item.name))
        return [item.form for item in ordered]
    return many.items


def _as_many(form: Form) -> Many:
    if isinstance(form, Many):
        signed = [isinstance(item, Value) and len(item.nodes) > 1 for item in form.items]
        if form.kind != "tuple" or not any(signed):
            return form
        return Many("bare", tuple(_with_sign(form, index) for index in range(2)))
    if isinstance(form, Value):
        return Many("set", tuple(Value((node,), form.unit) for node in form.nodes))
    if isinstance(form, Matrix):
        line = form.rows[0] if len(form.rows) == 1 else [row[0] for row in form.rows]
        flat = len(form.rows) == 1 or all(len(row) == 1 for row in form.rows)
        return Many("tuple", tuple(line) if flat else form.rows)
    return Many("bare", (form,))


def _with_sign(many: Many, index: int) -> Many:
    r"""``(1, \pm 2)`` with one of its signs."""
    items = [
        Value((item.nodes[index],), item.unit)
        if isinstance(item, Value) and len(item.nodes) > 1
        else item
        for item in many.items
    ]
    return Many(many.kind, tuple(items))


def _distinct(items: Sequence[Form]) -> list[Form]:
    flat: list[Form] = []
    for item in items:
        several = isinstance(item, Value) and len(item.nodes) > 1
        flat += _as_many(item).items if several else (item,)
    kept: list[Form] = []
    for item in flat[:60]:
        if not any(same(item, other) for other in kept):
            kept.append(item)
    return kept


def _matched(left: Sequence[Any], right: Sequence[Any], equal: Callable[[Any, Any], bool]) -> bool:
    """Whether each on the left has a partner of its own on the right."""
    if len(left) != len(right):
        return False
    free = list(right)
    for item in left:
        partner = next((i for i, other in enumerate(free) if equal(item, other)), None)
        if partner is None:
            return False
        del free[partner]
    return True


def _all(verdicts: Any) -> Optional[bool]:
    found = list(verdicts)
    return False if False in found else None if None in found else True


def _same_matrix(found: Matrix, wanted: Matrix) -> Optional[bool]:
    if [len(row) for row in found.rows] != [len(row) for row in wanted.rows]:
        return False
    pairs = [
        pair
        for rows in zip(found.rows, wanted.rows, strict=True)
        for pair in zip(*rows, strict=True)
    ]
    return _all(same(left, right) for left, right in pairs)


def _same_region(found: Form, wanted: Form) -> bool:
    one, two = _as_region(found), _as_region(wanted)
    if one is None or two is None or (one.of and two.of and one.of != two.of):
        return False
    return _matched(one.parts, two.parts, _same_part)


def _same_part(one: Any, two: Any) -> bool:
    if not isinstance(one, Interval) or not isinstance(two, Interval):
        return same(one, two) is True
    ends = (one.has_low, one.has_high) == (two.has_low, two.has_high)
    return ends and expression.equal(one.low, two.low) and expression.equal(one.high, two.high)


def _as_region(form: Form) -> Optional[Region]:
    """A pair in brackets is an interval where the other side is one."""
    if isinstance(form, Region):
        return form
    if not isinstance(form, Many) or form.kind not in ("tuple", "list") or len(form.items) != 2:
        return None
    low, high = form.items
    if not isinstance(low, Value) or not isinstance(high, Value):
        return None
    closed = form.kind == "list"
    return Region((Interval(low.nodes[0], high.nodes[0], closed, closed),))


def _same_ratio(found: Form, wanted: Form) -> bool:
    one, two = _parts(found), _parts(wanted)
    if len(one) != len(two):
        return False
    return all(
        expression.equal(("*", one[0], right), ("*", two[0], left))
        for left, right in zip(one[1:], two[1:], strict=True)
    )


def _parts(form: Form) -> tuple[Node, ...]:
    """``1:2`` may be written 1/2; ``2:10`` looks like a time."""
    if isinstance(form, Clock) and not form.half:
        minutes, hours = form.seconds // 60 % 60, form.seconds // 3600
        return ("num", Fraction(hours)), ("num", Fraction(minutes))
    if isinstance(form, Value):
        return form.nodes[0], ("num", Fraction(1))
    return form.parts if isinstance(form, Ratio) else ()
