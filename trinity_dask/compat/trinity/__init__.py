"""``import trinity...`` for code that was written for Trinity-RFT.

Invariant: importing this module, and nothing else, puts ``trinity`` and the modules of
:data:`MODULES` into ``sys.modules``, unless a ``trinity`` is there already; each has our objects
under their names, loaded when first used. A user's file that imports ``trinity`` where it is not
installed gets it without asking.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Optional

from trinity_dask import lazy

_HERE, _ROOT = "trinity_dask.compat.trinity.bases", "trinity_dask"


def _all(module: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), f"{_ROOT}.{module}")


_WORKFLOWS = _all("workflows", "WORKFLOWS Task Workflow PartialGroupError") | _all(
    "workflows.simple", "SimpleWorkflow MathWorkflow"
)
_REWARDS = (
    _all("rewards", "REWARD_FUNCTIONS")
    | _all("rewards.math", "AccuracyReward MathReward")
    | _all("rewards.format", "FormatReward")
    | {"RewardFn": _HERE}
)
_CONFIG = _all("config.schema", "Config AlgorithmConfig BufferConfig ModelConfig ExplorerConfig")
_ALGORITHM = _all(
    "algorithm", "ADVANTAGE_FN POLICY_LOSS_FN KL_FN ENTROPY_LOSS_FN SAMPLE_STRATEGY ALGORITHM"
)
_OPERATORS = _all("buffer.operators.operators", "OPERATORS") | {
    "EXPERIENCE_OPERATORS": _HERE,
    "ExperienceOperator": _HERE,
}
#: their module -> name -> the module of ours that has it
MODULES: dict[str, dict[str, str]] = {
    "common.workflows": _WORKFLOWS,
    "common.workflows.workflow": _WORKFLOWS,
    "common.experience": _all("experience", "EID Experience"),
    "common.models": _all("models.wrapper", "ModelWrapper"),
    "common.models.model": _all("models.wrapper", "ModelWrapper"),
    "common.rewards": _REWARDS,
    "common.rewards.reward_fn": _REWARDS,
    "common.config": _CONFIG,
    "algorithm": _ALGORITHM,
    "algorithm.advantage_fn": _all("algorithm", "ADVANTAGE_FN"),
    "algorithm.policy_loss_fn": _all("algorithm", "POLICY_LOSS_FN PolicyLoss"),
    "algorithm.kl_fn": _all("algorithm", "KL_FN"),
    "algorithm.entropy_loss_fn": _all("algorithm", "ENTROPY_LOSS_FN"),
    "algorithm.sample_strategy": _all("algorithm", "SAMPLE_STRATEGY"),
    "buffer.operators": _OPERATORS,
    "buffer.operators.experience_operator": _OPERATORS,
    "buffer.selector": _all("buffer.data.selectors", "SELECTORS"),
    "explorer.explorer": _all("explorer.explorer", "Explorer"),
    "explorer.scheduler": _all("explorer.scheduler", "Scheduler RunnerWrapper TaskWrapper"),
    "explorer.workflow_runner": _all("explorer.workflow_runner", "WorkflowRunner Status"),
    "manager.synchronizer": _all("manager.synchronizer", "Synchronizer")
    | _all("sync.state", "RunningStatus"),
    "manager.state_manager": _all("manager.state_manager", "StateManager"),
    "utils.registry": _all("registry", "Registry"),
    "utils.log": {"get_logger": _HERE},
}


def install(modules: Mapping[str, Mapping[str, str]] = MODULES) -> None:
    """Put ``trinity`` and its modules into ``sys.modules``; nothing where one is there already."""
    if "trinity" in sys.modules:
        return
    _module("trinity")
    for name, sources in modules.items():
        path = ["trinity"]
        for part in name.split("."):
            path.append(part)
            if ".".join(path) not in sys.modules:
                _module(".".join(path), modules.get(".".join(path[1:]), sources))


class _There(importlib.abc.Loader):
    """Loads a module that is in ``sys.modules`` already."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: it has its names."""


def _module(name: str, sources: Optional[Mapping[str, str]] = None) -> ModuleType:
    """An empty package of this name in ``sys.modules``, whose names are loaded later."""
    module = ModuleType(name, f"{name} of Trinity-RFT, by trinity_dask.compat.trinity.")
    module.__path__ = []  # so that a submodule without counterpart is told as missing
    module.__spec__ = importlib.machinery.ModuleSpec(name, _There(), is_package=True)
    module.__getattr__ = lazy.names(name, sources or {})  # type: ignore[method-assign]
    sys.modules[name] = module
    parent, _, leaf = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], leaf, module)
    return module


install()
