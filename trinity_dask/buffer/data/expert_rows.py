"""Expert rows that are mixed into the rows of the policy.

Invariant: the saved position is that of the last rows that were trained; rows that were read
for a step that found no partner wait for the next one.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np

from trinity_dask.buffer.store.row_files import RowFile, open_rows
from trinity_dask.config.schema import Config, ExperienceBufferConfig
from trinity_dask.experience import Experience
from trinity_dask.experience.payload import encode
from trinity_dask.experience.schema import from_table
from trinity_dask.models.tokenizer import load_tokenizer

ENDLESS_EPOCHS = 1 << 31


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
        self._file = await asyncio.to_thread(self._open)
        if state is not None:
            self._file.load_state_dict(state)
        self._position = self._file.state_dict()
        self._waiting = self._out = None

    def _open(self) -> RowFile:
        cfg = self._cfg
        return open_rows(
            self._source,
            "sft",
            load_tokenizer(cfg.model.model_path),
            batch_size=1,
            total_epochs=ENDLESS_EPOCHS,
            max_tokens=cfg.model.max_model_len,
        )

    async def next(self, n_rows: int, step: int) -> bytes:
        """``n_rows`` expert rows for train step ``step``, as a payload."""
        if self._file is None:
            raise RuntimeError("ExpertRows.prepare() was not called")
        if self._waiting is None:
            table = await asyncio.to_thread(self._file.read, n_rows)
            self._waiting = _Read(from_table(table), self._file.state_dict())
        for row in self._waiting.rows:
            _mark_expert(row, step)
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


def _mark_expert(row: Experience, step: int) -> None:
    zeros = np.zeros(row.response_length, np.float32)
    row.reward = 0.0
    row.logprobs, row.advantages, row.returns = zeros, zeros.copy(), zeros.copy()
    row.info = {**row.info, "is_expert": True, "step": step}
