"""Advantages, losses and their table: torch and numpy, nothing of ours.

:func:`resolve_algorithm` turns a config section into an :class:`AlgorithmSpec`. The
registries give every function by name; each accepts a dotted path and new names:

    @POLICY_LOSS_FN.register_module("mine")
    class MyLoss(PolicyLoss):
        reads = ("advantages",)

        def token_losses(self, x: LossInputs): ...
"""

from trinity_dask.algorithm.advantages import ADVANTAGE_FN, ADVANTAGES
from trinity_dask.algorithm.aggregate import Denominator, aggregate
from trinity_dask.algorithm.entropy import ENTROPY_LOSS_FN
from trinity_dask.algorithm.kl import KL_FN
from trinity_dask.algorithm.policy_losses import (
    POLICY_LOSS_FN,
    POLICY_LOSSES,
    LossInputs,
    PolicyLoss,
)
from trinity_dask.algorithm.sample_strategies import SAMPLE_STRATEGY
from trinity_dask.algorithm.table import AlgorithmSpec, resolve_algorithm
from trinity_dask.algorithm.types import ALGORITHM, AlgorithmType

__all__ = [
    "ADVANTAGES",
    "ADVANTAGE_FN",
    "ALGORITHM",
    "ENTROPY_LOSS_FN",
    "KL_FN",
    "POLICY_LOSSES",
    "POLICY_LOSS_FN",
    "SAMPLE_STRATEGY",
    "AlgorithmSpec",
    "AlgorithmType",
    "Denominator",
    "LossInputs",
    "PolicyLoss",
    "aggregate",
    "resolve_algorithm",
]
