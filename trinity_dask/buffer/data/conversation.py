"""Conversations as token ids, and which of the tokens the assistant says.

Invariant: every turn's ids are a continuation of the ids of the turns before it; where a
chat template breaks this, an error says so instead of a mask that is shifted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from trinity_dask.buffer.errors import DataError

Ids = list[int]
Messages = list[dict[str, Any]]


def as_list(value: Any, what: str, where: str) -> list[Any]:
    """A list, or the JSON text of one. Raises DataError with ``where``."""
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise DataError(f"{where}: {what} is no JSON ({error})") from error
    if isinstance(parsed, dict):
        parsed = [parsed]
    if not isinstance(parsed, Sequence) or not all(isinstance(item, dict) for item in parsed):
        raise DataError(f"{where}: {what} must be a list of objects (got {type(parsed).__name__})")
    return list(parsed)


def parse_messages(value: Any, what: str, where: str) -> Messages:
    """Messages without the keys that columnar files fill with null."""
    messages = as_list(value, what, where)
    if not messages:
        raise DataError(f"{where}: {what} has no message")
    for message in messages:
        if not message.get("role"):
            raise DataError(f"{where}: a message of {what} has no role (got {sorted(message)})")
    return [_without_nulls(message) for message in messages]


def parse_tools(value: Any, where: str) -> list[dict[str, Any]] | None:
    """Tool schemas from a list or its JSON text; None for an empty cell."""
    if value is None or value in ("", []):
        return None
    return [_without_nulls(tool) for tool in as_list(value, "the tools", where)]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def render(
    tokenizer: Any,
    messages: Messages,
    tools: list[dict[str, Any]] | None = None,
    *,
    generation_prompt: bool = False,
) -> Ids:
    """Token ids of a conversation by the tokenizer's chat template."""
    return list(
        tokenizer.apply_chat_template(
            messages,
            tools=tools,
            tokenize=True,
            return_dict=False,
            add_generation_prompt=generation_prompt,
        )
    )


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
) -> tuple[Ids, list[bool]]:
    """Ids of a whole conversation, and true where the assistant speaks.

    A template with a ``{% generation %}`` block marks the tokens itself. Otherwise each
    assistant turn is what its conversation has beyond the turns before it and the
    generation prompt; a template that knows ``<think>`` drops the thoughts of earlier
    turns, so there only turns after the last user's are marked. What follows an
    end-of-sequence token inside a turn is not marked: it is never sampled.

    Raises:
        DataError: there is no message, or earlier turns are rendered differently later.
    """
    if not messages:
        raise DataError(f"{where}: there is no message")
    template = tokenizer.get_chat_template(tools=tools)
    if "{% generation %}" in template or "{%- generation" in template:
        return _own_mask(tokenizer, messages, tools)
    ids = render(tokenizer, messages, tools)
    mask = [False] * len(ids)
    for turn in range(_first_turn(messages, template), len(messages)):
        if messages[turn]["role"] == "assistant":
            _mark_turn(tokenizer, messages[: turn + 1], tools, ids, mask, where)
    return ids, mask


def _own_mask(
    tokenizer: Any, messages: Messages, tools: list[dict[str, Any]] | None
) -> tuple[Ids, list[bool]]:
    found = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return list(found["input_ids"]), [bool(bit) for bit in found["assistant_masks"]]


def _first_turn(messages: Messages, template: str) -> int:
    if "<think>" not in template:
        return 0
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    return users[-1] + 1 if users else 0


def _mark_turn(
    tokenizer: Any,
    upto: Messages,
    tools: list[dict[str, Any]] | None,
    ids: Ids,
    mask: list[bool],
    where: str,
) -> None:
    after = render(tokenizer, upto, tools)
    # not rendered when there is no turn before: some templates refuse an empty conversation
    before = (
        render(tokenizer, upto[:-1], tools, generation_prompt=True)
        if upto[:-1]
        else after[: _header_length(tokenizer, after)]
    )
    spoken = answer_ids(before, after, where)
    if ids[: len(after)] != after:
        raise DataError(
            f"{where}: the chat template changes turn {len(upto)} when further turns follow, so "
            "not every turn can be learned; set format.enable_concatenated_multi_turn=false"
        )
    start = len(before)
    stop = start + len(without_tail(spoken, tokenizer.eos_token_id))
    mask[start:stop] = [True] * (stop - start)


def _header_length(tokenizer: Any, ids: Ids) -> int:
    """Tokens of the generation prompt at the start of a conversation that the assistant opens."""
    user = [{"role": "user", "content": "x"}]
    header = render(tokenizer, user, generation_prompt=True)[len(render(tokenizer, user)) :]
    return len(header) if header and ids[: len(header)] == header else 1


def without_tail(ids: Ids, eos: int | None) -> Ids:
    """``ids`` up to the last end-of-sequence token; all of them when there is none."""
    if eos is None or eos not in ids:
        return ids
    return ids[: len(ids) - ids[::-1].index(eos)]
