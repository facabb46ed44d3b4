"""From a value of theirs to one of ours, where the two are not written alike.

Invariant: a conversion returns the value to write, :data:`SKIP` where nothing is to be written, or
raises :class:`Lost` with the reason; it reads other keys of theirs and changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Optional

from trinity_dask.config import modes
from trinity_dask.config.algorithms import OFFLINE_TYPES
from trinity_dask.config.fields import choices_of, fields_of
from trinity_dask.config.schema import OptimizerConfig, SynchronizerConfig
from trinity_dask.registry import Registry
from trinity_dask.rewards import REWARD_FUNCTIONS
from trinity_dask.workflows import WORKFLOWS

SKIP = object()
SINKS = ("console", "jsonl")
COLOCATED_SHARE = 0.25  # what they cap an engine's memory at on a shared GPU
# built in there
FOREIGN_WORKFLOWS = frozenset(
    f"{prefix}{name}"
    for prefix in ("", "async_")
    for name in [
        "math_boxed_workflow",
        "math_eval_workflow",
        "math_rm_workflow",
        "tool_call_workflow",
        "rubric_judge_workflow",
        "rubric_judge_openai_workflow",
        "math_ruler_workflow",
        "math_trainable_ruler_workflow",
        "simple_mm_workflow",
        "on_policy_distill_workflow",
        "on_policy_distill_math_workflow",
        "agentscope_workflow_adapter",
        "agentscope_workflow_adapter_v1",
        "agentscope_react_workflow",
        "as_react_workflow",
        "agentscope_react_math_workflow",
        "agentscopev0_react_math_workflow",
        "agentscope_v1_react_search_workflow",
        "email_search_workflow",
        "frozen_lake_workflow",
        "alfworld_workflow",
        "RAFT_alfworld_workflow",
        "RAFT_reflect_alfworld_workflow",
        "step_wise_alfworld_workflow",
        "sciworld_workflow",
        "webshop_workflow",
        "intercode_sql_workflow",
        "sudoku_workflow",
    ]
)
FOREIGN_REWARDS = frozenset({"math_boxed_reward", "math_dapo_reward", "rm_gallery_reward"})
_BATCH_SIZES = {
    "use_dynamic_bsz",
    "ppo_mini_batch_size",
    "ppo_micro_batch_size_per_gpu",
    "ngpus_trainer",
    "train_batch_size_usual",
    "train_batch_size_expert",
    "loss_agg_mode",  # algorithm.loss_agg_mode is the one that holds
}


class Lost(Exception):
    """A value without counterpart; ``instead`` is written all the same (None: nothing)."""

    def __init__(self, reason: str, instead: Any = None) -> None:
        super().__init__(reason)
        self.instead = instead


class Theirs:
    """A configuration of theirs, read by dotted keys; None where it is silent.

    ``ranks`` of a stage are the run's, since a cluster does not change between stages.
    """

    def __init__(self, tree: Mapping[str, Any], ranks: Optional[int] = None) -> None:
        self.tree = tree
        self.ranks = ranks

    def get(self, key: str, default: Any = None) -> Any:
        node: Any = self.tree
        for part in key.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        return default if node is None else node

    @property
    def algorithm(self) -> str:
        return str(self.get("algorithm.algorithm_type", "ppo")).lower()

    @property
    def offline(self) -> bool:
        return self.algorithm in OFFLINE_TYPES

    @property
    def has_teacher(self) -> bool:
        """Whether the first auxiliary model is one."""
        return self.algorithm in ("on_policy_distill", "jsd")

    @property
    def mode(self) -> str:
        """Their launcher takes one GPU for a shared one, whatever the mode says."""
        mode = str(self.get("mode", "both")).lower()
        return "colocate" if mode == "both" and self.gpus == 1 else mode

    @property
    def gpus(self) -> int:
        """Of all nodes; 0: they are counted when the job starts."""
        return _number(self.get("cluster.node_num"), 0) * _number(
            self.get("cluster.gpu_per_node"), 0
        )

    @property
    def total_steps(self) -> Optional[int]:
        return self.get("trainer.total_steps") or self.get("buffer.total_steps")


@dataclass(frozen=True)
class Sizes:
    """Workers of ours for GPUs of theirs: engines with ``gpus_per_engine`` each, and ranks."""

    engines: int
    gpus_per_engine: int
    ranks: int

    @classmethod
    def of(cls, theirs: Theirs) -> Sizes:
        """As their validation divides them; one rank where the GPUs are not told."""
        engine = "explorer.rollout_model."
        engines = _number(theirs.get(f"{engine}engine_num"), 1)
        each = _number(theirs.get(f"{engine}tensor_parallel_size"), 1)
        models = theirs.get("explorer.auxiliary_models", [])
        others = sum(
            _number(model.get("engine_num"), 1) * _number(model.get("tensor_parallel_size"), 1)
            for model in models[theirs.has_teacher :]  # a teacher is run by the trainer
        )
        taken = engines * each + others if modes.samples(theirs.mode) else 0
        if not modes.trains(theirs.mode):
            ranks = 0
        elif theirs.mode == "colocate" or not theirs.gpus:
            ranks = 1
        else:
            ranks = theirs.gpus - taken
        return cls(engines, each, ranks)


def _number(value: Any, default: int) -> int:
    """A count; one that is an interpolation is not known yet."""
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def _choice(words: Mapping[str, str], what: str, instead: Any = None) -> Callable[..., Any]:
    def convert(value: Any, theirs: Theirs) -> Any:
        word = str(value).lower()
        if word not in words:
            raise Lost(f"there is no {what} {value!r}", instead)
        return words[word]

    return convert


def _optional_positive(value: Any, theirs: Theirs) -> Any:
    return value if isinstance(value, str) or value > 0 else SKIP


def _warmup_ratio(value: float, theirs: Theirs) -> Any:
    if not value:
        return SKIP
    if theirs.total_steps is None:
        raise Lost("the number of steps is not known: set lr_warmup_steps")
    return math.ceil(value * theirs.total_steps)


def _loss_args(value: Mapping[str, Any], theirs: Theirs) -> Any:
    return {name: each for name, each in value.items() if name not in _BATCH_SIZES} or SKIP


def _correction(value: Mapping[str, Any], theirs: Theirs) -> Any:
    """verl's ``rollout_is``, ``rollout_rs`` with their threshold."""
    weights = {"token": "token_tis", "sequence": "sequence_tis", "geometric": "geometric_tis"}
    masks = {"token": "token_mask", "sequence": "sequence_mask", "geometric": "geometric_mask"}
    if value.get("rollout_is") in weights:
        mode, cap = weights[value["rollout_is"]], value.get("rollout_is_threshold")
    elif value.get("rollout_rs") in masks:
        mode, cap = masks[value["rollout_rs"]], value.get("rollout_rs_threshold")
    else:
        raise Lost("none of these options is known here: see algorithm.rollout_correction")
    return {"mode": mode} | ({} if cap is None else {"cap": cap})


def _address(value: str, theirs: Theirs) -> Any:
    if value in ("auto", "local", ""):
        return SKIP
    raise Lost("a Ray cluster; start a Dask scheduler and set cluster=address cluster.address=...")


def _named(foreign: frozenset[str], known: Registry[Any], what: str) -> Callable[..., Any]:
    def convert(value: str, theirs: Theirs) -> Any:
        if value in foreign and value not in known.names():
            raise Lost(f"{what} is not built in here; register yours under this name", value)
        return value

    return convert


def _storage(value: str, theirs: Theirs) -> Any:
    if theirs.offline:
        return "file"
    if value == "file" and theirs.mode == "train":
        raise Lost("only sft, cpt and dpo train on the rows of a file", "store")
    return "store"


def _store_path(value: str, theirs: Theirs) -> Any:
    return value if theirs.offline else SKIP  # else where the run keeps it


def _strategy(value: str, theirs: Theirs) -> Any:
    if value not in ("fsdp", "fsdp2"):
        raise Lost(f"there is no strategy {value!r}; sharded ranks are fsdp2")
    ranks = Sizes.of(theirs).ranks if theirs.ranks is None else theirs.ranks
    return "fsdp2" if ranks > 1 else SKIP


def _interval(value: int, theirs: Theirs) -> Any:
    keys = ("sync_interval", "explorer_sync_interval", "trainer_sync_interval")
    given = {theirs.get(f"synchronizer.{key}") for key in keys} - {None}
    if len(given) > 1:
        raise Lost(f"both sides move weights at one interval, and these are {sorted(given)}")
    return value


def _monitor_args(value: Mapping[str, Any], theirs: Theirs) -> Any:
    sink = theirs.get("monitor.monitor_type", "tensorboard")
    return {sink: dict(value)} if value else SKIP


def _monitor(value: str, theirs: Theirs) -> Any:
    if value not in ("tensorboard", "wandb", "mlflow"):
        raise Lost(f"there is no sink {value!r}; monitor.sinks takes a class of yours", [*SINKS])
    return [*SINKS, value]


def _memory(value: float, theirs: Theirs) -> Any:
    return min(value, COLOCATED_SHARE) if theirs.mode == "colocate" else value


def _plain(names: str) -> dict[str, str]:
    return {name: name for name in names.split()}


_STYLE = fields_of(SynchronizerConfig)["sync_style"]
_METHOD = fields_of(SynchronizerConfig)["sync_method"]
HOW: dict[str, Callable[[Any, Theirs], Any]] = {
    "mode": lambda value, theirs: theirs.mode,
    "warmup_steps": lambda value, theirs: max(value, 0) or SKIP,
    "warmup_ratio": _warmup_ratio,
    "scheduler": _choice(
        {name: name for name in choices_of(OptimizerConfig, "lr_scheduler_type")}, "schedule"
    ),
    "optimizer": _choice(
        {**_plain("adamw sgd adamw8bit"), "adam": "adamw", "adamw_8bit": "adamw8bit"},
        "optimizer",
    ),
    "loss_args": _loss_args,
    "correction": _correction,
    "address": _address,
    "workflow": _named(FOREIGN_WORKFLOWS, WORKFLOWS, "this workflow"),
    "reward": _named(FOREIGN_REWARDS, REWARD_FUNCTIONS, "this reward function"),
    "storage": _storage,
    "store": _store_path,
    "capacity": _optional_positive,
    "positive": _optional_positive,
    "engine": _choice(
        {**_plain("vllm torch fake"), "vllm_async": "vllm"}, "engine", instead="vllm"
    ),
    "dtype": _choice(_plain("float32 bfloat16"), "dtype", instead="bfloat16"),
    "memory": _memory,
    "bucket": lambda value, theirs: min(value, 2047),
    "strategy": _strategy,
    "method": _choice({**_plain(" ".join(_METHOD.choices)), **_METHOD.aliases}, "sync_method"),
    "style": _choice({**_plain(" ".join(_STYLE.choices)), **_STYLE.aliases}, "sync_style"),
    "interval": _interval,
    "monitor": _monitor,
    "monitor_args": _monitor_args,
    "switch": lambda value, theirs: value or SKIP,
    "keep": lambda value, theirs: value or 0,
    "texts": lambda value, theirs: {name: str(each) for name, each in value.items()} or SKIP,
}
