"""Supervised rows as token ids: which tokens are context and which are learned.

Invariant: a token is learned when the assistant would have sampled it, and only then.
"""

from __future__ import annotations

from typing import Any

from trinity_dask.buffer.data.conversation import (
    Ids,
    Messages,
    assistant_mask,
    parse_messages,
    parse_tools,
)
from trinity_dask.buffer.data.row_format import RowFormatter
from trinity_dask.buffer.errors import DataError
from trinity_dask.experience import EID, Experience


class SFTFormatter(RowFormatter):
    """Rows to experiences by a Hugging Face tokenizer.

    * ``plaintext``: the prompt column through the chat template (with the system prompt,
      up to where the assistant begins), or tokenised as it is; then the response column
      and, with ``append_eos``, the end-of-sequence token.
    * ``messages``: all turns but the last are the prompt; the last one, which the
      assistant must speak, is the response, as the chat template renders it. Text that
      the template puts after the last end-of-sequence token is dropped with ``append_eos``.
      With ``enable_concatenated_multi_turn`` every assistant turn is learned: the prompt
      ends where the assistant first speaks, and other turns are masked. The tools column,
      where there is one, goes into the template.
    """

    @property
    def columns(self) -> list[str]:
        """Columns that every row needs."""
        if self.fmt.prompt_type == "messages":
            return [self.fmt.messages_key]
        return [self.fmt.prompt_key, self.fmt.response_key]

    def format_unit(self, row: dict[str, Any], eid: EID, where: str) -> list[Experience]:
        """The experience of one row of the file, in a list."""
        return [self.format(row, eid, where)]

    def format(self, row: dict[str, Any], eid: EID, where: str) -> Experience:
        """One row as an experience without log-probs and reward.

        Raises:
            DataError: the row has no response, is no conversation, or its prompt alone
                fills ``max_tokens``; ``where`` is named.
        """
        if self.fmt.prompt_type == "messages":
            return self._conversation(row, eid, where)
        question, answer = str(row[self.fmt.prompt_key]), str(row[self.fmt.response_key])
        texts = {"prompt_text": question, "response_text": answer}
        return self._experience(self._prompt(row), self._answer(answer), eid, where, None, **texts)

    def _conversation(self, row: dict[str, Any], eid: EID, where: str) -> Experience:
        messages = parse_messages(row[self.fmt.messages_key], self.fmt.messages_key, where)
        tools = parse_tools(row.get(self.fmt.tools_key), where)
        extra: dict[str, Any] = {"messages": messages, "tools": tools}
        if self.fmt.enable_concatenated_multi_turn:
            prompt, response, mask = self._every_turn(messages, tools, where)
            return self._experience(prompt, response, eid, where, mask, **extra)
        if len(messages) < 2 or messages[-1]["role"] != "assistant":
            raise DataError(
                f"{where}: a conversation needs at least two messages, the last one by the "
                f"assistant (got {[m['role'] for m in messages]})"
            )
        prompt, response = self._last_turns(messages[:-1], messages[-1:], tools, where)
        return self._experience(prompt, response, eid, where, **extra)

    def _every_turn(
        self, messages: Messages, tools: list[dict[str, Any]] | None, where: str
    ) -> tuple[Ids, Ids, list[bool]]:
        ids, mask = assistant_mask(self.tokenizer, messages, tools, where)
        if True not in mask:
            raise DataError(
                f"{where}: no turn of the conversation can be learned; one must be the "
                f"assistant's (got {[m['role'] for m in messages]})"
            )
        first, last = mask.index(True), len(mask) - 1 - mask[::-1].index(True)
        return ids[:first], ids[first : last + 1], mask[first : last + 1]
