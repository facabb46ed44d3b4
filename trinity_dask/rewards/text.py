r"""Finding the answer inside a response.

Invariant: only what was said last and in full counts, as a reader would take it: nothing inside
a think block, nothing whose tag or brace was never closed. Every search takes linear time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

TAIL = 8000  # characters in which an answer in words is looked for
MOST_BOXES = 50  # that are one answer

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ANSWER_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_THOUGHT = re.compile(
    r"<(/?)(?:think|thinking|thought|reasoning|analysis|scratchpad)>|\[(/?)THINK\]"
    r"|<\|(?:begin|(end))_of_thought\|>",
    re.IGNORECASE,
)
_OPENED = re.compile(r"(?:<(?:think|thinking|thought|reasoning)>|\[THINK\])\s*$", re.IGNORECASE)
_SPECIAL = re.compile(r"<\|[^|<>]{1,40}\|>|</s>|<eos>|<end_of_turn>|<pad>")
_BRACE = re.compile(r"\\(?:boxed|fbox|framebox)\s*\{|\\[{}\\]|[{}]")
_BARE_BOX = re.compile(r"\\boxed\s*(?![\s{])((?:\\[A-Za-z]+)?[^\s$\\.,]*)")
_GAP = re.compile(
    r"(?:[\s$,;&、，；]|\([a-z\d]\)|\\[()\[\],;:! ]|\\q?quad(?![A-Za-z])"
    r"|\\(?:text|mathrm)\s*\{\s*,?\s*(?:and|or)\s*,?\s*\}"
    r"|(?<![A-Za-z])(?:and|or)(?![A-Za-z])|[和或与]|\*\*)*"
    r"(?P<label>\\?[A-Za-z]+(?:_\{?\w{1,9}\}?)?\s*=\s*)?[\s$]*"
)
_LABEL = re.compile(r"(?<![A-Za-z\\])([A-Za-z](?:_\{?\w{1,9}\}?)?)\s*=\s*\$?\s*$")
_HASHES = re.compile(r"^[ \t>*]*####(?!#)[ \t]*([^\n]*)$", re.MULTILINE)
_SAYS = re.compile(
    r"(?:\bans(?:wer)?\b\.?(?:[ \t]+(?:to|for|of)\b[^\n.:=]{0,80}?)?[*_ \t]*"
    r"(?:(?:is|are|was|would be|should be|must be|will be|comes to|equals)\b[*_ \t]*:?|[:：=])"
    r"|答案(?:是|为|：|:)+)",
    re.IGNORECASE,
)
# what follows "the answer is" on lines of its own
_SET_OFF = re.compile(r"\$\$.{1,400}?\$\$|\\\[.{1,400}?\\\]", re.DOTALL)
_CODE_BLOCK = re.compile(r"```\w*[ \t]*\n(.{1,400}?)\n[ \t]*```", re.DOTALL)
_ITEMS = re.compile(r"(?:[ \t]*[-*+•][ \t]+[^\n]+(?:\n|$))+")

_TAKEN_BACK = re.compile(
    r"\b(?:wait|actually|correction|mistake|oops|sorry|scratch that|i mean|"
    r"that(?:'s| is| was) (?:wrong|incorrect))\b|[.!] No, ",
    re.IGNORECASE,
)


def tagged_answer(response: str) -> Optional[str]:
    """The text of the last ``<answer>`` block, stripped, or None."""
    found = _ANSWER.findall(response)
    return found[-1].strip() if found else None


def boxed_answer(response: str) -> Optional[str]:
    r"""The text of the last ``\boxed{...}`` (braces balanced), or None."""
    boxes, complete = _boxes(response)
    return _content(response, boxes[-1]) if boxes and complete else None


@dataclass(frozen=True)
class Found:
    """An answer. ``exact``: it was marked as one; else it may be a sentence with an answer,
    which ``said`` to be one where it followed "the answer is"."""

    text: str
    exact: bool
    said: bool = False


class _Box(NamedTuple):
    start: int
    end: int
    inside: tuple[int, int]


def opens_thought(prompt: Any) -> bool:
    """Whether a prompt ends in an opening think tag, which the response then goes on from."""
    return isinstance(prompt, str) and _OPENED.search(prompt[-200:]) is not None


def without_thoughts(response: str, prompt: Any = None) -> str:
    """What is said outside of think blocks. One that was never closed goes to the end."""
    kept: list[str] = []
    inside, start = opens_thought(prompt), 0
    for tag in _THOUGHT.finditer(response):
        if any(tag.groups()):
            if not inside:
                kept = []  # the prompt opened the block that ends here
            inside = False
        elif not inside:
            kept.append(response[start : tag.start()])
            inside = True
        start = tag.end()
    return " ".join(kept if inside else [*kept, response[start:]])


def final_answer(response: str, prompt: Any = None, cut_off: bool = False) -> Optional[Found]:
    r"""The answer that a response gives, or None when it gives none.

    In this order: the last ``<answer>`` block; in it or else in all of the response, the last
    ``\boxed{}`` (those side by side are one answer), what follows the last ``####`` or ``answer
    is``. Otherwise the text itself, unless it is ``cut_off``.
    """
    text = _SPECIAL.sub(" ", without_thoughts(response, prompt))
    tags = list(_ANSWER_TAG.finditer(text))
    opening = [tag for tag in tags if not tag[1]]
    if opening:
        if tags[-1] is opening[-1]:
            return None
        closing = next(tag for tag in tags if tag.start() > opening[-1].start())
        text = text[opening[-1].end() : closing.start()]
    elif tags:
        text = text[: tags[-1].start()]
    boxes, complete = _boxes(text)
    if not complete:
        return None
    if boxes:
        return _found(_side_by_side(text, boxes), exact=True)
    hashes = list(_HASHES.finditer(text))
    if hashes and (not text[hashes[-1].end() :].strip() or re.match(r"[-$]?\d", hashes[-1][1])):
        return _found(hashes[-1][1], exact=False)
    text = text[-TAIL:]
    said = list(_SAYS.finditer(text))
    if said and not _TAKEN_BACK.search(text, said[-1].end()):
        rest = _said_next(text[said[-1].end() :])
        if rest:
            return None if cut_off and not opening else _found(rest, exact=False, said=True)
    return None if cut_off and not opening else _found(text, exact=False)


def _said_next(rest: str) -> str:
    """The line behind ``answer is``, or the formula, code block or list on the lines below."""
    line, broken, below = rest.partition("\n")
    below = below.lstrip("\n")
    if broken and not line.strip(" \t*_") and (items := _ITEMS.match(below)):
        return ", ".join(item.strip().lstrip("-*+• \t") for item in items[0].strip().split("\n"))
    rest = rest.strip(" \t\n*_")
    if block := _CODE_BLOCK.match(rest):
        return ", ".join(block[1].split("\n"))
    if formula := _SET_OFF.match(rest):
        rest = " ".join(formula[0].split("\n")) + rest[formula.end() :]
    return re.sub(r"\*\*(?!\s*[\w(\\])", "", rest.partition("\n")[0])


def _found(text: str, exact: bool, said: bool = False) -> Optional[Found]:
    text = text.strip()
    return Found(text, exact, said) if text else None


def _boxes(text: str) -> tuple[list[_Box], bool]:
    """The outermost boxes, and whether the last one has an end."""
    boxes: list[_Box] = []
    start, inside, depth = -1, 0, 0
    if "\\boxed" not in text and "\\f" not in text:
        return [], True
    for brace in _BRACE.finditer(text):
        mark = brace[0]
        if depth == 0:
            if mark.startswith("\\") and len(mark) > 2:
                start, inside, depth = brace.start(), brace.end(), 1
        elif mark == "}":
            depth -= 1
            if depth == 0:
                boxes.append(_Box(start, brace.end(), (inside, brace.start())))
        elif mark == "{" or len(mark) > 2:
            depth += 1
    bare = [_Box(b.start(), b.end(), b.span(1)) for b in _BARE_BOX.finditer(text)]
    if bare:
        boxes = sorted([*boxes, *bare], key=lambda box: box.start)
    return boxes, depth == 0


def _content(text: str, box: _Box) -> str:
    return re.sub(r"\\(?:boxed|fbox)\s*(?=\{)", "", text[slice(*box.inside)]).strip()


def _side_by_side(text: str, boxes: Sequence[_Box]) -> str:
    """The last box, with those in front of it that nothing but ``,`` or ``and`` separates."""
    first = len(boxes) - 1
    if not _content(text, boxes[first]):
        return ""
    labels = {}
    while (
        first > max(0, len(boxes) - MOST_BOXES) and boxes[first].start - boxes[first - 1].end <= 60
    ):
        gap = _GAP.fullmatch(text, boxes[first - 1].end, boxes[first].start)
        if gap is None:
            break
        if gap["label"]:
            labels[first] = gap["label"].strip(" =")
        first -= 1
    group = boxes[first:]
    if labels and (label := _LABEL.search(text[max(0, group[0].start - 30) : group[0].start])):
        labels[first] = label[1]
    named = len(labels) == len(group) > 1
    texts = [_content(text, box) for box in group]
    pieces = [
        f"{labels[index]} = {content}" if named else content
        for index, content in enumerate(texts, first)
    ]
    return ", ".join(pieces)
