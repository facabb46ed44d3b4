"""Rows whose expected pass rate is nearest to a target (BOTS).

Bayesian online task selection, arXiv 2510.26374: each row has a Beta(α, β) belief about its
pass rate, moved by what was observed on it and by what its two anchor features predict.

Invariant: the whole belief is state (α, β, the capability estimate, ρ, the position), saved
bit by bit, so a restored selector chooses as the saved one would have.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

CAP_MEMORY = 0.9  # of the exponential average of the capability
RHO_TOLERANCE = 0.25  # mean error of the prediction at which adaptive_rho halves rho


class DifficultySelector:
    """Args (``f0``, ``f1``: pass rates of a weak and a strong anchor model, the features):

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
        self.n_rows, self.seed, self.position = n_rows, seed, 0
        self._weak, self._strong = features[:, 0].astype(np.float64), features[:, 1]
        self.m, self.lamb, self.rho = m, lamb, rho
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
        predicted = self._predict(seen, rates)
        success, failure = np.zeros(self.n_rows), np.zeros(self.n_rows)
        success[seen], failure[seen] = rates * self.m, (1 - rates) * self.m
        self.alpha = self._moved(self.alpha, success, predicted)
        self.beta = self._moved(self.beta, failure, 1 - predicted)

    def _moved(self, belief: np.ndarray, seen: np.ndarray, predicted: np.ndarray) -> np.ndarray:
        kept = (1 - self.lamb) * belief + self.lamb
        return kept + (1 - self.rho) * seen + self.rho * predicted * self.m

    def _predict(self, seen: np.ndarray, rates: np.ndarray) -> np.ndarray:
        """Pass rate of every row by the anchors and the current capability; p on ``seen``."""
        weak, strong = self._weak[seen].mean(), self._strong[seen].mean()
        cap = (rates.mean() - weak) / (strong - weak + 1e-6)
        if self.cap is not None:
            cap = CAP_MEMORY * self.cap + (1 - CAP_MEMORY) * cap
        self.cap = float(cap)
        predicted = np.clip((self._strong - self._weak) * self.cap + self._weak, 0.0, 1.0)
        if self.adaptive_rho and np.abs(predicted[seen] - rates).mean() >= RHO_TOLERANCE:
            self.rho /= 2
        predicted[seen] = rates
        return predicted

    # -- choosing -------------------------------------------------------------------

    def pass_rates(self) -> np.ndarray:
        """Expected (or drawn) pass rate of every row: float64 ``[rows]``."""
        if self.do_sample:
            return np.random.default_rng(self.seed + self.position).beta(self.alpha, self.beta)
        return self.alpha / (self.alpha + self.beta)

    def get_indices(self, batch_size: int) -> list[int]:
        """Different rows, as near to the target as ``tau`` asks."""
        if batch_size > self.n_rows:
            raise ValueError(
                f"selector 'difficulty_based' chooses {batch_size} different rows of "
                f"{self.n_rows}; lower the batch size"
            )
        score = -np.abs(self.target_reward - self.pass_rates())
        choose = self._nearest if self.tau == 0 else self._drawn
        chosen = choose(score, batch_size)
        self.position += batch_size
        return chosen

    def _nearest(self, score: np.ndarray, count: int) -> list[int]:
        return np.argsort(-score, kind="stable")[:count].tolist()

    def _drawn(self, score: np.ndarray, count: int) -> list[int]:
        """A draw without replacement from softmax(score / tau)."""
        import torch

        generator = torch.Generator().manual_seed(self.seed + self.position)
        weights = torch.softmax(torch.from_numpy(score) / self.tau, dim=0)
        # with a small tau most weights round to 0, which leaves too few rows to draw
        weights = weights.clamp_min(torch.finfo(weights.dtype).tiny)
        return torch.multinomial(weights, count, replacement=False, generator=generator).tolist()

    # -- state ----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """JSON; α and β as base64 of little-endian float64, 22 bytes a row."""
        return {
            "position": self.position,
            "alpha": _pack(self.alpha),
            "beta": _pack(self.beta),
            "cap": self.cap,
            "rho": self.rho,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after :meth:`state_dict`.

        Raises:
            ValueError: the file has another number of rows than when the state was saved.
        """
        self.position = int(state["position"])
        if "alpha" not in state:  # saved under another selector: nothing was learned
            return
        alpha, beta = _unpack(state["alpha"]), _unpack(state["beta"])
        if len(alpha) != self.n_rows:
            raise ValueError(
                f"the saved beliefs are about {len(alpha)} rows, the file has {self.n_rows}; "
                "restore the file, or start a new job directory"
            )
        self.alpha, self.beta = alpha, beta
        self.cap, self.rho = state["cap"], float(state["rho"])


def _pack(values: np.ndarray) -> str:
    return base64.b64encode(values.astype("<f8").tobytes()).decode()


def _unpack(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), "<f8").astype(np.float64)
