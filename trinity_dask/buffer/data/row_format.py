"""What all formats of training rows share: the tokenizer, the prompt and the length limit.

Invariant: the prompt ids of a row are the ids that the same prompt has at sampling time, and
the response ids follow them directly, so what is learned is what is sampled.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trinity_dask.buffer.data.conversation import Ids, answer_ids, render, without_tail
from trinity_dask.buffer.errors import DataError
from trinity_dask.config.schema import FormatConfig
from trinity_dask.experience import EID, RESPONSE_TRUNCATED, Experience


class RowFormatter:
    """Base of the formats; ``max_tokens`` cuts longer rows at the end and marks them."""

    rows_per_unit = 1

    def __init__(self, tokenizer: Any, fmt: FormatConfig, max_tokens: int | None = None) -> None:
        self.tokenizer = tokenizer
        self.fmt = fmt
        self.max_tokens = max_tokens
        self.truncated_rows = 0
        if fmt.append_eos and tokenizer.eos_token_id is None:
            raise DataError("append_eos is on, but the tokenizer has no end-of-sequence token")

    def _encode(self, text: str, *, special: bool) -> Ids:
        return list(self.tokenizer.encode(text, add_special_tokens=special))

    def _prompt(self, row: dict[str, Any]) -> Ids:
        """The prompt column, through the chat template up to where the assistant begins."""
        question = str(row[self.fmt.prompt_key])
        if not self.fmt.apply_chat_template:
            return self._encode(question, special=True)
        messages = [{"role": "user", "content": question}]
        system = row.get(self.fmt.system_prompt_key) or self.fmt.system_prompt
        if system:
            messages.insert(0, {"role": "system", "content": str(system)})
        return render(self.tokenizer, messages, generation_prompt=True)

    def _answer(self, text: str) -> Ids:
        """An answer column, with the end-of-sequence token when ``append_eos`` is on."""
        return self._ended(self._encode(text, special=False))

    def _ended(self, response: Ids) -> Ids:
        eos = self.tokenizer.eos_token_id
        if not self.fmt.append_eos or response[-1:] == [eos]:
            return response
        return [*response, eos]

    def _last_turns(
        self,
        before: list[dict[str, Any]],
        answer: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        where: str,
    ) -> tuple[Ids, Ids]:
        """Prompt and response ids of turns that the assistant ends."""
        prompt = render(self.tokenizer, before, tools, generation_prompt=True)
        response = answer_ids(prompt, render(self.tokenizer, before + answer, tools), where)
        if self.fmt.append_eos:
            response = self._ended(without_tail(response, self.tokenizer.eos_token_id))
        return prompt, response

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
        if not prompt or not action.any():
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
            action_mask=action,
            truncate_status=status,
            **extra,
        )
