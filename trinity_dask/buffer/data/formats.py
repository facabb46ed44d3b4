"""The formats of training rows by the name of the algorithm's schema.

Invariant: a formatter turns one row of a file into ``rows_per_unit`` experiences, always.
"""

from __future__ import annotations

from typing import Any, Protocol

from trinity_dask.buffer.data.conversation import Ids, parse_messages
from trinity_dask.buffer.data.row_format import RowFormatter
from trinity_dask.buffer.data.sft_format import SFTFormatter
from trinity_dask.buffer.errors import DataError
from trinity_dask.experience import EID, Experience
from trinity_dask.registry import Registry


class Formatter(Protocol):
    """Constructed with ``(tokenizer, FormatConfig, max_tokens)``."""

    rows_per_unit: int
    truncated_rows: int

    @property
    def columns(self) -> list[str]: ...

    def format_unit(self, row: dict[str, Any], eid: EID, where: str) -> list[Experience]: ...


FORMATTERS: Registry[Any] = Registry("schema of training rows")
FORMATTERS.register_module("sft")(SFTFormatter)


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
        text = str(row[self.fmt.prompt_key])
        ids = self._ended(self._encode(text, special=True))
        return [self._experience(ids[:1], ids[1:], eid, where, response_text=text)]


@FORMATTERS.register_module("dpo")
class DPOFormatter(RowFormatter):
    """A prompt with a preferred and a rejected answer, as two experiences of one task.

    Run 0 is the chosen one, run 1 the rejected one; both have the same prompt ids.

    * ``plaintext``: prompt, chosen and rejected columns of text.
    * ``messages``: the messages column holds the turns before the answer (a list, or its
      JSON text), chosen and rejected the turns of the answer.
    """

    rows_per_unit = 2

    @property
    def columns(self) -> list[str]:
        prompt = self.fmt.messages_key if self._is_chat else self.fmt.prompt_key
        return [prompt, self.fmt.chosen_key, self.fmt.rejected_key]

    @property
    def _is_chat(self) -> bool:
        return self.fmt.prompt_type == "messages"

    def format_unit(self, row: dict[str, Any], eid: EID, where: str) -> list[Experience]:
        """Raises DataError: an answer is empty, or a conversation is none."""
        keys = (self.fmt.chosen_key, self.fmt.rejected_key)
        return [
            self._answer_of(row, key, _run_of_pair(eid, run), where) for run, key in enumerate(keys)
        ]

    def _answer_of(self, row: dict[str, Any], key: str, eid: EID, where: str) -> Experience:
        if self._is_chat:
            prompt, response = self._turns(row, key, where)
            return self._experience(prompt, response, eid, where)
        texts = {"prompt_text": str(row[self.fmt.prompt_key]), "response_text": str(row[key])}
        return self._experience(
            self._prompt(row), self._answer(str(row[key])), eid, where, None, **texts
        )

    def _turns(self, row: dict[str, Any], key: str, where: str) -> tuple[Ids, Ids]:
        before = parse_messages(row[self.fmt.messages_key], self.fmt.messages_key, where)
        answer = parse_messages(row[key], key, where)
        if answer[-1]["role"] != "assistant":
            raise DataError(f"{where}: the last turn of {key!r} must be the assistant's")
        return self._last_turns(before, answer, None, where)


def _run_of_pair(eid: EID, run: int) -> EID:
    """Ids of a pair: the epoch, which ``eid.run`` counts, must not make one group of two pairs."""
    batch = eid.batch if eid.run == 0 else f"{eid.batch}@{eid.run}"
    return EID(batch, eid.task, run, eid.step, eid.suffix)
