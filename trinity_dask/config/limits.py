"""Range of every number and the allowed words of every choice.

Invariant: every numeric field of the dataclasses has a range here (a test compares);
choices are matched without regard to case.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Optional

from trinity_dask.config import schema as s
from trinity_dask.config.algorithms import ALGORITHM_TYPES
from trinity_dask.config.modes import MODES
from trinity_dask.config.nearest import hint


@dataclass(frozen=True)
class Range:
    """Allowed interval of a number; ``above``/``below`` exclude their end.

    ``also`` is one more allowed value (``-1`` for "off").
    """

    low: Optional[float] = None
    high: Optional[float] = None
    above: Optional[float] = None
    below: Optional[float] = None
    also: Optional[float] = None

    def contains(self, value: float) -> bool:
        if self.also is not None and value == self.also:
            return True
        return math.isfinite(value) and (
            (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        parts = [
            f"{sign} {bound:.12g}"
            for sign, bound in (
                (">=", self.low),
                (">", self.above),
                ("<=", self.high),
                ("<", self.below),
            )
            if bound is not None
        ]
        text = " and ".join(parts) or "any number"
        return text if self.also is None else f"{text}, or {self.also:g}"


POSITIVE = Range(above=0)
COUNT = Range(low=1)
FROM_ZERO = Range(low=0)
SHARE = Range(low=0, high=1)
SHARE_ABOVE_ZERO = Range(above=0, high=1)
SEED = Range(low=0, high=2**32 - 1)  # what numpy accepts

RANGES: dict[tuple[type, str], Range] = {
    (s.OptimizerConfig, "lr"): Range(low=0),
    (s.OptimizerConfig, "betas"): Range(low=0, below=1),
    (s.OptimizerConfig, "eps"): POSITIVE,
    (s.OptimizerConfig, "weight_decay"): FROM_ZERO,
    (s.OptimizerConfig, "lr_warmup_steps"): FROM_ZERO,
    (s.OptimizerConfig, "min_lr_ratio"): SHARE,
    (s.OptimizerConfig, "momentum"): Range(low=0, below=1),
    (s.OptimizerConfig, "wsd_decay_ratio"): SHARE_ABOVE_ZERO,
    (s.LoraConfig, "rank"): FROM_ZERO,
    (s.LoraConfig, "alpha"): POSITIVE,
    (s.RolloutCorrectionConfig, "cap"): POSITIVE,
    (s.RolloutCorrectionConfig, "floor"): FROM_ZERO,
    (s.RolloutCorrectionConfig, "filter_low"): FROM_ZERO,
    (s.RolloutCorrectionConfig, "filter_high"): FROM_ZERO,
    (s.RolloutCorrectionConfig, "dppo_delta"): SHARE_ABOVE_ZERO,
    (s.AlgorithmConfig, "repeat_times"): COUNT,
    (s.ModelConfig, "temperature"): FROM_ZERO,
    (s.ModelConfig, "top_p"): SHARE_ABOVE_ZERO,
    (s.ModelConfig, "top_k"): Range(low=1, also=-1),
    (s.ModelConfig, "max_model_len"): Range(low=2),
    (s.ModelConfig, "max_prompt_tokens"): COUNT,
    (s.ModelConfig, "max_response_tokens"): COUNT,
    (s.ModelConfig, "min_response_tokens"): FROM_ZERO,
    (s.GroupConfig, "n_workers"): FROM_ZERO,
    (s.GroupConfig, "nthreads"): COUNT,
    (s.GroupConfig, "omp_threads"): COUNT,
    (s.GroupConfig, "gpus_per_worker"): FROM_ZERO,
    (s.GroupConfig, "first_index"): FROM_ZERO,
    (s.ClusterConfig, "scheduler_port"): Range(low=0, high=65535),
    (s.ClusterConfig, "start_timeout_s"): POSITIVE,
    (s.SelectorConfig, "seed"): SEED,
    (s.RolloutArgs, "temperature"): FROM_ZERO,
    (s.RolloutArgs, "top_p"): SHARE_ABOVE_ZERO,
    (s.RolloutArgs, "top_k"): Range(low=1, also=-1),
    (s.RolloutArgs, "max_tokens"): COUNT,
    (s.TasksetConfig, "repeat_times"): COUNT,
    (s.ReplayBufferConfig, "reuse_cooldown_time_s"): FROM_ZERO,
    (s.ReplayBufferConfig, "capacity_groups"): COUNT,
    (s.ExperienceBufferConfig, "capacity_batches"): COUNT,
    (s.ExperienceBufferConfig, "max_read_timeout_s"): POSITIVE,
    (s.BufferConfig, "batch_size"): COUNT,
    (s.BufferConfig, "train_batch_size"): COUNT,
    (s.BufferConfig, "total_epochs"): COUNT,
    (s.BufferConfig, "total_steps"): COUNT,
    (s.BufferConfig, "max_refill_batches"): FROM_ZERO,
    (s.RolloutModelConfig, "seed"): SEED,
    (s.RolloutModelConfig, "tensor_parallel_size"): COUNT,
    (s.RolloutModelConfig, "gpu_memory_utilization"): SHARE_ABOVE_ZERO,
    (s.RolloutModelConfig, "kv_cache_memory_bytes"): Range(low=1 << 20),
    (s.RolloutModelConfig, "max_num_seqs"): COUNT,
    (s.RolloutModelConfig, "prepare_timeout_s"): POSITIVE,
    (s.RolloutModelConfig, "request_timeout_s"): POSITIVE,
    (s.RolloutModelConfig, "fake_latency_s"): FROM_ZERO,
    (s.RolloutModelConfig, "fake_latency_sigma"): FROM_ZERO,
    (s.RolloutModelConfig, "fake_first_latency_s"): FROM_ZERO,
    (s.OverRolloutConfig, "ratio"): Range(low=0, below=1),
    (s.OverRolloutConfig, "wait_after_min_s"): FROM_ZERO,
    (s.DynamicTimeoutConfig, "ratio"): Range(above=1),
    (s.DynamicTimeoutConfig, "warmup_min_steps"): COUNT,
    (s.ExplorerConfig, "max_timeout_s"): POSITIVE,
    (s.ExplorerConfig, "runner_state_report_interval_s"): FROM_ZERO,
    (s.ExplorerConfig, "batch_timeout_s"): POSITIVE,
    (s.ExplorerConfig, "max_retry_times"): FROM_ZERO,
    (s.ExplorerConfig, "max_repeat_times_per_runner"): COUNT,
    (s.ExplorerConfig, "max_inflight_batches"): COUNT,
    (s.ExplorerConfig, "eval_interval"): FROM_ZERO,
    (s.TrainerConfig, "total_steps"): COUNT,
    (s.TrainerConfig, "save_interval"): FROM_ZERO,
    (s.TrainerConfig, "max_checkpoints_to_keep"): FROM_ZERO,
    (s.TrainerConfig, "grad_clip"): POSITIVE,
    (s.TrainerConfig, "ppo_epochs"): COUNT,
    (s.TrainerConfig, "mini_batches"): COUNT,
    (s.TrainerConfig, "min_mini_batch_rows"): COUNT,
    (s.TrainerConfig, "micro_batch_tokens"): COUNT,
    (s.TrainerConfig, "logits_mb"): FROM_ZERO,
    (s.TrainerConfig, "peak_tflops"): POSITIVE,
    (s.TrainerConfig, "step_timeout_s"): POSITIVE,
    (s.TrainerConfig, "max_empty_batches"): COUNT,
    (s.TrainerConfig, "max_rank_restarts"): FROM_ZERO,
    (s.CriticConfig, "warmup_steps"): FROM_ZERO,
    (s.CriticConfig, "epochs"): COUNT,
    (s.CriticConfig, "mini_batches"): COUNT,
    (s.CriticConfig, "value_clip"): POSITIVE,
    (s.CriticConfig, "grad_clip"): FROM_ZERO,
    (s.SynchronizerConfig, "sync_interval"): COUNT,
    (s.SynchronizerConfig, "sync_offset"): FROM_ZERO,
    (s.SynchronizerConfig, "max_staleness"): FROM_ZERO,
    (s.SynchronizerConfig, "sync_timeout_s"): POSITIVE,
    (s.SynchronizerConfig, "peer_timeout_s"): FROM_ZERO,
    (s.SynchronizerConfig, "in_flight_timeout_s"): POSITIVE,
    (s.SynchronizerConfig, "bucket_mb"): Range(low=1, high=2047),
    (s.SynchronizerConfig, "probe_interval"): FROM_ZERO,
    (s.SynchronizerConfig, "probe_tolerance"): POSITIVE,
    (s.Config, "seed"): SEED,
}

SINKS = ("console", "jsonl", "tensorboard", "wandb", "mlflow")

CHOICES: dict[tuple[type, str], tuple[str, ...]] = {
    (s.OptimizerConfig, "optimizer_type"): ("adamw", "sgd", "adamw8bit"),
    (s.OptimizerConfig, "lr_scheduler_type"): ("constant", "linear", "cosine", "wsd"),
    (s.RolloutCorrectionConfig, "mode"): (
        "none",
        "token_tis",
        "token_mask",
        "sequence_tis",
        "sequence_mask",
        "geometric_tis",
        "geometric_mask",
    ),
    (s.RolloutCorrectionConfig, "sequence_filter"): ("none", "product", "geometric"),
    (s.AlgorithmConfig, "algorithm_type"): ALGORITHM_TYPES,
    (s.AlgorithmConfig, "loss_agg_mode"): (
        "token-mean",
        "seq-mean-token-mean",
        "seq-mean-token-sum",
        "seq-mean-token-sum-norm",
        "dr-grpo",
    ),
    (s.ModelConfig, "dtype"): ("float32", "bfloat16"),
    (s.ClusterConfig, "type"): ("local", "address"),
    (s.FormatConfig, "prompt_type"): ("plaintext", "messages"),
    (s.SelectorConfig, "selector_type"): (
        "sequential",
        "shuffle",
        "random",
        "offline_easy2hard",
        "difficulty_based",
    ),
    (s.ExperienceBufferConfig, "storage_type"): ("store", "file"),
    (s.ExperienceBufferConfig, "compression"): ("lz4", "zstd"),
    (s.RolloutModelConfig, "engine_type"): ("vllm", "torch", "fake"),
    (s.RolloutModelConfig, "dtype"): ("float32", "bfloat16"),
    (s.ExplorerConfig, "concurrent_mode"): ("sequential", "asynchronous", "multi-threading"),
    (s.ExplorerConfig, "partial_group"): ("keep", "replace", "drop"),
    (s.ExplorerConfig, "run_on"): ("auto", "rollout", "runner"),
    (s.TrainerConfig, "save_hf_checkpoint"): ("always", "last", "never"),
    (s.TrainerConfig, "fused_kernels"): ("auto", "off"),
    (s.ParallelConfig, "strategy"): ("ddp", "fsdp2"),
    (s.CriticConfig, "strategy"): ("ddp", "fsdp2"),
    (s.TrainerConfig, "frozen_strategy"): ("ddp", "fsdp2"),
    (s.SynchronizerConfig, "sync_method"): ("nccl", "memory", "checkpoint"),
    (s.SynchronizerConfig, "sync_style"): (
        "fixed",
        "trainer_driven",
        "explorer_driven",
        "fully_async",
    ),
    (s.SynchronizerConfig, "in_flight"): ("keep", "wait", "abort"),
    (s.MonitorConfig, "progress"): ("auto", "live", "plain", "off"),
    (s.Config, "mode"): MODES,
}


def limit_problem(key: str, section: type, name: str, value: Any) -> Optional[str]:
    """What is wrong with one value, or None."""
    if value is None:
        return None
    choices = CHOICES.get((section, name))
    if choices is not None and value not in choices:
        return f"{key}={value} is not a choice; {hint(str(value), choices)}"
    limit = RANGES.get((section, name))
    numbers = value if isinstance(value, list) else [value]
    if limit is not None and not all(limit.contains(number) for number in numbers):
        return f"{key}={value} is out of range: it must be {limit}"
    return None


# words of Trinity-RFT that mean the same
ALIASES: dict[tuple[type, str], dict[str, str]] = {
    (s.SynchronizerConfig, "sync_method"): {"online": "nccl", "offline": "checkpoint"},
    (s.SynchronizerConfig, "sync_style"): {
        "dynamic_by_trainer": "trainer_driven",
        "dynamic_by_explorer": "explorer_driven",
    },
}


def canonical(section: type, name: str, value: Any) -> Any:
    """A choice written in another case, as it is spelled here."""
    choices = CHOICES.get((section, name), ())
    lower = value.lower() if isinstance(value, str) else value
    aliases = ALIASES.get((section, name))
    if aliases is not None and isinstance(lower, str):
        lower = aliases.get(lower, lower)
    return lower if lower in choices else value
