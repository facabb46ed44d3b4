r"""Arithmetic and algebra in LaTeX or plain notation as a tree.

Invariant: a text is read as a whole or not at all, and never deeper than ``MAX_DEPTH``. Letters
are variables and keep their case, apart from ``e`` and ``i``; a longer word is none of them.

A node is ``(kind, ...)``: ``num`` and a fraction, ``var`` or ``const`` and a name, ``fn``, a name
and the arguments, or an operation (``+ * ^ neg inv factorial``) and its operands.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any, Optional

Node = tuple[Any, ...]

MAX_CHARACTERS = 400
MAX_DEPTH = 30
MAX_EXPONENT = 1000  # of a literal such as 1e300


class Unreadable(ValueError):
    """Not an expression of this grammar."""


_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+(?![\w.]))?)"
    r"|(?P<command>\\[A-Za-z]+)|(?P<word>[A-Za-z]+)|(?P<op>\*\*|\\[{}|%]|\S))"
)
_SUBSCRIPT = re.compile(r"\s*_\s*(?:\{\s*([^{}]{1,20}?)\s*\}|([A-Za-z0-9]))")
_ROOT_INDEX = re.compile(r"\s*\[([^\[\]]{1,20})\]")
_MIXED = re.compile(r"(?<![\d.^_{/])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])")
_REPEATING = re.compile(r"(?<![\d.])(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?")

FUNCTIONS = {
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh",
    "tanh", "log", "ln", "lg", "exp", "sqrt", "cbrt", "abs", "max", "min", "gcd", "lcm",
}  # fmt: skip
_CONSTANTS = frozenset({"pi", "e", "infty", "infinity"})
NAMES = FUNCTIONS | _CONSTANTS
_ALIASES = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "dbinom": "binom", "tbinom": "binom",
    "asin": "arcsin", "acos": "arccos", "atan": "arctan", "varepsilon": "epsilon",
    "varphi": "phi", "vartheta": "theta", "imath": "i",
}  # fmt: skip
_LETTER_NAMES = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau "
    "upsilon phi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega ell "
    "hbar"
)
_GREEK = frozenset(_LETTER_NAMES.split())
_WORDS = frozenset(
    {"and", "or", "to", "not", "is", "are", "for", "of", "the", "if", "it", "we", "no"}
)
_TIMES = {"*", "times", "cdot", "ast"}
_OVER = {"/", "div"}
_CLOSING = {"(": ")", "[": "]", "{": "}", "\\{": "\\}"}


def parse(text: str, sign: int = 1) -> Node:
    r"""The tree of ``text``. ``sign`` is what ``\pm`` means (1 or -1).

    Raises:
        Unreadable: it is no expression of this grammar, or too long.
    """
    if len(text) > MAX_CHARACTERS:
        raise Unreadable("too long")
    text = _REPEATING.sub(_repeating, text)
    text = _MIXED.sub(r"(\1+\2/\3)", text)
    parser = _Parser(text, sign)
    tree = parser.sum()
    if parser.token is not None:
        raise Unreadable(f"unexpected {parser.token[1]!r}")
    return tree


def _repeating(found: re.Match[str]) -> str:
    whole, fixed, period = found[1] or "0", found[2], found[3]
    scale = 10 ** len(fixed)
    nines = 10 ** len(period) - 1
    numerator = int(whole + fixed) * nines + int(period)
    return f"({numerator}/{scale * nines})"


class _Parser:
    """Recursive descent; ``token`` is the next ``(kind, text)`` or None at the end."""

    def __init__(self, text: str, sign: int) -> None:
        self._text, self._sign = text.strip(), sign
        self._position = self._depth = 0
        self._bars = 0
        self._pending: list[tuple[str, str]] = []
        self.token: Optional[tuple[str, str]] = None
        self._advance()

    def _advance(self) -> None:
        self._gap = False  # whether there is space in front of the token
        if self._pending:
            self.token = self._pending.pop(0)
            return
        found = _TOKEN.match(self._text, self._position)
        if found is None:
            if self._text[self._position :].strip():
                raise Unreadable("no token")
            self.token = None
            return
        self._gap = self._text[self._position].isspace()
        self._position = found.end()
        kind = str(found.lastgroup)
        token = found[kind]
        if kind == "command":
            token = _ALIASES.get(token[1:], token[1:])
            if token not in NAMES | _GREEK | _COMMANDS:
                raise Unreadable(f"\\{token}")
        elif kind == "word":
            self._take_word(token)
            return
        self.token = (kind, token)

    def _take_word(self, word: str) -> None:
        name = _ALIASES.get(word, word)
        if name in NAMES:
            self.token = ("command", name)
        elif len(word) <= 3 and word not in _WORDS:
            self._pending = [("letter", letter) for letter in word]
            self._advance()
        else:
            raise Unreadable(f"a word: {word}")

    def _at(self, *texts: str) -> bool:
        return self.token is not None and self.token[1] in texts and self.token[0] != "letter"

    def _take(self, text: str) -> None:
        if not self._at(text):
            raise Unreadable(f"{text!r} is missing")
        self._advance()

    def sum(self) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Unreadable("too deep")
        terms = [self._product()]
        while self._at("+", "-", "pm", "mp"):
            sign = self._take_sign()
            term = self._product()
            terms.append(term if sign > 0 else ("neg", term))
        self._depth -= 1
        return terms[0] if len(terms) == 1 else ("+", *terms)

    def _take_sign(self) -> int:
        assert self.token is not None
        sign = {"+": 1, "-": -1, "pm": self._sign, "mp": -self._sign}[self.token[1]]
        self._advance()
        return sign

    def _product(self) -> Node:
        factors = [self._signed()]
        while self.token is not None:
            if self._at(*_TIMES):
                self._advance()
                factors.append(self._signed())
            elif self._at(*_OVER):
                self._advance()
                factors.append(("inv", self._signed()))
            elif self._begins_factor():
                right = self._power()
                left = factors[-1]
                if _is_mixed(left, right):
                    factors[-1] = ("+", left, right)
                elif _is_mixed(left[1], right) if left[0] == "neg" else False:
                    factors[-1] = ("neg", ("+", left[1], right))
                else:
                    factors.append(right)
            else:
                break
        return factors[0] if len(factors) == 1 else ("*", *factors)

    def _begins_factor(self) -> bool:
        if self.token is None or self.token[0] == "number":
            return False  # two numbers side by side are no product
        if self._at("|"):
            return self._bars == 0
        return (self.token[0] in ("letter", "command") and not self._at(*_NO_FACTOR)) or self._at(
            "(", "[", "{"
        )

    def _signed(self) -> Node:
        sign = 1
        while self._at("+", "-", "pm", "mp"):
            sign *= self._take_sign()
        node = self._power()
        return node if sign > 0 else ("neg", node)

    def _power(self) -> Node:
        base = self._postfix(self._atom())
        if not self._at("^", "**"):
            return base
        self._advance()
        return self._postfix(("^", base, self._exponent()))

    def _exponent(self) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Unreadable("too deep")
        exponent = self._signed()
        self._depth -= 1
        return exponent

    def _postfix(self, node: Node) -> Node:
        for _ in range(3):
            if self._at("!"):
                node = ("factorial", node)
            elif self._at("%", "\\%"):
                node = ("*", node, ("num", Fraction(1, 100)))
            elif self._at("degree"):
                node = ("*", node, ("const", "pi"), ("num", Fraction(1, 180)))
            else:
                break
            self._advance()
        return node

    def _atom(self) -> Node:
        if self.token is None:
            raise Unreadable("ends too early")
        kind, text = self.token
        if kind == "number":
            self._advance()
            return ("num", _number(text))
        if kind == "letter":
            return self._variable(text)
        if kind == "command":
            return self._command(text)
        if text in _CLOSING:
            return self._group()
        if text == "|" and not self._bars:
            self._bars += 1
            self._advance()
            inside = self.sum()
            self._take("|")
            self._bars -= 1
            return ("fn", "abs", inside)
        raise Unreadable(f"unexpected {text!r}")

    def _group(self) -> Node:
        assert self.token is not None
        closing = _CLOSING[self.token[1]]
        bars, self._bars = self._bars, 0
        self._advance()
        inside = self.sum()
        if not self._at(closing):
            raise Unreadable(f"{closing!r} is missing")
        self._bars = bars
        self._advance()
        return inside

    def _subscript(self) -> str:
        if self._pending:
            return ""
        found = _SUBSCRIPT.match(self._text, self._position)
        if found is None:
            return ""
        self._position = found.end()
        return "_" + (found[1] or found[2])

    def _variable(self, name: str) -> Node:
        name += self._subscript()
        self._advance()
        if name in ("e", "i"):
            return ("const", name)
        adjacent = self.token is not None and self.token[0] == "number" and not self._gap
        if self.token is not None and adjacent and "_" not in name:
            name += "_" + self.token[1]  # x1 is x_1
            self._advance()
        return ("var", name)

    def _command(self, name: str) -> Node:
        if name == "i":
            self._advance()
            return ("const", "i")
        if name in _CONSTANTS:
            self._advance()
            return ("const", "infty" if name == "infinity" else name)
        if name in _GREEK:
            name += self._subscript()
            self._advance()
            return ("var", name)
        if name in ("lfloor", "lceil"):
            self._advance()
            inside = self.sum()
            self._take("r" + name[1:])
            return ("fn", name[1:], inside)
        if name in ("lvert", "vert"):
            self._advance()
            inside = self.sum()
            self._take({"lvert": "rvert", "vert": "vert"}[name])
            return ("fn", "abs", inside)
        if name in ("frac", "binom"):
            self._advance()
            top, bottom = self._argument(), self._argument()
            return ("*", top, ("inv", bottom)) if name == "frac" else ("fn", name, top, bottom)
        if name in FUNCTIONS:
            return self._function(name)
        raise Unreadable(f"unexpected \\{name}")

    def _argument(self) -> Node:
        """A group, or one token: ``\\frac12`` is one half."""
        if self.token is not None and self.token[0] == "number" and self._text:
            digits = self.token[1]
            self.token = ("number", digits[1:])
            if len(digits) == 1 or not digits.isdigit():
                self._advance()
                return ("num", _number(digits))
            return ("num", Fraction(int(digits[0])))
        return self._atom()

    def _function(self, name: str) -> Node:
        index: Optional[Node] = None
        if name == "sqrt":
            found = _ROOT_INDEX.match(self._text, self._position)
            if found is not None:
                self._position = found.end()
                index = parse(found[1])
        elif name == "log":
            base = self._subscript()
            index = parse(base[1:]) if base else None
        self._advance()
        power: Optional[Node] = None
        if self._at("^"):
            self._advance()
            power = self._argument()
        arguments = self._arguments(name)
        inverse = power == ("neg", ("num", Fraction(1)))
        if inverse and name in ("sin", "cos", "tan"):
            return ("fn", "arc" + name, *arguments)
        node: Node = ("fn", name, *arguments, *([] if index is None else [index]))
        return node if power is None else ("^", node, power)

    def _arguments(self, name: str) -> list[Node]:
        if self._at("(", "{"):
            closing = ")" if self._at("(") else "}"
            bars, self._bars = self._bars, 0
            self._advance()
            arguments = [self.sum()]
            while self._at(",") and name in ("max", "min", "gcd", "lcm"):
                self._advance()
                arguments.append(self.sum())
            self._bars = bars
            self._take(closing)
            return arguments
        if name == "sqrt":
            return [self._argument()]
        factors = [self._power()]
        while self._begins_factor() and not (self.token and self.token[1] in FUNCTIONS):
            factors.append(self._power())
        return [factors[0] if len(factors) == 1 else ("*", *factors)]


_COMMAND_NAMES = (
    "frac binom times cdot ast div pm mp degree lfloor rfloor lceil rceil lvert rvert vert i"
)
_COMMANDS = frozenset(_COMMAND_NAMES.split())
_NO_FACTOR = ("times", "cdot", "ast", "div", "pm", "mp", "degree", "rfloor", "rceil", "rvert",
              "vert")  # fmt: skip


def _number(text: str) -> Fraction:
    _, _, exponent = text.lower().partition("e")
    if exponent and abs(int(exponent)) > MAX_EXPONENT:
        raise Unreadable("exponent too large")
    return Fraction(text.rstrip(".") if not exponent else text)


def _is_mixed(left: Node, right: Node) -> bool:
    r"""``2\frac{1}{3}``: an integer in front of a proper fraction of integers."""
    if left[0] != "num" or left[1].denominator != 1 or right[0] != "*" or len(right) != 3:
        return False
    top, bottom = right[1], right[2]
    return (
        top[0] == "num" and bottom[0] == "inv" and bottom[1][0] == "num" and top[1] < bottom[1][1]
    )


def parsed(text: str) -> Optional[Node]:
    """The expression, or None."""
    try:
        return parse(text)
    except (Unreadable, ArithmeticError):
        return None
