r"""One way to write each thing: typography, LaTeX dressing and numerals brought to plain signs.

Invariant: what is taken away has no meaning (spacing, delimiters, emphasis, fonts); digits,
letters, their case and the order of everything stay as they are.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Optional

_SUPERSCRIPT = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ"
_SUBSCRIPT = "₀₁₂₃₄₅₆₇₈₉"
_RAISED = str.maketrans(_SUPERSCRIPT, "0123456789+-n")
_LOWERED = str.maketrans(_SUBSCRIPT, "0123456789")
_RAISED_RUN = re.compile(f"[{_SUPERSCRIPT}]+")
_LOWERED_RUN = re.compile(f"[{_SUBSCRIPT}]+")
_VULGAR = re.compile("[¼½¾⅐-⅞]")
_SIGNS = str.maketrans(
    {
        **dict.fromkeys("−–—‐‑‒﹣", "-"), **dict.fromkeys("“”„«»", '"'), 
        **dict.fromkeys("‘’`", "'"),
        "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∗": "*", "÷": "/", "⁄": "/", "∕": "/",
        "√": r"\sqrt ", "∞": r"\infty ", "±": r"\pm ", "∓": r"\mp ", "≤": r"\leq ", "⩽": r"\leq ",
        "≥": r"\geq ", "⩾": r"\geq ", "≠": r"\neq ", "≈": r"\approx ", "∪": r"\cup ",
        "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "≡": r"\equiv ",
        "°": r"\degree ", "º": r"\degree ",
        "、": ",", "。": ".", "；": ";", "∶": ":", "ℝ": r"\mathbb{R}", "ℓ": "l", "⟨": "(", "⟩": ")",
        "\u200b": "", "\ufeff": "", "\u2061": "", "\u2062": "",
    }
)  # fmt: skip
_LETTER_NAMES = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau "
    "upsilon phi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega"
)
_GREEK = {
    ord(character): f"\\{name} "
    for name, character in zip(
        _LETTER_NAMES.split(),
        "αβγδεζηθικλμνξπρστυφχψωΓΔΘΛΞΠΣΦΨΩ",
        strict=True,
    )
}
_FONTS = (
    "text|textbf|textit|textrm|textsf|texttt|textnormal|mathrm|mathbf|mathit|mathsf|mathtt|mbox|"
    "hbox|operatorname|boldsymbol|bm|emph|underline|boxed|fbox|hat|vec|ensuremath|mathcal"
)
_COLOR = r"\\(?:textcolor|color|colorbox)\s*\{[^{}]*\}"
_FONT = re.compile(rf"(?:\\(?:{_FONTS})\*?|{_COLOR})\s*\{{([^{{}}]*)\}}")
_COLORED = re.compile(_COLOR)
_ROMAN_WORD = r"\s*\{\s*\\(?:text|textrm|mathrm)\s*\{\s*([A-Za-z]+)\s*\}\s*\}"
_ROMAN_RATE = re.compile(
    rf"(?<=\d)((?:\s|~|\\[,;: ])*)\\[dt]?frac{_ROMAN_WORD}{_ROMAN_WORD}"
)  # of units: letters of variables are not upright
_END_OF_LINE = re.compile(r"^(?:\s*\\\\(?![A-Za-z]))+|(?:\\\\(?:\[[\w.]{1,8}\])?\s*)+$")
_MODULUS = re.compile(
    r"\(?\s*(?:\\[pb]?mod(?![A-Za-z])|(?<![A-Za-z\\])mod(?![A-Za-z]))\s*"
    r"(?:\{\s*(\w{1,9})\s*\}|(\w{1,9}))\s*\)?"
)
_GOES_ON = re.compile(
    r"(?<![\d.])(\d*)\.(\d{0,9}?)(?:(\d)\3\3+|(\d{2,6})\4+)\s*(?:\.{3}|…|\\ldots(?![A-Za-z]))"
)
_DOTTED = re.compile(r"\.(\d*)\\dot\s*\{?(\d)\}?(\d*)\\dot\s*\{?(\d)\}?")
_LINE_OVER = re.compile(r"\\overline\s*\{([A-Za-z]+)\}")
_SMALL_SPACE = re.compile(r"(?<=\d)(?:\\[,;:! ]|\{,\}|~|\\thinspace|,\\!)+(?=\d{3}(?!\d))")
_NOTHING = re.compile(
    r"\\(?:left|right|big|Big|bigg|Bigg|bigl|bigr|Bigl|Bigr|displaystyle|textstyle|limits|strut|"
    r"mathstrut|nolimits)(?![A-Za-z])\s*\.?"
)
_SPACE = re.compile(
    r"\\(?:quad|qquad|enspace|thinspace|hfill|newline|par)(?![A-Za-z])|(?<!\\)\\[,;:> ]|~"
)
_DELIMITER = re.compile(r"(?<!\\)\\[()\[\]]")
_SYNONYMS = (
    (re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))"), r"\\degree "),
    (re.compile(r"\\(?:le|leqslant|leqq)(?![A-Za-z])|<=|=<"), r"\\leq "),
    (re.compile(r"\\(?:ge|geqslant|geqq)(?![A-Za-z])|>="), r"\\geq "),
    (re.compile(r"\\ne(?![A-Za-z])|\\not\s*=|!=|/="), r"\\neq "),
    (re.compile(r"\\lt(?![A-Za-z])|&lt;"), "<"),
    (re.compile(r"\\gt(?![A-Za-z])|&gt;"), ">"),
    (re.compile(r"\\(?:varnothing|O)(?![A-Za-z])|\\\{\s*\\\}"), r"\\emptyset "),
    (re.compile(r"\{([^{}]{1,30})\\over(?![A-Za-z])([^{}]{1,30})\}"), r"\\frac{\1}{\2}"),
    (re.compile(r"\{([^{}]{1,30})\\choose(?![A-Za-z])([^{}]{1,30})\}"), r"\\binom{\1}{\2}"),
    (re.compile(r"(?<=\d)\s*[xX]\s*(?=10\s*(?:\^|\*\*))"), r"\\times "),
    (re.compile(r"\\cr(?![A-Za-z])"), r"\\\\"),
    (re.compile(r"\\(?:sfrac|nicefrac)(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\(?:lbrace)(?![A-Za-z])"), r"\\{"),
    (re.compile(r"\\(?:rbrace)(?![A-Za-z])"), r"\\}"),
    (re.compile(r"\\langle(?![A-Za-z])"), "("),
    (re.compile(r"\\rangle(?![A-Za-z])"), ")"),
    (re.compile(r"\\(?:approxeq|simeq|doteq)(?![A-Za-z])"), r"\\approx "),
    (re.compile(r"\\(?:implies|Rightarrow|therefore|iff)(?![A-Za-z])"), " "),
    (re.compile(r"\\(?:sim|dots|ldots|cdots)(?![A-Za-z])"), r" \\ldots "),
    (re.compile(r"\\bigcup(?![A-Za-z])"), r"\\cup "),
    (re.compile(r"\\euro(?:\{\})?(?![A-Za-z])"), "€"),
    (re.compile(r"\\pounds(?![A-Za-z])"), "£"),
    (
        re.compile(r"\\(?:Bbb|mathbb)\s*\{?\s*R\s*\}?|\\(?:R|Reals|reals)(?![A-Za-z])"),
        r"\\mathbb{R}",
    ),
)
_BOLD = re.compile(r"(?<![\w)])\*\*(\S(?:[^*]*\S)?)\*\*(?![\w(])")
_ROOT_SIGN = re.compile(r"([∛∜])\s*(\d+|[a-z]|\([^()]{1,40}\))")
_MARKUP = re.compile(r"<(b|i|u|em|strong|code|span)>([^<>]*)</\1>", re.IGNORECASE)
_OHM = re.compile(r"(?<=\d)\s*([kM]?)\s*\\Omega\s*$")
_MARKED_STOP = re.compile(r"([*_]+)([.!])\s*$")  # **18**.
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!\d|,\d)")
_EUROPEAN = re.compile(r"(?<![\d.,])\d{1,3}(?:\.\d{3})+,\d+(?![\d.,])")
_SPACED_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?: \d{3})+(?![\d,]| \d)")

_HAN_DIGITS = ["零〇", "一壹", "二两贰", "三叁", "四肆", "五伍", "六陆", "七柒", "八捌", "九玖"]
_DIGITS = {character: n for n, row in enumerate(_HAN_DIGITS) for character in row}
_SMALL = {"十": 10, "拾": 10, "百": 100, "佰": 100, "千": 1000, "仟": 1000}
_LARGE = {"万": 10**4, "萬": 10**4, "亿": 10**8, "億": 10**8}
_HAN = "".join({**_DIGITS, **_SMALL, **_LARGE})
_HAN_RUN = re.compile(rf"[{_HAN}]+")
_AFTER_DIGITS = re.compile(r"(?<![\d.,])(\d(?:[\d.,]*\d)?)\s*([万亿萬億]|千(?![克米瓦]))")
_HAN_FRACTION = re.compile(r"(?<!\d)(-?\d+)分之(\d+)")


def clean(text: str) -> str:
    """``text`` in the signs that the readers of this package know, without dressing."""
    text = _VULGAR.sub(_vulgar, text)
    text = _ROOT_SIGN.sub(lambda r: rf"\sqrt[{'∛∜'.index(r[1]) + 3}]{{{r[2]}}}", text)
    text = _RAISED_RUN.sub(lambda run: "^{" + run[0].translate(_RAISED) + "}", text)
    text = _LOWERED_RUN.sub(lambda run: "_{" + run[0].translate(_LOWERED) + "}", text)
    text = text.translate(_SIGNS).translate(_GREEK)
    text = unicodedata.normalize("NFKC", text).translate(_SIGNS)
    text = "".join(str(unicodedata.decimal(c)) if c.isdecimal() else c for c in text)
    text = han_numerals(text)
    text = _MARKED_STOP.sub(r"\2\1", text)
    for marks in ('"', "'", "*", "_"):  # around the whole
        text = text.strip().strip(marks) if text.strip()[:1] == marks else text
    text = _MARKUP.sub(r"\2", text)
    text = _BOLD.sub(r"\1", text)
    text = _dollars(text)
    text = _SMALL_SPACE.sub("", text).replace("\\!", "")
    text = text.replace("\\left\\", "\\").replace("\\right\\", "\\")
    text = _NOTHING.sub(" ", text)
    text = _DELIMITER.sub(" ", text)
    for pattern, plain in _SYNONYMS:
        text = pattern.sub(plain, text)
    text = _ROMAN_RATE.sub(r" \2/\3", text)
    for _ in range(4):  # fonts inside fonts
        text, changes = _FONT.subn(r" \1 ", text)
        if not changes:
            break
    text = _COLORED.sub("", text)
    text = _LINE_OVER.sub(r"\1", text)
    text = _OHM.sub(r" \1ohm", text)
    text = _DOTTED.sub(r".\1\\overline{\2\3\4}", text)
    text = _GOES_ON.sub(r"\1.\2\\overline{\3\4}", text)
    text = _END_OF_LINE.sub("", text.strip())
    text = _SPACE.sub(" ", text).replace("\\%", "%").replace("\\#", "#").replace("\\&", "&")
    if "\\equiv" in text:
        text = _MODULUS.sub(r"\\pmod{\1\2}", text)
    return " ".join(re.sub(r"(?<!\\)\\$", "", text.strip()).split())


def joined_thousands(text: str) -> str:
    """``1,234.5``, ``1 234.5`` and ``1.234,5`` as ``1234.5``."""
    text = _EUROPEAN.sub(lambda found: found[0].replace(".", "").replace(",", "."), text)
    text = _THOUSANDS.sub(lambda found: found[0].replace(",", ""), text)
    return _SPACED_THOUSANDS.sub(lambda found: found[0].replace(" ", ""), text)


def _vulgar(found: re.Match[str]) -> str:
    top, bottom = unicodedata.normalize("NFKC", found[0]).split("⁄")
    return rf"\frac{{{top}}}{{{bottom}}}"


def _dollars(text: str) -> str:
    """Delimiters of mathematics go; what stands for money stays as ``$``."""
    text = text.replace("\\$", "¤")
    if text.count("$") % 2:
        text = re.sub(r"\$(?=\s*-?[\d.])", "¤", text)
    return text.replace("$", " ").replace("¤", "$")


def han_numerals(text: str) -> str:
    """Numbers written in Chinese as digits: ``三百二十``, ``三分之二``, ``3.5万``."""
    if not any("\u3000" < c < "\ua000" for c in text):
        return text
    text = _AFTER_DIGITS.sub(_scaled, text)
    text = re.sub(rf"(?<=[{_HAN}])点(?=[{_HAN}])(?![{_HAN}]*分)", ".", text)
    text = re.sub(rf"负(?=[{_HAN}\d])", "-", text)
    text = re.sub(rf"(?<=\.)[{_HAN}]+", lambda run: _digit_by_digit(run[0]) or run[0], text)
    text = _HAN_RUN.sub(lambda run: _han_number(run[0]) or run[0], text)
    text = re.sub(r"(?<!\d)(\d+)又(\d+)分之(\d+)", r"\1 \3/\2", text)
    text = _HAN_FRACTION.sub(
        lambda found: f"{found[2]}%" if found[1] == "100" else f"{found[2]}/{found[1]}", text
    )
    text = re.sub(r"百分之(-?\d+(?:\.\d+)?)", r"\1%", text)
    text = re.sub(r"(\d{1,4})年(\d{1,2})月(\d{1,2})[日号]", r"\1-\2-\3", text)
    text = re.sub(r"(\d{1,2})[点时](\d{1,2})分", r"\1:\2", text)
    text = re.sub(r"(?<![\d.])(\d+)[元块](\d)角(?:(\d)分)?", r"\1.\2\3元", text)
    return re.sub(r"(?<=\d)\s*[或和与](?=\s*[-\d])", " , ", text)


def _scaled(found: re.Match[str]) -> str:
    scale = {**_SMALL, **_LARGE}[found[2]]
    return f"({found[1].replace(',', '')}\\times {scale})"


def _digit_by_digit(run: str) -> Optional[str]:
    return "".join(str(_DIGITS[c]) for c in run) if all(c in _DIGITS for c in run) else None


def _han_number(run: str) -> Optional[str]:
    """``三百二十`` is ``320``; None when it is no numeral."""
    if len(run) > 1 and (plain := _digit_by_digit(run)) is not None:
        return plain
    total = section = digit = 0
    for character in run:
        if character in _DIGITS:
            digit = _DIGITS[character]
        elif character in _SMALL:
            section += (digit or (1 if not section else 0)) * _SMALL[character]
            digit = 0
        else:
            total = (total + section + digit) * _LARGE[character]
            section = digit = 0
    value = total + section + digit
    if run == "千":  # of a unit: 5千克
        return None
    return str(value) if value or run[0] in _DIGITS else None


def split_top(text: str, separator: re.Pattern[str]) -> list[str]:
    """``text`` cut at the matches of ``separator`` that lie in no bracket."""
    pieces, start, depth, position = [], 0, 0, 0
    while position < len(text):
        character = text[position]
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif depth == 0 and (found := separator.match(text, position)):
            pieces.append(text[start:position])
            start = position = found.end()
            continue
        position += 1
    return [piece.strip() for piece in (*pieces, text[start:])]


_SMALL_NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
)
_ONES = _SMALL_NUMBERS.split()
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_WORDS = {word: n for n, word in enumerate(_ONES)} | {w: 20 + 10 * n for n, w in enumerate(_TENS)}
_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_PARTS = {
    "half": 2, "halves": 2, "third": 3, "thirds": 3, "quarter": 4, "quarters": 4, "fourth": 4,
    "fourths": 4, "fifth": 5, "fifths": 5, "sixth": 6, "sixths": 6, "eighth": 8, "eighths": 8,
    "tenth": 10, "tenths": 10,
}  # fmt: skip
_NUMBER_AND_SCALE = re.compile(
    r"(?<![\d.,])(\d[\d.,]*)\s*(hundred|thousand|million|billion|trillion)\b", re.IGNORECASE
)
_ONE_PART = re.compile(
    r"^(?:an?|one)[ -](half|third|quarter|fourth|fifth|sixth|eighth|tenth)\b", re.I
)
_AND_HALF = re.compile(r"^\s+and\s+(?:a|one)\s+half\b", re.IGNORECASE)
_MINUS_WORD = re.compile(r"^(?:minus|negative)\s+", re.IGNORECASE)


def spelled_numbers(text: str) -> str:
    """A number in English words at the beginning as digits; ``3 million`` as 3000000."""
    text = _NUMBER_AND_SCALE.sub(
        lambda found: f"({found[1].replace(',', '')}\\times {_SCALES[found[2].lower()]})", text
    )
    if not text[:1].isalpha():
        return text
    text = re.sub(r"^an?\s+(?=dozen\b)", "1 ", text, flags=re.IGNORECASE)
    text = _ONE_PART.sub(lambda part: f"1/{_PARTS[part[1].lower()]}", text)
    minus = _MINUS_WORD.match(text)
    rest = text[minus.end() :] if minus else text
    words = re.findall(r"[A-Za-z]+|[^A-Za-z\s-]+", rest)
    total = section = used = 0
    for index, word in enumerate(words):
        low = word.lower()
        if low in _WORDS:
            section += _WORDS[low]
        elif low in _SCALES and index:
            section = max(section, 1) * _SCALES[low]
            if low != "hundred":
                total, section = total + section, 0
        elif low != "and" or not used or not _goes_on(words, index):
            break
        used = index + 1
    if not used:
        return "-" + rest if minus and rest[:1].isdigit() else text
    value = str(total + section)
    if used < len(words) and words[used].lower() in _PARTS:
        value, used = f"{value}/{_PARTS[words[used].lower()]}", used + 1
    tail = rest
    for word in words[:used]:
        tail = tail[tail.index(word) + len(word) :]
    and_half = _AND_HALF.match(tail)
    if and_half:
        value, tail = f"{value}.5", tail[and_half.end() :]
    return f"{'-' if minus else ''}{value} {tail.lstrip(' -')}".strip()


def _goes_on(words: list[str], index: int) -> bool:
    """Whether an ``and`` stands inside a number, as in ``one hundred and five``."""
    behind = words[index + 1].lower() if index + 1 < len(words) else ""
    return behind in _WORDS and words[index - 1].lower() in _SCALES
