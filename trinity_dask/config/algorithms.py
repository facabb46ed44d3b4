"""What the configuration knows of the algorithm types without importing torch.

Invariant: this is a copy of the parts of ``trinity_dask.algorithm`` that checks and derived
values need; a test compares the two.
"""

from __future__ import annotations

# group size of each type where the user gives none
REPEAT_TIMES = {
    "asymre": 2,
    "cispo": 2,
    "clipb": 2,
    "clipv": 2,
    "cpt": 1,
    "dapo": 16,
    "dpo": 2,
    "dr_grpo": 2,
    "gigpo": 8,
    "grpo": 2,
    "grpo_verl": 2,
    "gspo": 2,
    "jsd": 8,
    "mix": 8,
    "mix_chord": 8,
    "multi_step_grpo": 8,
    "on_policy_distill": 8,
    "opmd": 2,
    "ppo": 1,
    "raft": 8,
    "rec": 2,
    "reinforceplusplus": 2,
    "reinforceplusplus_baseline": 2,
    "remax": 2,
    "rloo": 2,
    "sapo": 2,
    "sft": 1,
    "sppo": 2,
    "topr": 2,
}
ALGORITHM_TYPES = tuple(sorted(REPEAT_TIMES))

# types that train on a data set and never sample
OFFLINE_TYPES = ("cpt", "dpo", "sft")
# types whose advantage compares the answers of a group: of a single one it is zero
GROUP_TYPES = (
    "asymre",
    "cispo",
    "clipb",
    "clipv",
    "dapo",
    "dr_grpo",
    "gigpo",
    "grpo",
    "grpo_verl",
    "gspo",
    "mix",
    "mix_chord",
    "multi_step_grpo",
    "opmd",
    "raft",
    "rec",
    "reinforceplusplus_baseline",
    "rloo",
    "sapo",
    "sppo",
)


def repeat_times(algorithm_type: str) -> int:
    """The default group size of a type; 1 for one that is not ours."""
    return REPEAT_TIMES.get(algorithm_type, 1)
