"""Where the rows of a train step come from: the experience buffer, or a file.

Invariant: a source's state after ``done`` names exactly the rows that were trained on, and
``replay`` gives again, in order, what was done since ``checkpointed`` was last called.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Optional, Protocol

import pyarrow as pa

from trinity_dask.algorithm.table import resolve_algorithm
from trinity_dask.buffer.errors import EndOfData
from trinity_dask.buffer.experience_buffer import ExperienceBuffer
from trinity_dask.buffer.sample_strategy import Sample, make_strategy
from trinity_dask.buffer.store.row_files import RowFile, open_rows
from trinity_dask.config.schema import Config
from trinity_dask.experience.payload import encode_table
from trinity_dask.models.tokenizer import load_tokenizer
from trinity_dask.trainer.step.rows import TrainInput
from trinity_dask.workflows.loading import load_plugins

SLICE_S = 1.0  # how long one wait for rows lasts before the caller can look around


@dataclass(frozen=True)
class Feed:
    """The rows of one train step; ``rows`` may be 0 (a batch whose rows were filtered)."""

    input: TrainInput
    rows: int
    sample: Optional[Sample] = None
    metrics: dict[str, float] = field(default_factory=dict)


class Source(Protocol):
    @property
    def left_rows(self) -> int:
        """Rows that were too few for another step, once the data has ended."""

    @property
    def progress(self) -> int:
        """Every explorer batch up to this one is trained."""

    async def prepare(self, state: Optional[dict[str, Any]]) -> None:
        """Open the data and continue after ``state`` (None: from the start)."""

    async def next(self, step: int) -> Optional[Feed]:
        """The rows of train step ``step``, or None when there are none within ``SLICE_S``.

        Raises EndOfData when there will be none.
        """

    async def done(self, feed: Feed) -> None:
        """The rows are trained."""

    async def state_dict(self) -> dict[str, Any]: ...

    def checkpointed(self) -> None:
        """What is done so far is in a checkpoint."""

    def replay(self) -> AsyncIterator[Feed]:
        """What was done since then, again; feeds of 0 rows are left out."""
        ...


class BufferSource:
    """Rows of committed batches, as the algorithm's sample strategy draws them."""

    def __init__(self, cfg: Config, buffer: Optional[ExperienceBuffer]) -> None:
        self._cfg = cfg.buffer.trainer_input.experience_buffer
        # without an explorer the batches of an earlier run are all there will be
        self._offline = buffer is None
        self._buffer = buffer or ExperienceBuffer(self._cfg)
        load_plugins(cfg.plugin_dirs)  # they may register a function of the algorithm
        spec = resolve_algorithm(asdict(cfg.algorithm))
        args = spec.sample_strategy_args
        self._strategy = make_strategy(spec.sample_strategy, args, cfg, self._buffer)
        self._since: list[Feed] = []

    @property
    def left_rows(self) -> int:
        return self._strategy.left_rows

    @property
    def progress(self) -> int:
        return self._strategy.progress

    async def prepare(self, state: Optional[dict[str, Any]]) -> None:
        await self._strategy.prepare(state)
        if self._offline:
            await self._buffer.close_writes()

    async def next(self, step: int) -> Optional[Feed]:
        sample = await self._strategy.sample(step, SLICE_S)
        return None if sample is None else self._feed(sample)

    def _feed(self, sample: Sample) -> Feed:
        rows = TrainInput(
            store_url=self._cfg.path,
            storage_options=dict(self._cfg.storage_options),
            refs=sample.refs,
            payload=sample.payload,
            skip_corrupt=self._cfg.skip_corrupt,
            min_version=sample.min_version,
        )
        return Feed(rows, sample.rows, sample, sample.metrics)

    async def done(self, feed: Feed) -> None:
        assert feed.sample is not None
        await self._strategy.done(feed.sample)
        if feed.rows:
            self._since.append(feed)

    async def state_dict(self) -> dict[str, Any]:
        return await self._strategy.state_dict()

    def checkpointed(self) -> None:
        self._since.clear()

    async def replay(self) -> AsyncIterator[Feed]:
        for feed in list(self._since):
            yield feed


class FileSource:
    """Rows of a file (sft, cpt, dpo), formatted and tokenised as they are read."""

    def __init__(self, cfg: Config) -> None:
        if cfg.buffer.train_batch_size is None:
            raise ValueError(
                "training from a file needs buffer.train_batch_size (rows per train step)"
            )
        self.left_rows = 0
        self.progress = 0
        self._cfg = cfg
        load_plugins(cfg.plugin_dirs)  # they may register a function of the algorithm
        self._schema = resolve_algorithm(asdict(cfg.algorithm)).schema
        self._rows: int = cfg.buffer.train_batch_size
        self._since = 0
        self._reader: Optional[RowFile] = None
        self._saved: dict[str, Any] = {}

    async def prepare(self, state: Optional[dict[str, Any]]) -> None:
        self._reader = await asyncio.to_thread(self._open)
        if state is not None:
            self._reader.load_state_dict(state)
        elif self._reader.total_rows < self._rows:
            raise ValueError(
                f"{self._cfg.buffer.trainer_input.experience_buffer.path} gives "
                f"{self._reader.total_rows} rows in all, fewer than one train step takes "
                f"(buffer.train_batch_size = {self._rows}); lower it or raise total_epochs"
            )
        self._saved = self._reader.state_dict()

    def _open(self) -> RowFile:
        cfg = self._cfg
        return open_rows(
            cfg.buffer.trainer_input.experience_buffer,
            self._schema,
            load_tokenizer(cfg.model.model_path),
            batch_size=self._rows,
            total_epochs=cfg.buffer.total_epochs,
            total_steps=cfg.trainer.total_steps or cfg.buffer.total_steps,
            max_tokens=cfg.model.max_model_len,
        )

    @property
    def _open_reader(self) -> RowFile:
        if self._reader is None:
            raise RuntimeError("FileSource.prepare() was not called")
        return self._reader

    async def next(self, step: int) -> Optional[Feed]:
        try:
            table = await asyncio.to_thread(self._open_reader.read, self._rows)
        except EndOfData as end:
            self.left_rows = end.left_rows
            raise
        return _payload_feed(table)

    async def done(self, feed: Feed) -> None:
        self._since += 1

    async def state_dict(self) -> dict[str, Any]:
        return self._open_reader.state_dict()

    def checkpointed(self) -> None:
        self._saved = self._open_reader.state_dict()
        self._since = 0

    async def replay(self) -> AsyncIterator[Feed]:
        reader = self._open_reader
        position = reader.state_dict()
        reader.load_state_dict(self._saved)
        for _ in range(self._since):
            yield _payload_feed(await asyncio.to_thread(reader.read, self._rows))
        reader.load_state_dict(position)


def _payload_feed(table: pa.Table) -> Feed:
    return Feed(TrainInput(payload=encode_table(table, {})), table.num_rows)


def open_source(cfg: Config, buffer: Optional[ExperienceBuffer]) -> Source:
    """The source that the config describes (not prepared yet)."""
    if cfg.buffer.trainer_input.experience_buffer.storage_type == "file":
        return FileSource(cfg)
    return BufferSource(cfg, buffer)


class Patience:
    """Waits for rows slice by slice, and says once that it is starving."""

    def __init__(self, timeout_s: float, starved: Callable[[], Awaitable[None]]) -> None:
        self.timeout_s = timeout_s
        self.starving = False
        self._starved = starved
        self._since = time.monotonic()

    async def nothing_came(self) -> None:
        """A slice passed without rows. Raises TimeoutError when that was one too many."""
        if not self.starving:
            self.starving = True
            await self._starved()
        waited = time.monotonic() - self._since
        if waited > self.timeout_s:
            raise TimeoutError(
                f"the trainer waited {waited:.0f} s for rows (buffer.trainer_input."
                f"experience_buffer.max_read_timeout_s = {self.timeout_s:g}); is the explorer "
                "stuck, or does it commit fewer rows than buffer.train_batch_size?"
            )
