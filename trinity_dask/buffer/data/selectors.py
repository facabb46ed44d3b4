"""The order in which the rows of a file are read.

Invariant: the indices are a function of (rows, seed, state) alone; the state is the position
(the number of indices given so far) and, where a selector learns, all that it has learned.
So restoring the state restores the order exactly, at an epoch edge too, and changing the
batch size does not reshuffle (``random`` and ``difficulty_based`` excepted).
"""

from __future__ import annotations

import base64
import inspect
import logging
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from trinity_dask.buffer.data.readers import RowReader
from trinity_dask.buffer.errors import DataError
from trinity_dask.config.schema import SelectorConfig
from trinity_dask.registry import Registry, build

log = logging.getLogger(__name__)
SELECTORS: Registry[Any] = Registry("selector")
CAP_MEMORY = 0.9  # of the exponential average of the capability
RHO_TOLERANCE = 0.25  # mean error of the prediction at which adaptive_rho halves rho


@SELECTORS.register_module("sequential")
class SequentialSelector:
    """Rows in file order, again from the start at the end.

    Also the base of the others, and what a user's own must have: it is made of ``(n_rows,
    seed, **kwargs)``, and of ``features``, float64 ``[rows, keys]`` (the columns
    ``data_selector.feature_keys``), where it declares them.

    ``LEARNED`` names the keys of :meth:`state_dict` that :meth:`update` alone decides. They are
    kept in a file of their own and never in the record of a batch, so they may be large; what
    came after that file is told to :meth:`update` again.
    """

    LEARNED: ClassVar[tuple[str, ...]] = ()

    def __init__(self, n_rows: int, seed: int = 42) -> None:
        if n_rows < 1:
            raise ValueError(f"a selector needs at least one row (got {n_rows})")
        self.n_rows = n_rows
        self.seed = seed
        self.position = 0

    def get_indices(self, batch_size: int) -> list[int]:
        """The next ``batch_size`` rows; moves the position by as many."""
        start, self.position = self.position, self.position + batch_size
        return [i % self.n_rows for i in range(start, self.position)]

    def update(self, indices: Sequence[int], values: Sequence[float]) -> None:
        """Learn from what was observed: ``values`` (as pass rates) of rows ``indices``."""

    def state_dict(self) -> dict[str, Any]:
        """The position and what was learned, as JSON."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after :meth:`state_dict`; of other data there is the position only."""
        self.position = int(state["position"])


@SELECTORS.register_module("shuffle")
class ShuffleSelector(SequentialSelector):
    """Epoch ``e`` is the permutation of ``default_rng(seed + e)``."""

    _order: tuple[int, np.ndarray] | None = None  # epoch, its permutation

    def get_indices(self, batch_size: int) -> list[int]:
        indices: list[int] = []
        while len(indices) < batch_size:
            epoch, offset = divmod(self.position, self.n_rows)
            if self._order is None or self._order[0] != epoch:
                rng = np.random.default_rng(self.seed + epoch)
                self._order = (epoch, rng.permutation(self.n_rows))
            part = self._order[1][offset : offset + batch_size - len(indices)].tolist()
            indices += part
            self.position += len(part)
        return indices


@SELECTORS.register_module("random")
class RandomSelector(SequentialSelector):
    """Each batch is a draw without replacement by ``default_rng(seed + position)``."""

    def get_indices(self, batch_size: int) -> list[int]:
        if batch_size > self.n_rows:
            raise ValueError(
                f"selector 'random' draws {batch_size} different rows of {self.n_rows}; "
                "lower the batch size, or use 'shuffle'"
            )
        rng = np.random.default_rng(self.seed + self.position)
        self.position += batch_size
        return rng.choice(self.n_rows, batch_size, replace=False).tolist()


@SELECTORS.register_module("offline_easy2hard")
class EasyToHardSelector(SequentialSelector):
    """Rows sorted once by (features…, index), the largest first; then in that order, round.

    With pass rates as features the easy rows come first.
    """

    def __init__(self, n_rows: int, seed: int = 42, *, features: np.ndarray) -> None:
        super().__init__(n_rows, seed)
        by_last_key_first = (np.arange(n_rows), *features.T[::-1])
        self._order = np.lexsort(by_last_key_first)[::-1]

    def get_indices(self, batch_size: int) -> list[int]:
        return self._order[super().get_indices(batch_size)].tolist()


@SELECTORS.register_module("difficulty_based")
class DifficultySelector(SequentialSelector):
    """Rows whose expected pass rate is nearest to a target (BOTS).

    Bayesian online task selection, arXiv 2510.26374: each row has a Beta(α, β) belief about
    its pass rate, moved by what was observed on it and by what its two anchor features
    predict. The whole belief is state (α, β, the capability estimate, ρ, the position), saved
    bit by bit, so a restored selector chooses as the saved one would have.

    Args (``f0``, ``f1``: pass rates of a weak and a strong anchor model, the features):

    m: weight of one observation, in runs. lamb (λ): forgetting. rho (ρ): weight of the
    prediction against the observation; adaptive_rho halves it when the prediction is off.
    do_sample: draw the pass rate from the belief instead of taking its mean. target_reward:
    pass rate to look for. tau: temperature of the choice, 0 takes the nearest rows.

    The belief after observing pass rates p on rows I, for every row::

        cap = (mean p − mean f0[I]) / (mean f1[I] − mean f0[I] + 1e-6)   (then averaged)
        p̃  = clip((f1 − f0) · cap + f0, 0, 1),  p̃[I] = p
        α   = (1−λ)α + λ + (1−ρ)·s + ρ·p̃·m        s = p·m on I, else 0
        β   = (1−λ)β + λ + (1−ρ)·f + ρ·(1−p̃)·m    f = (1−p)·m on I, else 0
    """

    LEARNED = ("alpha", "beta", "cap", "rho")

    def __init__(
        self,
        n_rows: int,
        seed: int = 42,
        *,
        features: np.ndarray,
        m: float = 16,
        lamb: float = 0.2,
        rho: float = 0.2,
        adaptive_rho: bool = False,
        do_sample: bool = False,
        target_reward: float = 1.0,
        tau: float = 1.0,
    ) -> None:
        if features.shape != (n_rows, 2):
            raise ValueError(
                "selector 'difficulty_based' needs exactly two feature_keys, the pass rates of a "
                f"weak and of a strong model (got {features.shape[1]})"
            )
        for name, value in (("lamb", lamb), ("rho", rho)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} must be between 0 and 1 (got {value})")
        if m <= 0 or tau < 0:
            raise ValueError(f"m must be > 0 and tau >= 0 (got m={m}, tau={tau})")
        super().__init__(n_rows, seed)
        self._weak, self._strong = features[:, 0].astype(np.float64), features[:, 1]
        self.m, self.lamb, self.rho = m, lamb, rho
        self._first_rho = rho
        self.adaptive_rho, self.do_sample = adaptive_rho, do_sample
        self.target_reward, self.tau = target_reward, tau
        self.alpha, self.beta = np.ones(n_rows), np.ones(n_rows)
        self.cap: float | None = None

    # -- learning -------------------------------------------------------------------

    def update(self, indices: Sequence[int], values: Sequence[float]) -> None:
        """Observed pass rates ``values`` in [0, 1] (others are cut) of rows ``indices``."""
        if len(indices) == 0:
            return
        seen = np.asarray(indices, np.int64)
        # rewards outside [0, 1] are no pass rates; α and β would become negative
        rates = np.clip(np.asarray(values, np.float64), 0.0, 1.0)
        weak, strong = self._weak[seen].mean(), self._strong[seen].mean()
        cap = (rates.mean() - weak) / (strong - weak + 1e-6)
        if self.cap is not None:
            cap = CAP_MEMORY * self.cap + (1 - CAP_MEMORY) * cap
        self.cap = float(cap)
        predicted = np.clip((self._strong - self._weak) * self.cap + self._weak, 0.0, 1.0)
        if self.adaptive_rho and np.abs(predicted[seen] - rates).mean() >= RHO_TOLERANCE:
            self.rho /= 2
        predicted[seen] = rates  # every row's pass rate by the anchors and the capability
        success, failure = np.zeros(self.n_rows), np.zeros(self.n_rows)
        success[seen], failure[seen] = rates * self.m, (1 - rates) * self.m

        for name, observed, expected in (
            ("alpha", success, predicted),
            ("beta", failure, 1 - predicted),
        ):
            kept = (1 - self.lamb) * getattr(self, name) + self.lamb
            moved = kept + (1 - self.rho) * observed + self.rho * expected * self.m
            setattr(self, name, moved)

    # -- choosing -------------------------------------------------------------------

    def get_indices(self, batch_size: int) -> list[int]:
        """Different rows, as near to the target as ``tau`` asks."""
        if batch_size > self.n_rows:
            raise ValueError(
                f"selector 'difficulty_based' chooses {batch_size} different rows of "
                f"{self.n_rows}; lower the batch size"
            )
        if self.do_sample:
            rates = np.random.default_rng(self.seed + self.position).beta(self.alpha, self.beta)
        else:
            rates = self.alpha / (self.alpha + self.beta)
        score = -np.abs(self.target_reward - rates)
        start, self.position = self.position, self.position + batch_size
        if self.tau == 0:
            return np.argsort(-score, kind="stable")[:batch_size].tolist()
        import torch

        # a draw without replacement from softmax(score / tau)
        generator = torch.Generator().manual_seed(self.seed + start)
        weights = torch.softmax(torch.from_numpy(score) / self.tau, dim=0)
        # with a small tau most weights round to 0, which leaves too few rows to draw
        weights = weights.clamp_min(torch.finfo(weights.dtype).tiny)
        return torch.multinomial(
            weights, batch_size, replacement=False, generator=generator
        ).tolist()

    # -- state ----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """JSON; α and β as base64 of little-endian float64, 22 bytes a row."""
        return {
            "position": self.position,
            "alpha": base64.b64encode(self.alpha.astype("<f8").tobytes()).decode(),
            "beta": base64.b64encode(self.beta.astype("<f8").tobytes()).decode(),
            "cap": self.cap,
            "rho": self.rho,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after :meth:`state_dict`; about other rows nothing is known (a warning)."""
        self.position = int(state["position"])
        if "alpha" not in state:  # saved under another selector: nothing was learned
            self.alpha, self.beta = np.ones(self.n_rows), np.ones(self.n_rows)
            self.cap, self.rho = None, self._first_rho
            return
        alpha, beta = (
            np.frombuffer(base64.b64decode(state[name]), "<f8").astype(np.float64)
            for name in ("alpha", "beta")
        )
        if len(alpha) != self.n_rows:
            log.warning(
                "the saved beliefs are about %d rows, the file has %d: they begin anew",
                len(alpha),
                self.n_rows,
            )
            return
        self.alpha, self.beta = alpha, beta
        self.cap, self.rho = state["cap"], float(state["rho"])


def make_selector(cfg: SelectorConfig, reader: RowReader) -> SequentialSelector:
    """The selector that ``cfg`` describes, for the rows of ``reader``.

    Raises:
        ValueError: an unknown selector or argument, or features too few or too many.
        DataError: a row has no number in a feature column.
    """
    factory = SELECTORS.get(cfg.selector_type)
    args: dict[str, Any] = {**cfg.kwargs, "n_rows": len(reader), "seed": cfg.seed}
    if "features" in inspect.signature(factory).parameters:
        if not cfg.feature_keys:
            raise ValueError(
                f"data_selector.selector_type={cfg.selector_type} needs feature_keys: the number "
                "columns that say how hard a row is"
            )
        args["features"] = read_features(reader, cfg.feature_keys)
    return build(f"selector {cfg.selector_type!r}", factory, args)


def read_features(reader: RowReader, keys: Sequence[str]) -> np.ndarray:
    """float64 ``[rows, keys]``. Raises DataError: file, row and column of what is no number."""
    features = np.empty((len(reader), len(keys)))
    for place, key in enumerate(keys):
        values = reader.column(key)
        try:
            features[:, place] = values  # csv cells are text, which is parsed here
            if np.isfinite(features[:, place]).all():
                continue
        except (TypeError, ValueError):
            pass  # one by one, to name it
        for index, value in enumerate(values):
            try:
                number = float(value)  # csv cells are text
            except (TypeError, ValueError):
                number = math.nan
            if not math.isfinite(number):
                raise DataError(
                    f"{reader.where(index)}: feature column {key!r} holds {value!r}, not a "
                    "number. Name the right columns in data_selector.feature_keys."
                )
            features[index, place] = number
    return features
