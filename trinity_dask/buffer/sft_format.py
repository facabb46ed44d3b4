"""Training rows as token ids: which tokens are context and which are learned.

Invariant: the prompt ids of an example are the ids that the same prompt has at sampling
time, and the response ids follow them directly, so what is learned is what is sampled.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from trinity_dask.buffer.errors import DataError
from trinity_dask.config.schema import FormatConfig
from trinity_dask.experience import EID, RESPONSE_TRUNCATED, Experience

Ids = list[int]


class SFTFormatter:
    """Rows to experiences by a Hugging Face tokenizer.

    * ``plaintext``: the prompt column through the chat template (with the system prompt,
      up to where the assistant begins), or tokenised as it is; then the response column
      and, with ``append_eos``, the end-of-sequence token.
    * ``messages``: all turns but the last are the prompt; the last one, which the
      assistant must speak, is the response, as the chat template renders it. Text that
      the template puts after the last end-of-sequence token is dropped with ``append_eos``.

    ``max_tokens`` cuts longer examples at the end and marks them ``response_truncated``.
    """

    def __init__(self, tokenizer: Any, fmt: FormatConfig, max_tokens: int | None = None) -> None:
        self.tokenizer = tokenizer
        self.fmt = fmt
        self.max_tokens = max_tokens
        self.truncated_rows = 0
        if fmt.append_eos and tokenizer.eos_token_id is None:
            raise DataError("append_eos is on, but the tokenizer has no end-of-sequence token")

    @property
    def columns(self) -> list[str]:
        """Columns that every row needs."""
        if self.fmt.prompt_type == "messages":
            return [self.fmt.messages_key]
        return [self.fmt.prompt_key, self.fmt.response_key]

    def format(self, row: dict[str, Any], eid: EID, where: str) -> Experience:
        """One row as an experience without log-probs and reward.

        Raises:
            DataError: the row has no response, is no conversation, or its prompt alone
                fills ``max_tokens``; ``where`` is named.
        """
        if self.fmt.prompt_type == "messages":
            prompt, response, extra = self._conversation(row[self.fmt.messages_key], where)
        else:
            prompt, response, extra = self._plaintext(row)
        return self._experience(prompt, response, eid, where, extra)

    def _plaintext(self, row: dict[str, Any]) -> tuple[Ids, Ids, dict[str, Any]]:
        question, answer = str(row[self.fmt.prompt_key]), str(row[self.fmt.response_key])
        response = self._encode(answer, special=False)
        if self.fmt.append_eos and response[-1:] != [self.tokenizer.eos_token_id]:
            response.append(self.tokenizer.eos_token_id)
        return self._prompt(question), response, {"prompt_text": question, "response_text": answer}

    def _prompt(self, question: str) -> Ids:
        if not self.fmt.apply_chat_template:
            return self._encode(question, special=True)
        messages = [{"role": "user", "content": question}]
        if self.fmt.system_prompt:
            messages.insert(0, {"role": "system", "content": self.fmt.system_prompt})
        return self._template(messages, add_generation_prompt=True)

    def _conversation(self, value: Any, where: str) -> tuple[Ids, Ids, dict[str, Any]]:
        messages = self._messages(value, where)
        prompt = self._template(messages[:-1], add_generation_prompt=True)
        whole = self._template(messages, add_generation_prompt=False)
        if whole[: len(prompt)] != prompt:
            raise DataError(
                f"{where}: the chat template renders the conversation without its last turn "
                "differently from the start of the whole one, so prompt and response cannot "
                "be told apart; use another template, or prompt_type=plaintext"
            )
        return prompt, self._without_tail(whole[len(prompt) :]), {"messages": messages}

    def _messages(self, value: Any, where: str) -> list[dict[str, Any]]:
        try:
            messages = json.loads(value) if isinstance(value, str) else list(value)
        except ValueError as error:
            raise DataError(f"{where}: {self.fmt.messages_key!r} is no JSON ({error})") from error
        # columnar files fill the keys that a message does not have with null
        messages = [{k: v for k, v in m.items() if v is not None} for m in messages]
        if len(messages) < 2 or messages[-1].get("role") != "assistant":
            raise DataError(
                f"{where}: a conversation needs at least two messages, the last one by the "
                f"assistant (got {[m.get('role') for m in messages]})"
            )
        return messages

    def _without_tail(self, response: Ids) -> Ids:
        eos = self.tokenizer.eos_token_id
        if not self.fmt.append_eos:
            return response
        if eos not in response:
            return [*response, eos]
        return response[: len(response) - response[::-1].index(eos)]

    def _experience(
        self, prompt: Ids, response: Ids, eid: EID, where: str, extra: dict[str, Any]
    ) -> Experience:
        limit = self.max_tokens or len(prompt) + len(response)
        kept = response[: max(limit - len(prompt), 0)]
        if not prompt or not kept:
            raise DataError(
                f"{where}: {len(prompt)} prompt and {len(response)} response tokens leave "
                f"nothing to learn (limit {limit} tokens); fill both columns, or raise "
                "model.max_model_len"
            )
        status = RESPONSE_TRUNCATED if len(kept) < len(response) else None
        self.truncated_rows += status is not None
        return Experience(
            tokens=np.array(prompt + kept, np.int32),
            prompt_length=len(prompt),
            eid=eid,
            truncate_status=status,
            **extra,
        )

    def _encode(self, text: str, *, special: bool) -> Ids:
        return list(self.tokenizer.encode(text, add_special_tokens=special))

    def _template(self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool) -> Ids:
        return list(
            self.tokenizer.apply_chat_template(
                list(messages),
                tokenize=True,
                return_dict=False,
                add_generation_prompt=add_generation_prompt,
            )
        )
