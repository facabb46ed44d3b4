"""Every configuration key of Trinity-RFT 0.5-0.6: what it is here, or why it is not.

Invariant: the converter, its report and the table in ``docs/from-trinity.md`` are made from this
table (and its part about verl) alone; a key that no row covers is told as unknown, never dropped
in silence. ``*`` stands for one entry of a list, or of a mapping by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Optional


@dataclass(frozen=True)
class Key:
    """One key of theirs.

    ``ours`` None: there is no counterpart, ``note`` says why; else ``note`` says what changed.
    ``default`` is theirs; ``carry``: it is written where their file is silent, since ours is
    another. ``how`` names the conversion of the value (:mod:`.values`), or the part of
    :mod:`.convert` that needs more than one key. ``matters``: a value other than the default that
    has no counterpart changes what is run.
    """

    theirs: str
    ours: Optional[str] = None
    default: Any = None
    note: str = ""
    how: str = ""
    carry: bool = False
    matters: bool = True

    @property
    def kind(self) -> str:
        """``mapped``, ``changed`` or ``none``."""
        if self.ours is None:
            return "none"
        return "changed" if self.note else "mapped"


def same(theirs: str, default: Any = None, carry: bool = False) -> Key:
    """The same name, place and meaning."""
    return Key(theirs, theirs, default, carry=carry)


def to(theirs: str, ours: str, default: Any = None, carry: bool = False, how: str = "") -> Key:
    """The same meaning by another name."""
    return Key(theirs, ours, default, how=how, carry=carry)


def differs(
    theirs: str, ours: str, note: str, default: Any = None, how: str = "", carry: bool = False
) -> Key:
    """A counterpart that does not mean quite the same."""
    return Key(theirs, ours, default, note, how, carry)


def gone(theirs: str, note: str, default: Any = None, matters: bool = True, how: str = "") -> Key:
    """No counterpart; ``note`` is the reason."""
    return Key(theirs, None, default, note, how, matters=matters)


def many(theirs: str, names: str, note: str, matters: bool = True) -> Iterable[Key]:
    """Keys without counterpart that share a reason."""
    return (gone(f"{theirs}{name}", note, matters=matters) for name in names.split())


def moved(keys: Iterable[Key], theirs: str, ours: str) -> list[Key]:
    """The same rows below other sections."""
    return [
        dataclasses.replace(
            key, theirs=theirs + key.theirs, ours=None if key.ours is None else ours + key.ours
        )
        for key in keys
    ]


FILLED = "filled in by their validation"
OF_RAY = "Ray's; Dask has no such thing"
TEMPLATE = "put the template into the model's tokenizer files"
TINKER = "there is no remote training service here; the trainer is ours"
CHAT = "the chat template is called without such options"
ROPE = "set it in the model's config.json, so that sampler and trainer have it alike"
SERVER = "an OpenAI endpoint is there for workflow agent, without a switch (docs/agents.md)"
MEGATRON = "there is no Megatron strategy: ranks are replicated (ddp) or sharded (fsdp2)"
ONLY_TEXT = "prompts are text"
JUICER = "there is no Data-Juicer service here; prepare the file beforehand"

TOP = (
    differs("mode", "mode", "both on one GPU is colocate", "both", how="mode"),
    same("project", "Trinity-RFT", carry=True),
    same("group", ""),
    same("name", "rft"),
    to("checkpoint_root_dir", "checkpoint_root_dir", ""),
    same("continue_from_checkpoint", True),
    gone("checkpoint_job_dir", FILLED, matters=False),
    gone("ray_namespace", f"{OF_RAY}: a run is found by its name on a scheduler", "", False),
    gone("ignore_validator_suggestions", "what cannot run is refused", False, False),
    gone("global_config", "an older layout: its keys are at the top level"),
    differs(
        "stages", "stages", "a stage is merged key by key, not section by section", [], "stages"
    ),
)

ALGORITHM = (
    same("algorithm.algorithm_type", "ppo", carry=True),
    differs(
        "algorithm.repeat_times",
        "algorithm.repeat_times",
        "left out, it is the algorithm's own group size and not 1",
    ),
    same("algorithm.optimizer.lr", 1e-6),
    differs(
        "algorithm.optimizer.lr_warmup_steps",
        "algorithm.optimizer.lr_warmup_steps",
        "-1 is written 0",
        -1,
        how="warmup_steps",
    ),
    differs(
        "algorithm.optimizer.lr_warmup_steps_ratio",
        "algorithm.optimizer.lr_warmup_steps",
        "a number of steps, so the run's total_steps must be set",
        0.0,
        how="warmup_ratio",
    ),
    same("algorithm.optimizer.min_lr_ratio", 0.01),
    same("algorithm.optimizer.lr_scheduler_type", "constant"),
    to(
        "algorithm.optimizer.warmup_style",
        "algorithm.optimizer.lr_scheduler_type",
        how="scheduler",
    ),
    differs(
        "algorithm.optimizer.optimizer_type",
        "algorithm.optimizer.optimizer_type",
        "adam is AdamW, as FSDP's was; other classes cannot be named",
        "adam",
        how="optimizer",
    ),
    same("algorithm.optimizer.betas"),
    same("algorithm.optimizer.weight_decay", 0.01),
    gone(
        "algorithm.optimizer.clip_grad",
        "FSDP used trainer.grad_clip; so does this trainer",
        1.0,
    ),
    same("algorithm.sample_strategy"),
    same("algorithm.sample_strategy_args", {}),
    same("algorithm.advantage_fn"),
    differs(
        "algorithm.advantage_fn_args",
        "algorithm.advantage_fn_args",
        "merged over the function's own defaults, here and in every *_args",
        {},
    ),
    same("algorithm.kl_penalty_fn"),
    same("algorithm.kl_penalty_fn_args", {}),
    same("algorithm.policy_loss_fn"),
    differs(
        "algorithm.policy_loss_fn_args",
        "algorithm.policy_loss_fn_args",
        "mix: the batch sizes that had to be repeated there are known here",
        {},
        how="loss_args",
    ),
    same("algorithm.kl_loss_fn"),
    same("algorithm.kl_loss_fn_args", {}),
    same("algorithm.entropy_loss_fn"),
    same("algorithm.entropy_loss_fn_args", {}),
    differs(
        "algorithm.loss_agg_mode",
        "algorithm.loss_agg_mode",
        "counted over the whole mini-batch of all ranks; the -norm mode divides by the response "
        "budget; left out, gspo keeps its own seq-mean-token-mean",
    ),
    gone("algorithm.enable_router_replay", "routed experts are not replayed", False),
    differs(
        "algorithm.bypass_old_logprobs",
        "algorithm.bypass_old_logprobs",
        "their default is true, ours false",
        True,
        carry=True,
    ),
    differs(
        "algorithm.rollout_correction",
        "algorithm.rollout_correction",
        "another set of options: docs/algorithms.md",
        how="correction",
    ),
    gone("algorithm.use_critic", "follows from the advantage function", matters=False),
)

MODEL = (
    same("model.model_path", ""),
    to("model.critic_model_path", "critic.model_path", ""),
    same("model.trust_remote_code", False),
    gone("model.custom_chat_template", TEMPLATE),
    gone("model.chat_template_path", TEMPLATE),
    same("model.temperature", 1.0),
    same("model.top_p", 1.0),
    same("model.top_k", -1),
    gone("model.logprobs", "every sampled token's log-prob is recorded", 0, False),
    same("model.max_model_len"),
    same("model.max_prompt_tokens"),
    same("model.max_response_tokens"),
    same("model.min_response_tokens", 0),
    same("model.enable_prompt_truncation", True),
    gone("model.repetition_penalty", "the trainer's distribution would be another one", 1.0),
    gone("model.enable_thinking", CHAT),
    differs("model.lora_configs", "model.lora", "one adapter, not a list", [], "lora"),
    gone("model.fully_sharded_loras", "not read there either", False, False),
    gone("model.max_cpu_loras", "not read there either", None, False),
    gone("model.rope_scaling", ROPE),
    gone("model.rope_theta", ROPE),
    gone("model.tinker.enable", TINKER, False),
    *many("model.tinker.", "rank seed train_mlp train_attn train_unembed base_url", TINKER, False),
    gone("model.external_model.enable", "engines are local: vllm, torch or your own", False),
    *many("model.external_model.", "base_url_env api_key_env model_name", "as enable", False),
)

CLUSTER = (
    differs(
        "cluster.ray_address",
        "cluster.address",
        "a Dask scheduler's address; auto and local mean processes on this machine",
        "auto",
        how="address",
    ),
    differs(
        "cluster.node_num",
        "cluster.trainer.n_workers",
        "what the engines leave of node_num x gpu_per_node is the trainer's, one rank each",
        0,
        how="sizes",
    ),
    differs("cluster.gpu_per_node", "cluster.trainer.gpus_per_worker", "see node_num", 0, "sizes"),
    *many(
        "cluster.",
        "total_gpu_num rollout_gpu_num auxiliary_model_gpu_num explorer_gpu_num trainer_gpu_num "
        "trainer_node_num trainer_gpu_num_per_node",
        FILLED,
        False,
    ),
)

FORMAT = (
    same("format.prompt_type", "messages", carry=True),
    same("format.prompt_key", "prompt"),
    same("format.response_key", "response"),
    same("format.system_prompt_key"),
    same("format.system_prompt"),
    to("format.messages_key", "format.messages_key", "message", carry=True),
    same("format.tools_key", "tools"),
    gone("format.image_key", ONLY_TEXT),
    gone("format.video_key", ONLY_TEXT),
    same("format.reply_prefix"),
    same("format.workflow_key", ""),
    same("format.reward_fn_key", ""),
    same("format.chosen_key", "chosen"),
    same("format.rejected_key", "rejected"),
    same("format.enable_concatenated_multi_turn", False),
    gone("format.chat_template", TEMPLATE),
    gone("format.enable_thinking", CHAT),
)
SELECTOR = tuple(
    Key(
        f"{name}.{key}",
        f"data_selector.{key}",
        default,
        note="the posterior of difficulty_based is saved too" if key == "kwargs" else "",
    )
    for name in ("data_selector", "task_selector")
    for key, default in (
        ("selector_type", "sequential"),
        ("seed", 42),
        ("feature_keys", []),
        ("kwargs", {}),
    )
)
TASKSET = (
    same("name"),
    gone("storage_type", "the path says whether it is a file or a database", "file", False),
    gone("schema_type", "the path says it", None, False),
    same("path"),
    same("split", "train"),
    same("subset_name"),
    *FORMAT,
    *SELECTOR,
    to("default_workflow_type", "workflow", how="workflow"),
    to("default_reward_fn_type", "reward_fn", how="reward"),
    to("workflow_type", "workflow", how="workflow"),
    to("reward_fn_type", "reward_fn", how="reward"),
    differs(
        "rollout_args.temperature",
        "rollout_args.temperature",
        "of a train taskset it must be model.temperature, at which the trainer computes log-probs",
        1.0,
    ),
    same("rollout_args.top_p"),
    same("rollout_args.top_k", -1),
    gone("rollout_args.logprobs", "always recorded", None, False),
    same("rollout_args.max_tokens"),
    gone("rollout_args.n", "filled in from repeat_times", None, False),
    same("workflow_args", {}),
    same("reward_fn_args", {}),
    gone("max_retry_times", "files are read at once, or refused", 3, False),
    gone("max_retry_interval", "files are read at once, or refused", 1, False),
    gone("enable_progress_bar", "monitor.progress shows the run", False, False),
    same("repeat_times"),
    *many("", "index is_eval batch_size total_epochs total_steps ray_namespace", FILLED, False),
    gone("task_type", FILLED, None, False),
)
STORAGE = (
    to("name", "name"),
    differs(
        "storage_type",
        "storage_type",
        "queue and sql are one store of Arrow files; file stays file",
        "queue",
        how="storage",
    ),
    gone("schema_type", "follows from the algorithm", None, False),
    gone("algorithm_type", "follows from the algorithm", None, False),
    differs("path", "path", "of a queue: a directory of the run, not a copy of it", how="store"),
    differs(
        "capacity",
        "capacity_batches",
        "counted in batches of the explorer, and it always waits",
        10000,
        how="capacity",
    ),
    differs(
        "max_read_timeout",
        "max_read_timeout_s",
        "an incomplete batch is not lost when it is over",
        1800,
    ),
    same("replay_buffer.enable", False),
    same("replay_buffer.priority_fn", "linear_decay"),
    to("replay_buffer.reuse_cooldown_time", "replay_buffer.reuse_cooldown_time_s"),
    same("replay_buffer.priority_fn_args", {"decay": 2.0}),
    to("use_priority_queue", "replay_buffer.enable", False),
    to("reuse_cooldown_time", "replay_buffer.reuse_cooldown_time_s"),
    same("split", "train"),
    same("subset_name"),
    *FORMAT,
    *SELECTOR,
    gone("max_retry_times", "a store that fails is an error with its reason", 3, False),
    gone("max_retry_interval", "as max_retry_times", 1, False),
    gone("enable_progress_bar", "monitor.progress shows the run", False, False),
    *many("", "index batch_size total_epochs total_steps ray_namespace wrap_in_ray", FILLED, False),
    *many("", "tokenizer_path cache_dir", FILLED, False),
)
_TASKS, _INPUT = "buffer.explorer_input.", "buffer.trainer_input."
BUFFER = (
    same("buffer.batch_size", 1),
    differs(
        "buffer.train_batch_size",
        "buffer.train_batch_size",
        "0 is null: what one batch of the explorer committed, whatever was filtered",
        0,
        how="positive",
    ),
    same("buffer.total_epochs", 1),
    same("buffer.total_steps"),
    gone("buffer.explorer_output", FILLED, matters=False),
    gone("buffer.tokenizer_path", FILLED, matters=False),
    gone("buffer.cache_dir", FILLED, matters=False),
    gone("buffer.pad_token_id", "rows are packed and never padded with a token", matters=False),
    gone("buffer.max_retry_times", "an older key of their databases", 3, False),
    gone("buffer.max_retry_interval", "an older key of their databases", 1, False),
    *moved(TASKSET, f"{_TASKS}taskset.", f"{_TASKS}taskset."),
    *moved(TASKSET, f"{_TASKS}tasksets.*.", f"{_TASKS}tasksets.*."),
    *moved(TASKSET, f"{_TASKS}eval_tasksets.*.", f"{_TASKS}eval_tasksets.*."),
    to(f"{_TASKS}default_workflow_type", f"{_TASKS}default_workflow", how="workflow"),
    gone(
        f"{_TASKS}default_eval_workflow_type",
        "written into each eval taskset that names none",
        how="eval_workflow",
    ),
    to(f"{_TASKS}default_reward_fn_type", f"{_TASKS}default_reward_fn", how="reward"),
    *moved(STORAGE, f"{_INPUT}experience_buffer.", f"{_INPUT}experience_buffer."),
    *moved(STORAGE, f"{_INPUT}auxiliary_buffers.*.", f"{_INPUT}auxiliary_buffers.*."),
    gone(f"{_INPUT}read_experience_strategy", "algorithm.sample_strategy says it"),
    gone(f"{_INPUT}sft_warmup_dataset", "a stage of algorithm_type sft before the other one"),
    gone(f"{_INPUT}sft_warmup_steps", "a stage of algorithm_type sft before the other one"),
)

_PIPE = "data_processor.experience_pipeline."
DATA_PROCESSOR = (
    differs(
        f"{_PIPE}operators",
        "buffer.operators",
        "a batch that they make smaller is trained on as it is, or filled up "
        "(buffer.max_refill_batches)",
        [],
        "operators",
    ),
    gone(f"{_PIPE}save_input", "every committed experience is kept in the store", True, False),
    gone(f"{_PIPE}input_save_path", "trinity-dask samples reads the store", None, False),
    gone(f"{_PIPE}inputs", "the pipeline has the explorer's batches only", {}),
    gone(f"{_PIPE}output", FILLED, matters=False),
    *many(
        "data_processor.task_pipeline.",
        "operators num_process config_path inputs output target_fields priority_weights top_k",
        JUICER,
    ),
    gone("data_processor.task_pipeline", JUICER),
    gone("data_processor.source_data_path", JUICER),
)
