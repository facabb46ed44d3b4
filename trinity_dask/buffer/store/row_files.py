"""Training rows in a file, read in batches, as experiences.

Invariant: exactly ``total_rows`` experiences are read over the life of a job, however often
it is resumed: the saved state holds both how many were read and where the selector stands.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from trinity_dask.buffer.data.formats import FORMATTERS
from trinity_dask.buffer.data.readers import RowReader
from trinity_dask.buffer.data.selectors import make_selector
from trinity_dask.buffer.errors import DataError, EndOfData
from trinity_dask.config.schema import ExperienceBufferConfig
from trinity_dask.experience import EID, Experience
from trinity_dask.experience.schema import to_table


class RowFile:
    """Batches of formatted rows of ``cfg.path``, whole batches only.

    A row of the file is a *unit*: one experience for ``sft`` and ``cpt``; two for ``dpo``,
    which stay together (run 0 the chosen, run 1 the rejected answer of one task).

    Args:
        schema: ``sft``, ``cpt`` or ``dpo``.
        total_steps, batch_size: end after ``total_steps * batch_size`` experiences; with
            ``total_steps`` None after ``total_epochs`` passes over the file.
        max_tokens: longest experience in tokens; longer ones are cut and counted.

    Raises:
        DataError: the file is missing or a row lacks a column (file, row, column named).
        ValueError: unknown schema.
    """

    def __init__(
        self,
        cfg: ExperienceBufferConfig,
        tokenizer: Any,
        *,
        batch_size: int,
        schema: str = "sft",
        total_epochs: int = 1,
        total_steps: int | None = None,
        max_tokens: int | None = None,
    ) -> None:
        if not cfg.path:
            raise DataError(f"buffer {cfg.name!r} is read from a file: set its path, a data file")
        self.name = cfg.name
        self._reader = RowReader(cfg.path, cfg.split, cfg.name)
        self._formatter = FORMATTERS.get(schema)(tokenizer, cfg.format, max_tokens)
        self._reader.require(self._formatter.columns)
        self._selector = make_selector(cfg.data_selector, self._reader)
        self.unit: int = self._formatter.rows_per_unit
        n_rows = len(self._reader) * self.unit
        self.total_rows = total_steps * batch_size if total_steps else total_epochs * n_rows
        self._consumed = 0  # units

    def __len__(self) -> int:
        """Rows in the file."""
        return len(self._reader)

    @property
    def truncated_rows(self) -> int:
        """Experiences cut at ``max_tokens`` so far."""
        return self._formatter.truncated_rows

    def read(self, n_rows: int) -> pa.Table:
        """The next ``n_rows`` experiences as a table.

        Raises:
            EndOfData: fewer than ``n_rows`` are left (``left_rows`` says how many).
            ValueError: ``n_rows`` would tear a unit apart.
        """
        if n_rows % self.unit:
            raise ValueError(
                f"{n_rows} rows are no whole number of pairs; set buffer.train_batch_size to a "
                f"multiple of {self.unit}"
            )
        left = self.total_rows - self._consumed * self.unit
        if n_rows > left:
            raise EndOfData(left)
        first = self._consumed
        indices = self._selector.get_indices(n_rows // self.unit)
        self._consumed += len(indices)
        return to_table([e for k, i in enumerate(indices) for e in self._unit(i, first + k)])

    def _unit(self, index: int, serial: int) -> list[Experience]:
        # the serial number makes the id unique over epochs, and equal after a resume
        epoch = serial // len(self)
        eid = EID(batch=self.name, task=index, run=epoch, suffix=f"{serial:06x}")
        return self._formatter.format_unit(self._reader[index], eid, self._reader.where(index))

    def state_dict(self) -> dict[str, Any]:
        """Units read so far and the selector's state, as JSON."""
        return {"consumed": self._consumed, "selector": self._selector.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after :meth:`state_dict`."""
        self._consumed = int(state["consumed"])
        self._selector.load_state_dict(state["selector"])


def open_rows(cfg: ExperienceBufferConfig, schema: str, tokenizer: Any, **kw: Any) -> RowFile:
    """The file of ``cfg`` as rows of ``schema``; ``kw`` as in :class:`RowFile`."""
    return RowFile(cfg, tokenizer, schema=schema, **kw)
