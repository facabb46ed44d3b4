"""What programs send and get: OpenAI's chat protocol, read and written.

Invariant: a field either has its effect, or has none here and says so in :data:`UNUSED`, or is
refused; what would change the distribution that is sampled is never taken silently, since the
log-probs of a run are those of the run's own sampling. Pure: nothing here waits.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from trinity_dask.buffer.data.prompts import parse_messages, parse_tools
from trinity_dask.buffer.errors import DataError
from trinity_dask.models.conversation import Turn

MAX_BODY_BYTES = 8 << 20
MAX_N = 128
ROLES = ("system", "developer", "user", "assistant", "tool")
# sampling is the run's own; the others are for the books of a provider
UNUSED = frozenset(
    [
        "temperature",
        "top_p",
        "user",
        "metadata",
        "store",
        "parallel_tool_calls",
        "service_tier",
        "reasoning_effort",
        "prompt_cache_key",
        "safety_identifier",
        "verbosity",
        "model",
    ]
)
USED = frozenset(
    [
        "messages",
        "tools",
        "tool_choice",
        "n",
        "stream",
        "stream_options",
        "stop",
        "max_tokens",
        "max_completion_tokens",
        "logprobs",
        "top_logprobs",
        "return_token_ids",
        "response_format",
        "frequency_penalty",
        "presence_penalty",
        "logit_bias",
    ]
)
# of these only the value that does nothing is taken
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tool_choice": ("auto", "none"),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
}
CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class ApiError(Exception):
    """A request that gets no answer; ``status`` is HTTP's."""

    def __init__(
        self, message: str, status: int = 400, code: Optional[str] = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        told = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": told}


@dataclass(frozen=True)
class ChatRequest:
    """What a body asks for. ``max_tokens`` None: the run's own limit."""

    messages: list[dict[str, Any]]
    tools: Optional[list[dict[str, Any]]] = None
    n: int = 1
    max_tokens: Optional[int] = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    stream_usage: bool = False
    logprobs: bool = False
    token_ids: bool = False

    @classmethod
    def of(cls, body: Any) -> ChatRequest:
        """Read the body of ``/v1/chat/completions``. Raises ApiError naming the field."""
        if not isinstance(body, dict):
            raise ApiError("the body is no JSON object")
        given = {name: value for name, value in body.items() if value is not None}
        for name in given.keys() - USED - UNUSED:
            raise ApiError(f"{name!r} is not supported here", param=name)
        for name, values in NEUTRAL.items():
            if name in given and given[name] not in values:
                raise ApiError(
                    f"{name}={given[name]!r} would change what is sampled; sampling is the run's "
                    f"(allowed: {' or '.join(map(repr, values))})",
                    param=name,
                )
        options = given.get("stream_options", {})
        limit = given.get("max_completion_tokens", given.get("max_tokens"))
        tools = given.get("tools") if given.get("tool_choice") != "none" else None
        return cls(
            messages=_messages(given.get("messages")),
            tools=_tools(tools),
            n=_whole("n", given.get("n", 1), MAX_N),
            max_tokens=None if limit is None else _whole("max_tokens", limit, 1 << 31),
            stop=_stops(given.get("stop", ())),
            stream=given.get("stream") is True,
            stream_usage=isinstance(options, dict) and options.get("include_usage") is True,
            logprobs=given.get("logprobs") is True,
            token_ids=given.get("return_token_ids") is True,
        )


def _messages(value: Any) -> list[dict[str, Any]]:
    try:
        messages = parse_messages(value, "messages", "the request")
    except DataError as error:
        raise ApiError(str(error), param="messages") from error
    for message in messages:
        if message["role"] not in ROLES:
            known = ", ".join(ROLES)
            raise ApiError(f"role {message['role']!r} is none of {known}", param="messages")
    return messages


def _tools(value: Any) -> Optional[list[dict[str, Any]]]:
    try:
        return parse_tools(value, "tools", "the request")
    except DataError as error:
        raise ApiError(str(error), param="tools") from error


def _whole(name: str, value: Any, highest: int) -> int:
    if type(value) is not int or not 1 <= value <= highest:
        raise ApiError(f"{name} is a whole number from 1 to {highest} (got {value!r})", param=name)
    return value


def _stops(value: Any) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else value
    if not isinstance(stops, list | tuple) or not all(isinstance(s, str) and s for s in stops):
        raise ApiError("stop is a text or a list of texts", param="stop")
    return tuple(stops)


# replies ----------------------------------------------------------------------------------
def reply_message(
    tokenizer: Any, text: str, prompt_text: str, tools: Optional[Sequence[Mapping[str, Any]]]
) -> dict[str, Any]:
    """The assistant's message in ``text``, which has its special tokens.

    By the tokenizer's ``response_template`` where it has one, else calls are looked for in
    ``<tool_call>{"name": ..., "arguments": ...}</tool_call>``. A call that cannot be read is left
    as the text that it is. Arguments are objects, and every call has an id.
    """
    plain = {"role": "assistant", "content": _without_special(tokenizer, text)}
    if getattr(tokenizer, "response_template", None):
        try:
            parsed = tokenizer.parse_response(text, prefix=prompt_text, tools=tools)
        except (ValueError, TypeError, KeyError):  # broken by the model
            return plain
        calls = [c.get("function", c) for c in parsed.get("tool_calls") or ()] if tools else []
        plain["content"] = parsed.get("content") or ""
        if thought := parsed.get("reasoning_content") or parsed.get("thinking"):
            plain["reasoning_content"] = thought
    else:
        try:
            calls = [json.loads(found) for found in CALL.findall(text)] if tools else []
        except (ValueError, RecursionError):
            return plain
        if calls and all(map(_is_call, calls)):
            plain["content"] = _without_special(tokenizer, CALL.sub("", text)).strip()
    if not calls or not all(map(_is_call, calls)):
        return plain
    return {**plain, "tool_calls": [_call(call) for call in calls]}


def _is_call(call: Any) -> bool:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return False
    return isinstance(call.get("arguments", {}), dict)


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = {"name": call["name"], "arguments": call.get("arguments", {})}
    return {"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": function}


def _without_special(tokenizer: Any, text: str) -> str:
    for special in tokenizer.all_special_tokens:
        text = text.replace(special, "")
    return text


def chat_reply(turns: Sequence[Turn], request: ChatRequest, tokenizer: Any) -> dict[str, Any]:
    """The body of a ``chat.completion``; ``turns`` answer one prompt."""
    sampled = sum(len(turn.completion.token_ids) for turn in turns)
    prompt = turns[0].prompt
    reply: dict[str, Any] = {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": "policy",
        "choices": [_choice(index, turn, request, tokenizer) for index, turn in enumerate(turns)],
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": sampled,
            "total_tokens": len(prompt) + sampled,
        },
    }
    if request.token_ids:
        reply["prompt_token_ids"] = prompt
    return reply


def _choice(index: int, turn: Turn, request: ChatRequest, tokenizer: Any) -> dict[str, Any]:
    message = {**turn.message}
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [
            {
                **c,
                "function": {**c["function"], "arguments": json.dumps(c["function"]["arguments"])},
            }
            for c in calls
        ]
        message["content"] = message["content"] or None
    reason = turn.completion.finish_reason
    choice: dict[str, Any] = {
        "index": index,
        "message": message,
        "finish_reason": "tool_calls" if calls else "length" if reason == "length" else "stop",
        "logprobs": _logprobs(turn, tokenizer) if request.logprobs else None,
    }
    if request.token_ids:
        choice["token_ids"] = turn.completion.token_ids.tolist()
        choice["weight_versions"] = turn.completion.versions.tolist()
    return choice


def _logprobs(turn: Turn, tokenizer: Any) -> dict[str, Any]:
    ids, values = turn.completion.token_ids.tolist(), turn.completion.logprobs.tolist()
    texts = [tokenizer.decode([token], skip_special_tokens=False) for token in ids]
    return {
        "content": [
            {
                "token": text,
                "logprob": max(value, -9999.0),
                "bytes": list(text.encode(errors="replace")),
                "top_logprobs": [],
            }
            for text, value in zip(texts, values, strict=True)
        ],
        "refusal": None,
    }


def chunks(reply: dict[str, Any], usage: bool) -> Iterator[dict[str, Any]]:
    """A whole reply as the events of a stream: for each choice what it says, then its end."""
    head = {**{k: reply[k] for k in ("id", "created", "model")}, "object": "chat.completion.chunk"}
    for choice in reply["choices"]:
        delta = {**choice["message"]}
        if calls := delta.get("tool_calls"):
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        rest = {k: v for k, v in choice.items() if k not in ("message", "finish_reason")}
        yield {**head, "choices": [{**rest, "delta": delta, "finish_reason": None}]}
        end = {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}
        yield {**head, "choices": [end]}
    if usage:
        yield {**head, "choices": [], "usage": reply["usage"]}
