"""The functions that an algorithm can be made of, without importing torch.

Invariant: this is a copy of what the registries of ``trinity_dask.algorithm`` have, for a page that
must be there at once; a test compares the two.
"""

from __future__ import annotations

_KL: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("abs", "corrected_k3", "k1", "k2", "k3", "low_var_kl"),
        ("kl_coef", "adaptive", "target_kl", "horizon"),
    ),
    "none": (),
}
#: key of the section ``algorithm`` -> the names that it takes -> their arguments
ARGUMENTS: dict[str, dict[str, tuple[str, ...]]] = {
    "advantage_fn": {
        "asymre": ("baseline_shift",),
        "asymre_verl": ("baseline_shift",),
        "clipb": ("epsilon", "mu"),
        "clipv": ("epsilon", "mu", "max_frac"),
        "gigpo": ("omega", "gamma", "fnorm", "epsilon", "step_reward_key", "env_state_hash_key"),
        "grpo": (
            "epsilon",
            "std_threshold",
            "std_cal_level",
            "rank_penalty",
            "duplicate_experiences",
        ),
        "grpo_verl": ("epsilon",),
        "jsd": ("lambda_coef", "kl_coef", "temperature", "ratio_cap"),
        "on_policy_distill": ("kl_coef",),
        "opmd": ("opmd_baseline", "tau"),
        "opmd_verl": ("opmd_baseline", "tau"),
        "ppo": ("gamma", "lam"),
        "raft": ("n_best", "min_reward"),
        "rec": ("epsilon", "std_normalize", "drop"),
        "reinforce": (),
        "reinforceplusplus": ("gamma",),
        "reinforceplusplus_baseline": (),
        "remax": (),
        "rloo": (),
        "step_wise_grpo": ("epsilon", "enable_step_norm", "std_threshold", "std_cal_level"),
        "none": (),
    },
    "policy_loss_fn": {
        "cispo": (
            "clip_range_low",
            "clip_range_high",
            "enable_mask_clip",
            "mask_clip_range_low",
            "mask_clip_range_high",
            "ratio_cap",
        ),
        "dpo": ("beta", "label_smoothing"),
        "gspo": ("clip_range_low", "clip_range_high"),
        "importance_sampling": (),
        "jsd": ("lambda_coef", "chunk_size"),
        "mix": ("mu", "clip_range", "clip_range_low", "clip_range_high"),
        "mix_chord": (
            "mu_warmup_steps",
            "mu_decay_steps",
            "mu_peak",
            "mu_valley",
            "enable_phi_function",
            "clip_range",
            "clip_range_low",
            "clip_range_high",
        ),
        "opmd": ("tau",),
        "ppo": (
            "clip_range",
            "clip_range_low",
            "clip_range_high",
            "clip_ratio_c",
            "enable_sequence_masking",
            "delta_sequence_masking",
            "fallback_to_policy_gradient",
        ),
        "rec": (
            "epsilon_low",
            "epsilon_high",
            "epsilon_low_prime",
            "epsilon_high_prime",
            "clip_mode",
            "weight",
            "regularizer",
            "regularizer_coef",
            "temp",
        ),
        "sapo": ("tau_pos", "tau_neg"),
        "sft": (),
        "sft_is": (),
        "sft_phi": ("cutoff_prob",),
        "sppo": ("epsilon",),
        "topr": ("advantage_threshold", "ratio_level"),
    },
    "kl_penalty_fn": _KL,
    "kl_loss_fn": _KL,
    "entropy_loss_fn": {
        "default": ("entropy_coef",),
        "mix": ("entropy_coef",),
        "none": ("entropy_coef",),
    },
    "sample_strategy": {
        "default": (),
        "mix": ("expert_data_ratio", "sft_dataset_name"),
        "staleness_control": ("max_staleness", "over_limit"),
        "warmup": (),
    },
}
FUNCTIONS: dict[str, tuple[str, ...]] = {slot: tuple(names) for slot, names in ARGUMENTS.items()}
#: algorithm type -> its own functions, in the order of :data:`ARGUMENTS`
OWN: dict[str, tuple[str, ...]] = {
    "asymre": ("asymre", "opmd", "none", "none", "none", "default"),
    "cispo": ("grpo", "cispo", "none", "k2", "default", "default"),
    "clipb": ("clipb", "ppo", "none", "k2", "default", "default"),
    "clipv": ("clipv", "ppo", "none", "k2", "default", "default"),
    "cpt": ("none", "sft", "none", "none", "none", "default"),
    "dapo": ("grpo", "ppo", "none", "none", "default", "default"),
    "dpo": ("none", "dpo", "none", "k2", "default", "default"),
    "dr_grpo": ("grpo", "ppo", "none", "none", "default", "default"),
    "gigpo": ("gigpo", "ppo", "none", "k2", "default", "default"),
    "grpo": ("grpo", "ppo", "none", "k2", "default", "default"),
    "grpo_verl": ("grpo_verl", "ppo", "none", "k2", "default", "default"),
    "gspo": ("grpo", "gspo", "none", "k2", "default", "default"),
    "jsd": ("jsd", "ppo", "none", "none", "none", "default"),
    "mix": ("grpo", "mix", "none", "k2", "mix", "mix"),
    "mix_chord": ("grpo", "mix_chord", "none", "k2", "mix", "mix"),
    "multi_step_grpo": ("step_wise_grpo", "ppo", "none", "k2", "default", "default"),
    "on_policy_distill": ("on_policy_distill", "ppo", "none", "none", "none", "default"),
    "opmd": ("opmd", "opmd", "none", "k2", "default", "default"),
    "ppo": ("ppo", "ppo", "none", "k2", "default", "default"),
    "raft": ("raft", "sft", "none", "none", "none", "default"),
    "rec": ("rec", "rec", "none", "k2", "default", "default"),
    "reinforceplusplus": ("reinforceplusplus", "ppo", "none", "k2", "default", "default"),
    "reinforceplusplus_baseline": (
        "reinforceplusplus_baseline",
        "ppo",
        "none",
        "k2",
        "default",
        "default",
    ),
    "remax": ("remax", "ppo", "none", "k2", "default", "default"),
    "rloo": ("rloo", "ppo", "none", "k2", "default", "default"),
    "sapo": ("grpo", "sapo", "none", "k2", "default", "default"),
    "sft": ("none", "sft", "none", "none", "none", "default"),
    "sppo": ("opmd", "sppo", "none", "none", "none", "default"),
    "topr": ("reinforce", "topr", "none", "k2", "default", "default"),
}


def chosen(slot: str, algorithm: str, name: str | None) -> str:
    """The function that ``slot`` has: the one named, or the algorithm's own."""
    own = OWN.get(algorithm)
    return name or (own[tuple(ARGUMENTS).index(slot)] if own else "")
