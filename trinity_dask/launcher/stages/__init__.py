"""Which stage runner runs a mode.

Invariant: every mode that validation lets through is here.
"""

from __future__ import annotations

from trinity_dask.launcher.stages.base import StageRunner
from trinity_dask.launcher.stages.bench import BenchStage
from trinity_dask.launcher.stages.both import BothStage
from trinity_dask.launcher.stages.explore import ExploreStage
from trinity_dask.launcher.stages.train import TrainStage

STAGES: dict[str, type[StageRunner]] = {
    "both": BothStage,
    "colocate": BothStage,
    "explore": ExploreStage,
    "train": TrainStage,
    "bench": BenchStage,
}
