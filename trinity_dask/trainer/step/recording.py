"""What a rank's train step knew of its rows, for people to look at.

Invariant: a row is recorded by the one rank that owns it, with the mask and advantages it was
trained with and log-probs of the weights at the start of the step. Writing is done beside the
next step, and before a checkpoint that holds the step is complete; it changes nothing of either.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Optional

import numpy as np
import pyarrow as pa
from torch import Tensor

from trinity_dask.config.schema import Config
from trinity_dask.records.layout import EID_COLUMNS, TRAINER_COLUMNS
from trinity_dask.records.writer import MB, Recorder
from trinity_dask.trainer.step.batching import StepRows

log = logging.getLogger("trinity_dask.records")

# column -> the tensors that may hold it
_TENSORS = {
    "train_logprobs": ("start_logprobs",),
    "train_entropy": ("entropys", "entropy"),
    "train_advantages": ("advantages",),
    "train_mask": ("action_mask",),
}
BYTES_PER_TOKEN = 13  # three float32 and a mask


class StepRecorder:
    """Records the train steps of one rank; ``monitor.record_trainer`` and ``record_mb`` bound the
    rows with numbers, all rows are named."""

    def __init__(self, cfg: Config, rank: int, world_size: int) -> None:
        self.limit = cfg.monitor.record_trainer if cfg.job_dir else 0
        self._max_tokens = int(cfg.monitor.record_mb * MB / BYTES_PER_TOKEN)
        self._interval = cfg.trainer.save_interval
        self._place = rank, world_size
        self._recorder = Recorder(cfg)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="records")
        self._writing: Optional[Future[None]] = None

    def take(self, table: pa.Table, step: int, rows: StepRows, whole: bool = False) -> None:
        """Have written what is known of ``rows``, made of ``table``; nobody may change them after.

        ``whole``: the rows are in no store, so their tokens and texts are recorded too.
        """
        if self.limit == 0:
            return
        self.flush()  # no more than one step waits
        self._writing = self._thread.submit(self._write, table, step, rows, whole)
        if self._interval and step % self._interval == 0:
            self.flush()

    def _write(self, table: pa.Table, step: int, rows: StepRows, whole: bool) -> None:
        owned = rows.plan.owned
        lengths = rows.widths.response[owned]
        within = np.flatnonzero(np.cumsum(lengths) <= self._max_tokens)
        n = min(len(within), self.limit)
        found = table.take(pa.array(owned))
        found = found if whole else found.select(EID_COLUMNS)
        for column, names in _TENSORS.items():
            name = next((name for name in names if name in rows.batch), None)
            values = pa.nulls(len(owned), TRAINER_COLUMNS[column])
            if name is not None:
                known = rows.known.get(name)
                values = as_lists(rows.batch[name], owned[:n], lengths[:n], known, len(owned))
            found = found.append_column(column, values.cast(TRAINER_COLUMNS[column]))
        self._recorder.train_step(step, *self._place, found, n)

    def flush(self) -> None:
        """Wait until what was taken is written. No step fails for its record."""
        writing, self._writing = self._writing, None
        if writing is not None and (error := writing.exception()) is not None:
            log.warning("a train step is not recorded: %s: %s", type(error).__name__, error)

    def close(self) -> None:
        """Write what was taken, and end."""
        self.flush()
        self._thread.shutdown()


def as_lists(
    tensor: Tensor, rows: np.ndarray, lengths: np.ndarray, known: Optional[Tensor], n_rows: int
) -> pa.Array:
    """The first ``lengths`` values of ``rows`` of a ``[B, R]`` tensor, each as a list; null for
    those that are not ``known``, and for those that make it ``n_rows``."""
    values = tensor[rows].detach().cpu().numpy()
    chosen = np.arange(values.shape[1]) < lengths[:, None]
    offsets = np.zeros(n_rows + 1, np.int32)
    offsets[1 : len(rows) + 1] = np.cumsum(lengths)
    offsets[len(rows) + 1 :] = offsets[len(rows)]
    missing = np.ones(n_rows, np.bool_)
    missing[: len(rows)] = False if known is None else ~known[rows].cpu().numpy()
    flat = pa.array(values[chosen])
    return pa.ListArray.from_arrays(pa.array(offsets), flat, mask=pa.array(missing))
