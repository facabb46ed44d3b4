"""Advantage functions by name; see :mod:`.base` for the two kinds and how they are called."""

from trinity_dask.algorithm.advantages.base import (
    ADVANTAGE_FN,
    AdvantageFn,
    advantage_needs,
    runs_in_trainer,
)
from trinity_dask.algorithm.advantages.baselines import (
    AsymREAdvantage,
    OPMDAdvantage,
    RAFTAdvantage,
    RECAdvantage,
    ReinforceAdvantage,
)
from trinity_dask.algorithm.advantages.distill import JSDAdvantage, OnPolicyDistillAdvantage
from trinity_dask.algorithm.advantages.entropy_guard import ClipBAdvantage, ClipVAdvantage
from trinity_dask.algorithm.advantages.gigpo import GiGPOAdvantage
from trinity_dask.algorithm.advantages.groups import Rewards, group_by_task
from trinity_dask.algorithm.advantages.grpo import GRPOAdvantage, StepWiseGRPOAdvantage
from trinity_dask.algorithm.advantages.in_trainer import (
    AsymREVerlAdvantage,
    GRPOVerlAdvantage,
    OPMDVerlAdvantage,
    PPOAdvantage,
    ReinforcePlusPlusAdvantage,
    ReinforcePlusPlusBaselineAdvantage,
    RemaxAdvantage,
    RLOOAdvantage,
    gae,
)

ADVANTAGES = ADVANTAGE_FN

__all__ = [
    "ADVANTAGES",
    "ADVANTAGE_FN",
    "AdvantageFn",
    "AsymREAdvantage",
    "AsymREVerlAdvantage",
    "ClipBAdvantage",
    "ClipVAdvantage",
    "GRPOAdvantage",
    "GRPOVerlAdvantage",
    "GiGPOAdvantage",
    "JSDAdvantage",
    "OPMDAdvantage",
    "OPMDVerlAdvantage",
    "OnPolicyDistillAdvantage",
    "PPOAdvantage",
    "RAFTAdvantage",
    "RECAdvantage",
    "RLOOAdvantage",
    "ReinforceAdvantage",
    "ReinforcePlusPlusAdvantage",
    "ReinforcePlusPlusBaselineAdvantage",
    "RemaxAdvantage",
    "Rewards",
    "StepWiseGRPOAdvantage",
    "advantage_needs",
    "gae",
    "group_by_task",
    "runs_in_trainer",
]
