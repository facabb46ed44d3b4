"""Policy losses by name; see :mod:`.base` for how one is called."""

from trinity_dask.algorithm.policy_losses.base import (
    MAX_LOG_RATIO,
    POLICY_LOSS_FN,
    AnyLoss,
    LossInputs,
    PolicyLoss,
)
from trinity_dask.algorithm.policy_losses.divergence import JSDLoss, generalised_jsd
from trinity_dask.algorithm.policy_losses.likelihood import (
    DPOLoss,
    MixChordLoss,
    MixLoss,
    SFTISLoss,
    SFTLoss,
    SFTPhiLoss,
    mu_schedule,
)
from trinity_dask.algorithm.policy_losses.ratio import (
    CISPOLoss,
    GSPOLoss,
    ImportanceSamplingLoss,
    OPMDLoss,
    PPOLoss,
    RECLoss,
    SAPOLoss,
    SPPOLoss,
    TOPRLoss,
)

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
    "LossInputs",
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
