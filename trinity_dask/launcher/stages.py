"""Which stage runner runs a mode.

Invariant: every mode that validation lets through is here.
"""

from __future__ import annotations

from trinity_dask.launcher.stage import StageRunner
from trinity_dask.launcher.stage_bench import BenchStage
from trinity_dask.launcher.stage_both import BothStage
from trinity_dask.launcher.stage_explore import ExploreStage
from trinity_dask.launcher.stage_train import TrainStage

STAGES: dict[str, type[StageRunner]] = {
    "both": BothStage,
    "colocate": BothStage,
    "explore": ExploreStage,
    "train": TrainStage,
    "bench": BenchStage,
}
