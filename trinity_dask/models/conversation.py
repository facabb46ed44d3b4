"""A dialogue as token ids: the next prompt begins with exactly the ids of the turns before it.

Invariant: a turn's prompt is its parent's prompt, the parent's sampled ids and the ids of what
came since, or, where a chat template does not allow that, a rendering from the beginning: then
it has no parent and begins a row of its own. Sampled ids are never made from text again: half
of the vocabulary's words have several spellings, and templates rewrite what they show.

The turn that a message list goes on from is looked for by what cannot change: the ids of its
tool calls, else the text of its reply, since programs between drop thoughts and write arguments
anew. Rows are the paths to the turns that nobody answered; a turn on several of them is
trained once. Nothing here waits or asks an engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Optional

import numpy as np

from trinity_dask.models.protocol import FINISH_STOP, Completion
from trinity_dask.models.tokenizer import begun_reply, chat_prompt

Messages = list[dict[str, Any]]
Tools = Optional[list[dict[str, Any]]]
MARK = (
    "\u2402reply\u2403"  # stands for a reply whose ids are known; no template trims or escapes it
)
NOBODY = -1  # the version of a token that no model sampled


@dataclass(frozen=True)
class Turn:
    """One sampled reply, ``number`` of its dialogue (from 0).

    ``prompt`` and ``completion`` hold what the engine saw and answered; ``messages`` and
    ``tools`` are what was asked; ``text`` is the reply without special tokens, ``message`` what
    of it was given to the program that asked.
    """

    number: int
    prompt: list[int]
    prompt_text: str
    completion: Completion
    text: str
    messages: Messages
    tools: Tools = None
    message: dict[str, Any] = field(default_factory=dict)
    parent: Optional[Turn] = None

    @property
    def ids(self) -> list[int]:
        return [*self.prompt, *self.completion.token_ids.tolist()]


@dataclass(frozen=True)
class NextPrompt:
    """Ids int ``[prompt]`` and their text; ``parent`` is the turn that they begin with, if any."""

    ids: list[int]
    text: str
    parent: Optional[Turn] = None


@dataclass(frozen=True)
class Row:
    """A path through the dialogue: ids int32 ``[seq]``, the others ``[seq - prompt_length]``.

    ``mask`` is true where the row's tokens were sampled and no row before trains them;
    ``versions`` is -1 and ``logprobs`` 0 where nobody sampled. ``turns`` are in order.
    """

    tokens: np.ndarray
    prompt_length: int
    logprobs: np.ndarray
    versions: np.ndarray
    mask: np.ndarray
    turns: tuple[Turn, ...]


class Conversation:
    """The turns of one run with one tokenizer; keeps the last ``limit`` of them."""

    def __init__(self, tokenizer: Any, limit: int = 1024) -> None:
        self.tokenizer = tokenizer
        self.turns: list[Turn] = []
        self._limit, self._n_turns = limit, 0

    def prompt(self, messages: Messages, tools: Tools = None) -> NextPrompt:
        """The prompt that asks for the turn after ``messages``.

        Raises:
            ValueError: there are no messages, or no template.
            ValueError, jinja2.TemplateError: the template refuses the messages.
        """
        if not messages:
            raise ValueError("chat needs at least one message (got an empty list)")
        text = chat_prompt(self.tokenizer, messages, tools)
        for turn, rest in self._ancestors(messages, tools):
            added = self._added(turn, rest, tools, text)
            if added is not None:
                ids = self._encode(added)
                return NextPrompt([*turn.ids, *ids], _shown(self.tokenizer, turn) + added, turn)
        return NextPrompt(self._encode(text), text)

    def add(
        self,
        asked: NextPrompt,
        completion: Completion,
        messages: Messages,
        tools: Tools = None,
        text: Optional[str] = None,
        message: Optional[dict[str, Any]] = None,
    ) -> Turn:
        """Note that ``asked`` was answered so; ``text`` is the reply's, if known already."""
        if text is None:
            text = self.tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True)
        begun, _ = begun_reply(messages)
        said = message or {"role": "assistant", "content": begun + text}
        turn = Turn(
            self._n_turns,
            *(asked.ids, asked.text, completion, text, list(messages), tools, said, asked.parent),
        )
        self._n_turns += 1
        self.turns.append(turn)
        del self.turns[: -self._limit]
        return turn

    def rows(self) -> list[Row]:
        """The paths to the turns that no other turn goes on from, in the order of those."""
        parents = {id(turn.parent) for turn in self.turns if turn.parent is not None}
        trained: set[int] = set()
        return [_row(turn, trained) for turn in self.turns if id(turn) not in parents]

    # parents ----------------------------------------------------------------------------
    def _ancestors(self, messages: Messages, tools: Tools) -> Iterator[tuple[Turn, Messages]]:
        """Turns that ``messages`` go on from and the messages since, the nearest first."""
        found = []
        for turn in self.turns:
            before = begun_reply(turn.messages)[1]
            n = len(before)
            if (
                len(messages) > n
                and turn.tools == tools
                and _replies(messages[n], turn)
                and all(map(_same, messages[:n], before))
            ):
                found.append((n, turn.number, turn))
        for n, _, turn in sorted(found, key=lambda item: item[:2], reverse=True):
            yield turn, messages[n + 1 :]

    def _added(self, turn: Turn, rest: Messages, tools: Tools, text: str) -> Optional[str]:
        """What follows the sampled ids of ``turn`` in a prompt for ``rest``; None where that
        cannot be told from the template.

        The template writes a short dialogue that ends in a reply, as it stands and with
        ``rest`` after it. What stands after the reply is what follows, if the whole dialogue
        ends with it too, and all that ``rest`` says is in it.
        """
        if not rest:  # the reply itself is to be continued
            return None if turn.completion.finish_reason == FINISH_STOP else ""
        begun, since = begun_reply([{"role": "user", "content": "x"}, *rest])
        calls = {k: v for k, v in turn.message.items() if k == "tool_calls" and v}
        reply = {"role": "assistant", "content": MARK, **calls}
        dialogue = [{"role": "user", "content": "x"}, reply]
        try:
            closed = self._after_mark(dialogue, tools, False)
            longer = self._after_mark([*dialogue, *since[1:]], tools, True)
        except Exception:  # a template may refuse this dialogue, though not the whole one
            return None
        if closed is None or longer is None:
            return None
        sampled = self._sampled_part(turn, closed, longer)
        added = None if sampled is None else longer[sampled:] + begun
        if added is None or not text.endswith(added):
            return None
        return added if all(said(message) in added for message in since[1:]) else None

    def _sampled_part(self, turn: Turn, closed: str, longer: str) -> Optional[int]:
        """How many characters after a reply's text the model has sampled: its calls, and the
        token that ended it. None where the model has ended it otherwise than the template."""
        answer, has_calls = turn.completion, bool(turn.message.get("tool_calls"))
        if answer.finish_reason != FINISH_STOP or not len(answer.token_ids):
            return None if has_calls else 0  # cut: the model has not ended it
        last = self.tokenizer.decode([int(answer.token_ids[-1])], skip_special_tokens=False)
        start = closed.rfind(last) if has_calls else 0
        end = start + len(last)
        is_so = last and start >= 0 and longer.startswith(last, start)
        return end if is_so and longer[:start] == closed[:start] else None

    def _after_mark(self, messages: Messages, tools: Tools, generation: bool) -> Optional[str]:
        text = self.tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=generation
        )
        _, mark, after = text.rpartition(MARK)
        return after if mark else None

    # text -------------------------------------------------------------------------------
    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []


def _row(leaf: Turn, trained: set[int]) -> Row:
    turns = [leaf]
    while (parent := turns[-1].parent) is not None:
        turns.append(parent)
    turns.reverse()
    first, length = turns[0], len(leaf.ids)
    start = len(first.prompt)
    logprobs = np.zeros(length - start, np.float32)
    versions = np.full(length - start, NOBODY, np.int32)
    mask = np.zeros(length - start, np.bool_)
    for turn in turns:
        begin = len(turn.prompt) - start
        part = slice(begin, begin + len(turn.completion.token_ids))
        logprobs[part] = turn.completion.logprobs
        versions[part] = turn.completion.versions
        mask[part] = id(turn) not in trained
        trained.add(id(turn))
    return Row(np.asarray(leaf.ids, np.int32), start, logprobs, versions, mask, tuple(turns))


def _shown(tokenizer: Any, turn: Turn) -> str:
    sampled = turn.completion.token_ids.tolist()
    return turn.prompt_text + tokenizer.decode(sampled, skip_special_tokens=False)


# messages ---------------------------------------------------------------------------------
def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two messages say the same, whatever a program between has made of them."""
    if a.get("role") != b.get("role"):
        return False
    ids = _call_ids(a)
    if ids or _call_ids(b):
        return ids == _call_ids(b)
    return said(a) == said(b) and a.get("tool_call_id") == b.get("tool_call_id")


def _replies(message: dict[str, Any], turn: Turn) -> bool:
    """Whether ``message`` is the reply of ``turn``."""
    if message.get("role") != "assistant":
        return False
    if _call_ids(turn.message):
        return _call_ids(message) == _call_ids(turn.message)
    return said(message) in {said(turn.message), turn.text.strip()} and not _call_ids(message)


def _call_ids(message: dict[str, Any]) -> tuple[str, ...]:
    return tuple(str(call.get("id")) for call in message.get("tool_calls") or ())


def said(message: dict[str, Any]) -> str:
    """The text of a message whose content is text, parts of text, or nothing."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "").strip()
