"""Words, and letters that are none.

Invariant: words are equal in any case; letters that stand for points, lengths or numbers keep it.
"""

from __future__ import annotations

import re

_WORD = re.compile(r"\b[^\W\d_]{3}")
_TWO_LETTERS = re.compile(r"[^\W\d_]{2}")
_SIGN = re.compile(r"[\d+*/^=<>_|]")
# two other letters are a product, or a side of a triangle
_SHORT = (
    "ad ah ai am an as at bc be by cm cv do dr eu ft go ha he hi hr id if in is it kg km lb me mi "
    "ml mm mr ms my no of oh ok on or ox oz pc pi pm so tv uk un up us vs we yd"
)
_SHORT_WORDS = frozenset(_SHORT.split())


def text_key(text: str) -> str:
    """Equal for equal words: in any case and spacing, without an article or a full stop."""
    text = re.sub(r"^(?:the|an|a)\s+(?=\w)", "", text.strip(" ,;:?"), flags=re.IGNORECASE)
    text = " ".join(text.split())
    if text.casefold() == "does not exist":
        return "dne"
    plain = text.strip(" .!")
    is_words = "\\" not in text and (
        _WORD.search(text) or (_TWO_LETTERS.search(text) and not _SIGN.search(text))
    )
    if is_words and not _are_symbols(plain):
        return plain.casefold()
    # symbols keep their case, .5 its point, 5! its mark and 1 2 its space
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)|\.$", "", text)


def _are_symbols(text: str) -> bool:
    """Two letters that are no word: ``AB``."""
    pair = len(text) == 2 and text.isalpha() and text.isascii()
    return pair and text.casefold() not in _SHORT_WORDS
