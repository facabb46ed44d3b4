"""How much a group of rows is worth, by its age and how often it was used.

Invariant: a priority is a function of (version, uses, the group's number, seed) alone, so a
queue that is rebuilt from its state orders the same groups the same way.
"""

from __future__ import annotations

from typing import Optional, Protocol

import numpy as np

from trinity_dask.registry import Registry

PRIORITY_FNS: Registry = Registry("priority_fn")


class PriorityFn(Protocol):
    def __call__(self, version: int, use_count: int, serial: int) -> Optional[float]:
        """The priority, or None when the group is not to be kept any more."""


@PRIORITY_FNS.register_module("linear_decay")
class LinearDecay:
    """p = version − decay · uses; every group is kept."""

    def __init__(self, decay: float = 2.0) -> None:
        self.decay = decay

    def __call__(self, version: int, use_count: int, serial: int) -> Optional[float]:
        return version - self.decay * use_count


@PRIORITY_FNS.register_module("decay_limit_randomization")
class DecayLimitRandomization:
    """p = version − decay · uses + N(0, sigma²); kept while uses < ``use_count_limit``.

    A limit of 0 or less is none. The noise of a group's n-th use is always the same.
    """

    def __init__(
        self, decay: float = 2.0, use_count_limit: int = 3, sigma: float = 0.0, seed: int = 42
    ) -> None:
        if sigma < 0:
            raise ValueError(f"sigma must be >= 0 (got {sigma}); 0 switches the noise off")
        self.decay = decay
        self.use_count_limit = use_count_limit
        self.sigma = sigma
        self.seed = seed

    def __call__(self, version: int, use_count: int, serial: int) -> Optional[float]:
        if 0 < self.use_count_limit <= use_count:
            return None
        priority = version - self.decay * use_count
        if self.sigma > 0:
            noise = np.random.default_rng([self.seed, serial, use_count])
            priority += float(noise.normal(0.0, self.sigma))
        return priority
