"""The configuration keys of ``buffer``: formats, tasksets, stores, sampling and operators.

Invariant: the same as that of :mod:`trinity_dask.config.schema`, which this is a part of and
through which it is imported.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional


@dataclass
class FormatConfig:
    """How a data set row becomes a prompt, a truth, or a training example."""

    prompt_type: str = "plaintext"  # plaintext | messages
    prompt_key: str = "prompt"
    response_key: str = "response"
    messages_key: str = "messages"  # dpo: the turns before the answers
    tools_key: str = "tools"  # tool schemas of a conversation: a list, or its JSON text
    chosen_key: str = "chosen"  # dpo only
    rejected_key: str = "rejected"  # dpo only
    workflow_key: str = ""  # column with the task's own workflow; "" = the taskset's
    reward_fn_key: str = ""  # column with the task's own reward function; "" = the taskset's
    system_prompt: Optional[str] = None
    system_prompt_key: str = ""  # column with the row's own system prompt
    # sft messages: learn every assistant turn, not only the last one
    enable_concatenated_multi_turn: bool = False
    # false: the prompt text is tokenised as it is, without the chat template
    apply_chat_template: bool = True
    # append the end-of-sequence token to the response of a plaintext SFT row
    append_eos: bool = True


@dataclass
class SelectorConfig:
    """The order in which a taskset is read."""

    # sequential | shuffle | random | offline_easy2hard | difficulty_based
    selector_type: str = "sequential"
    seed: int = 42
    # number columns of the file that offline_easy2hard sorts by and difficulty_based starts from
    feature_keys: list[str] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)  # of the selector; see docs/data.md


@dataclass
class RolloutArgs:
    """Sampling of one taskset; ``None`` inherits from ``model``."""

    temperature: Optional[float] = None
    top_p: Optional[float] = None
    top_k: Optional[int] = None
    max_tokens: Optional[int] = None


@dataclass
class TasksetConfig:
    """A file of tasks (or of SFT rows)."""

    name: Optional[str] = None
    path: str = ""
    split: str = "train"
    format: FormatConfig = field(default_factory=FormatConfig)
    workflow: Optional[str] = None  # registered name, "module:Class" or "file.py:Class"
    reward_fn: Optional[str] = None  # registered name, "module:fn" or "file.py:fn"
    workflow_args: dict[str, Any] = field(default_factory=dict)
    reward_fn_args: dict[str, Any] = field(default_factory=dict)
    rollout_args: RolloutArgs = field(default_factory=RolloutArgs)
    data_selector: SelectorConfig = field(default_factory=SelectorConfig)
    repeat_times: Optional[int] = None  # train: algorithm.repeat_times; eval: 1


@dataclass
class ExplorerInputConfig:
    taskset: TasksetConfig = field(default_factory=TasksetConfig)
    # several train tasksets, mixed by their sizes; then taskset stays empty
    tasksets: list[TasksetConfig] = field(default_factory=list)
    eval_tasksets: list[TasksetConfig] = field(default_factory=list)
    default_workflow: Optional[str] = "simple_workflow"
    default_reward_fn: Optional[str] = None

    @property
    def train_tasksets(self) -> list[TasksetConfig]:
        """``tasksets``, or the one ``taskset``."""
        return self.tasksets or [self.taskset]


@dataclass
class ReplayBufferConfig:
    """Rows by priority instead of first-in-first-out, and again after a pause."""

    enable: bool = False
    priority_fn: str = "linear_decay"  # linear_decay | decay_limit_randomization | module:Class
    priority_fn_args: dict[str, Any] = field(default_factory=dict)  # over the function's defaults
    # seconds until a trained group may be drawn again; None = every group is drawn once
    reuse_cooldown_time_s: Optional[float] = None
    capacity_groups: int = 10_000  # groups that wait; the least important one gives way


@dataclass
class ExperienceBufferConfig:
    """Where experiences are kept between explorer and trainer."""

    name: str = "experience"
    storage_type: str = "store"  # store (Arrow on fsspec, from the explorer) | file (SFT rows)
    path: Optional[str] = None  # store: fsspec URL, default <job>/buffer/<name>; file: the rows
    storage_options: dict[str, Any] = field(default_factory=dict)  # passed to fsspec
    compression: Optional[str] = None  # None | lz4 | zstd
    capacity_batches: int = 64  # committed and not yet trained; the explorer waits beyond it
    max_read_timeout_s: float = 1800.0
    skip_corrupt: bool = False  # true: a damaged file is named, counted and skipped
    replay_buffer: ReplayBufferConfig = field(default_factory=ReplayBufferConfig)
    split: str = "train"
    format: FormatConfig = field(default_factory=FormatConfig)
    data_selector: SelectorConfig = field(default_factory=SelectorConfig)


@dataclass
class TrainerInputConfig:
    experience_buffer: ExperienceBufferConfig = field(default_factory=ExperienceBufferConfig)
    # files of expert rows by name, for sample_strategy mix
    auxiliary_buffers: list[ExperienceBufferConfig] = field(default_factory=list)


@dataclass
class OperatorConfig:
    name: str = ""
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class BufferConfig:
    batch_size: int = 1  # tasks per explorer step
    # rows per train step; None = exactly what one explorer step committed
    train_batch_size: Optional[int] = None
    total_epochs: int = 1
    total_steps: Optional[int] = None
    explorer_input: ExplorerInputConfig = field(default_factory=ExplorerInputConfig)
    trainer_input: TrainerInputConfig = field(default_factory=TrainerInputConfig)
    operators: list[OperatorConfig] = field(default_factory=list)  # on every committed batch
    # further batches of tasks that may be rolled out to fill up one whose groups an operator
    # has dropped (dapo); 0 = train on what is left
    max_refill_batches: int = 0
