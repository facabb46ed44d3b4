"""Which rows one train step gets: the trainer's side of the experience buffer.

Invariant: a sample that was given out is settled by ``done`` (trained) or ``release`` (not
trained); ``state_dict`` names exactly what ``done`` has settled. So after a crash nothing
that was trained comes again and nothing that was not is lost.

How the trainer uses it::

    strategy = make_strategy(name, args, cfg, buffer)    # name, args: of the algorithm
    await strategy.prepare(state)                        # state: state_dict() of a checkpoint
    sample = await strategy.sample(step, timeout_s)      # None: nothing within timeout_s
    ...train on sample.refs (rows of the store), then sample.payload (rows by value)...
    await strategy.done(sample)                          # or release(sample)
    strategy.progress                                    # explorer batches that are through

``sample`` raises ``EndOfData`` when writes are closed and too few rows are left. Strategies:
``default`` (alias ``warmup``), ``staleness_control``, ``mix``. Priority and replay are not a
strategy but the order of the buffer itself (``experience_buffer.replay_buffer``), so they
combine with each of them.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from typing import Any, Optional

import numpy as np

from trinity_dask.algorithm.sample_strategies import (
    SAMPLE_STRATEGY,
    check_expert_ratio,
    check_over_limit,
    check_staleness,
)
from trinity_dask.algorithm.table import resolve_algorithm
from trinity_dask.buffer.data.row_file import ExpertRows
from trinity_dask.buffer.errors import EndOfData
from trinity_dask.buffer.experience_buffer import BufferLease, ExperienceBuffer
from trinity_dask.buffer.store.manifest import RowRef
from trinity_dask.config.schema import Config
from trinity_dask.registry import build


@dataclass(frozen=True)
class Sample:
    """The rows of one train step: ``refs`` into the store first, then those of ``payload``.

    ``rows`` counts both, ``expert_rows`` those of the payload (bytes of
    :mod:`trinity_dask.experience.schema`). ``rows`` is 0 for a batch whose rows were all
    filtered. ``metrics`` are of the leased rows (``sample/...``, ``time/read_experience``).
    Tokens of versions below ``min_version`` are not to be trained on.
    """

    lease: Optional[BufferLease]
    payload: Optional[bytes]
    rows: int
    expert_rows: int
    metrics: dict[str, float]
    min_version: int = 0

    @property
    def refs(self) -> tuple[RowRef, ...]:
        return () if self.lease is None else self.lease.refs


class SampleStrategy:
    """The default, and what a user's own must have; see the module's docstring.

    ``buffer.train_batch_size`` rows in the buffer's order; None: a whole explorer batch.

    ``progress``: the explorer batch up to which all is through. ``left_rows``: too few for
    another step, after the end.

    Args:
        cfg, buffer: of the run; the buffer is opened by :meth:`prepare`.
        whole_groups: rather a few rows more than a torn group. None: when the algorithm
            computes its advantages in the trainer, from the groups of a step.
    """

    def __init__(
        self, cfg: Config, buffer: ExperienceBuffer, whole_groups: Optional[bool] = None
    ) -> None:
        self.progress = 0
        self.left_rows = 0
        self._buffer = buffer
        self._whole_groups = (
            resolve_algorithm(asdict(cfg.algorithm)).advantage_in_trainer
            if whole_groups is None
            else whole_groups
        )
        self._rows = cfg.buffer.train_batch_size

    async def prepare(self, state: Optional[dict[str, Any]]) -> None:
        """Open the buffer and continue after ``state`` (None: from the start)."""
        if state is not None and "experts" in state:  # saved under the strategy mix
            state = state["buffer"]
        await self._buffer.prepare(state)
        self.progress = (await self._buffer.stats())["consumed_batch"]

    def _oldest_versions(self, step: int) -> tuple[int, int]:
        """Below the first, a version's groups are dropped; below the second, masked; 0: none."""
        return 0, 0

    async def sample(self, step: int, timeout_s: float) -> Optional[Sample]:
        """The rows of train step ``step`` (from 1), or None after ``timeout_s`` seconds.

        Raises:
            EndOfData: no batch will come any more and too few rows are left.
        """
        started = time.perf_counter()
        drop_below, mask_below = self._oldest_versions(step)
        try:
            lease = await self._buffer.lease(self._rows, timeout_s, drop_below, self._whole_groups)
        except EndOfData as end:
            self.left_rows = end.left_rows
            raise
        finally:
            # rows that were dropped as too old make progress without a training
            self.progress = (await self._buffer.stats())["consumed_batch"]
        if lease is None:
            return None
        metrics = version_metrics(lease)
        metrics["time/read_experience"] = time.perf_counter() - started
        return Sample(lease, None, lease.rows, 0, metrics, mask_below)

    async def done(self, sample: Sample) -> None:
        """The rows are trained."""
        if sample.lease is not None:
            self.progress = await self._buffer.ack(sample.lease.lease_id)

    async def release(self, sample: Sample) -> None:
        """The rows were not trained: they come again."""
        if sample.lease is not None:
            await self._buffer.release(sample.lease.lease_id)

    async def state_dict(self) -> dict[str, Any]:
        """What was trained or dropped, as JSON."""
        return await self._buffer.state_dict()


class StalenessControlSampleStrategy(SampleStrategy):
    """Leaves out what is too old: versions below max(step − max_staleness − 1, 0).

    With ``over_limit`` ``drop`` a group goes as a whole when one of its tokens is too old, and
    counts as dropped. With ``mask`` it stays, and no loss sees those tokens.
    """

    def __init__(
        self,
        cfg: Config,
        buffer: ExperienceBuffer,
        max_staleness: Optional[float] = None,
        over_limit: str = "drop",
        whole_groups: Optional[bool] = None,
    ) -> None:
        check_staleness(max_staleness)
        check_over_limit(over_limit)
        super().__init__(cfg, buffer, whole_groups)
        self.max_staleness = max_staleness
        self._masks = over_limit == "mask"

    def _oldest_versions(self, step: int) -> tuple[int, int]:
        limit = math.inf if self.max_staleness is None else self.max_staleness
        oldest = math.ceil(max(step - limit - 1, 0))
        return (0, oldest) if self._masks else (oldest, 0)


class MixSampleStrategy(SampleStrategy):
    """Of each step's rows, ceil(ratio · train_batch_size) are an expert's, from a file.

    The file is the entry ``sft_dataset_name`` of ``buffer.trainer_input.auxiliary_buffers``,
    formatted as for SFT and read round and round. Its rows carry reward 0, zero log-probs
    and advantages, ``info.is_expert`` and ``info.step``.
    """

    def __init__(
        self,
        cfg: Config,
        buffer: ExperienceBuffer,
        expert_data_ratio: float = 0.5,
        sft_dataset_name: str = "sft_dataset",
        whole_groups: Optional[bool] = None,
    ) -> None:
        super().__init__(cfg, buffer, whole_groups)
        if self._rows is None:
            raise ValueError(
                "sample_strategy 'mix' needs buffer.train_batch_size: the rows of a train step, "
                "the expert's among them"
            )
        self._expert_rows = expert_share(expert_data_ratio, self._rows)
        self._rows -= self._expert_rows
        self._experts = ExpertRows(cfg, sft_dataset_name)

    async def prepare(self, state: Optional[dict[str, Any]]) -> None:
        """Open buffer and file; continue both after ``state``."""
        await super().prepare(state)
        await self._experts.prepare((state or {}).get("experts"))

    async def sample(self, step: int, timeout_s: float) -> Optional[Sample]:
        # read first: a lease must not be lost to an error of the file
        payload = await self._experts.next(self._expert_rows, step)
        sample = await super().sample(step, timeout_s)
        if sample is None:
            return None
        self._experts.hand_out()
        rows = sample.rows + self._expert_rows
        metrics = {**sample.metrics, "sample/expert_rows": float(self._expert_rows)}
        return Sample(sample.lease, payload, rows, self._expert_rows, metrics)

    async def done(self, sample: Sample) -> None:
        await super().done(sample)
        self._experts.done()
        self._buffer.foreign_rows += sample.expert_rows

    async def release(self, sample: Sample) -> None:
        await super().release(sample)
        self._experts.release()

    async def state_dict(self) -> dict[str, Any]:
        return {
            "buffer": await super().state_dict(),
            "experts": self._experts.state_dict(),
        }


def expert_share(ratio: float, rows: int) -> int:
    """ceil(ratio · rows), between one and all but one of the rows."""
    check_expert_ratio(ratio)
    share = math.ceil(ratio * rows)
    if share >= rows:
        raise ValueError(
            f"expert_data_ratio={ratio} of buffer.train_batch_size={rows} leaves no row of the "
            "policy; lower the ratio, or raise the batch size"
        )
    return share


def version_metrics(lease: BufferLease) -> dict[str, float]:
    """``sample/model_version`` and its drift inside a group, over the leased rows.

    ``mean`` is weighted by rows; rows of unknown version are left out.
    """
    metrics: dict[str, float] = {}
    if lease.versions:
        oldest, newest, rows = np.array(lease.versions, np.float64).T
        metrics |= _summary("sample/model_version", oldest, rows)
        metrics["sample/model_version/max"] = float(newest.max())
        metrics |= _summary("sample/model_version_drift", newest - oldest, rows)
    if lease.use_counts:
        rows = np.array([ref.rows for ref in lease.refs], np.float64)
        uses = np.array(lease.use_counts, np.float64)
        metrics |= _summary("sample/use_count", uses, rows) if rows.sum() else {}
    return metrics


def _summary(name: str, values: np.ndarray, weights: np.ndarray) -> dict[str, float]:
    return {
        f"{name}/mean": float(np.average(values, weights=weights)),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


def make_strategy(
    name: str, args: dict[str, Any], cfg: Config, buffer: ExperienceBuffer
) -> SampleStrategy:
    """The strategy called ``name``, or at the dotted path; ``args`` over its defaults.

    Raises:
        ValueError: an unknown name or argument (with the nearest), or an impossible value.
    """
    factory = SAMPLE_STRATEGY.get(name)
    return build(f"sample_strategy {name!r}", factory, {**args, "cfg": cfg, "buffer": buffer})
