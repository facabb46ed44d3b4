"""The one place where a tokenizer is loaded and a chat written out: all see the same ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from trinity_dask.lazy import MODEL_LIBRARY, import_modules

NO_TEMPLATE = (
    "the tokenizer has no chat template; take a chat model's, or set "
    "format.apply_chat_template=false with plain text"
)


@lru_cache(maxsize=8)
def load_tokenizer(path: str, trust_remote_code: bool = False) -> Any:
    """The tokenizer of the model directory ``path``, with a padding token set.

    Raises:
        ValueError: there is no tokenizer at ``path``.
    """
    import_modules(MODEL_LIBRARY[-1:])
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"no tokenizer at {path!r}: {error}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def end_token_ids(configs: Iterable[Any], tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends an answer: those of the ``configs`` (model and generation), and the
    tokenizer's, which is the end of a turn in a chat model and often stands nowhere else."""
    found: set[int] = set()
    for value in (getattr(each, "eos_token_id", None) for each in (*configs, tokenizer)):
        if value is not None:
            found.update([value] if isinstance(value, int) else value)
    return tuple(sorted(found))


def chat_prompt(
    tokenizer: Any, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
) -> str:
    """``messages`` by the chat template, up to where the assistant begins to speak.

    Text of the assistant's at the end is a reply that has begun: it follows as it is, and is
    continued.

    Raises:
        ValueError: the tokenizer has no chat template.
        jinja2.TemplateError, TypeError, ValueError: the template refuses the messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(NO_TEMPLATE)
    begun, messages = begun_reply(messages)
    text = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True
    )
    return text + begun


def begun_reply(messages: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """Text of the assistant's at the end, which is to be continued, and what stands before it."""
    last = messages[-1]
    if last["role"] == "assistant" and last.keys() == {"role", "content"} and len(messages) > 1:
        return str(last["content"]), messages[:-1]
    return "", messages


def decode_all(tokenizer: Any, sequences: Sequence[Sequence[int]]) -> list[str]:
    """The texts of ``sequences`` without special tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return tokenizer.batch_decode(sequences, skip_special_tokens=True)
    # one call for all: the tokenizer's own loop costs three times as much
    return backend.decode_batch([list(s) for s in sequences], skip_special_tokens=True)
