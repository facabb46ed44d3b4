"""The fields about the trainer, and what became of verl's.

Invariant: a name of the table is a function of this module: state -> field.
"""

from __future__ import annotations

from typing import Optional

from trinity_dask.manager.config_registry.config_registry import (
    CONFIG_GENERATORS,
    setters,
    uses_critic,
)
from trinity_dask.manager.config_registry.state import State

_MEGATRON = "there is no Megatron strategy: ranks are replicated (ddp) or sharded (fsdp2)"
_VERL = "trainer.trainer_config."
_NAMES = f"""
    set_trainer_gpu_num_display =cluster.trainer.n_workers trains
    set_trainer_type trainer.trainer_type trains
    set_save_interval =trainer.save_interval trains
    set_enable_preview trainer.enable_preview trains
    set_actor_grad_clip =trainer.grad_clip trains
    set_training_args =trainer.gradient_checkpointing trains
    set_ppo_epochs =trainer.ppo_epochs trains
    set_training_strategy =trainer.parallel.strategy trains
    set_param_offload =trainer.offload trains
    set_grad_offload trainer.grad_offload trains
    set_optimizer_offload =trainer.offload trains
    set_forward_prefetch {_VERL}actor_rollout_ref.actor.fsdp_config.forward_prefetch trains
    set_offload_policy =trainer.offload trains
    set_reshard_after_forward =trainer.parallel.reshard_after_forward trains
    set_tensor_model_parallel_size trainer.megatron.tensor_model_parallel_size trains
    set_pipeline_model_parallel_size trainer.megatron.pipeline_model_parallel_size trains
    set_virtual_pipeline_model_parallel_size trainer.megatron.virtual_pipeline_model_parallel_size trains
    set_expert_model_parallel_size trainer.megatron.expert_model_parallel_size trains
    set_expert_tensor_parallel_size trainer.megatron.expert_tensor_parallel_size trains
    set_context_parallel_size trainer.megatron.context_parallel_size trains
    set_sequence_parallel trainer.megatron.sequence_parallel trains
    set_use_distributed_optimizer megatron trains
    set_use_dist_checkpointing megatron trains
    set_dist_checkpointing_path megatron trains
    set_use_mbridge megatron trains
    set_recompute_granularity =trainer.gradient_checkpointing trains
    set_recompute_modules megatron trains
    set_recompute_method megatron trains
    set_recompute_num_layers megatron trains
    set_resume_mode =continue_from_checkpoint
    set_resume_from_path {_VERL}trainer.resume_from_path trains
    set_impl_backend =trainer.fused_kernels trains
    set_critic_warmup =critic.warmup_steps critic
    set_default_hdfs_dir =synchronizer.path trains
    set_del_local_ckpt_after_load {_VERL}trainer.del_local_ckpt_after_load trains
    set_max_actor_ckpt_to_keep =trainer.max_checkpoints_to_keep trains
    set_max_critic_ckpt_to_keep {_VERL}trainer.max_critic_ckpt_to_keep critic
    set_norm_adv_by_std_in_grpo norm trains
    set_use_kl_in_reward =algorithm.kl_penalty_fn online
    set_kl_penalty =algorithm.kl_penalty_fn online
    set_kl_ctrl_type =algorithm.kl_penalty_fn_args.adaptive online
    set_kl_ctrl_coef =algorithm.kl_penalty_fn_args.kl_coef online
    set_horizon =algorithm.kl_penalty_fn_args.horizon online
    set_target_kl =algorithm.kl_penalty_fn_args.target_kl online
    set_actor_ppo_micro_batch_size_per_gpu =trainer.micro_batch_tokens trains
    set_ref_log_prob_micro_batch_size_per_gpu =trainer.micro_batch_tokens trains
    set_actor_ppo_max_token_len_per_gpu =trainer.micro_batch_tokens trains
    set_actor_ulysses_sequence_parallel_size trainer.ulysses_sequence_parallel_size trains
    set_actor_entropy_from_logits_with_chunking =trainer.logits_mb trains
    set_actor_entropy_checkpointing =trainer.logits_mb trains
    set_actor_lr =algorithm.optimizer.lr trains
    set_actor_warmup_style =algorithm.optimizer.lr_scheduler_type trains
    set_actor_lr_warmup_steps_ratio =algorithm.optimizer.lr_warmup_steps trains
    set_actor_save_checkpoint checkpoint trains
    set_actor_load_checkpoint checkpoint trains
    set_critic_lr =critic.optimizer.lr critic
    set_critic_warmup_style =critic.optimizer.lr_scheduler_type critic
    set_critic_lr_warmup_steps_ratio =critic.optimizer.lr_warmup_steps critic
    set_critic_grad_clip =critic.grad_clip critic
    set_critic_cliprange_value =critic.value_clip critic
    set_critic_ppo_micro_batch_size_per_gpu =trainer.micro_batch_tokens critic
    set_critic_ulysses_sequence_parallel_size trainer.ulysses_sequence_parallel_size critic
    set_critic_save_checkpoint checkpoint critic
    set_critic_load_checkpoint checkpoint critic
"""  # noqa: E501  (a table)
_WHOLE = "a checkpoint has everything that a resume needs"
_NOTES = {
    **{
        name: _MEGATRON
        for name in (
            "set_use_distributed_optimizer",
            "set_use_dist_checkpointing",
            "set_dist_checkpointing_path",
            "set_use_mbridge",
            "set_recompute_modules",
            "set_recompute_method",
            "set_recompute_num_layers",
        )
    },
    **{
        f"set_{role}_{verb}_checkpoint": _WHOLE
        for role in ("actor", "critic")
        for verb in ("save", "load")
    },
    "set_norm_adv_by_std_in_grpo": "algorithm_type dr_grpo is grpo without the standard deviation",
}
globals().update(setters(__name__, _NAMES, _NOTES))


def use_critic(state: State) -> bool:
    """Whether there is a value model."""
    return uses_critic(state)


@CONFIG_GENERATORS.register_check()
def check_resume_from_path(state: State) -> Optional[str]:
    """A job goes on where it was by its name; there is no path to get wrong."""
    return None
