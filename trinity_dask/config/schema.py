"""Every configuration key, its type and its default, in one place.

Invariant: this module imports neither torch nor dask, and a key that is not a field
here does not exist. YAML presets in ``conf/`` only give values to these fields; ranges
and cross-field rules live in :mod:`trinity_dask.config.validation`.

Units are part of the name (``_s`` seconds, ``_tokens``, ``_bytes``, ``_mb``). ``None``
means "derived": validation fills it in, and the saved ``config.yaml`` shows the value.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional


@dataclass
class OptimizerConfig:
    """AdamW or SGD with warm-up and a named schedule."""

    optimizer_type: str = "adamw"  # adamw | sgd
    lr: float = 1e-6
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    weight_decay: float = 0.01
    lr_scheduler_type: str = "constant"  # constant | linear | cosine
    lr_warmup_steps: int = 0  # optimizer schedule counts train steps, not updates
    min_lr_ratio: float = 0.01  # floor of a decaying schedule, as a share of lr


@dataclass
class RolloutCorrectionConfig:
    """Importance correction for the gap between the sampler and the trainer."""

    mode: str = "none"  # none | token_tis
    cap: float = 2.0  # weight = min(exp(old_logprob - rollout_logprob), cap)


@dataclass
class AlgorithmConfig:
    """What is optimised. ``None`` fields take the algorithm type's own default."""

    algorithm_type: str = "grpo"  # grpo | sft
    repeat_times: Optional[int] = None  # samples per task (the group size)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    advantage_fn: Optional[str] = None
    advantage_fn_args: dict[str, Any] = field(default_factory=dict)
    policy_loss_fn: Optional[str] = None
    policy_loss_fn_args: dict[str, Any] = field(default_factory=dict)
    kl_loss_fn: Optional[str] = None
    kl_loss_fn_args: dict[str, Any] = field(default_factory=dict)
    entropy_loss_fn: Optional[str] = None
    entropy_loss_fn_args: dict[str, Any] = field(default_factory=dict)
    loss_agg_mode: Optional[str] = None  # token-mean | seq-mean-token-mean | seq-mean-token-sum
    # true: the sampler's log-probs are the "old" ones; false: the trainer recomputes them
    # with the weights it has at the start of the step.
    bypass_old_logprobs: bool = False
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)


@dataclass
class ModelConfig:
    """The policy: a Hugging Face model directory, and how it samples."""

    model_path: str = ""
    trust_remote_code: bool = False
    dtype: str = "float32"  # float32 | bfloat16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_model_len: Optional[int] = None  # prompt + response, tokens
    max_prompt_tokens: Optional[int] = None
    max_response_tokens: Optional[int] = None
    min_response_tokens: int = 0
    enable_prompt_truncation: bool = True


@dataclass
class GroupConfig:
    """One kind of worker: how many, and what each one has."""

    n_workers: int = 1
    nthreads: Optional[int] = None  # Dask threads; a rollout worker's task slots
    omp_threads: int = 1  # OpenMP/BLAS threads of each process
    gpus_per_worker: int = 0
    memory_limit: str = "0"  # Dask memory limit; 0 = none (never pause an engine)
    env: dict[str, str] = field(default_factory=dict)


@dataclass
class ClusterConfig:
    """Where the processes live."""

    type: str = "local"  # local | address
    address: Optional[str] = None  # scheduler address for type=address
    scheduler_port: int = 0  # 0 = any free port
    dashboard_address: Optional[str] = "127.0.0.1:0"  # None = no dashboard
    host: str = "127.0.0.1"
    start_timeout_s: float = 120.0
    local_directory: Optional[str] = None  # Dask scratch; None = a directory under the job
    control: GroupConfig = field(default_factory=lambda: GroupConfig(nthreads=8))
    rollout: GroupConfig = field(default_factory=lambda: GroupConfig(nthreads=256))
    trainer: GroupConfig = field(default_factory=lambda: GroupConfig(nthreads=4))
    runner: GroupConfig = field(default_factory=lambda: GroupConfig(n_workers=0, nthreads=1))


@dataclass
class FormatConfig:
    """How a data set row becomes a prompt, a truth, or a training example."""

    prompt_type: str = "plaintext"  # plaintext | messages
    prompt_key: str = "prompt"
    response_key: str = "response"
    messages_key: str = "messages"
    system_prompt: Optional[str] = None
    # false: the prompt text is tokenised as it is, without the chat template
    apply_chat_template: bool = True
    # append the end-of-sequence token to the response of a plaintext SFT row
    append_eos: bool = True


@dataclass
class SelectorConfig:
    """The order in which a taskset is read."""

    selector_type: str = "sequential"  # sequential | shuffle | random
    seed: int = 42


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
    eval_tasksets: list[TasksetConfig] = field(default_factory=list)
    default_workflow: Optional[str] = "simple_workflow"
    default_reward_fn: Optional[str] = None


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
    split: str = "train"
    format: FormatConfig = field(default_factory=FormatConfig)
    data_selector: SelectorConfig = field(default_factory=SelectorConfig)


@dataclass
class TrainerInputConfig:
    experience_buffer: ExperienceBufferConfig = field(default_factory=ExperienceBufferConfig)


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


@dataclass
class RolloutModelConfig:
    """The engine that samples. One engine per rollout worker."""

    engine_type: str = "vllm"  # vllm | torch | fake
    seed: int = 42
    dtype: Optional[str] = None  # None = model.dtype
    tensor_parallel_size: int = 1
    enforce_eager: bool = True
    enable_prefix_caching: bool = True
    gpu_memory_utilization: float = 0.9  # GPU only
    kv_cache_memory_bytes: int = 268_435_456  # CPU only
    max_num_seqs: int = 256  # sequences decoded together (vllm), or per batch (torch)
    prepare_timeout_s: float = 600.0
    request_timeout_s: float = 300.0
    extra_engine_args: dict[str, Any] = field(default_factory=dict)
    # fake engine only: seconds per request, drawn log-normally when sigma > 0
    fake_latency_s: float = 0.0
    fake_latency_sigma: float = 0.0


@dataclass
class ExplorerConfig:
    name: str = "explorer"
    rollout_model: RolloutModelConfig = field(default_factory=RolloutModelConfig)
    max_timeout_s: float = 1800.0  # one attempt of one sub-task
    batch_timeout_s: Optional[float] = None  # a whole batch; None = attempts x max_timeout_s + 60
    max_retry_times: int = 2
    max_repeat_times_per_runner: Optional[int] = None  # split a group into sub-tasks
    concurrent_mode: str = "asynchronous"  # sequential | asynchronous | multi-threading
    partial_group: str = "keep"  # keep | drop: a group in which some runs failed
    eval_interval: int = 10  # explorer steps; 0 = never
    eval_on_startup: bool = True
    eval_at_end: bool = True


@dataclass
class TrainerConfig:
    name: str = "trainer"
    total_steps: Optional[int] = None
    save_interval: int = 10  # train steps; 0 = only at the end
    save_hf_checkpoint: str = "last"  # always | last | never
    max_checkpoints_to_keep: int = 2  # 0 = all
    grad_clip: float = 1.0
    ppo_epochs: int = 1
    mini_batches: int = 1  # optimizer updates per epoch of one train step
    min_mini_batch_rows: int = 1  # fewer mini-batches rather than smaller ones
    micro_batch_tokens: int = 65_536  # padded tokens of one forward pass
    gradient_checkpointing: bool = False
    step_timeout_s: float = 1800.0
    max_empty_batches: int = 20  # consecutive batches without a row before the run stops
    max_rank_restarts: int = 3


@dataclass
class SynchronizerConfig:
    sync_method: str = "nccl"  # nccl (gloo on CPU) | memory | checkpoint
    sync_style: str = "fixed"
    sync_interval: int = 1
    sync_offset: int = 0
    sync_timeout_s: float = 600.0
    bucket_mb: int = 64
    probe_interval: int = 1  # compare fixed log-probs every k-th sync; 0 = never
    probe_tolerance: float = 1e-3


@dataclass
class MonitorConfig:
    sinks: list[str] = field(default_factory=lambda: ["console", "jsonl", "tensorboard"])
    sink_args: dict[str, Any] = field(default_factory=dict)  # {"wandb": {"entity": ...}}
    progress: str = "auto"  # auto | live | plain | off
    curves: bool = True  # write curves.png at the end


@dataclass
class Config:
    """The whole job. Section names follow Trinity-RFT."""

    mode: str = "both"  # both | train | explore
    project: str = "trinity-dask"
    group: str = ""
    name: str = "rft"
    checkpoint_root_dir: str = "./runs"
    continue_from_checkpoint: bool = True
    # true: once the newest run of this name is finished, the same command starts another one
    rerun_finished: bool = False
    seed: int = 42
    prepare: Optional[str] = None  # "module:fn" called with the config before the run; idempotent
    prepare_args: dict[str, Any] = field(default_factory=dict)
    plugin_dirs: list[str] = field(default_factory=list)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    buffer: BufferConfig = field(default_factory=BufferConfig)
    explorer: ExplorerConfig = field(default_factory=ExplorerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    synchronizer: SynchronizerConfig = field(default_factory=SynchronizerConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    stages: list[dict[str, Any]] = field(default_factory=list)
    # filled by validation; not set by users
    job_dir: Optional[str] = None
    stage_name: Optional[str] = None
