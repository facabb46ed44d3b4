"""The rows of :mod:`.keys` about ``trainer.trainer_config``: verl's own keys.

Invariant: the same as that of :mod:`.keys`. ``actor_rollout_ref`` may be left out in front of
``actor`` and ``ref``, and keys may be written dotted; what no row names is verl's and told so.
"""

from __future__ import annotations

from trinity_dask.compat.trinity_config.keys import (
    FILLED,
    MEGATRON,
    Key,
    differs,
    gone,
    many,
    moved,
    to,
)

_CONTROLLED = "Trinity-RFT itself sets it, from its own key"
_MICRO = "micro-batches are made by tokens: trainer.micro_batch_tokens"
_LOSSES = "of no effect there: the functions of algorithm have their own arguments"
_CHECKPOINT = "a checkpoint has everything that a resume needs"
_KERNELS = "logits are made in parts beyond trainer.logits_mb"

_OPTIM = (
    to("optim.lr", "optimizer.lr"),
    to("optim.weight_decay", "optimizer.weight_decay"),
    to("optim.betas", "optimizer.betas"),
    to("optim.lr_warmup_steps", "optimizer.lr_warmup_steps", -1, how="warmup_steps"),
    differs(
        "optim.lr_warmup_steps_ratio",
        "optimizer.lr_warmup_steps",
        "a number of steps",
        0.0,
        how="warmup_ratio",
    ),
    to("optim.warmup_style", "optimizer.lr_scheduler_type", how="scheduler"),
    to("optim.lr_scheduler_type", "optimizer.lr_scheduler_type", how="scheduler"),
    to("optim.min_lr_ratio", "optimizer.min_lr_ratio"),
    gone("optim.total_training_steps", FILLED, -1, False),
    gone("optim.optimizer", "algorithm.optimizer.optimizer_type names it", None, False),
    gone("optim.clip_grad", "grad_clip beside it is the one used", None, False),
)
# of actor, ref and critic alike
_RANKS = (
    *many("", "ppo_micro_batch_size ppo_micro_batch_size_per_gpu", _MICRO, False),
    *many("", "forward_micro_batch_size forward_micro_batch_size_per_gpu", _MICRO, False),
    *many("", "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu", _MICRO, False),
    *many("", "forward_max_token_len_per_gpu log_prob_max_token_len_per_gpu", _MICRO, False),
    *many("", "use_dynamic_bsz log_prob_use_dynamic_bsz", _MICRO, False),
    gone("ulysses_sequence_parallel_size", "a sequence is on one rank", 1),
    *many("", "shuffle use_torch_compile entropy_from_logits_with_chunking", _KERNELS, False),
    *many("", "entropy_checkpointing use_remove_padding data_loader_seed", _KERNELS, False),
    gone("checkpoint", _CHECKPOINT, matters=False),
    gone("megatron", MEGATRON, matters=False),
    gone("profiler", "Dask profiles its workers", matters=False),
)
_FSDP = (
    gone("wrap_policy", "each layer is a unit", matters=False),
    gone("fsdp_size", "all ranks share a model", -1),
    gone("forward_prefetch", "fsdp2 decides it", False, False),
    gone("model_dtype", "weights are float32; model.dtype is the forward pass's", None, False),
    gone("mixed_precision", "model.dtype says it", None, False),
)
_ACTOR = (
    *moved(_OPTIM, "", "algorithm."),
    to("ppo_epochs", "trainer.ppo_epochs", 1),
    gone("ppo_mini_batch_size", "the whole batch there; here trainer.mini_batches", None, False),
    *many("", "strategy ppo_max_token_len_per_gpu grad_clip use_kl_loss", _CONTROLLED, False),
    *many("", "loss_agg_mode rollout_n", _CONTROLLED, False),
    *many("", "clip_ratio clip_ratio_low clip_ratio_high clip_ratio_c policy_loss", _LOSSES, False),
    *many("", "entropy_coeff kl_loss_coef kl_loss_type", _LOSSES, False),
    to("fsdp_config.param_offload", "trainer.offload", False, how="switch"),
    to("fsdp_config.optimizer_offload", "trainer.offload", False, how="switch"),
    to("fsdp_config.offload_policy", "trainer.offload", False, how="switch"),
    to("fsdp_config.reshard_after_forward", "trainer.parallel.reshard_after_forward", True),
    *moved(_FSDP, "fsdp_config.", ""),
    *_RANKS,
)
_REF = (
    gone("strategy", _CONTROLLED, None, False),
    to("fsdp_config.param_offload", "trainer.frozen_offload", False),
    gone("fsdp_config.reshard_after_forward", "as the policy's", matters=False),
    *moved(_FSDP, "fsdp_config.", ""),
    *_RANKS,
)
_CRITIC = (
    *moved(_OPTIM, "", "critic."),
    to("model.path", "critic.model_path"),
    *many("model.", "tokenizer_path override_config external_lib", _CONTROLLED, False),
    *many("model.", "enable_gradient_checkpointing use_remove_padding", _CONTROLLED, False),
    to("model.fsdp_config.param_offload", "critic.offload", False, how="switch"),
    to("model.fsdp_config.optimizer_offload", "critic.offload", False, how="switch"),
    gone("model.fsdp_config", "as trainer.parallel", matters=False),
    to("ppo_epochs", "critic.epochs", 1),
    gone("ppo_mini_batch_size", "the whole batch there; here critic.mini_batches", None, False),
    *many("", "strategy ppo_max_token_len_per_gpu rollout_n enable", _CONTROLLED, False),
    gone("loss_agg_mode", _CONTROLLED, None, False),
    to("grad_clip", "critic.grad_clip"),
    to("cliprange_value", "critic.value_clip"),
    *_RANKS,
)
_MODEL = (
    to("enable_gradient_checkpointing", "trainer.gradient_checkpointing"),
    gone("use_fused_kernels", "trainer.fused_kernels: auto takes them where they are", None, False),
    gone("fused_kernel_options", "as use_fused_kernels", None, False),
    gone("override_config", "change the model's own config.json"),
    gone("external_lib", "plugin_dirs loads your code"),
    *many("", "path trust_remote_code use_remove_padding custom_chat_template", _CONTROLLED, False),
    *many("", "lora_rank lora_alpha target_modules exclude_modules", _CONTROLLED, False),
)
_ROOT = (
    gone("actor_rollout_ref.hybrid_engine", _CONTROLLED, matters=False),
    gone("actor_rollout_ref.rollout", "engines are explorer.rollout_model", matters=False),
    gone("rollout", "engines are explorer.rollout_model", matters=False),
    *many("algorithm.", "gamma lam adv_estimator norm_adv_by_std_in_grpo", _LOSSES, False),
    *many("algorithm.", "use_kl_in_reward kl_penalty kl_ctrl", _LOSSES, False),
    gone("algorithm.rollout_is", "algorithm.rollout_correction says it"),
    to("trainer.critic_warmup", "critic.warmup_steps", 0),
    to("trainer.max_actor_ckpt_to_keep", "trainer.max_checkpoints_to_keep", how="keep"),
    gone("trainer.max_critic_ckpt_to_keep", "kept with the policy's", None, False),
    *many("trainer.", "save_freq total_training_steps", _CONTROLLED, False),
    gone(
        "trainer.resume_mode",
        "a job goes on where it was; continue_from_checkpoint=false begins anew",
        "auto",
    ),
    gone("trainer.resume_from_path", "give the directory as model.model_path"),
    gone("trainer.default_hdfs_dir", "synchronizer.path takes any fsspec URL for weights"),
    *many(
        "trainer.", "balance_batch total_epochs project_name experiment_name", _CONTROLLED, False
    ),
    *many(
        "trainer.", "logger nnodes n_gpus_per_node val_before_train test_freq", _CONTROLLED, False
    ),
    *many(
        "trainer.", "default_local_dir device sync_freq training_rollout_mode", _CONTROLLED, False
    ),
    *many("trainer.", "remove_previous_ckpt_in_save del_local_ckpt_after_load", _CHECKPOINT, False),
    gone("data", "the taskset says it", matters=False),
    gone("reward_model", "a reward function says it", matters=False),
    gone(
        "custom_reward_function", "buffer.explorer_input.default_reward_fn says it", matters=False
    ),
)
VERL: tuple[Key, ...] = (
    *(key for prefix in ("actor_rollout_ref.", "") for key in moved(_ACTOR, f"{prefix}actor.", "")),
    *(key for prefix in ("actor_rollout_ref.", "") for key in moved(_REF, f"{prefix}ref.", "")),
    *moved(_MODEL, "actor_rollout_ref.model.", ""),
    *moved(_CRITIC, "critic.", ""),
    *_ROOT,
)
