"""An answer inside a sentence, for responses that mark none.

Invariant: the last sentence that can hold an answer of the wanted kind decides; what stands
side by side there is one answer, so that a list of guesses is none.
"""

from __future__ import annotations

import re
from typing import Any, Optional

from trinity_dask.rewards.answers.forms import read
from trinity_dask.rewards.answers.kinds import Assigned, Many, Opaque, Region, Text
from trinity_dask.rewards.answers.notation import clean
from trinity_dask.rewards.answers.units import parse_unit

TAIL = 1500
SENTENCES = 12
LONGEST = 200  # characters of what may be read as one answer

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z\\$*(\d])|[\n。]+")
_FILLER = re.compile(
    r"^(?:therefore|thus|hence|so|then|finally|in total|altogether|because|since|"
    r"(?:i|we|you) (?:get|got|have|find|found|obtain|obtained)|"
    r"i think|i believe|it is|it's|that is|indeed|simply|just|exactly|equal to|obtained as|"
    r"either|given by|which is|total|final answer|answer|option|choice)\b[,:]?\s*",
    re.IGNORECASE,
)
_COPULA = re.compile(
    r"(?<![A-Za-z])(?:is|are|was|were|be|equals?|gives?|gets?|got|becomes?|makes?|costs?|takes?|"
    r"needs?|earns?|has|have|had|=)(?![A-Za-z])|(?<!\d)[:：]|[:：](?!\d)|[是为=]",
    re.IGNORECASE,
)
_MATH = re.compile(
    r"\$\$([^$]{1,400})\$\$|\$([^$\n]{1,400})\$|\\\((.{1,400}?)\\\)|\\\[(.{1,400}?)\\\]", re.DOTALL
)
_GAP = re.compile(r"[\s,;、]*(?:and|or|和|或)?[\s,;、]*(?:also\s+)?")
_NUMBER = re.compile(
    r"(?<![\w.\\^])[-+]?[$€£¥₹]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:e[+-]?\d+)?"
    r"(?:\s*(?:[/^:-]|\\times\s*10\s*\^)\s*\{?-?\d+(?:\.\d+)?\}?)*"
    r"(?:\s*(?:%|\\%|[ap]\.?m\b\.?))?",
    re.IGNORECASE,
)
_PRAISE = re.compile(r"^(?:the\s+)?(?:correct|right|best)\b", re.IGNORECASE)
_BOUND = re.compile(r"^(?:at least|at most|no more than|up to|over|more than)\s+", re.IGNORECASE)
_DENIED = re.compile(
    r"(?:(?:n't|not) (?:think|believe)\b.{0,15}|\bnot|n't|\bnever)"
    r"(?:\s+(?:be|equal|equal to|exactly))?\s*[\s$]$",
    re.IGNORECASE,
)
_UNIT = re.compile(r"\s*(?:[A-Za-z°€%]+(?:\^\{?\d\}?|[²³])?)(?:\s*/\s*[A-Za-z]+)?")
_CLAUSE_END = re.compile(
    r"\s*(?:\b(?:because|since|as|which|where|when|after|for|by|so|not|and then|in order)\b|;"
    r"|(?<=\w )\("
    r"|,\s*(?:but|and|not|because|since|as|so|which)\b).*$",
    re.DOTALL | re.IGNORECASE,
)

# between two numbers of which the last only says where, or for what, the first was counted
_WITHIN = re.compile(
    r"\$?\s*(?:(?!(?:sells?|sold|goes|go)\b)[A-Za-z][A-Za-z'-]*\s+){0,2}"
    r"(?:in|into|for|per|among|across|within)\s+(?:(?:the|each|all|every|of|his|her|their)\s+)*",
    re.IGNORECASE,
)
# "5 workers 3 days": two counts, and nothing says which of them is meant
_COUNTED = re.compile(r"\s+[a-z][a-z'-]+\s+")
_NEW_CLAUSE = re.compile(
    r"\s*(?:to|into|then|so|total|totals|totalling|totaling|making|leaving|giving|means|yields|he|she|"
    r"they|it|we|you|there|left|equals?|or|and|than|minus|plus|times|over|by|with|from|via|if|but)\s",
    re.IGNORECASE,
)
_CODE = re.compile(
    r"^\s*(?:(?:lambda|def|class|elif|else|try|while|return)\b[^:\n]{0,80}:"
    r"|(?:print|echo)\s+[\d\"']|(?:print(?:f|ln!?)?|puts|console\.log|System\.out\.print(?:ln)?|(?:sys\.)?exit)\s*[(\"'])"
)
# the answer is not these, but they say that it comes
_NO_ANSWER = re.compile(
    r"(?:(?:very|quite|rather|as|now)\s+)?(?:simple|clear|easy|obvious|straightforward|correct|right|"
    r"wrong|follows|below|above|here|known|unique|given|found|unclear|complicated)\W*",
    re.IGNORECASE,
)

_COMPARED = re.compile(r"\d\s*==\s*\d")


def is_words(text: str) -> bool:
    """Whether it is no mathematics, but words, or the letter of a choice."""
    return isinstance(read(text), Text) or re.fullmatch(r"\(?[A-J]\)?\.?", text) is not None


def candidates(text: str, wants_words: bool, said: bool = False) -> list[str]:
    """What the text may mean as a whole, then what its last telling sentence says; of what
    followed ``answer is`` (``said``) its first one, where that is an answer by itself."""
    text = text[-TAIL:].strip()
    found = [text] if len(text) <= LONGEST else []
    if not wants_words and isinstance(read(text), Region):
        return found  # a range such as "at least 18" holds a number that is not the answer
    sentences = [piece for piece in _SENTENCE_END.split(text) if piece.strip(" *_#>-")]
    stated = [sentence for sentence in sentences if not sentence.rstrip(" *_").endswith("?")]
    sentences = stated or sentences
    if said and len(sentences) > 1:
        first = sentences[0].strip(" \t*_.!")
        words = 0 < len(first.split()) < 5 and not _NO_ANSWER.fullmatch(first)
        if words if wants_words else _is_mathematics(first):
            return [*found, first]
    for sentence in reversed(sentences[-SENTENCES:]):
        told = _words(sentence) if wants_words else _mathematics(sentence)
        if told is not None:
            return [*found, told]
    return found


def _plain(sentence: str) -> str:
    sentence = sentence.strip(" \t*_#>")
    for _ in range(4):
        shorter = _FILLER.sub("", sentence).strip(" ,:*_")
        if shorter == sentence:
            break
        sentence = shorter
    return sentence


def _words(sentence: str) -> Optional[str]:
    sentence = _plain(sentence)
    said = list(_COPULA.finditer(sentence))
    said = [each for each in said if each[0] not in ":："] or said  # a colon only explains
    told = _plain(sentence[said[-1].end() :]) if said else sentence
    if said and _PRAISE.match(told):
        told = _plain(sentence[: said[-1].start()])
    return _CLAUSE_END.sub("", told) or None


def _mathematics(sentence: str) -> Optional[str]:
    if re.search("[A-Za-z]{2}", sentence):
        sentence = sentence.rstrip("! ")  # of a cry, not a factorial
    if _CODE.match(sentence):
        return sentence
    sentence = _plain(sentence)
    if _is_mathematics(sentence):
        return sentence
    formulas = [m for m in _MATH.finditer(sentence) if _is_mathematics(m[0])]
    if formulas:
        return _last_group(sentence, formulas)
    if _COMPARED.search(sentence):
        return sentence
    said = list(_COPULA.finditer(sentence))
    if said:
        told = _BOUND.sub("", _plain(sentence[said[-1].end() :]))
        if not told[:4].lower().startswith("not"):
            for part in (told, _CLAUSE_END.sub("", told)):
                if _is_mathematics(part):
                    return part
    numbers = [
        m
        for m in _NUMBER.finditer(sentence)
        if not _DENIED.search(sentence[max(0, m.start() - 30) : m.start()])
        and _stands_alone(sentence, m.end())
    ]
    if len(numbers) > 1:
        between = (numbers[-2].end(), numbers[-1].start())
        counted = _COUNTED.fullmatch(sentence, *between)
        if _WITHIN.fullmatch(sentence, *between) or (
            counted and not _NEW_CLAUSE.fullmatch(counted[0])
        ):
            return sentence  # "15 apples in 3 boxes": nothing says which of them is meant
    return _last_group(sentence, numbers) if numbers else None


def _stands_alone(sentence: str, end: int) -> bool:
    """Whether no letter follows at once, or one of a unit: not the 50 of ``50a``."""
    unit = _UNIT.match(sentence, end) if sentence[end : end + 1].isalpha() else None
    return unit is None or parse_unit(clean(unit[0])) is not None


def _is_mathematics(text: str) -> bool:
    return 0 < len(text) <= LONGEST and not _has_words(read(text))


def _has_words(form: Any) -> bool:
    if isinstance(form, Many):
        return any(_has_words(item) for item in form.items)
    return isinstance(form, Text | Opaque) or (isinstance(form, Assigned) and _has_words(form.form))


def _last_group(sentence: str, found: list[re.Match[str]]) -> str:
    """The last one, its unit, and those that stand right in front of it."""
    first = len(found) - 1
    while first > 0 and _GAP.fullmatch(sentence, found[first - 1].end(), found[first].start()):
        first -= 1
    group = [clean(each[0]).strip(" ,") for each in found[first:]]
    unit = _UNIT.match(sentence, found[-1].end())
    if len(group) == 1 and unit and parse_unit(clean(unit[0])) is not None:
        return group[0] + unit[0]
    return ", ".join(group)
