"""What a row asks: the one way from a row to a prompt, for rollouts and for training rows.

Invariant: a prompt is a function of the row, the format and the workflow's own system prompt,
whatever file the row lay in: lists may be JSON text, keys that a columnar file filled with
null are not there, and arguments of tool calls are objects. Only text becomes tokens; what
is no text is refused with file, row and column, never written out as Python would print it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2

from trinity_dask.buffer.errors import DataError, UnusableRow
from trinity_dask.config.schema import FormatConfig
from trinity_dask.models.tokenizer import NO_TEMPLATE, chat_prompt

Ids = list[int]
Messages = list[dict[str, Any]]
SYSTEM_ROLES = ("system", "developer")
MAX_NESTING = 100  # lists and objects inside each other; templates and pickle recurse
# what a template raises itself, and what Python does inside of one
TEMPLATE_ERRORS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError
)  # fmt: skip
SAYS = ("content", "tool_calls", "function_call", "reasoning_content", "thought", "thinking")


@dataclass(frozen=True)
class Prompt:
    """A conversation for the chat template or, with ``messages`` empty, ``text`` as it is.

    ``answer`` is the assistant's turn at the end of the row's conversation, which a rollout
    samples and a training row learns. ``reply_prefix`` is how every reply begins: part of the
    prompt. ``where`` names file and row.
    """

    where: str
    messages: Messages = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    text: str | None = None
    answer: Messages = field(default_factory=list)
    reply_prefix: str = ""

    @property
    def chat(self) -> Messages:
        """The messages; a reply prefix is a last turn of the assistant, to be continued."""
        if not self.messages:
            raise DataError(f"{self.where}: the conversation has no turn before the assistant's")
        # without text it says that the assistant's turn before it is closed, not to be continued
        is_begun = self.reply_prefix or self.messages[-1]["role"] == "assistant"
        begun = [{"role": "assistant", "content": self.reply_prefix}] if is_begun else []
        return [*self.messages, *begun]

    def render(self, tokenizer: Any) -> str:
        """The prompt as text. Raises DataError where the chat template refuses it."""
        if self.text is not None:
            return self.text
        try:
            return chat_prompt(tokenizer, self.chat, self.tools)
        except TEMPLATE_ERRORS as error:
            raise template_error(self.where, tokenizer, error) from error

    def encode(self, tokenizer: Any) -> Ids:
        """The ids that a model is asked with."""
        special = self.text is not None  # a template writes its own special tokens
        return list(tokenizer.encode(self.render(tokenizer), add_special_tokens=special))


def prompt_of(
    row: dict[str, Any], fmt: FormatConfig, where: str, default_system: str | None = None
) -> Prompt:
    """The prompt of ``row``.

    ``plaintext``: the prompt column as the user's turn, or as it is without a chat template.
    ``messages``: the conversation without the assistant's turn at its end. The system prompt
    is the conversation's own, else the row's (``system_prompt_key``), else
    ``fmt.system_prompt``, else ``default_system``, the workflow's.

    Raises:
        DataError: a column holds no text, or no conversation; ``where`` and column are named.
        UnusableRow: nothing is asked, since the column is empty.
    """
    prefix, answer = fmt.reply_prefix or "", list[dict[str, Any]]()
    if fmt.prompt_type != "messages":
        question = text_of(row, fmt.prompt_key, where, "format.prompt_key")
        if not question.strip():
            raise UnusableRow(f"{where}: column {fmt.prompt_key!r} is empty")
        if not fmt.apply_chat_template:
            return Prompt(where, text=question + prefix, reply_prefix=prefix)
        messages = [{"role": "user", "content": question}]
    else:
        messages = parse_messages(row.get(fmt.messages_key), fmt.messages_key, where)
        # no turn of the assistant's is asked for when the last one is already there
        if messages[-1]["role"] == "assistant":
            messages, answer = messages[:-1], messages[-1:]
        if all(map(is_silent, messages)) or (
            messages[-1]["role"] == "user" and is_silent(messages[-1])
        ):
            raise UnusableRow(f"{where}: column {fmt.messages_key!r} asks nothing")
    system = fmt.system_prompt or default_system
    if fmt.system_prompt_key and row.get(fmt.system_prompt_key) is not None:
        system = text_of(row, fmt.system_prompt_key, where, "format.system_prompt_key") or system
    if system and not (messages and messages[0]["role"] in SYSTEM_ROLES):
        messages = [{"role": "system", "content": system}, *messages]
    tools = parse_tools(row.get(fmt.tools_key), fmt.tools_key, where)
    return Prompt(where, messages, tools, None, answer, prefix)


def text_of(row: dict[str, Any], column: str, where: str, key: str) -> str:
    """The text in ``column``, which the configuration key ``key`` names.

    Raises:
        DataError: there is something else than text. UnusableRow: there is nothing.
    """
    value = row.get(column)
    if isinstance(value, str):
        check_text(value, f"{where}: column {column!r}")
        return value
    if value is None:
        there = ", ".join(sorted(map(str, row))) or "nothing"
        raise UnusableRow(
            f"{where}: column {column!r} has no text (the row has {there}); set {key}"
        )
    hint = "text"
    if isinstance(value, list | dict):
        hint = "text, or set format.prompt_type=messages"
        if key.startswith(("format.chosen", "format.rejected")):
            hint += " (conversations that begin with what is asked need no other column)"
        else:
            hint += " and format.messages_key"
    raise DataError(
        f"{where}: column {column!r} holds a {type(value).__name__}, not text; make it {hint}"
    )


def check_text(value: Any, where: str, level: int = 0) -> None:
    """Raises DataError: a text in ``value`` has half a character, which no tokenizer takes, or
    lists and objects are nested too deep."""
    if level > MAX_NESTING:
        raise DataError(f"{where} is nested more than {MAX_NESTING} levels deep")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(value[error.start]):04x}"
            raise DataError(
                f"{where} holds no text: half a character ({half}) at {error.start}"
            ) from error
    elif isinstance(value, dict):
        for key, item in value.items():
            check_text(key, where)
            check_text(item, where, level + 1)
    elif isinstance(value, list):
        for item in value:
            check_text(item, where, level + 1)


def is_blank(value: Any) -> bool:
    """Nothing: null, not a number, text of spaces, a list or an object without items."""
    if isinstance(value, str):
        return not value.strip()
    if isinstance(value, float):
        return math.isnan(value)
    return value is None or (isinstance(value, list | dict) and not value)


# -- conversations --------------------------------------------------------------------------
def parse_messages(value: Any, column: str, where: str) -> Messages:
    """The messages in a cell: a list, one message, or the JSON text of either.

    Raises:
        DataError: it holds a message without a role, or content that is no text.
        UnusableRow: it holds no message.
    """
    messages = as_list(value, column, where)
    if not messages:
        raise UnusableRow(f"{where}: column {column!r} has no message")
    return [
        _message(message, f"{where}: column {column!r}, message {number}")
        for number, message in enumerate(messages)
    ]


def parse_tools(value: Any, column: str, where: str) -> list[dict[str, Any]] | None:
    """Tool schemas from a list or its JSON text; None for an empty cell."""
    return [_without_nulls(tool) for tool in as_list(value, column, where)] or None


def as_list(value: Any, column: str, where: str) -> list[Any]:
    """A list of objects, or the JSON text of one; nothing is none of them.

    Raises DataError with ``where``.
    """
    try:
        parsed = json.loads(value) if isinstance(value, str) and value.strip() else value
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: column {column!r} is no JSON ({error})") from error
    if parsed is None or (isinstance(parsed, str | float) and is_blank(parsed)):
        return []
    if isinstance(parsed, dict):
        parsed = [parsed]
    if not isinstance(parsed, Sequence) or not all(isinstance(item, dict) for item in parsed):
        raise DataError(
            f"{where}: column {column!r} must be a list of objects (got {type(parsed).__name__})"
        )
    check_text(list(parsed), f"{where}: column {column!r}")
    return list(parsed)


def is_silent(message: dict[str, Any]) -> bool:
    """A turn that says nothing, thinks nothing and calls nothing."""
    return all(is_blank(message.get(key)) for key in SAYS)


def _message(given: dict[str, Any], where: str) -> dict[str, Any]:
    message = _without_nulls(given)
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise DataError(f"{where}: it has no role (it has {sorted(map(str, given))})")
    # a turn that only calls tools says nothing; a template prints a missing text as nothing,
    # or fails where it adds to it
    message["content"] = _text(message.get("content", ""), where)
    if "tool_calls" in message:
        calls = as_list(message.pop("tool_calls"), "tool_calls", where)
        if calls:  # templates ask whether the key is there
            message["tool_calls"] = [_tool_call(call, where) for call in calls]
    if isinstance(message.get("function_call"), dict):
        message["function_call"] = _with_arguments(message["function_call"], where)
    return message


def _text(content: Any, where: str) -> str:
    """Text, or the text of its parts (``{"type": "text", "text": ...}``) one after another."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    found = [part.get("text") if isinstance(part, dict) else part for part in parts]
    texts = [text for text in found if isinstance(text, str)]
    if len(texts) < len(parts):
        raise DataError(
            f"{where}: its content is no text (got {type(content).__name__}); "
            "other content than text is not supported"
        )
    return "".join(texts)


def _tool_call(call: dict[str, Any], where: str) -> dict[str, Any]:
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_arguments(call["function"], where)}
    return _with_arguments(call, where)


def _with_arguments(function: dict[str, Any], where: str) -> dict[str, Any]:
    """The call with its arguments as an object: templates write them as JSON themselves."""
    if "parameters" in function:  # another way to write a call
        return function
    given = function.get("arguments")
    try:
        parsed = json.loads(given) if isinstance(given, str) and given.strip() else given
    except (ValueError, RecursionError):
        parsed = given
    if is_blank(parsed):  # null too: the call has none
        return {**function, "arguments": {}}
    if not isinstance(parsed, dict):
        raise DataError(
            f"{where}: arguments of a tool call are no JSON object (got {str(given)[:80]!r})"
        )
    check_text(parsed, f"{where}: arguments of a tool call")
    return {**function, "arguments": _without_nulls(parsed)}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def template_error(where: str, tokenizer: Any, error: Exception) -> DataError:
    """What a template that is not there, or that refused a conversation, said."""
    if not getattr(tokenizer, "chat_template", None):
        return DataError(f"{where}: {NO_TEMPLATE}")
    said = str(error) or type(error).__name__
    return DataError(f"{where}: the chat template refuses the conversation ({said})")
