"""Training rows as experiences: the formats by the name of the algorithm's schema.

Invariant: a formatter turns one row of a file into ``rows_per_unit`` experiences, always. The
prompt ids of a row are the ids that the same prompt has at sampling time, and the response
ids follow them directly; a token is learned when the assistant would have sampled it, and
only then. Every turn's ids are a continuation of the ids of the turns before it; where a
chat template breaks this, an error says so instead of a mask that is shifted.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trinity_dask.buffer.data.prompts import (
    SYSTEM_ROLES,
    TEMPLATE_ERRORS,
    Ids,
    Messages,
    Prompt,
    as_list,
    is_silent,
    parse_messages,
    prompt_of,
    template_error,
    text_of,
)
from trinity_dask.buffer.errors import DataError, UnusableRow
from trinity_dask.config.schema import FormatConfig
from trinity_dask.experience import EID, RESPONSE_TRUNCATED, Experience
from trinity_dask.registry import Registry

FORMATTERS: Registry[Any] = Registry("schema of training rows")


class RowFormatter:
    """What all formats share: the tokenizer, the answer's ids and the length limit.

    A format has ``columns`` (those that every row needs), ``rows_per_unit`` and
    ``format_unit(row, eid, where)``, the experiences of one row.

    ``max_tokens`` cuts longer rows at the end and marks them, or ``fmt.long_rows`` has them
    raise :class:`~trinity_dask.buffer.errors.UnusableRow`."""

    rows_per_unit = 1

    def __init__(self, tokenizer: Any, fmt: FormatConfig, max_tokens: int | None = None) -> None:
        self.tokenizer = tokenizer
        self.fmt = fmt
        self.max_tokens = max_tokens
        if fmt.append_eos and tokenizer.eos_token_id is None:
            raise DataError("append_eos is on, but the tokenizer has no end-of-sequence token")

    def _ended(self, response: Ids) -> Ids:
        eos = self.tokenizer.eos_token_id
        if not self.fmt.append_eos or response[-1:] == [eos]:
            return response
        return [*response, eos]

    def _text_answer(self, prompt: Prompt, text: str) -> tuple[Ids, Ids]:
        """Prompt and response ids of an answer column of text."""
        spoken = text.removeprefix(prompt.reply_prefix)
        if not spoken.strip():
            raise UnusableRow(f"{prompt.where}: the answer is empty")
        response = self.tokenizer.encode(spoken, add_special_tokens=False)
        return prompt.encode(self.tokenizer), self._ended(list(response))

    def _last_turns(self, prompt: Prompt, answer: Messages) -> tuple[Ids, Ids, list[bool] | None]:
        """Prompt and response ids of turns that the assistant ends.

        The mask of the response leaves out what the assistant did not write (what a tool
        replied); None where that is nothing.
        """
        last = answer[-1]["content"]
        said = last.removeprefix(prompt.reply_prefix) if len(answer) == 1 else last
        if is_silent({**answer[-1], "content": said}):
            raise UnusableRow(f"{prompt.where}: the answer is empty")
        first = answer[0]
        if not first["content"].startswith(prompt.reply_prefix):
            first = {**first, "content": prompt.reply_prefix + first["content"]}
        asked = prompt.render(self.tokenizer)
        ids = prompt.encode(self.tokenizer)
        turns = [*prompt.messages, first, *answer[1:]]
        if len(answer) > 1:
            whole, mask = assistant_mask(
                self.tokenizer, turns, prompt.tools, prompt.where, prompt.reply_prefix
            )
            response, mask = answer_ids(ids, whole, prompt.where), mask[len(ids) :]
            if True not in mask:
                raise DataError(f"{prompt.where}: no turn of the answer can be learned")
            end = len(mask) - mask[::-1].index(True)
            response = self._ended(response[:end])
            return ids, response, mask[:end] + [True] * (len(response) - end)
        whole = render(self.tokenizer, turns, prompt.tools, where=prompt.where)
        try:
            response = answer_ids(ids, whole, prompt.where)
        except DataError:
            # the answer's first characters may share a token with the prompt's last ones;
            # what is sampled never does
            text = self.tokenizer.apply_chat_template(turns, tools=prompt.tools, tokenize=False)
            if not text.startswith(asked):
                raise
            rest = text[len(asked) :]
            response = list(self.tokenizer.encode(rest, add_special_tokens=False))
        if self.fmt.append_eos:
            response = self._ended(without_tail(response, self.tokenizer.eos_token_id))
        return ids, response, None

    def _experience(
        self,
        prompt: Ids,
        response: Ids,
        eid: EID,
        where: str,
        mask: list[bool] | None = None,
        **extra: Any,
    ) -> Experience:
        limit = self.max_tokens or len(prompt) + len(response)
        kept = response[: max(limit - len(prompt), 0)]
        action = np.ones(len(kept), np.bool_) if mask is None else np.array(mask[: len(kept)])
        is_long = len(kept) < len(response)
        if is_long and self.fmt.long_rows != "cut":
            n_tokens = len(prompt) + len(response)
            raise UnusableRow(f"{where}: {n_tokens} tokens, the limit is {limit}", "long")
        if not prompt or not action.any():
            raise UnusableRow(
                f"{where}: {len(prompt)} prompt and {len(response)} response tokens leave "
                f"nothing to learn (limit {limit} tokens); fill both columns, or raise "
                "model.max_model_len",
                "long" if is_long else "empty",
            )
        status = RESPONSE_TRUNCATED if is_long else None
        return Experience(
            tokens=np.array(prompt + kept, np.int32),
            prompt_length=len(prompt),
            eid=eid,
            action_mask=action,
            truncate_status=status,
            **extra,
        )


@FORMATTERS.register_module("sft")
class SFTFormatter(RowFormatter):
    """Rows to experiences by a Hugging Face tokenizer.

    * ``plaintext``: the prompt column through the chat template (with the system prompt,
      up to where the assistant begins), or tokenised as it is; then the response column
      and, with ``append_eos``, the end-of-sequence token.
    * ``messages``: all turns but the last are the prompt; the last one, which the
      assistant must speak, is the response, as the chat template renders it. Text that
      the template puts after the last end-of-sequence token is dropped with ``append_eos``.
      With ``enable_concatenated_multi_turn`` every assistant turn is learned: the prompt
      ends where the assistant first speaks, and other turns are masked; a reply prefix
      begins each of its turns and is not learned. The tools column, where there is one, goes
      into the template.
    """

    @property
    def columns(self) -> list[str]:
        """Columns that every row needs."""
        if self.fmt.prompt_type == "messages":
            return [self.fmt.messages_key]
        return [self.fmt.prompt_key, self.fmt.response_key]

    def format_unit(self, row: dict[str, Any], eid: EID, where: str) -> list[Experience]:
        """One row as an experience without log-probs and reward, in a list.

        Raises:
            DataError: the row has no response, is no conversation, or its prompt alone
                fills ``max_tokens``; ``where`` is named.
        """
        asked = prompt_of(row, self.fmt, where)
        if self.fmt.prompt_type != "messages":
            answer = text_of(row, self.fmt.response_key, where, "format.response_key")
            texts = {"prompt_text": row[self.fmt.prompt_key], "response_text": answer}
            prompt, response = self._text_answer(asked, answer)
            return [self._experience(prompt, response, eid, where, None, **texts)]
        messages = [*asked.messages, *asked.answer]
        extra: dict[str, Any] = {"messages": messages, "tools": asked.tools}
        if self.fmt.enable_concatenated_multi_turn:
            prefix = asked.reply_prefix
            said = [m for m in messages if m["role"] == "assistant"]
            if any(is_silent({**m, "content": m["content"].removeprefix(prefix)}) for m in said):
                raise UnusableRow(f"{where}: a turn of the assistant's is empty")
            ids, mask = assistant_mask(self.tokenizer, messages, asked.tools, where, prefix)
            if True not in mask:
                raise DataError(
                    f"{where}: no turn of the conversation can be learned; one must be the "
                    f"assistant's (got {[m['role'] for m in messages]})"
                )
            first, end = mask.index(True), len(mask) - mask[::-1].index(True)
            prompt, response, mask = ids[:first], ids[first:end], mask[first:end]
            return [self._experience(prompt, response, eid, where, mask, **extra)]
        if not asked.answer or not asked.messages:
            raise DataError(
                f"{where}: a conversation needs at least two messages, the last one by the "
                f"assistant (got {[m['role'] for m in messages]})"
            )
        prompt, response, _ = self._last_turns(asked, asked.answer)
        return [self._experience(prompt, response, eid, where, **extra)]


@FORMATTERS.register_module("cpt")
class CPTFormatter(RowFormatter):
    """Plain text to continue: every token after the first is learned (``prompt_length`` 1).

    The text is the prompt column, tokenised as it is, with the tokenizer's special tokens.
    """

    @property
    def columns(self) -> list[str]:
        if self.fmt.prompt_type != "plaintext":
            raise DataError(
                f"format.prompt_type={self.fmt.prompt_type}: pre-training rows are plain text; "
                "set format.prompt_type=plaintext and format.prompt_key"
            )
        return [self.fmt.prompt_key]

    def format_unit(self, row: dict[str, Any], eid: EID, where: str) -> list[Experience]:
        """Raises DataError: the text has fewer than two tokens."""
        text = text_of(row, self.fmt.prompt_key, where, "format.prompt_key")
        ids = self._ended(list(self.tokenizer.encode(text, add_special_tokens=True)))
        return [self._experience(ids[:1], ids[1:], eid, where, response_text=text)]


@FORMATTERS.register_module("dpo")
class DPOFormatter(RowFormatter):
    """A prompt with a preferred and a rejected answer, as two experiences of one task.

    Run 0 is the chosen one, run 1 the rejected one; both have the same prompt ids.

    * ``plaintext``: prompt, chosen and rejected columns of text.
    * ``messages``: the messages column holds the turns before the answer (a list, or its
      JSON text), chosen and rejected the turns of the answer. In an answer of several turns
      only the assistant's are learned. Where chosen and rejected are whole conversations,
      what both begin with is the prompt, and a messages column is not needed.
    """

    rows_per_unit = 2

    @property
    def columns(self) -> list[str]:
        answers = [self.fmt.chosen_key, self.fmt.rejected_key]
        return answers if self.fmt.prompt_type == "messages" else [self.fmt.prompt_key, *answers]

    def format_unit(self, row: dict[str, Any], eid: EID, where: str) -> list[Experience]:
        """Raises DataError: an answer is empty, or a conversation is none."""
        # the epoch, which eid.run counts, must not make one group of two pairs
        batch = eid.batch if eid.run == 0 else f"{eid.batch}@{eid.run}"
        chats: list[Messages] = []
        if self.fmt.prompt_type == "messages":
            row, chats = self._told_apart(row, where)
        asked = prompt_of(row, self.fmt, where)
        if asked.answer and asked.answer not in chats:
            raise DataError(
                f"{where}: the conversation in {self.fmt.messages_key!r} ends with a turn of the "
                "assistant's, which is neither the chosen nor the rejected answer; end it with "
                "what is asked"
            )
        pair = []
        for run, kind in enumerate(("chosen_key", "rejected_key")):
            key = getattr(self.fmt, kind)
            texts, mask = dict[str, str](), None
            if chats:
                prompt, response, mask = self._last_turns(asked, chats[run])
            else:
                text = text_of(row, key, where, f"format.{kind}")
                texts = {"prompt_text": row[self.fmt.prompt_key], "response_text": text}
                prompt, response = self._text_answer(asked, text)
            of_run = EID(batch, eid.task, run, eid.step, eid.suffix)
            pair.append(self._experience(prompt, response, of_run, where, mask, **texts))
        return pair

    def _told_apart(self, row: dict[str, Any], where: str) -> tuple[dict[str, Any], list[Messages]]:
        """The row with what is asked in its messages column, and the turns of both answers."""
        column = self.fmt.messages_key
        given = row.get(column)
        given = parse_messages(given, column, where) if as_list(given, column, where) else []
        chats = []
        for key in (self.fmt.chosen_key, self.fmt.rejected_key):
            turns = parse_messages(row.get(key), key, where)
            if turns[-1]["role"] != "assistant":
                raise DataError(f"{where}: the last turn of {key!r} must be the assistant's")
            chats.append(turns)
        if chats[0][0]["role"] == chats[1][0]["role"] == "assistant":
            if not given:
                raise (UnusableRow if column in row else DataError)(
                    f"{where}: no value in column {column!r}, and {self.fmt.chosen_key!r} and "
                    f"{self.fmt.rejected_key!r} begin with the answer; name the column of what is "
                    "asked in format.messages_key"
                )
            return row, chats
        common = 0
        while common < min(map(len, chats)) and chats[0][common] == chats[1][common]:
            common += 1
        while common > 0 and not all(
            chat[common:] and chat[common]["role"] == "assistant" for chat in chats
        ):
            common -= 1
        asked, own = chats[0][:common], [m for m in given if m["role"] not in SYSTEM_ROLES]
        spoken = [m for m in asked if m["role"] not in SYSTEM_ROLES]
        if not spoken or spoken[: len(own)] != own:
            raise DataError(
                f"{where}: {self.fmt.chosen_key!r} and {self.fmt.rejected_key!r} are conversations "
                f"that do not begin with the same turns{f' as {column!r}' if own else ''}, so what "
                "is asked cannot be told from the answers"
            )
        if asked[0]["role"] not in SYSTEM_ROLES:
            asked = [*(m for m in given[:1] if m["role"] in SYSTEM_ROLES), *asked]
        return {**row, column: asked}, [chat[common:] for chat in chats]


# -- conversations as token ids ---------------------------------------------------------
def render(
    tokenizer: Any,
    messages: Messages,
    tools: list[dict[str, Any]] | None = None,
    *,
    generation_prompt: bool = False,
    where: str = "conversation",
) -> Ids:
    """Token ids of a conversation by the chat template. Raises DataError where it refuses."""
    try:
        return list(
            tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=True,
                return_dict=False,
                add_generation_prompt=generation_prompt,
            )
        )
    except TEMPLATE_ERRORS as error:
        raise template_error(where, tokenizer, error) from error


def answer_ids(prompt: Ids, whole: Ids, where: str) -> Ids:
    """What follows ``prompt`` in ``whole``.

    Raises:
        DataError: ``whole`` does not begin with ``prompt``.
    """
    if whole[: len(prompt)] != prompt:
        raise DataError(
            f"{where}: the chat template renders the conversation without its last turn "
            "differently from the start of the whole one, so prompt and response cannot "
            "be told apart; use another template, or prompt_type=plaintext"
        )
    return whole[len(prompt) :]


def assistant_mask(
    tokenizer: Any,
    messages: Messages,
    tools: list[dict[str, Any]] | None = None,
    where: str = "conversation",
    reply_prefix: str = "",
) -> tuple[Ids, list[bool]]:
    """Ids of a whole conversation, and true where the assistant speaks.

    A template with a ``{% generation %}`` block marks the tokens itself. Otherwise each
    assistant turn is what its conversation has beyond the turns before it and the
    generation prompt; a template that knows ``<think>`` drops the thoughts of earlier
    turns, so there only turns after the last user's are marked. What follows an
    end-of-sequence token inside a turn is not marked: it is never sampled. Nor is the
    ``reply_prefix``, which begins each of these turns, written in the row or not.

    Raises:
        DataError: there is no message, or earlier turns are rendered differently later.
    """
    if not messages:
        raise DataError(f"{where}: there is no message")
    try:
        template = tokenizer.get_chat_template(tools=tools)
    except ValueError as error:
        raise template_error(where, tokenizer, error) from error
    first = 0
    if "<think>" in template:
        users = [i for i, message in enumerate(messages) if message["role"] == "user"]
        first = users[-1] + 1 if users else 0
    if reply_prefix:
        return _mask_behind_prefix(tokenizer, messages, tools, where, (first, reply_prefix))
    if "{% generation %}" in template or "{%- generation" in template:
        try:
            found = tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
        except TEMPLATE_ERRORS as error:
            raise template_error(where, tokenizer, error) from error
        return list(found["input_ids"]), [bool(bit) for bit in found["assistant_masks"]]
    ids = render(tokenizer, messages, tools, where=where)
    mask = [False] * len(ids)
    for turn in range(first, len(messages)):
        if messages[turn]["role"] == "assistant":
            _mark_turn(tokenizer, messages[: turn + 1], tools, ids, mask, where)
    return ids, mask


def _mask_behind_prefix(
    tokenizer: Any,
    messages: Messages,
    tools: list[dict[str, Any]] | None,
    where: str,
    learned: tuple[int, str],
) -> tuple[Ids, list[bool]]:
    """The same from turn ``learned[0]`` on, where each reply is asked for with a prefix.

    What is asked and what is replied are tokenised apart, as they are when it is sampled.
    """
    first, prefix = learned
    turns = list(messages)
    for number in range(first, len(turns)):
        turn = turns[number]
        if turn["role"] == "assistant" and not turn["content"].startswith(prefix):
            turns[number] = {**turn, "content": prefix + turn["content"]}

    def text_of_first(count: int) -> str:
        try:
            return tokenizer.apply_chat_template(turns[:count], tools=tools, tokenize=False)
        except TEMPLATE_ERRORS as error:
            raise template_error(where, tokenizer, error) from error

    whole, done = text_of_first(len(turns)), 0
    ids, mask = Ids(), list[bool]()

    def add(stop: int, learn: bool) -> None:
        nonlocal done
        piece = list(tokenizer.encode(whole[done:stop], add_special_tokens=False))
        kept = len(without_tail(piece, tokenizer.eos_token_id)) if learn else 0
        ids.extend(piece)
        mask.extend([True] * kept + [False] * (len(piece) - kept))
        done = stop

    for number in range(first, len(turns)):
        if turns[number]["role"] == "assistant":
            asked = Prompt(where, turns[:number], tools, reply_prefix=prefix).render(tokenizer)
            after = text_of_first(number + 1)
            if not after.startswith(asked) or not whole.startswith(after):
                raise DataError(
                    f"{where}: the chat template renders turn {number + 1} differently when it is "
                    "asked for with format.reply_prefix, or when further turns follow, so not "
                    "every turn can be learned; set format.enable_concatenated_multi_turn=false"
                )
            add(len(asked), learn=False)
            add(len(after), learn=True)
    add(len(whole), learn=False)
    return ids, mask


def _mark_turn(
    tokenizer: Any,
    upto: Messages,
    tools: list[dict[str, Any]] | None,
    ids: Ids,
    mask: list[bool],
    where: str,
) -> None:
    after = render(tokenizer, upto, tools, where=where)
    if upto[:-1]:
        before = render(tokenizer, upto[:-1], tools, generation_prompt=True, where=where)
    else:
        # some templates refuse an empty conversation: the generation prompt is what they
        # put after any other
        user = [{"role": "user", "content": "x"}]
        header = render(tokenizer, user, generation_prompt=True)[len(render(tokenizer, user)) :]
        begins = bool(header) and after[: len(header)] == header
        before = after[: len(header) if begins else 1]
    spoken = answer_ids(before, after, where)
    if ids[: len(after)] != after:
        raise DataError(
            f"{where}: the chat template changes turn {len(upto)} when further turns follow, so "
            "not every turn can be learned; set format.enable_concatenated_multi_turn=false"
        )
    start = len(before)
    stop = start + len(without_tail(spoken, tokenizer.eos_token_id))
    mask[start:stop] = [True] * (stop - start)


def without_tail(ids: Ids, eos: int | None) -> Ids:
    """``ids`` up to the last end-of-sequence token; all of them when there is none."""
    if eos is None or eos not in ids:
        return ids
    return ids[: len(ids) - ids[::-1].index(eos)]
