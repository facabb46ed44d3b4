"""Where the rows of a train step come from, and how they reach the ranks.

Invariant: every rank reads the same :class:`TrainInput` as the same table, row for row, so
the ranks can agree on shares without talking. A source's state after ``done`` names exactly
the rows that were trained on, and ``replay`` gives again, in order, what was done since
``checkpointed`` was last called.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Optional, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from trinity_dask.algorithm.table import AlgorithmSpec, resolve_algorithm
from trinity_dask.buffer.data.row_file import RowFile
from trinity_dask.buffer.errors import EndOfData
from trinity_dask.buffer.experience_buffer import ExperienceBuffer
from trinity_dask.buffer.sample_strategy import Sample, make_strategy
from trinity_dask.buffer.store.manifest import RowRef
from trinity_dask.config.schema import Config
from trinity_dask.experience.schema import encode
from trinity_dask.models.tokenizer import load_tokenizer
from trinity_dask.registry import load_plugins

SLICE_S = 1.0  # how long one wait for rows lasts before the caller can look around


# on the ranks -------------------------------------------------------------------------
@dataclass(frozen=True)
class TrainInput:
    """Rows by reference into a store, then rows by value (of ``experience.schema``).

    Tokens of versions below ``min_version`` are masked; a row of unknown versions is not, nor is
    a token that no model sampled (of a negative version).
    """

    store_url: Optional[str] = None
    storage_options: dict[str, Any] = field(default_factory=dict)
    refs: tuple[RowRef, ...] = ()
    payload: Optional[bytes] = None
    skip_corrupt: bool = False
    min_version: int = 0


def without_stale(table: pa.Table, min_version: int) -> pa.Table:
    """``table`` with every token of a version below ``min_version`` out of its action mask."""
    if not stale_metrics(table, min_version):
        return table
    masks = []
    for versions, mask in zip(table["versions"], table["action_mask"], strict=True):
        fresh = None
        if versions.is_valid:
            values = versions.values.to_numpy()
            fresh = (values >= min_version) | (values < 0)
            if mask.is_valid:
                fresh &= mask.values.to_numpy(zero_copy_only=False)
        masks.append(mask.as_py() if fresh is None else fresh)
    index = table.column_names.index("action_mask")
    field = table.schema.field(index)
    return table.set_column(index, field, pa.array(masks, field.type))


def stale_metrics(table: pa.Table, min_version: int) -> dict[str, float]:
    """``sample/stale_tokens``, ``sample/stale_rows``: masked for their age; empty for none."""
    if min_version <= 0 or table.num_rows == 0:
        return {}
    known = table["versions"].drop_null()
    flat = pc.list_flatten(known)
    stale = pc.and_(pc.less(flat, min_version), pc.greater_equal(flat, 0))
    if not pc.any(stale).as_py():
        return {}
    rows = pc.list_parent_indices(known).filter(stale)
    return {
        "sample/stale_tokens": float(pc.sum(stale).as_py()),
        "sample/stale_rows": float(pc.count_distinct(rows).as_py()),
    }


# in the trainer -----------------------------------------------------------------------
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

    @property
    def arrived(self) -> int:
        """Batches that have come; grows while rows come."""

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

    def __init__(
        self, cfg: Config, spec: AlgorithmSpec, buffer: Optional[ExperienceBuffer]
    ) -> None:
        self._cfg = cfg.buffer.trainer_input.experience_buffer
        # without an explorer the batches of an earlier run are all there will be
        self._offline = buffer is None
        self._buffer = buffer or ExperienceBuffer(self._cfg)
        args = spec.sample_strategy_args
        self._strategy = make_strategy(spec.sample_strategy, args, cfg, self._buffer)
        self._since: list[Feed] = []

    @property
    def left_rows(self) -> int:
        return self._strategy.left_rows

    @property
    def progress(self) -> int:
        return self._strategy.progress

    @property
    def arrived(self) -> int:
        return self._buffer.n_committed

    async def prepare(self, state: Optional[dict[str, Any]]) -> None:
        await self._strategy.prepare(state)
        if self._offline:
            await self._buffer.close_writes()

    async def next(self, step: int) -> Optional[Feed]:
        sample = await self._strategy.sample(step, SLICE_S)
        if sample is None:
            return None
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

    def __init__(self, cfg: Config, spec: AlgorithmSpec) -> None:
        if cfg.buffer.train_batch_size is None:
            raise ValueError(
                "training from a file needs buffer.train_batch_size (rows per train step)"
            )
        self.left_rows, self.arrived = 0, 0  # rows come when they are asked for
        self.progress = 0
        self._cfg = cfg
        self._schema = spec.schema
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
        return RowFile(
            cfg.buffer.trainer_input.experience_buffer,
            load_tokenizer(cfg.model.model_path, cfg.model.trust_remote_code),
            schema=self._schema,
            batch_size=self._rows,
            total_epochs=cfg.buffer.total_epochs,
            total_steps=cfg.trainer.total_steps or cfg.buffer.total_steps,
            max_tokens=cfg.model.max_model_len,
            accept_other_data=cfg.buffer.accept_other_data,
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
        feed = _payload_feed(table)
        return replace(feed, metrics={"sample/skipped_rows": float(self._open_reader.skipped)})

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
    return Feed(TrainInput(payload=encode(table, {})), table.num_rows)


def open_source(cfg: Config, buffer: Optional[ExperienceBuffer]) -> Source:
    """The source that the config describes (not prepared yet)."""
    load_plugins(cfg.plugin_dirs)  # they may register a function of the algorithm
    spec = resolve_algorithm(asdict(cfg.algorithm))
    if cfg.buffer.trainer_input.experience_buffer.storage_type == "file":
        return FileSource(cfg, spec)
    return BufferSource(cfg, spec, buffer)
