"""The fields about the algorithm and its functions.

Invariant: a name of the table is a function of this module: state -> field.
"""

from __future__ import annotations

from trinity_dask.manager.config_registry.config_registry import setters

_NAMES = """
    set_algorithm_type =algorithm.algorithm_type
    set_repeat_times =algorithm.repeat_times group
    set_sample_strategy =algorithm.sample_strategy
    set_expert_data_ratio_in_sample_strategy =algorithm.sample_strategy_args.expert_data_ratio
    set_advantage_fn =algorithm.advantage_fn online
    set_gamma_in_advantage_fn =algorithm.advantage_fn_args.gamma
    set_lam_in_advantage_fn =algorithm.advantage_fn_args.lam
    set_epsilon_in_advantage_fn =algorithm.advantage_fn_args.epsilon
    set_opmd_baseline_in_advantage_fn =algorithm.advantage_fn_args.opmd_baseline
    set_tau_in_advantage_fn =algorithm.advantage_fn_args.tau
    set_kl_loss_fn =algorithm.kl_loss_fn
    set_kl_coef_in_kl_loss_fn =algorithm.kl_loss_fn_args.kl_coef
    set_kl_penalty_fn =algorithm.kl_penalty_fn online
    set_adaptive_in_kl_penalty_fn =algorithm.kl_penalty_fn_args.adaptive
    set_kl_coef_in_kl_penalty_fn =algorithm.kl_penalty_fn_args.kl_coef
    set_policy_loss_fn =algorithm.policy_loss_fn
    set_clip_range_in_policy_loss_fn =algorithm.policy_loss_fn_args.clip_range
    set_sft_loss_agg_mode =algorithm.loss_agg_mode sft
    set_beta_in_policy_loss_fn =algorithm.policy_loss_fn_args.beta
    set_label_smoothing_in_policy_loss_fn =algorithm.policy_loss_fn_args.label_smoothing
    set_tau_in_policy_loss_fn =algorithm.policy_loss_fn_args.tau
    set_mu_in_policy_loss_fn =algorithm.policy_loss_fn_args.mu
    set_entropy_loss_fn =algorithm.entropy_loss_fn
    set_entropy_coef_in_entropy_loss_fn =algorithm.entropy_loss_fn_args.entropy_coef
"""
globals().update(setters(__name__, _NAMES, {}))
