"""The configuration keys of ``buffer``: formats, tasksets, stores, sampling and operators.

Invariant: the same as that of :mod:`trinity_dask.config.schema`, which this is a part of and
through which it is imported.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from trinity_dask.config.fields import setting

MAX_SEED = 2**32 - 1  # what numpy accepts


@dataclass
class FormatConfig:
    """How a data set row becomes a prompt, a truth, or a training example."""

    # the row's prompt is one text, or a conversation
    prompt_type: str = setting("plaintext", choices=("plaintext", "messages"))
    prompt_key: str = "prompt"  # column of the prompt
    response_key: str = "response"  # column of the answer, or of the truth it is compared with
    messages_key: str = "messages"  # dpo: the turns before the answers, if these have none
    tools_key: str = "tools"  # column of tool schemas: a list, or its JSON text
    chosen_key: str = "chosen"  # dpo only
    rejected_key: str = "rejected"  # dpo only
    workflow_key: str = ""  # column with the task's own workflow; "" = the taskset's
    reward_fn_key: str = ""  # column with the task's own reward function; "" = the taskset's
    # put before every prompt that has no system prompt of its own
    system_prompt: Optional[str] = None
    system_prompt_key: str = ""  # column with the row's own system prompt
    reply_prefix: Optional[str] = None  # how every reply begins; part of the prompt, not learned
    # sft messages: learn every assistant turn, not only the last one
    enable_concatenated_multi_turn: bool = False
    # false: the prompt text is tokenised as it is, without the chat template
    apply_chat_template: bool = True
    # a row without prompt, truth or answer: the next usable one takes its place, or the run ends
    empty_rows: str = setting("skip", choices=("skip", "refuse"))
    # a training row longer than model.max_model_len; what cutting leaves nothing of is skipped
    long_rows: str = setting("cut", choices=("cut", "skip", "refuse"))
    # append the end-of-sequence token to the response of a plaintext SFT row
    append_eos: bool = True


@dataclass
class SelectorConfig:
    """The order in which a taskset is read."""

    # order of the tasks; see docs/data.md
    selector_type: str = setting(
        "sequential",
        choices=("sequential", "shuffle", "random", "offline_easy2hard", "difficulty_based"),
    )
    seed: int = setting(42, ge=0, le=MAX_SEED)  # of the random orders
    # number columns of the file that offline_easy2hard sorts by and difficulty_based starts from
    feature_keys: list[str] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)  # of the selector; see docs/data.md


@dataclass
class RolloutArgs:
    """Sampling of one taskset; ``None`` inherits from ``model``."""

    temperature: Optional[float] = setting(None, ge=0)  # as model.temperature; 0 = greedy
    top_p: Optional[float] = setting(None, gt=0, le=1)  # as model.top_p
    top_k: Optional[int] = setting(None, ge=1, also=-1)  # as model.top_k
    max_tokens: Optional[int] = setting(None, ge=1)  # as model.max_response_tokens


@dataclass
class TasksetConfig:
    """A file of tasks (or of SFT rows)."""

    name: Optional[str] = None  # in metrics; None = taskset, taskset_<i> or eval_taskset_<i>
    # a file, a pattern, a directory, any of them as an fsspec URL, a data set of the Hugging Face
    # hub, or the URL of a database; see docs/data.md
    path: str = ""
    split: str = "train"  # of a data set that has several
    subset_name: Optional[str] = None  # of a data set that has several
    storage_options: dict[str, Any] = field(default_factory=dict)  # passed to fsspec
    query: Optional[str] = None  # of a database: a SELECT or a table; None = its only table
    format: FormatConfig = field(default_factory=FormatConfig)
    workflow: Optional[str] = None  # registered name, "module:Class" or "file.py:Class"
    reward_fn: Optional[str] = None  # registered name, "module:fn" or "file.py:fn"
    workflow_args: dict[str, Any] = field(default_factory=dict)  # passed to the workflow
    reward_fn_args: dict[str, Any] = field(default_factory=dict)  # passed to the reward function
    rollout_args: RolloutArgs = field(default_factory=RolloutArgs)
    data_selector: SelectorConfig = field(default_factory=SelectorConfig)
    repeat_times: Optional[int] = setting(None, ge=1)  # train: algorithm.repeat_times; eval: 1


@dataclass
class ExplorerInputConfig:
    taskset: TasksetConfig = field(default_factory=TasksetConfig)
    # several train tasksets, mixed by their sizes; then taskset stays empty
    tasksets: list[TasksetConfig] = field(default_factory=list)
    # tasks that are evaluated and never trained
    eval_tasksets: list[TasksetConfig] = field(default_factory=list)
    default_workflow: Optional[str] = "simple_workflow"  # of tasksets that name none
    default_reward_fn: Optional[str] = None  # of tasksets that name none

    @property
    def train_tasksets(self) -> list[TasksetConfig]:
        """``tasksets``, or the one ``taskset``."""
        return self.tasksets or [self.taskset]


@dataclass
class ReplayBufferConfig:
    """Rows by priority instead of first-in-first-out, and again after a pause."""

    enable: bool = False  # false: first in, first out, each row once
    priority_fn: str = "linear_decay"  # linear_decay | decay_limit_randomization | module:Class
    priority_fn_args: dict[str, Any] = field(default_factory=dict)  # over the function's defaults
    # seconds until a trained group may be drawn again; None = every group is drawn once
    reuse_cooldown_time_s: Optional[float] = setting(None, ge=0)
    # groups that wait; the least important one gives way
    capacity_groups: int = setting(10_000, ge=1)


@dataclass
class ExperienceBufferConfig:
    """Where experiences are kept between explorer and trainer."""

    name: str = "experience"  # part of its directory
    # store: Arrow on fsspec, from the explorer; file: SFT rows
    storage_type: str = setting("store", choices=("store", "file"))
    # store: fsspec URL, default <job>/buffer/<name>; file: the rows, as in a taskset
    path: Optional[str] = None
    storage_options: dict[str, Any] = field(default_factory=dict)  # passed to fsspec
    # of the store's files; None = none
    compression: Optional[str] = setting(None, choices=("lz4", "zstd"))
    # committed and not yet trained; the explorer waits beyond it
    capacity_batches: int = setting(64, ge=1)
    # how long the trainer waits for rows, and a batch for room, while neither moves on; None =
    # half an hour, or what a batch or a train step may take if that is longer
    max_read_timeout_s: Optional[float] = setting(None, gt=0)
    skip_corrupt: bool = False  # true: a damaged file is named, counted and skipped
    replay_buffer: ReplayBufferConfig = field(default_factory=ReplayBufferConfig)
    split: str = "train"  # of a data set that has several
    subset_name: Optional[str] = None  # of a data set that has several
    query: Optional[str] = None  # of a database: a SELECT or a table; None = its only table
    format: FormatConfig = field(default_factory=FormatConfig)
    data_selector: SelectorConfig = field(default_factory=SelectorConfig)


@dataclass
class TrainerInputConfig:
    experience_buffer: ExperienceBufferConfig = field(default_factory=ExperienceBufferConfig)
    # files of expert rows by name, for sample_strategy mix
    auxiliary_buffers: list[ExperienceBufferConfig] = field(default_factory=list)


@dataclass
class OperatorConfig:
    name: str = ""  # registered name, module:Class or file.py:Class
    args: dict[str, Any] = field(default_factory=dict)  # arguments of the operator


@dataclass
class BufferConfig:
    batch_size: int = setting(1, ge=1)  # tasks per explorer step
    # rows per train step; None = exactly what one explorer step committed
    train_batch_size: Optional[int] = setting(None, ge=1)
    # on resume: go on at the saved position in data that is not what it was; false refuses it
    accept_other_data: bool = False
    # passes over the train tasks, unless total_steps ends the run before
    total_epochs: int = setting(1, ge=1)
    # explorer steps (of a trainer alone: train steps); None = total_epochs
    total_steps: Optional[int] = setting(None, ge=1)
    explorer_input: ExplorerInputConfig = field(default_factory=ExplorerInputConfig)
    trainer_input: TrainerInputConfig = field(default_factory=TrainerInputConfig)
    operators: list[OperatorConfig] = field(default_factory=list)  # on every committed batch
    # further batches of tasks that may be rolled out to fill up one whose groups an operator has
    # dropped (dapo); 0 = train on what is left
    max_refill_batches: int = setting(0, ge=0)
