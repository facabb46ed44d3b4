"""Supervised rows for the trainer: a file, read in batches, as experiences.

Invariant: exactly ``total_rows`` rows are read over the life of a job, however often it
is resumed: the saved state holds both how many were read and where the selector stands.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from trinity_dask.buffer.errors import DataError, EndOfData
from trinity_dask.buffer.readers import RowReader
from trinity_dask.buffer.selectors import SELECTORS
from trinity_dask.buffer.sft_format import SFTFormatter
from trinity_dask.config.schema import ExperienceBufferConfig
from trinity_dask.experience import EID
from trinity_dask.experience.schema import to_table

__all__ = ["SFTFormatter", "SFTReader"]


class SFTReader:
    """Batches of formatted rows of ``cfg.path``, whole batches only.

    Args:
        total_steps, batch_size: end after ``total_steps * batch_size`` rows; with
            ``total_steps`` None after ``total_epochs`` passes over the file.
        max_tokens: longest example in tokens; longer ones are cut and counted.

    Raises:
        DataError: the file is missing or a row lacks a column (file, row, column named).
    """

    def __init__(
        self,
        cfg: ExperienceBufferConfig,
        tokenizer: Any,
        *,
        batch_size: int,
        total_epochs: int = 1,
        total_steps: int | None = None,
        max_tokens: int | None = None,
    ) -> None:
        if not cfg.path:
            raise DataError(
                "storage_type=file needs buffer.trainer_input.experience_buffer.path, a data file"
            )
        self.name = cfg.name
        self._reader = RowReader(cfg.path, cfg.split, cfg.name)
        self._formatter = SFTFormatter(tokenizer, cfg.format, max_tokens)
        self._reader.require(self._formatter.columns)
        selector = cfg.data_selector
        self._selector = SELECTORS.get(selector.selector_type)(len(self._reader), selector.seed)
        n_rows = len(self._reader)
        self.total_rows = total_steps * batch_size if total_steps else total_epochs * n_rows
        self._consumed = 0

    def __len__(self) -> int:
        """Rows in the file."""
        return len(self._reader)

    @property
    def truncated_rows(self) -> int:
        """Examples cut at ``max_tokens`` so far."""
        return self._formatter.truncated_rows

    def read(self, n_rows: int) -> pa.Table:
        """The next ``n_rows`` rows as a table of experiences.

        Raises:
            EndOfData: fewer than ``n_rows`` are left (``left_rows`` says how many).
        """
        left = self.total_rows - self._consumed
        if n_rows > left:
            raise EndOfData(left)
        indices = self._selector.get_indices(n_rows)
        first = self._consumed
        self._consumed += n_rows
        return to_table([self._example(i, first + k) for k, i in enumerate(indices)])

    def _example(self, index: int, serial: int) -> Any:
        # the serial number makes the id unique over epochs, and equal after a resume
        eid = EID(batch=self.name, task=index, run=serial // len(self), suffix=f"{serial:06x}")
        return self._formatter.format(self._reader[index], eid, self._reader.where(index))

    def state_dict(self) -> dict[str, Any]:
        """Rows read so far and the selector's position, as JSON."""
        return {"consumed": self._consumed, "selector": self._selector.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after :meth:`state_dict`."""
        self._consumed = int(state["consumed"])
        self._selector.load_state_dict(state["selector"])
