"""Policy losses by name; see :mod:`.base` for how one is called."""

from trinity_dask.algorithm.policy_losses.base import (
    MAX_LOG_RATIO,
    POLICY_LOSS_FN,
    AnyLoss,
    PolicyLoss,
)
from trinity_dask.algorithm.policy_losses.divergence import JSDLoss, generalised_jsd
from trinity_dask.algorithm.policy_losses.dpo import DPOLoss
from trinity_dask.algorithm.policy_losses.mix import MixChordLoss, MixLoss, mu_schedule
from trinity_dask.algorithm.policy_losses.ppo import PPOLoss
from trinity_dask.algorithm.policy_losses.ratio import (
    ImportanceSamplingLoss,
    SAPOLoss,
    SPPOLoss,
)
from trinity_dask.algorithm.policy_losses.rec import RECLoss
from trinity_dask.algorithm.policy_losses.sequence_ratio import GSPOLoss
from trinity_dask.algorithm.policy_losses.sft import SFTISLoss, SFTLoss, SFTPhiLoss
from trinity_dask.algorithm.policy_losses.weighted import CISPOLoss, OPMDLoss, TOPRLoss

POLICY_LOSSES = POLICY_LOSS_FN

__all__ = [
    "MAX_LOG_RATIO",
    "POLICY_LOSSES",
    "POLICY_LOSS_FN",
    "AnyLoss",
    "CISPOLoss",
    "DPOLoss",
    "GSPOLoss",
    "ImportanceSamplingLoss",
    "JSDLoss",
    "MixChordLoss",
    "MixLoss",
    "OPMDLoss",
    "PPOLoss",
    "PolicyLoss",
    "RECLoss",
    "SAPOLoss",
    "SFTISLoss",
    "SFTLoss",
    "SFTPhiLoss",
    "SPPOLoss",
    "TOPRLoss",
    "generalised_jsd",
    "mu_schedule",
]
