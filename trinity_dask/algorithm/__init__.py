"""Advantages, losses and their table: torch and numpy, nothing of ours."""

from trinity_dask.algorithm.advantages import ADVANTAGES
from trinity_dask.algorithm.aggregate import Denominator, aggregate
from trinity_dask.algorithm.policy_losses import POLICY_LOSSES
from trinity_dask.algorithm.registry import Registry
from trinity_dask.algorithm.table import ALGORITHM, AlgorithmSpec, resolve_algorithm

__all__ = [
    "ADVANTAGES",
    "ALGORITHM",
    "POLICY_LOSSES",
    "AlgorithmSpec",
    "Denominator",
    "Registry",
    "aggregate",
    "resolve_algorithm",
]
