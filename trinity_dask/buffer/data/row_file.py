"""Training rows in a file, read in batches, as experiences; expert rows for mixed steps.

Invariant: exactly ``total_rows`` experiences are read over the life of a job, however often
it is resumed: the saved state holds both how many were read and where the selector stands.
The saved position of expert rows is that of the last ones that were trained; rows that were
read for a step that found no partner wait for the next one.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Any, Optional

import numpy as np
import pyarrow as pa

from trinity_dask.buffer.data.formats import FORMATTERS
from trinity_dask.buffer.data.readers import RowReader, compare_data
from trinity_dask.buffer.data.selectors import make_selector
from trinity_dask.buffer.data.skipping import Skipping
from trinity_dask.buffer.errors import DataError, EndOfData
from trinity_dask.config.schema import Config, ExperienceBufferConfig
from trinity_dask.experience import EID, Experience
from trinity_dask.experience.schema import encode, from_table, to_table
from trinity_dask.models.tokenizer import load_tokenizer

ENDLESS_EPOCHS = 1 << 31


class RowFile:
    """Batches of formatted rows of ``cfg.path``, whole batches only.

    A row of the file is a *unit*: one experience for ``sft`` and ``cpt``; two for ``dpo``,
    which stay together (run 0 the chosen, run 1 the rejected answer of one task).

    Args:
        schema: ``sft``, ``cpt`` or ``dpo``.
        total_steps, batch_size: end after ``total_steps * batch_size`` experiences; with
            ``total_steps`` None after ``total_epochs`` passes over the file.
        max_tokens: longest experience in tokens; ``format.long_rows`` says what becomes of
            longer ones.
        accept_other_data: a saved position in other data is used, with a warning.

    Raises:
        DataError: the file is missing, or no row of a sample has a column (one lacks it, with
            ``format.empty_rows=refuse``); file, row and column are named.
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
        accept_other_data: bool = True,
    ) -> None:
        if not cfg.path:
            raise DataError(f"buffer {cfg.name!r} is read from a file: set its path, a data file")
        self.name = cfg.name
        self._reader = RowReader.of(cfg)
        self._formatter = FORMATTERS.get(schema)(tokenizer, cfg.format, max_tokens)
        self._reader.require(self._formatter.columns, some=cfg.format.empty_rows == "skip")
        self._skipping = Skipping(self.name, len(self._reader), cfg.format)
        self._accept_other_data = accept_other_data
        self._selector = make_selector(cfg.data_selector, self._reader)
        self.unit: int = self._formatter.rows_per_unit
        n_rows = len(self._reader) * self.unit
        self.total_rows = total_steps * batch_size if total_steps else total_epochs * n_rows
        self._consumed = 0  # units

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
        rows: list[Experience] = []
        for serial, index in enumerate(indices, first):
            # the serial number makes the id unique over epochs, and equal after a resume
            epoch = serial // len(self._reader)
            eid = EID(batch=self.name, task=index, run=epoch, suffix=f"{serial:06x}")
            rows += self._skipping.usable(index, partial(self._format, eid))
        return to_table(rows)

    def _format(self, eid: EID, index: int) -> list[Experience]:
        row = self._reader[index]
        self._reader.check(index, row, self._formatter.columns)
        return self._formatter.format_unit(row, eid, self._reader.where(index))

    @property
    def skipped(self) -> int:
        """Rows of the file that could not be used so far; the next one took the place of each."""
        return self._skipping.count

    def state_dict(self) -> dict[str, Any]:
        """Units read so far, the selector's state and whose rows they are, as JSON."""
        return {
            "consumed": self._consumed,
            "selector": self._selector.state_dict(),
            "rows": len(self._reader),
            "fingerprint": self._reader.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after :meth:`state_dict`.

        Raises:
            DataError: the data is not what it was, and that is not accepted.
        """
        known = compare_data(self._reader, state, accept=self._accept_other_data)
        self._consumed = int(state["consumed"])
        selector = state["selector"]
        self._selector.load_state_dict(selector if known else {"position": selector["position"]})


@dataclass(frozen=True)
class _Read:
    """Rows, and the position of the file after them."""

    rows: list[Experience]
    position: dict[str, Any]


class ExpertRows:
    """The file ``name`` of ``buffer.trainer_input.auxiliary_buffers``, round and round.

    Raises:
        ValueError: there is no such entry.
    """

    def __init__(self, cfg: Config, name: str) -> None:
        self._cfg = cfg
        self._source = auxiliary_buffer(cfg, name)
        self._file: Optional[RowFile] = None
        self._position: dict[str, Any] = {}  # after the last rows that were trained
        self._waiting: Optional[_Read] = None  # read, in no sample yet
        self._out: Optional[_Read] = None  # in a sample that is not settled

    async def prepare(self, state: Optional[dict[str, Any]]) -> None:
        """Open the file and continue after ``state``. Raises DataError for a bad file."""
        cfg = self._cfg
        self._file = await asyncio.to_thread(
            lambda: RowFile(
                self._source,
                load_tokenizer(cfg.model.model_path, cfg.model.trust_remote_code),
                batch_size=1,
                total_epochs=ENDLESS_EPOCHS,
                max_tokens=cfg.model.max_model_len,
                accept_other_data=cfg.buffer.accept_other_data,
            )
        )
        if state is not None:
            self._file.load_state_dict(state)
        self._position = self._file.state_dict()
        self._waiting = self._out = None

    async def next(self, n_rows: int, step: int) -> bytes:
        """``n_rows`` expert rows for train step ``step``, as a payload."""
        if self._file is None:
            raise RuntimeError("ExpertRows.prepare() was not called")
        if self._waiting is None:
            table = await asyncio.to_thread(self._file.read, n_rows)
            self._waiting = _Read(from_table(table), self._file.state_dict())
        for row in self._waiting.rows:
            zeros = np.zeros(row.response_length, np.float32)
            row.reward = 0.0
            row.logprobs, row.advantages, row.returns = zeros, zeros.copy(), zeros.copy()
            row.info = {**row.info, "is_expert": True, "step": step}
        return encode(self._waiting.rows, {})

    def hand_out(self) -> None:
        """The waiting rows are part of a sample now."""
        self._out, self._waiting = self._waiting, None

    def done(self) -> None:
        """They were trained."""
        assert self._out is not None
        self._position, self._out = self._out.position, None

    def release(self) -> None:
        """They were not: they wait for the next step."""
        self._waiting, self._out = self._out, None

    def state_dict(self) -> dict[str, Any]:
        return dict(self._position)


def auxiliary_buffer(cfg: Config, name: str) -> ExperienceBufferConfig:
    """The entry of that name.

    Raises:
        ValueError: there is none; the names that exist are given.
    """
    entries = {entry.name: entry for entry in cfg.buffer.trainer_input.auxiliary_buffers}
    if name not in entries:
        raise ValueError(
            f"buffer.trainer_input.auxiliary_buffers has no entry named {name!r} (it has: "
            f"{', '.join(entries) or 'none'}); add one with name and path"
        )
    return entries[name]
