"""An answer inside a sentence, for responses that mark none.

Invariant: the last sentence that can hold an answer of the wanted kind decides; what stands
side by side there is one answer, so that a list of guesses is none.
"""

from __future__ import annotations

import re
from typing import Any, Optional

from trinity_dask.rewards.answers.forms import read
from trinity_dask.rewards.answers.kinds import Assigned, Many, Opaque, Region, Text, Value
from trinity_dask.rewards.answers.notation import clean, han_numerals, spelled_numbers
from trinity_dask.rewards.answers.units import parse_unit

TAIL = 1500
SENTENCES = 12
LONGEST = 200  # characters of what may be read as one answer

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z\\$*(\d])|[\n。]+")
_FILLER = re.compile(
    r"^(?:therefore|thus|hence|so|then|finally|in total|altogether|because|since|"
    r"(?:i|we|you) (?:get|got|have|find|found|obtain|obtained)|"
    r"(?:i|we)(?: would|'d| will|'ll)? (?:go with|choose|pick|select|opt for|say)|both|"
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
_PRAISE = re.compile(
    r"^(?:the\s+)?(?:(?:correct|right|best)\b|(?:final\s+)?(?:answer|solution)\b)", re.IGNORECASE
)
_LEFT = re.compile(r"\bleav(?:ing|es)\s+(?:us\s+with\s+)?(?:only\s+)?", re.IGNORECASE)
_CHOSE = re.compile(
    r"\b(?:i|we|will|would|to|and|then|so)\s+(?:will\s+|would\s+)?"
    r"(?:say|choose|pick|select|go with|opt for|settle on)\s+|^(?:choose|pick|select)\s+",
    re.IGNORECASE,
)
_SO_IT_IS = re.compile(
    r"[,;]\s*(?:so|hence|thus|therefore)\s+(?:it(?:'s| is)\s+|option\s+)?(\(?[A-J]\)?)\W*$"
)
_HAN_CHOICE = re.compile(
    r"^(?:因此|所以|故)?\s*(?=.*[选对确])应?(?:选项|选择|选)?\s*([A-J])\s*(?:选?项)?(?:是?正确的?|是?对的?)?$"
)
# 3+4=7, 7*2=14
_SUM = r"[^,;=A-Za-z\\]{1,60}=[^,;=A-Za-z\\]{1,40}"
_STEPS = re.compile(rf"^(?:{_SUM}[,;])+({_SUM})$")
_ASIDE = re.compile(r"\s\((?=[^()]*[A-Za-z]{3})[^()]*\)\W*$")
_SO = re.compile(
    r"[,;]\s*(?:and\s+)?(?:so|hence|thus|therefore|meaning|which means)\b(?=[^,;]*\d)",
    re.IGNORECASE,
)
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
    r"|(?:print|echo|puts)\s+[\d\"']|(?:print(?:f|ln!?)?|puts|console\.log|System\.out\.print(?:ln)?|(?:sys\.)?exit)\s*[(\"'])"
)
# the answer is not these, but they say that it comes
_NO_ANSWER = re.compile(
    r"(?:(?:very|quite|rather|as|now)\s+)?(?:simple|clear|easy|obvious|straightforward|correct|right|"
    r"wrong|follows|below|above|here|known|unique|given|found|unclear|complicated)\W*",
    re.IGNORECASE,
)

# words with a numeral in them that count nothing
_NO_NUMERAL = re.compile("一共|一样|一起|一定|一般|一直|一些|统一|唯一|万一|第一")
_TO_TWENTY = (
    "zero|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|"
    "sixteen|seventeen|eighteen|nineteen|twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety"
)
_NUMBER_WORDS = re.compile(
    rf"(?<![A-Za-z-])(?:(?:one|an?)(?= (?:hundred|thousand|million))|(?:{_TO_TWENTY})(?![A-Za-z]))"
    rf"(?:(?:[ -]|\s+and\s+)(?:one|{_TO_TWENTY}|hundred|thousand|million)(?![A-Za-z]))*"
    r"(?:[ -](?:halves|thirds|quarters|fourths|fifths|sixths|eighths|tenths)(?![A-Za-z]))?",
    re.IGNORECASE,
)
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sept?|Oct|Nov|Dec)(?:[a-z]{1,6})?\.?"
_DATE = re.compile(
    rf"{_MONTH}\s+\d{{1,2}}(?:st|nd|rd|th)?(?:,?\s+\d{{4}})?(?!\d)"
    rf"|(?<!\d)\d{{1,2}}(?:st|nd|rd|th)?\s+(?:of\s+)?{_MONTH}(?:,?\s+\d{{4}})?(?!\d)"
    r"|(?<!\d)\d{4}([-/.])\d{1,2}\1\d{1,2}(?!\d)|(?<!\d)\d{1,2}([-/.])\d{1,2}\2\d{4}(?!\d)"
)
_REASON = re.compile(r"\s*,?\s*\b(?:because|since|whereas|while)\b.*$", re.DOTALL | re.IGNORECASE)
_DIMENSION = re.compile(
    r"(?<=[A-Za-z])\s+(?:long|tall|wide|high|deep|old|away|apart|thick|in length|in total)\W*$"
)
_MEASURES = re.compile(
    r"\d+(?:\.\d+)?\s*[A-Za-z]+(?:(?:\s*,\s*|\s+)(?:and\s+)?\d+(?:\.\d+)?\s*[A-Za-z]+){1,2}"
)
_COMPARED = re.compile(r"\d\s*==\s*\d")


def is_words(text: str) -> bool:
    """Whether it is no mathematics, but words, or the letters of choices."""
    letters = re.fullmatch(r"\(?[A-J]\)?\.?|[A-J](?:\s*(?:,|and|&)\s*[A-J])+", text)
    return isinstance(read(text), Text) or letters is not None


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
    outside = [s for s in sentences if not (s.startswith("(") and s.rstrip(" .").endswith(")"))]
    for sentence in reversed((outside or sentences)[-SENTENCES:]):
        told = _words(sentence) if wants_words else _mathematics(_in_digits(sentence))
        if told is not None:
            dates = [] if wants_words else [date[0] for date in _DATE.finditer(sentence)]
            return [*found, *dates[-1:], told]
    return found


def _in_digits(sentence: str) -> str:
    """Numbers in words as digits; English ones where the sentence has no other numbers."""
    sentence = re.sub(
        r"(?<=[\u4e00-\u9fff])(?=\d)", " ", han_numerals(_NO_NUMERAL.sub(" ", sentence))
    )
    words = [] if re.search(r"[\d\\$]", sentence) else list(_NUMBER_WORDS.finditer(sentence))
    if not words:
        return sentence
    last = words[-1]
    return sentence[: last.start()] + spelled_numbers(last[0]) + sentence[last.end() :]


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
    sentence = _REASON.sub("", sentence) or sentence
    if letter := _HAN_CHOICE.match(sentence):
        return letter[1]
    if chosen := list(_CHOSE.finditer(sentence)):
        told = _plain(sentence[chosen[-1].end() :]).strip(" .'\"")
        return _CLAUSE_END.sub("", told) or None
    if so := _SO_IT_IS.search(sentence):
        return _plain(so[1]).strip(" .") or None
    if left := list(_LEFT.finditer(sentence)):
        return _CLAUSE_END.sub("", sentence[left[-1].end() :]) or None
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
    without = _ASIDE.sub("", sentence)
    sentence = _plain(without if re.search(r"\d", without) else sentence)
    if results := list(_SO.finditer(sentence)):
        sentence = _plain(sentence[results[-1].end() :])
    if steps := _STEPS.match(sentence):
        return steps[1]
    if _is_mathematics(sentence):
        return sentence
    formulas = [m for m in _MATH.finditer(sentence) if _is_mathematics(m[0])]
    if formulas:
        return _last_group(sentence, formulas)
    if _COMPARED.search(sentence):
        return sentence
    said = list(_COPULA.finditer(sentence))
    if said:
        told = _DIMENSION.sub("", _BOUND.sub("", _plain(sentence[said[-1].end() :])))
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
    if len(numbers) > 1 and (measure := _measure(sentence, numbers)):
        return measure
    if len(numbers) > 1:
        between = (numbers[-2].end(), numbers[-1].start())
        counted = _COUNTED.fullmatch(sentence, *between)
        if _WITHIN.fullmatch(sentence, *between) or (
            counted and not _NEW_CLAUSE.fullmatch(counted[0])
        ):
            return sentence  # "15 apples in 3 boxes": nothing says which of them is meant
    return _last_group(sentence, numbers) if numbers else None


def _measure(sentence: str, numbers: list[re.Match[str]]) -> Optional[str]:
    """The last numbers, where their units add up to one measure: ``2 hours and 30 minutes``."""
    unit = _UNIT.match(sentence, numbers[-1].end())
    for first in numbers[-3:-1] if unit else []:
        text = sentence[first.start() : unit.end() if unit else None]
        if _MEASURES.fullmatch(text) and isinstance(read(text), Value):
            return text
    return None


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
