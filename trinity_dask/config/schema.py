"""Every configuration key, its type, default, limits and meaning, in one place.

Invariant: this module imports neither torch nor dask, and a key that is not a field
here does not exist. YAML presets in ``conf/`` only give values to these fields; rules
between fields are in :mod:`trinity_dask.config.checks`.

Units are part of the name (``_s`` seconds, ``_tokens``, ``_bytes``, ``_mb``). ``None``
means "derived": validation fills it in, and the saved ``config.yaml`` shows the value.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from trinity_dask.config.algorithms import ALGORITHM_TYPES
from trinity_dask.config.fields import setting
from trinity_dask.config.modes import MODES
from trinity_dask.config.schema_buffer import (
    MAX_SEED,
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

DTYPES = ("float32", "bfloat16")
STRATEGIES = ("ddp", "fsdp2")
ATTENTIONS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
# Dask threads of a worker of each group where nthreads is None
DEFAULT_THREADS = {"control": 8, "rollout": 256, "trainer": 4, "runner": 1}
SINKS = ("console", "jsonl", "tensorboard", "wandb", "mlflow")
#: filled by resolve; refused as an override
DERIVED = ("job_dir", "stage_name")
#: what a stage may change besides its name; the cluster and the names belong to the run
STAGE_KEYS = (
    "stage_name",
    "mode",
    "seed",
    "algorithm",
    "model",
    "buffer",
    "explorer",
    "trainer",
    "synchronizer",
)


@dataclass
class OptimizerConfig:
    """An optimizer with warm-up and a named schedule."""

    # adamw8bit needs bitsandbytes and a GPU
    optimizer_type: str = setting("adamw", choices=("adamw", "sgd", "adamw8bit"))
    lr: float = setting(1e-6, ge=0)  # learning rate at its highest; 0 = nothing moves
    # adamw and adamw8bit: decay of the two moments
    betas: list[float] = setting(lambda: [0.9, 0.999], ge=0, lt=1)
    eps: float = setting(1e-8, gt=0)  # adamw and adamw8bit: added to the root of the second moment
    momentum: float = setting(0.0, ge=0, lt=1)  # sgd only
    weight_decay: float = setting(0.01, ge=0)  # decoupled, times the learning rate
    # after the warm-up: stay, fall to min_lr_ratio linearly or as a cosine, or stay and fall at
    # the end (wsd)
    lr_scheduler_type: str = setting("constant", choices=("constant", "linear", "cosine", "wsd"))
    lr_warmup_steps: int = setting(0, ge=0)  # optimizer schedule counts train steps, not updates
    # floor of a decaying schedule, as a share of lr
    min_lr_ratio: float = setting(0.01, ge=0, le=1)
    # wsd: the last share of the steps, in which lr falls linearly
    wsd_decay_ratio: float = setting(0.2, gt=0, le=1)


@dataclass
class RolloutCorrectionConfig:
    """Importance correction for the gap between the sampler and the trainer."""

    # w = exp(old_logprob - rollout_logprob). *_tis: weight moved into [floor, cap]; *_mask:
    # dropped outside. token: each token's own w; sequence: product; geometric: its mean
    mode: str = setting(
        "none",
        choices=(
            "none",
            "token_tis",
            "token_mask",
            "sequence_tis",
            "sequence_mask",
            "geometric_tis",
            "geometric_mask",
        ),
    )
    cap: float = setting(2.0, gt=0)  # upper bound of w
    # lower bound of w; None = 1/cap for token_mask, none otherwise
    floor: Optional[float] = setting(None, ge=0)
    # drop answers whose product or geometric mean of w is out of bounds
    sequence_filter: str = setting("none", choices=("none", "product", "geometric"))
    filter_low: float = setting(0.99, ge=0)  # lower bound of sequence_filter
    filter_high: float = setting(1.01, ge=0)  # upper bound of sequence_filter
    # drop tokens whose probability moved by more than this in the advantage's direction (DPPO;
    # 0.2 is usual); None: off
    dppo_delta: Optional[float] = setting(None, gt=0, le=1)


@dataclass
class AlgorithmConfig:
    """What is optimised. ``None`` fields take the algorithm type's own default."""

    algorithm_type: str = setting("grpo", choices=ALGORITHM_TYPES)  # docs/algorithms.md
    repeat_times: Optional[int] = setting(None, ge=1)  # samples per task (the group size)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    # how rewards become advantages: registered name, module:Class or file.py:Class
    advantage_fn: Optional[str] = None
    advantage_fn_args: dict[str, Any] = field(default_factory=dict)  # over the function's defaults
    policy_loss_fn: Optional[str] = None  # the loss: registered name, module:Class or file.py:Class
    # over the function's defaults
    policy_loss_fn_args: dict[str, Any] = field(default_factory=dict)
    kl_penalty_fn: Optional[str] = None  # in the reward; for advantages of the trainer
    kl_penalty_fn_args: dict[str, Any] = field(default_factory=dict)  # over the function's defaults
    kl_loss_fn: Optional[str] = None  # a term of the loss
    kl_loss_fn_args: dict[str, Any] = field(default_factory=dict)  # over the function's defaults
    entropy_loss_fn: Optional[str] = None  # a term of the loss
    # over the function's defaults
    entropy_loss_fn_args: dict[str, Any] = field(default_factory=dict)
    # how rows of a step are drawn: default | staleness_control | mix
    sample_strategy: Optional[str] = None
    # over the strategy's defaults
    sample_strategy_args: dict[str, Any] = field(default_factory=dict)
    # None: the algorithm's, mostly token-mean
    loss_agg_mode: Optional[str] = setting(
        None,
        choices=(
            "token-mean",
            "seq-mean-token-mean",
            "seq-mean-token-sum",
            "seq-mean-token-sum-norm",
            "dr-grpo",
        ),
    )
    # true: the sampler's log-probs are the "old" ones; false: the trainer recomputes them with
    # the weights it has at the start of the step.
    bypass_old_logprobs: bool = False
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)


@dataclass
class LoraConfig:
    """A low-rank adapter (arXiv 2106.09685); with ``rank`` > 0 nothing else is trained."""

    # 0 = train the whole model; vLLM serves 8, 16, 32, 64, 128, 256, 320, 512
    rank: int = setting(0, ge=0)
    alpha: float = setting(32.0, gt=0)  # the adapter is scaled by alpha / rank
    # module names, or all-linear: every linear layer but the output head
    target_modules: list[str] = field(default_factory=lambda: ["all-linear"])
    # module names that target_modules leaves out
    exclude_modules: list[str] = field(default_factory=list)
    path: Optional[str] = None  # a peft adapter directory to start from; None = a new one
    merge_export: bool = False  # true: huggingface/ is a whole model, false: the adapter


@dataclass
class ModelConfig:
    """The policy: a Hugging Face model directory, and how it samples."""

    model_path: str = ""  # directory of the model to train
    # frozen teacher of on_policy_distill and jsd, run by the trainer; "" = rows carry
    # teacher_logprobs already
    teacher_model_path: str = ""
    trust_remote_code: bool = False  # run code that the model's directory brings along
    # attention of the trainer's models and of the torch engine; None = sdpa, or eager where the
    # architecture needs it. flash_* and flex need a GPU and their packages
    attn_implementation: Optional[str] = setting(None, choices=ATTENTIONS)
    # of the engines' weights and of the trainer's forward passes; the trainer's own weights are
    # float32
    dtype: str = setting("float32", choices=DTYPES)
    # of sampling, and of the log-probs that are trained; 0 = greedy
    temperature: float = setting(1.0, ge=0)
    # sample from the likeliest tokens of this mass; 1 = from all
    top_p: float = setting(1.0, gt=0, le=1)
    top_k: int = setting(-1, ge=1, also=-1)  # sample from so many likeliest tokens; -1 = from all
    max_model_len: Optional[int] = setting(None, ge=2)  # prompt + response, tokens
    # longer prompts are cut or refused (enable_prompt_truncation)
    max_prompt_tokens: Optional[int] = setting(None, ge=1)
    max_response_tokens: Optional[int] = setting(None, ge=1)  # of one answer
    min_response_tokens: int = setting(0, ge=0)  # no end of an answer before so many tokens
    # a prompt that is too long: true cuts it, false fails its run
    enable_prompt_truncation: bool = True
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass
class GroupConfig:
    """One kind of worker: how many, and what each one has."""

    n_workers: int = setting(1, ge=0)  # processes of this kind
    nthreads: Optional[int] = setting(None, ge=1)  # Dask threads; a rollout worker's task slots
    omp_threads: int = setting(1, ge=1)  # OpenMP/BLAS threads of each process
    gpus_per_worker: int = setting(0, ge=0)  # GPUs of each; 0 = it computes on the CPU
    memory_limit: str = "0"  # a process beyond it is ended, named, and started again; 0 = none
    env: dict[str, str] = field(default_factory=dict)  # environment variables of the processes
    # which of a shared cluster's slots this run has; filled in when it joins other runs
    first_index: Optional[int] = setting(None, ge=0)
    # slurm: cores of the job of each worker; None = omp_threads
    cpus: Optional[int] = setting(None, ge=1)
    mem: Optional[str] = None  # slurm: memory of the job, as 32G; None = what the site gives
    gres: Optional[str] = None  # slurm: as gpu:a100:1; None = gpu:<gpus_per_worker>
    partition: Optional[str] = None  # slurm: None = cluster.partition
    walltime: Optional[str] = None  # slurm: as 4:00:00; None = cluster.walltime
    # slurm: more options of sbatch (or of srun, in an allocation), as --constraint=a100
    directives: list[str] = field(default_factory=list)


@dataclass
class ClusterConfig:
    """Where the processes live."""

    # processes on this machine, those of a running scheduler, or jobs of Slurm
    type: str = setting("local", choices=("local", "address", "slurm"))
    address: Optional[str] = None  # scheduler address for type=address
    scheduler_port: int = setting(0, ge=0, le=65535)  # 0 = any free port
    dashboard_address: Optional[str] = "127.0.0.1:0"  # None = no dashboard
    # beside the dashboard itself, pages of which host:port may open its websockets; * = all
    dashboard_origins: list[str] = field(default_factory=list)
    # address the scheduler and the workers of this machine listen on; auto = this machine's own
    host: str = "127.0.0.1"
    start_timeout_s: float = setting(120.0, gt=0)  # until all workers are there
    # a run whose driver is gone saves its state and ends so long after it was last asked for; None
    # = never. For schedulers that were started apart: elsewhere the workers end with the driver
    orphan_after_s: Optional[float] = setting(86400.0, gt=0)
    local_directory: Optional[str] = None  # Dask scratch; None = a directory under the job
    # network interface of all traffic, as ib0; None = the one on the way to the scheduler
    interface: Optional[str] = None
    # encrypted, and only for holders of the run's own certificate; slurm only. None = unless the
    # scheduler listens on the loopback alone
    tls: Optional[bool] = None
    # slurm: a job for each worker (login), or a step of the allocation this runs in; auto = as
    # this process is in an allocation or not; tasks = all processes are those of one srun
    where: str = setting("auto", choices=("auto", "login", "allocation", "tasks"))
    partition: Optional[str] = None  # slurm: of all groups that name none; None = the site's
    account: Optional[str] = None  # slurm: who pays
    qos: Optional[str] = None  # slurm: quality of service
    walltime: Optional[str] = None  # slurm: of each job, as 4:00:00; None = the partition's
    prologue: list[str] = field(default_factory=list)  # slurm: shell lines before each command
    # slurm: more options of sbatch for all jobs (or of srun, in an allocation)
    directives: list[str] = field(default_factory=list)
    # slurm: so long before the end of its job a process is told to save and leave; at most a
    # quarter of the job's walltime
    signal_lead_s: float = setting(300.0, gt=0)
    # slurm: how long a job may wait in the queue; None = for ever. start_timeout_s counts from
    # the moment a job runs
    pending_timeout_s: Optional[float] = setting(None, gt=0)
    # slurm: how often the job of a worker that was lost is submitted again
    max_resubmits: int = setting(3, ge=0)
    # the launcher, the explorer, the buffer and the synchronizer
    control: GroupConfig = field(
        default_factory=lambda: GroupConfig(nthreads=DEFAULT_THREADS["control"])
    )
    rollout: GroupConfig = field(
        default_factory=lambda: GroupConfig(nthreads=DEFAULT_THREADS["rollout"])
    )
    trainer: GroupConfig = field(
        default_factory=lambda: GroupConfig(nthreads=DEFAULT_THREADS["trainer"])
    )
    runner: GroupConfig = field(
        default_factory=lambda: GroupConfig(n_workers=0, nthreads=DEFAULT_THREADS["runner"])
    )
    # slurm: the job in which `trinity-dask submit` has the driver; its job options count only
    driver: GroupConfig = field(default_factory=lambda: GroupConfig(nthreads=1))


@dataclass
class RolloutModelConfig:
    """The engine that samples. One engine per rollout worker."""

    # vllm, torch (the embedded sampler), fake (made-up answers for tests), or your own: a
    # registered name or a path ("engine.py:MyEngine")
    engine_type: str = "vllm"
    seed: int = setting(42, ge=0, le=MAX_SEED)  # of the sampler
    dtype: Optional[str] = setting(None, choices=DTYPES)  # None = model.dtype
    tensor_parallel_size: int = setting(1, ge=1)  # GPUs that share one engine (vllm)
    # vllm: no compilation and no CUDA graphs; starts sooner, samples slower
    enforce_eager: bool = True
    enable_prefix_caching: bool = True  # vllm: prompts that begin alike are computed once
    # GPU only; None = 0.9, colocate: 0.25
    gpu_memory_utilization: Optional[float] = setting(None, gt=0, le=1)
    kv_cache_memory_bytes: int = setting(268_435_456, ge=1 << 20)  # CPU only
    # sequences decoded together (vllm), or per batch (torch)
    max_num_seqs: int = setting(256, ge=1)
    prepare_timeout_s: float = setting(600.0, gt=0)  # until an engine has loaded its model
    # in which a request to the engine is neither begun nor goes on, and nothing that waits
    # before it is answered; then it fails its run. The time in the engine's queue does not count
    request_timeout_s: float = setting(300.0, gt=0)
    enable_history: bool = False  # a run's model keeps all it sampled, for multi-turn workflows
    # each request is sampled from a seed of its own (made from seed, batch, task and run), and by
    # the torch engine alone in its batch: a run's answers depend on no timing, but come slowly
    deterministic: bool = False
    # vllm: passed to the engine as they are
    extra_engine_args: dict[str, Any] = field(default_factory=dict)
    # fake engine only: seconds per request, drawn log-normally when sigma > 0
    fake_latency_s: float = setting(0.0, ge=0)
    # fake engine only: spread of the logarithm of the seconds
    fake_latency_sigma: float = setting(0.0, ge=0)
    # fake engine only: more for the first request, as a compile
    fake_first_latency_s: float = setting(0.0, ge=0)


@dataclass
class OverRolloutConfig:
    """Go on with most of a batch instead of waiting for its slowest tasks."""

    # share of a train batch's tasks that may be missing; 0 = wait for all of them
    ratio: float = setting(0.0, ge=0, lt=1)
    # how long the rest may still come in, once enough are there
    wait_after_min_s: float = setting(30.0, ge=0)
    # tasks that are cut off with some runs finished count with those runs
    return_partial_tasks: bool = True


@dataclass
class DynamicTimeoutConfig:
    """Shorten ``max_timeout_s`` to a multiple of what a training sub-task usually takes."""

    enable: bool = False  # false: max_timeout_s holds as it is
    ratio: float = setting(3.0, gt=1)  # times the mean seconds of a finished training sub-task
    warmup_min_steps: int = setting(1, ge=1)  # train batches to be complete before it applies


@dataclass
class ExplorerConfig:
    name: str = "explorer"  # names its files and metrics; explorers of one job differ in it
    rollout_model: RolloutModelConfig = field(default_factory=RolloutModelConfig)
    max_timeout_s: float = setting(1800.0, gt=0)  # one attempt of one sub-task
    # a whole batch; None = attempts x max_timeout_s + 60
    batch_timeout_s: Optional[float] = setting(None, gt=0)
    max_retry_times: int = setting(2, ge=0)  # further attempts of a sub-task that failed
    max_repeat_times_per_runner: Optional[int] = setting(None, ge=1)  # split a group into sub-tasks
    # how the runs of one sub-task follow each other
    concurrent_mode: str = setting(
        "asynchronous", choices=("sequential", "asynchronous", "multi-threading")
    )
    # what workflows report of themselves; 0 = off
    runner_state_report_interval_s: float = setting(5.0, ge=0)
    # workers that run workflows: auto | rollout | runner. auto: blocking (not async) ones on
    # runner workers where cluster.runner has some, everything else beside its engine
    run_on: str = setting("auto", choices=("auto", "rollout", "runner"))
    # a group in which some runs failed: keep the others | replace the failed ones by new runs, as
    # long as attempts are left | drop all of it
    partial_group: str = setting("keep", choices=("keep", "replace", "drop"))
    over_rollout: OverRolloutConfig = field(default_factory=OverRolloutConfig)
    dynamic_timeout: DynamicTimeoutConfig = field(default_factory=DynamicTimeoutConfig)
    max_inflight_batches: int = setting(2, ge=1)  # submitted and not yet committed
    eval_interval: int = setting(10, ge=0)  # explorer steps; 0 = never
    eval_on_startup: bool = True  # evaluate before the first step
    eval_at_end: bool = True  # evaluate the last weights
    bench_on_latest_checkpoint: bool = False  # bench: the newest checkpoint only

    @property
    def longest_batch_s(self) -> float:
        """What a batch takes at most where ``batch_timeout_s`` does not say it."""
        return (self.max_retry_times + 1) * self.max_timeout_s + 60.0


@dataclass
class ParallelConfig:
    """How the trainer's ranks share a model."""

    # ddp: every rank has all of it; fsdp2: each rank keeps a shard of every tensor
    strategy: str = setting("ddp", choices=STRATEGIES)
    # fsdp2: true frees a layer's gathered weights after its forward pass and gathers them again
    # for the backward pass (least memory); false keeps them (less communication)
    reshard_after_forward: bool = True


@dataclass
class TrainerConfig:
    name: str = "trainer"  # names its files and metrics
    # train steps; None = until the explorer ends (alone: buffer.total_steps)
    total_steps: Optional[int] = setting(None, ge=1)
    save_interval: int = setting(10, ge=0)  # train steps; 0 = only at the end
    # Hugging Face exports: with every checkpoint, with the last one, or none
    save_hf_checkpoint: str = setting("last", choices=("always", "last", "never"))
    max_checkpoints_to_keep: int = setting(2, ge=0)  # 0 = all
    grad_clip: float = setting(1.0, ge=0)  # largest norm of the gradient; 0 = not clipped
    ppo_epochs: int = setting(1, ge=1)  # passes over the rows of a train step
    mini_batches: int = setting(1, ge=1)  # optimizer updates per epoch of one train step
    min_mini_batch_rows: int = setting(1, ge=1)  # fewer mini-batches rather than smaller ones
    micro_batch_tokens: int = setting(65_536, ge=1)  # padded tokens of one forward pass
    # answers to one prompt share the prompt's forward and backward pass, where the model allows
    share_prompts: bool = True
    # compute activations again in the backward pass, for less memory
    gradient_checkpointing: bool = False
    # weights and optimizer state wait in CPU memory between train steps (GPU only)
    offload: bool = False
    # float32 logits of more than this many MB are computed in parts, and again for the gradient,
    # so that they are never all in memory; 0 = always in parts
    logits_mb: int = setting(256, ge=0)
    # auto: kernels of liger-kernel where it is installed and the device is a GPU; off: torch's
    fused_kernels: str = setting("auto", choices=("auto", "off"))
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    # of reference and teacher; None = as the policy
    frozen_strategy: Optional[str] = setting(None, choices=STRATEGIES)
    # of reference and teacher: weights wait in CPU memory between steps; None = as the policy
    frozen_offload: Optional[bool] = None
    # metrics variance_proxy/*: how much of the gradient is noise, for one more pass over all
    # logits per step
    variance_proxies: bool = False
    # TFLOP/s that one rank's device can do at most, for perf/mfu/actor; None = that of common
    # GPUs with model.dtype=bfloat16, else unknown
    peak_tflops: Optional[float] = setting(None, gt=0)
    # one train step of a rank; then it counts as lost
    step_timeout_s: float = setting(1800.0, gt=0)
    # consecutive batches without a row before the run stops
    max_empty_batches: int = setting(20, ge=1)
    # times that lost ranks are started again from the last checkpoint
    max_rank_restarts: int = setting(3, ge=0)


@dataclass
class CriticConfig:
    """The value model of ``ppo``; used only by algorithms that have a critic."""

    model_path: str = ""  # a critic's or a causal model's directory; "" = model.model_path
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    # train steps in which the critic learns and the policy stands still
    warmup_steps: int = setting(0, ge=0)
    epochs: int = setting(1, ge=1)  # passes over the rows of a train step
    mini_batches: int = setting(1, ge=1)  # optimizer updates per epoch
    # how far a value may move in a step; None = freely
    value_clip: Optional[float] = setting(0.5, gt=0)
    grad_clip: float = setting(1.0, ge=0)  # largest norm of the critic's gradient; 0 = not clipped
    strategy: Optional[str] = setting(None, choices=STRATEGIES)  # None = trainer.parallel.strategy
    offload: Optional[bool] = None  # None = trainer.offload


@dataclass
class SynchronizerConfig:
    # nccl is gloo on CPU
    sync_method: str = setting(
        "nccl",
        choices=("nccl", "memory", "checkpoint"),
        aliases={"online": "nccl", "offline": "checkpoint"},
    )
    # who decides when weights move
    sync_style: str = setting(
        "fixed",
        choices=("fixed", "trainer_driven", "explorer_driven", "fully_async"),
        aliases={"dynamic_by_trainer": "trainer_driven", "dynamic_by_explorer": "explorer_driven"},
    )
    sync_interval: int = setting(1, ge=1)  # steps from one sync point to the next, on either side
    sync_offset: int = setting(0, ge=0)  # batches the explorer may be ahead of the trainer (fixed)
    # train steps between the sampling of a token and its training: batches are begun only when
    # they will be young enough, with one train step per batch; None = any age
    max_staleness: Optional[int] = setting(None, ge=0)
    # longest time for one transfer of the weights, and for an answer of the other side
    sync_timeout_s: float = setting(600.0, gt=0)
    # longest wait at a sync point in which neither side moves on by a step, a batch or a version;
    # None = sync_timeout_s and what they may take for that: a batch and an evaluation
    # (explorer.batch_timeout_s each) or a step (trainer.step_timeout_s)
    meet_timeout_s: Optional[float] = setting(None, gt=0)
    # mode explore or train: how long to wait for the other side to join under this run's name; 0
    # = alone. None = sync_timeout_s with cluster.type=address, else 0
    peer_timeout_s: Optional[float] = setting(None, ge=0)
    # method checkpoint: directory or fsspec URL (s3://...) for the weights; None = <job>/weights
    path: Optional[str] = None
    storage_options: dict[str, Any] = field(default_factory=dict)  # passed to fsspec
    bucket_mb: int = setting(8, ge=1, le=2047)  # weights travel in pieces of this size (nccl)
    # what an update does to requests that are being sampled: keep (they go on with the new
    # weights) | wait (it waits until they have ended) | abort (they are sampled again)
    in_flight: str = setting("keep", choices=("keep", "wait", "abort"))
    # wait: for how long; then those that are left are aborted
    in_flight_timeout_s: float = setting(60.0, gt=0)
    # compare fixed log-probs at the first and every k-th sync; 0 = at the first only
    probe_interval: int = setting(1, ge=0)
    # largest difference of a probed log-prob; 0 = none
    probe_tolerance: float = setting(1e-3, ge=0)


@dataclass
class MonitorConfig:
    # where metrics go: console, jsonl, tensorboard, wandb, mlflow, or module:Class
    sinks: list[str] = field(default_factory=lambda: ["console", "jsonl", "tensorboard"])
    sink_args: dict[str, Any] = field(default_factory=dict)  # {"wandb": {"entity": ...}}
    # what the command shows: a live display, plain lines, nothing; auto: live on a terminal
    progress: str = setting("auto", choices=("auto", "live", "plain", "off"))
    curves: bool = True  # write curves.png at the end
    detailed_stats: bool = False  # eval metrics with mean, max, min and std over the tasks
    # rows of a batch that operators dropped, kept to be looked at; 0 = none
    record_filtered: int = setting(512, ge=0)
    # failed runs of a batch, with their errors and tracebacks; 0 = none
    record_failed: int = setting(256, ge=0)
    # answers of one evaluation of one taskset; 0 = none
    record_eval: int = setting(256, ge=0)
    # rows of a train step of one rank with the trainer's log-probs; 0 = none, and no row is known
    # to be trained
    record_trainer: int = setting(4096, ge=0)
    record_mb: float = setting(64.0, gt=0)  # of each of these; what is beyond it is left out


@dataclass
class Config:
    """The whole job. Section names follow Trinity-RFT."""

    # what the run has: explorer and trainer, one of them, an evaluation of checkpoints, or all on
    # one device (serve: not yet)
    mode: str = setting("both", choices=MODES)
    project: str = "trinity-dask"  # first part of the job's directory
    group: str = ""  # second part of the job's directory; empty = none
    name: str = "rft"  # the job: the same name goes on where it was; last part of its directory
    checkpoint_root_dir: str = "./runs"  # directory of all jobs
    # false: a name that has a run gets a new directory beside it, with a time stamp
    continue_from_checkpoint: bool = True
    # true: once the newest run of this name is finished, the same command starts another one
    rerun_finished: bool = False
    # of the trainer and of the explorer's random choices; the engines have their own
    seed: int = setting(42, ge=0, le=MAX_SEED)
    prepare: Optional[str] = None  # "module:fn" called with the config before the run; idempotent
    prepare_args: dict[str, Any] = field(default_factory=dict)  # keyword arguments of prepare
    # directories whose *.py files register workflows and rewards
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
    stages: list[dict[str, Any]] = field(default_factory=list)  # one entry per stage
    job_dir: Optional[str] = None  # directory of the run
    stage_name: Optional[str] = None  # name of the stage
