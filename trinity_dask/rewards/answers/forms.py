r"""What kind of thing an answer is: a value, a time, an interval, a set, a matrix, or text.

Invariant: reading never fails and takes bounded time. What is mathematics but not of this
grammar is ``Opaque``; what is none is ``Text``, and stays text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from typing import Any, Optional

from trinity_dask.rewards.answers import expression, grammar
from trinity_dask.rewards.answers.dates import read_clock, read_date
from trinity_dask.rewards.answers.grammar import Node, Unreadable, parsed
from trinity_dask.rewards.answers.kinds import (
    EMPTY,
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
from trinity_dask.rewards.answers.notation import (
    clean,
    joined_thousands,
    spelled_numbers,
    split_top,
)
from trinity_dask.rewards.answers.regions import (
    INFINITE,
    common,
    inequality,
    interval,
    interval_without,
    overlap,
    reals_without,
)
from trinity_dask.rewards.answers.units import DOZEN, MONEY, Unit, lookup, parse_unit
from trinity_dask.rewards.answers.words import text_key

MAX_ITEMS = 60
MAX_NESTING = 6
MAX_UNIT_CHARACTERS = 60


_SECONDS = (("s", 1),)
_REALS = Region((Interval(("neg", INFINITE), INFINITE, False, False),))

_CLOSED_BY = {"(": ")", "[": "]", "{": "}"}
_NAMED: dict[str, Form] = {
    "\\emptyset": EMPTY, "none": EMPTY, "empty set": EMPTY, "the empty set": EMPTY,
    "no solution": EMPTY, "no solutions": EMPTY, "no real solution": EMPTY,
    "no real solutions": EMPTY,
    "\\mathbb{R}": _REALS, "all real numbers": _REALS, "all reals": _REALS,
    "infinite": Value((INFINITE,)), "infinity": Value((INFINITE,)),
    "positive infinity": Value((INFINITE,)), "inf": Value((INFINITE,)),
    "-infinity": Value((("neg", INFINITE),)), "negative infinity": Value((("neg", INFINITE),)),
}  # fmt: skip
_SYMBOL = r"(?:[A-Za-z]|\\(?!in|cup|leq|geq|neq|pm)[A-Za-z]+)(?:_\{?\w{1,10}\}?)?'?"
_LABEL = re.compile(
    rf"^(?:[A-Z]{{2,4}}|\|\s*[A-Z]{{2}}\s*\||\\(?:det|dim|deg|ker)\s*\(?\s*[A-Za-z]\s*\)?|m?\s*\\angle\s*[A-Z]{{1,3}}|(?:\\frac\s*)?\{{?d[a-z]\}}?/?\{{?d[a-z]\}}?|{_SYMBOL}(?:\^\s*\{{?-1\}}?(?=\s*\())?(?:\s*\(\s*{_SYMBOL}(?:\s*,\s*{_SYMBOL})*\s*\))?)$"
)
_POINT_LABEL = re.compile(rf"^\(\s*{_SYMBOL}(?:\s*,\s*{_SYMBOL})*\s*\)$")
_CHANCE = re.compile(r"^P\s*\([^()]{1,40}\)\s*=\s*(.+)$")
_COLUMN = re.compile(r"(?<=[)\]])\s*\^\s*\{?\s*(?:T|\\top|\\intercal)\s*\}?$")
_POINT_NAME = re.compile(r"^[A-Z]\s*(?=\([^()]*,[^()]*\)$)")
_WORDS_LABEL = re.compile(r"^[A-Za-z][A-Za-z' ()-]{2,60}$")
_MEMBER = re.compile(rf"^({_SYMBOL})\s*\\in(?![A-Za-z])\s*(.+)$")
_SIGNS = re.compile(r"\\leq|\\geq|\\neq|[<>=]")
_MATRIX = re.compile(
    r"^\\begin\{([bpvBV]?matrix|array)\}(?:\{[clr|]+\})?(.*)\\end\{\1\}$", re.DOTALL
)
_SYSTEM = re.compile(r"^(?:\\\{\s*)?\\begin\{(cases|aligned)\}(.*)\\end\{\1\}$", re.DOTALL)
_ANY = ("var", "")
_BOUNDS = tuple(
    (sign, re.compile(rf"^(?:{words})$", re.IGNORECASE))
    for sign, words in (
        ("\\geq", r"(?:\\geq|at least|no less than|no fewer than|a minimum of)\s*(\S.*)"),
        ("\\geq", r"(\S*\d)\+"),
        ("\\geq", r"(\S.*?)\s+(?:or|and)\s+(?:more|greater|above|higher|over)"),
        ("\\leq", r"(?:\\leq|at most|no more than|up to|a maximum of)\s*(\S.*)"),
        ("\\leq", r"(\S.*?)\s+(?:or|and)\s+(?:less|fewer|below|lower|under)"),
        ("<", r"(?:<|less than|fewer than|under|below)\s*(\S.*)"),
        (">", r"(?:>|more than|greater than|over|above)\s*(\S.*)"),
    )
)
_ORDINAL = re.compile(r"^(\d+)(?:st|nd|rd|th)$")
_IN_BASE = re.compile(r"^(\d+)_(?:\{\s*(\w+)\s*\}|(\d))$")
_CURRENCY = re.compile(
    r"^(-?)\s*((?:US|A|C|HK)?[$€£¥₹₩]|(?:USD|EUR|GBP|RMB|CNY|JPY|INR|KRW|Rs)\.?(?![A-Za-z]))\s*(?=[-\d.(\\])"
)
_NOUN = re.compile(r"^(?:[A-Za-z][A-Za-z']{2,}|of|a)(?:[ /-]+(?:[A-Za-z][A-Za-z']+|a))*\.?$")
_HAN_NOUN = re.compile(r"^[\u4e00-\u9fff]+$")
_DOZENS = re.compile(r"^dozen(?: [A-Za-z]+){0,2}\.?$")
_TIMES_MATRIX = re.compile(
    r"^(?P<times>[^&,;=]{0,30}?)\s*(?:\\cdot\s*|\\times\s*)?"
    r"(?P<matrix>\\begin\s*\{[pb]matrix\}.*\\end\s*\{[pb]matrix\})"
    r"\s*(?P<turned>\^\s*\{?\s*(?:T|\\top|\\intercal)\s*\}?)?$",
    re.DOTALL,
)
_NO_NOUNS = "and or to than not is are for times plus minus over mod if else where"
_NO_NOUN = frozenset(_NO_NOUNS.split())
_CODE_WORDS = frozenset({"lambda", "def", "class", "elif", "else", "try", "while", "return"})
_TWICE = re.compile(
    r"^(?P<digits>\d+)\s*\((?P<words>[A-Za-z][A-Za-z -]*)\)$"
    r"|^(?P<first>[A-Za-z][A-Za-z -]*?)\s*\((?P<then>\d+)\)$"
)
_UNIT_FRACTION = re.compile(
    r"^(.*\d)\s*\\[dt]?frac\s*\{\s*([A-Za-z]+)\s*\}\s*\{\s*([A-Za-z]+)\s*\}$"
)
_MEASURES = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*(?:,\s*|\band\s+)?")
_ANGLE_OF = re.compile(r"sin|cos|tan|cot|sec|csc")
_CONNECTIVE = re.compile(r"(?:,\s*)?(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|[,;]")


@lru_cache(maxsize=512)
def read(text: str, loose: bool = False) -> Form:
    """The form of an answer. ``loose`` takes a letter right behind a number for a unit."""
    return _Reader(loose).read(clean(text), 0)


def _enclosed(text: str) -> bool:
    """Whether the first bracket is closed by the last character, whatever the kinds."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0:
            return position == len(text) - 1
    return False


class _Reader:
    def __init__(self, loose: bool) -> None:
        self._loose = loose

    def read(self, text: str, level: int) -> Form:
        text = text.strip(" ,;:?")
        if twice := _TWICE.match(text):  # "12 (twelve)"
            digits = twice["digits"] or twice["then"]
            if spelled_numbers((twice["words"] or twice["first"]).strip()) == digits:
                text = digits
        text = spelled_numbers(re.sub(r"(?<!\d)\.+$|(?<=\d)\.$", "", text).strip())
        named = _NAMED.get(text, _NAMED.get(text.lower()))
        if named is not None:
            return named
        if level > MAX_NESTING or len(text) > grammar.MAX_CHARACTERS:
            return Text(text_key(text))
        if len(text) > 40 and not re.search(r"[\d\\]", text):
            return Text(text_key(text))  # a sentence
        for reader in (
            lambda text, level: read_clock(text),
            lambda text, level: read_date(text),
            self._matrix,
            self._bound,
            self._measures,
            self._several,
            self._related,
            self._region,
            self._bracketed,
            lambda text, level: self._value(text),
            lambda text, level: self._ratio(text),
            self._labelled,
        ):
            form = reader(text, level)
            if form is not None:
                return form
        return Opaque(text) if _is_mathematical(text) else Text(text_key(text))

    def _matrix(self, text: str, level: int) -> Form:
        system = _SYSTEM.match(text)
        if system is not None and "&" not in system[2]:
            return self._several(", ".join(system[2].split("\\\\")), level)
        made = _TIMES_MATRIX.match(text)
        if made and (made["times"] or made["turned"]) and text.count("\\begin") == 1:
            factor = parsed(made["times"]) if made["times"] not in ("", "-") else None
            if made["times"] == "-":
                factor = ("num", Fraction(-1))
            inner = self._matrix(made["matrix"], level + 1)
            known = isinstance(inner, Matrix) and (factor is not None or not made["times"])
            return _scaled(inner, factor, bool(made["turned"])) if known else None
        found = _MATRIX.match(text)
        if found is not None:
            rows = [row for row in re.split(r"\\\\", found[2]) if row.strip()]
            cells = [re.split(r"(?<!\\)&", row) for row in rows]
            if found[1] in ("vmatrix", "Vmatrix"):  # a number, not a table of them
                nodes = [[parsed(cell.strip()) for cell in row] for row in cells]
                value = expression.determinant(nodes) if found[1] == "vmatrix" else None
                return None if value is None else Value((value,))
        elif text.startswith("[[") and text.endswith("]]") and _enclosed(text):
            rows = split_top(text[1:-1], _CONNECTIVE)
            cells = [split_top(row[1:-1], _CONNECTIVE) for row in rows]
        else:
            return None
        if sum(map(len, cells)) > MAX_ITEMS:
            return None
        return Matrix(tuple(tuple(self.read(c, level + 1) for c in row) for row in cells))

    def _several(self, text: str, level: int) -> Form:
        """Answers side by side: ``2, 3``, ``x = 1 or x = 2``, ``a and b``."""
        pieces = split_top(joined_thousands(text), _CONNECTIVE)
        if len(pieces) < 2 or len(pieces) > MAX_ITEMS or not _balanced(text):
            return None
        pieces = [piece for piece in pieces if piece]
        if not pieces:
            return None
        forms = [self.read(piece, level + 1) for piece in pieces]
        if all(isinstance(form, Text) for form in forms) and not re.search(
            r",|\band\b|\bor\b", text
        ):
            return None
        if all(isinstance(form, Region) for form in forms):
            return overlap(forms) or Region(
                tuple(part for form in forms for part in form.parts), forms[0].of
            )
        names = [form.name if isinstance(form, Assigned) else "" for form in forms]
        if names[0] and len(set(filter(None, names))) == 1:
            forms = [form.form if isinstance(form, Assigned) else form for form in forms]
            return Assigned(names[0], Many("bare", tuple(forms)))
        return Many("bare", tuple(forms))

    def _related(self, text: str, level: int) -> Form:
        member = _MEMBER.match(text)
        if member is not None:
            inside = self.read(member[2], level + 1)
            return Region(inside.parts, member[1]) if isinstance(inside, Region) else inside
        if chance := _CHANCE.match(text):
            return self.read(chance[1], level + 1)
        approximate = text.split("\\approx")
        if len(approximate) > 1:
            first, last = (approximate[0].strip(), approximate[-1])
            exact = first and not _LABEL.match(first) and not _WORDS_LABEL.match(first)
            return self.read(first if exact else last, level + 1)
        pieces = split_top(text, _SIGNS)
        if len(pieces) < 2 or len(pieces) > 6:
            return None
        signs = [sign for sign in _SIGNS.findall(text)]
        if len(signs) != len(pieces) - 1:
            return None  # some are inside brackets
        if set(signs) == {"="}:
            return self._equation(pieces, level)
        nodes = [parsed(piece) for piece in pieces]
        if "=" in signs or any(node is None for node in nodes):
            return None
        return inequality([node for node in nodes if node is not None], signs)

    def _equation(self, pieces: list[str], level: int) -> Form:
        first, last = pieces[0], pieces[-1]
        if _LABEL.match(first):
            return Assigned(_name(first), self.read(last, level + 1))
        if _LABEL.match(last) and len(pieces) == 2:
            return Assigned(_name(last), self.read(first, level + 1))
        left, right = parsed(first), parsed(last)
        numbers = left and right and left[0] == right[0] == "num" and left != right
        if numbers and all(node and node[1].denominator == 1 for node in (left, right)):
            return None  # "7 = 5" is no result
        if re.fullmatch("[a-z]{3}", first) and not _is_product(first):
            left = None  # "sum = 12", "age = 12"
        if left is not None and expression.variables(left) and len(pieces) == 2:
            if right is not None and expression.equal(left, right):
                return self.read(last, level + 1)  # x^2 - 4 = (x - 2)(x + 2)
            return None if right is None else Relation("=", left, right)
        if left is not None and not expression.variables(left):
            return self.read(last, level + 1)
        form = self.read(last, level + 1)
        if _POINT_LABEL.match(first) or (_WORDS_LABEL.match(first) and not isinstance(form, Text)):
            return form
        # "3 boxes * 4 = 12": sums with words in them
        return form if isinstance(form, Value) and left is None and first[:1].isdigit() else None

    def _region(self, text: str, level: int) -> Form:
        without = re.split(r"\\(?:setminus|backslash)(?![A-Za-z])", text)
        if len(without) == 2 and without[0].strip() == "\\mathbb{R}":
            return reals_without(self.read(without[1], level + 1))
        if len(without) == 2 and (whole := interval(without[0])) is not None:
            return interval_without(whole.parts[0], self.read(without[1], level + 1))
        shared = split_top(text, re.compile(r"\\cap(?![A-Za-z])"))
        if len(shared) == 2:
            return common([interval(piece) for piece in shared])
        pieces = split_top(text, re.compile(r"\\cup(?![A-Za-z])|(?<=[)\]}])\s*U(?=\s*[(\[\\])"))
        if len(pieces) == 1:
            if text[:1] in ("(", "[", "]") and text[-1:] in (")", "]", "["):
                return interval(text, must_differ=True)
            return None
        parts: list[Any] = []
        for piece in pieces:
            found = interval(piece)
            if found is not None:
                parts += found.parts
                continue
            form = self.read(piece, level + 1)
            if not isinstance(form, Many) or form.kind != "set":
                return None
            parts += form.items
        if all(isinstance(part, Interval) for part in parts):
            return Region(tuple(parts))
        intervals = any(isinstance(part, Interval) for part in parts)
        return Region(tuple(parts)) if intervals else Many("set", tuple(parts))

    def _bracketed(self, text: str, level: int) -> Form:
        kind = "set"
        text = _COLUMN.sub("", _POINT_NAME.sub("", text))
        if text.startswith("\\{") and text.endswith("\\}"):
            inside = text[2:-2]
            if not _balanced(inside):
                return None
            rule = re.match(
                rf"^\s*{_SYMBOL}\s*(?:\\in(?![a-z])[^:|]{{1,30}})?(?:\\mid|\\vert|\||:)\s*(.+)$",
                inside,
            )
            if rule is not None:
                return self.read(rule[1], level + 1)
        elif text[:1] in ("(", "[", "{") and text.endswith(_CLOSED_BY[text[0]]) and _enclosed(text):
            kind = {"(": "tuple", "[": "list", "{": "set"}[text[0]]
            inside = text[1:-1]
        else:
            return None
        if not re.search(r",\s", inside):
            pieces = split_top(inside, re.compile("[,;]"))
        else:
            pieces = split_top(joined_thousands(inside), re.compile("[,;]"))
        if not inside.strip():
            return EMPTY if kind != "tuple" else None
        if len(pieces) > MAX_ITEMS:
            return None
        items = tuple(self.read(piece, level + 1) for piece in pieces)
        if len(items) == 1 and kind != "set":
            return items[0] if kind == "tuple" else Many("list", items)
        return Many(kind, items)

    def _ratio(self, text: str) -> Form:
        pieces = [
            piece.strip() for piece in re.split(r":|\\colon(?![A-Za-z])|(?<=\d) to (?=\d)", text)
        ]
        nodes = [parsed(joined_thousands(piece)) for piece in pieces] if len(pieces) < 5 else [None]
        if len(pieces) < 2 or any(node is None for node in nodes):
            return None
        return Ratio(tuple(node for node in nodes if node is not None))

    def _labelled(self, text: str, level: int) -> Form:
        """``Total: 18``"""
        name, colon, rest = text.partition(":")
        if name.split(" ")[0] in _CODE_WORDS:
            return None
        if not colon or not (_WORDS_LABEL.match(name) or _LABEL.match(name)):
            return None
        form = self.read(rest, level + 1)
        return None if isinstance(form, Text | Opaque) else form

    def _bound(self, text: str, level: int) -> Form:
        """``at least 18``, ``< 18``, ``18 or more``, ``18+``"""
        for sign, pattern in _BOUNDS:
            found = pattern.match(text)
            value = self._value(found[1]) if found else None
            if isinstance(value, Value):
                return inequality([_ANY, value.nodes[0]], [sign])
        return None

    def _measures(self, text: str, level: int) -> Form:
        """``2 hours 30 minutes``, ``5 feet and 3 inches``: measures that add up to one."""
        found = _MEASURES.findall(text) if text[:1].isdigit() and len(text) < 80 else []
        units = [lookup(name) for _, name in found]
        if any(unit is not None and unit.bases == _SECONDS for unit in units):
            units = [lookup("min" if name == "m" else name) for _, name in found]
        if len(found) < 2 or _MEASURES.sub("", text).strip() or None in units:
            return None
        total, base = Fraction(0), units[0]
        for (number, _), unit in zip(found, units, strict=True):
            assert base is not None
            if unit is None or unit.bases != base.bases or unit.factor > base.factor:
                return None
            total += Fraction(number) * unit.factor / base.factor
        return Value((("num", total),), base)

    def _value(self, text: str) -> Form:
        text = joined_thousands(text)
        if re.fullmatch(r"[A-Za-z ]+", text) and not all(map(_is_product, text.split())):
            return None
        if ordinal := _ORDINAL.match(text):
            text = ordinal[1]
        if in_base := _IN_BASE.match(text):
            base = Unit(Fraction(1), ((f"base {(in_base[2] or in_base[3]).lower()}", 1),))
            return Value((("num", Fraction(in_base[1])),), base)
        rate = _UNIT_FRACTION.match(text) if self._loose else None
        if rate and parse_unit(rate[2]) and parse_unit(rate[3]):
            text = f"{rate[1]} {rate[2]}/{rate[3]}"
        money = _CURRENCY.match(text)
        unit: Optional[Unit] = None
        if money is not None:
            unit = lookup(money[2].rstrip(".")) or lookup(money[2][-1])
            text = money[1] + text[money.end() :]
        if re.match(r"^-?\d*[.]?\d+,\d+$", text) and not money:
            return None  # a list, or a decimal comma
        for value, tail in self._cuts(text):
            found = DOZEN if _DOZENS.match(tail) else parse_unit(tail)
            apart = len(value) < len(text) - len(tail) or len(tail) > 3
            if found is None and not (self._counts(tail) and (apart or not tail.isascii())):
                continue
            nodes = _nodes(value)
            may_vary = found is not None and len(tail) > 1
            if nodes and (may_vary or not any(map(expression.variables, nodes))):
                return Value(nodes, unit or found)
        nodes = _nodes(text)
        return Value(nodes, unit) if nodes else None

    def _cuts(self, text: str) -> Iterator[tuple[str, str]]:
        """Where a unit may begin: the longest tails first."""
        lowest = max(1, len(text) - MAX_UNIT_CHARACTERS)
        for position in range(lowest, len(text)):
            before, character = text[position - 1], text[position]
            per = character == "/" and before.isdigit() and text[position + 1 :].strip().isalpha()
            if (
                per
                or character in MONEY
                or character == "%"
                or text.startswith("\\degree", position)
            ):
                if _ANGLE_OF.search(text, 0, position):
                    return
                yield text[:position], text[position:]
            elif before == " " and (character.isalpha() or character == "\\"):
                yield text[: position - 1], text[position:]
            elif (before.isdigit() or before in ")}") and character.isalpha():
                tail = text[position:]
                if (len(tail) > 1 and tail[1].isalpha()) or self._loose or not tail.isascii():
                    yield text[:position], tail

    @staticmethod
    def _counts(tail: str) -> bool:
        """Whether it names the things that are counted, as in ``18 eggs``."""
        if _HAN_NOUN.match(tail):
            return True
        words = set(re.split(r"[ /-]+", tail.lower().rstrip(".")))
        return bool(_NOUN.match(tail)) and not words & (_NO_NOUN | grammar.NAMES)


def _nodes(text: str) -> tuple[Node, ...]:
    text = text.strip()
    if not text or text.endswith(("+", "-", "*", "/", "\\")):
        return ()
    try:
        first = grammar.parse(text)
        if "\\pm" not in text:
            return (first,)
        return (first, grammar.parse(text, -1))
    except (Unreadable, ArithmeticError):
        return ()


def _balanced(text: str) -> bool:
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return False
    return depth == 0


def _name(label: str) -> str:
    """``f(x)`` is called ``y``."""
    label = re.sub(r"[\s{}]", "", label)
    return "y" if "(" in label and label[0] in "fgh" else label


def _is_mathematical(text: str) -> bool:
    """Whether a computer algebra system might make something of it."""
    if not _balanced(text) or not re.search(r"\\[A-Za-z]", text):
        return False
    words = re.findall(r"(?<!\\)\b(?:[A-Za-z]{4,}|[A-Z]{2,})", text)
    known = ("frac", "sqrt", "begin", "matrix", "pmatrix", "bmatrix", "cases", "array", "text")
    return not [word for word in words if word not in known]


def _is_product(letters: str) -> bool:
    """``xy`` is a product, ``on`` a word; and there are names such as ``pi``."""
    return len(letters) == 1 or letters in grammar.NAMES or set(letters) <= set("xyz")


def _scaled(matrix: Matrix, factor: Optional[Node], turned: bool) -> Optional[Matrix]:
    """``2 A`` and ``A^T`` of a matrix whose items are values."""
    rows = tuple(zip(*matrix.rows, strict=True)) if turned else matrix.rows
    if factor is None:
        return Matrix(rows)
    if not all(isinstance(item, Value) for row in rows for item in row):
        return None
    return Matrix(
        tuple(
            tuple(Value(tuple(("*", factor, node) for node in item.nodes)) for item in row)
            for row in rows
        )
    )
