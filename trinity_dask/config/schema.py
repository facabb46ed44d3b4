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

from trinity_dask.config.schema_buffer import (
    BufferConfig,
    ExperienceBufferConfig,
    ExplorerInputConfig,
    FormatConfig,
    OperatorConfig,
    ReplayBufferConfig,
    RolloutArgs,
    SelectorConfig,
    TasksetConfig,
    TrainerInputConfig,
)

__all__ = [
    "AlgorithmConfig",
    "BufferConfig",
    "ClusterConfig",
    "Config",
    "CriticConfig",
    "DynamicTimeoutConfig",
    "ExperienceBufferConfig",
    "ExplorerConfig",
    "ExplorerInputConfig",
    "FormatConfig",
    "GroupConfig",
    "LoraConfig",
    "ModelConfig",
    "MonitorConfig",
    "OperatorConfig",
    "OptimizerConfig",
    "OverRolloutConfig",
    "ParallelConfig",
    "ReplayBufferConfig",
    "RolloutArgs",
    "RolloutCorrectionConfig",
    "RolloutModelConfig",
    "SelectorConfig",
    "SynchronizerConfig",
    "TasksetConfig",
    "TrainerConfig",
    "TrainerInputConfig",
]


@dataclass
class OptimizerConfig:
    """An optimizer with warm-up and a named schedule."""

    optimizer_type: str = "adamw"  # adamw | sgd | adamw8bit (needs bitsandbytes and a GPU)
    lr: float = 1e-6
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    momentum: float = 0.0  # sgd only
    weight_decay: float = 0.01
    lr_scheduler_type: str = "constant"  # constant | linear | cosine | wsd
    lr_warmup_steps: int = 0  # optimizer schedule counts train steps, not updates
    min_lr_ratio: float = 0.01  # floor of a decaying schedule, as a share of lr
    wsd_decay_ratio: float = 0.2  # wsd: the last share of the steps, in which lr falls linearly


@dataclass
class RolloutCorrectionConfig:
    """Importance correction for the gap between the sampler and the trainer."""

    # w = exp(old_logprob - rollout_logprob). *_tis: weight moved into [floor, cap]; *_mask:
    # dropped outside. token: each token's own w; sequence: product; geometric: its mean
    mode: str = "none"
    cap: float = 2.0
    floor: Optional[float] = None  # None: 1/cap for token_mask, no bound otherwise
    sequence_filter: str = "none"  # drop answers whose product or geometric mean of w is
    filter_low: float = 0.99  # below this
    filter_high: float = 1.01  # or above this
    # drop tokens whose probability moved by more than this in the advantage's direction
    # (DPPO; 0.2 is usual); None: off
    dppo_delta: Optional[float] = None


@dataclass
class AlgorithmConfig:
    """What is optimised. ``None`` fields take the algorithm type's own default."""

    algorithm_type: str = "grpo"  # docs/algorithms.md
    repeat_times: Optional[int] = None  # samples per task (the group size)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    advantage_fn: Optional[str] = None
    advantage_fn_args: dict[str, Any] = field(default_factory=dict)
    policy_loss_fn: Optional[str] = None
    policy_loss_fn_args: dict[str, Any] = field(default_factory=dict)
    kl_penalty_fn: Optional[str] = None  # in the reward; for advantages of the trainer
    kl_penalty_fn_args: dict[str, Any] = field(default_factory=dict)
    kl_loss_fn: Optional[str] = None  # a term of the loss
    kl_loss_fn_args: dict[str, Any] = field(default_factory=dict)
    entropy_loss_fn: Optional[str] = None
    entropy_loss_fn_args: dict[str, Any] = field(default_factory=dict)
    # how rows of a step are drawn: default | staleness_control | mix
    sample_strategy: Optional[str] = None
    sample_strategy_args: dict[str, Any] = field(default_factory=dict)
    loss_agg_mode: Optional[str] = None  # None: the algorithm's, mostly token-mean
    # true: the sampler's log-probs are the "old" ones; false: the trainer recomputes them
    # with the weights it has at the start of the step.
    bypass_old_logprobs: bool = False
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)


@dataclass
class LoraConfig:
    """A low-rank adapter (arXiv 2106.09685); with ``rank`` > 0 nothing else is trained."""

    rank: int = 0  # 0 = train the whole model; vLLM serves 8, 16, 32, 64, 128, 256, 320, 512
    alpha: float = 32.0  # the adapter is scaled by alpha / rank
    # module names, or all-linear: every linear layer but the output head
    target_modules: list[str] = field(default_factory=lambda: ["all-linear"])
    exclude_modules: list[str] = field(default_factory=list)
    path: Optional[str] = None  # a peft adapter directory to start from; None = a new one
    merge_export: bool = False  # true: huggingface/ is a whole model, false: the adapter


@dataclass
class ModelConfig:
    """The policy: a Hugging Face model directory, and how it samples."""

    model_path: str = ""
    # frozen teacher of on_policy_distill and jsd, run by the trainer; "" = rows carry
    # teacher_logprobs already
    teacher_model_path: str = ""
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
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass
class GroupConfig:
    """One kind of worker: how many, and what each one has."""

    n_workers: int = 1
    nthreads: Optional[int] = None  # Dask threads; a rollout worker's task slots
    omp_threads: int = 1  # OpenMP/BLAS threads of each process
    gpus_per_worker: int = 0
    memory_limit: str = "0"  # Dask memory limit; 0 = none (never pause an engine)
    env: dict[str, str] = field(default_factory=dict)
    # which of a shared cluster's slots this run has; filled in when it joins other runs
    first_index: Optional[int] = None


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
class RolloutModelConfig:
    """The engine that samples. One engine per rollout worker."""

    engine_type: str = "vllm"  # vllm | torch | fake
    seed: int = 42
    dtype: Optional[str] = None  # None = model.dtype
    tensor_parallel_size: int = 1
    enforce_eager: bool = True
    enable_prefix_caching: bool = True
    gpu_memory_utilization: Optional[float] = None  # GPU only; None = 0.9, colocate: 0.25
    kv_cache_memory_bytes: int = 268_435_456  # CPU only
    max_num_seqs: int = 256  # sequences decoded together (vllm), or per batch (torch)
    prepare_timeout_s: float = 600.0
    request_timeout_s: float = 300.0
    enable_history: bool = False  # a run's model keeps all it sampled, for multi-turn workflows
    # each request is sampled from a seed of its own (made from seed, batch, task and run), and by
    # the torch engine alone in its batch: a run's answers depend on no timing, but come slowly
    deterministic: bool = False
    extra_engine_args: dict[str, Any] = field(default_factory=dict)
    # fake engine only: seconds per request, drawn log-normally when sigma > 0
    fake_latency_s: float = 0.0
    fake_latency_sigma: float = 0.0
    fake_first_latency_s: float = 0.0  # fake engine only: more for the first request, as a compile


@dataclass
class OverRolloutConfig:
    """Go on with most of a batch instead of waiting for its slowest tasks."""

    # share of a train batch's tasks that may be missing; 0 = wait for all of them
    ratio: float = 0.0
    wait_after_min_s: float = 30.0  # how long the rest may still come in, once enough are there
    # tasks that are cut off with some runs finished count with those runs
    return_partial_tasks: bool = True


@dataclass
class DynamicTimeoutConfig:
    """Shorten ``max_timeout_s`` to a multiple of what a training sub-task usually takes."""

    enable: bool = False
    ratio: float = 3.0  # times the mean seconds of a finished training sub-task
    warmup_min_steps: int = 1  # train batches to be complete before it applies


@dataclass
class ExplorerConfig:
    name: str = "explorer"
    rollout_model: RolloutModelConfig = field(default_factory=RolloutModelConfig)
    max_timeout_s: float = 1800.0  # one attempt of one sub-task
    batch_timeout_s: Optional[float] = None  # a whole batch; None = attempts x max_timeout_s + 60
    max_retry_times: int = 2
    max_repeat_times_per_runner: Optional[int] = None  # split a group into sub-tasks
    concurrent_mode: str = "asynchronous"  # sequential | asynchronous | multi-threading
    runner_state_report_interval_s: float = 5.0  # what workflows report of themselves; 0 = off
    # workers that run workflows: auto | rollout | runner. auto: blocking (not async) ones on
    # runner workers where cluster.runner has some, everything else beside its engine
    run_on: str = "auto"
    # a group in which some runs failed: keep the others | replace the failed ones by new runs, as
    # long as attempts are left | drop all of it
    partial_group: str = "keep"
    over_rollout: OverRolloutConfig = field(default_factory=OverRolloutConfig)
    dynamic_timeout: DynamicTimeoutConfig = field(default_factory=DynamicTimeoutConfig)
    max_inflight_batches: int = 2  # submitted and not yet committed
    eval_interval: int = 10  # explorer steps; 0 = never
    eval_on_startup: bool = True
    eval_at_end: bool = True
    bench_on_latest_checkpoint: bool = False  # bench: the newest checkpoint only


@dataclass
class ParallelConfig:
    """How the trainer's ranks share a model."""

    # ddp: every rank has all of it; fsdp2: each rank keeps a shard of every tensor
    strategy: str = "ddp"
    # fsdp2: true frees a layer's gathered weights after its forward pass and gathers them
    # again for the backward pass (least memory); false keeps them (less communication)
    reshard_after_forward: bool = True


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
    # answers to one prompt share the prompt's forward and backward pass, where the model allows
    share_prompts: bool = True
    gradient_checkpointing: bool = False
    # weights and optimizer state wait in CPU memory between train steps (GPU only)
    offload: bool = False
    # float32 logits of more than this many MB are computed in parts, and again for the
    # gradient, so that they are never all in memory; 0 = always in parts
    logits_mb: int = 256
    # auto: kernels of liger-kernel where it is installed and the device is a GPU; off: torch's
    fused_kernels: str = "auto"
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    # of reference and teacher: ddp | fsdp2, and offload; None = as the policy
    frozen_strategy: Optional[str] = None
    frozen_offload: Optional[bool] = None
    # metrics variance_proxy/*: how much of the gradient is noise, for one more pass over all
    # logits per step
    variance_proxies: bool = False
    # TFLOP/s that one rank's device can do at most, for perf/mfu/actor; None = that of common
    # GPUs with model.dtype=bfloat16, else unknown
    peak_tflops: Optional[float] = None
    step_timeout_s: float = 1800.0
    max_empty_batches: int = 20  # consecutive batches without a row before the run stops
    max_rank_restarts: int = 3


@dataclass
class CriticConfig:
    """The value model of ``ppo``; used only by algorithms that have a critic."""

    model_path: str = ""  # a critic's or a causal model's directory; "" = model.model_path
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    warmup_steps: int = 0  # train steps in which the critic learns and the policy stands still
    epochs: int = 1  # passes over the rows of a train step
    mini_batches: int = 1  # optimizer updates per epoch
    value_clip: Optional[float] = 0.5  # how far a value may move in a step; None = freely
    grad_clip: float = 1.0
    strategy: Optional[str] = None  # ddp | fsdp2; None = trainer.parallel.strategy
    offload: Optional[bool] = None  # None = trainer.offload


@dataclass
class SynchronizerConfig:
    sync_method: str = "nccl"  # nccl (gloo on CPU) | memory | checkpoint
    # who decides when weights move: fixed | trainer_driven | explorer_driven | fully_async
    sync_style: str = "fixed"
    sync_interval: int = 1  # steps from one sync point to the next, on either side
    sync_offset: int = 0  # batches the explorer may be ahead of the trainer (fixed)
    # train steps between the sampling of a token and its training: batches are begun only when
    # they will be young enough, with one train step per batch; None = any age
    max_staleness: Optional[int] = None
    sync_timeout_s: float = 600.0
    # mode explore or train: how long to wait for the other side to join under this run's name;
    # 0 = alone. None = sync_timeout_s with cluster.type=address, else 0
    peer_timeout_s: Optional[float] = None
    # method checkpoint: directory or fsspec URL (s3://...) for the weights; None = <job>/weights
    path: Optional[str] = None
    storage_options: dict[str, Any] = field(default_factory=dict)  # passed to fsspec
    bucket_mb: int = 8  # weights travel in pieces of this size (nccl)
    # what an update does to requests that are being sampled: keep (they go on with the new
    # weights) | wait (it waits until they have ended) | abort (they are sampled again)
    in_flight: str = "keep"
    in_flight_timeout_s: float = 60.0  # wait: for how long; then those that are left are aborted
    probe_interval: int = 1  # compare fixed log-probs every k-th sync; 0 = never
    probe_tolerance: float = 1e-3


@dataclass
class MonitorConfig:
    sinks: list[str] = field(default_factory=lambda: ["console", "jsonl", "tensorboard"])
    sink_args: dict[str, Any] = field(default_factory=dict)  # {"wandb": {"entity": ...}}
    progress: str = "auto"  # auto | live | plain | off
    curves: bool = True  # write curves.png at the end
    detailed_stats: bool = False  # eval metrics with mean, max, min and std over the tasks


@dataclass
class Config:
    """The whole job. Section names follow Trinity-RFT."""

    mode: str = "both"  # both | explore | train | bench | colocate | serve (not yet)
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
    critic: CriticConfig = field(default_factory=CriticConfig)
    synchronizer: SynchronizerConfig = field(default_factory=SynchronizerConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    stages: list[dict[str, Any]] = field(default_factory=list)
    # filled by validation; not set by users
    job_dir: Optional[str] = None
    stage_name: Optional[str] = None
