"""The fields about the job, its machines and its model.

Invariant: a name of the table is a function of this module: state -> field.
"""

from __future__ import annotations

from typing import Optional

from trinity_dask.manager.config_registry.config_registry import CONFIG_GENERATORS, setters
from trinity_dask.manager.config_registry.state import State

_NAMES = """
    set_total_gpu_num cluster.total_gpu_num
    set_trainer_gpu_num =cluster.trainer.n_workers trains
    set_project =project
    set_exp_name =name
    set_checkpoint_root_dir =checkpoint_root_dir
    set_monitor_type =monitor.sinks
    set_log_level log.level
    set_model_path =model.model_path
    set_critic_model_path =critic.model_path critic
    set_max_prompt_tokens =model.max_prompt_tokens samples
    set_min_response_tokens =model.min_response_tokens samples
    set_max_response_tokens =model.max_response_tokens samples
    set_max_model_len =model.max_model_len
    set_node_num =cluster.rollout.n_workers samples
    set_gpu_per_node =cluster.rollout.gpus_per_worker samples
"""
_NOTES = {
    "set_total_gpu_num": "each group of workers has its own: cluster.rollout, cluster.trainer"
}
globals().update(setters(__name__, _NAMES, _NOTES))


@CONFIG_GENERATORS.register_check()
def check_checkpoint_root_dir(state: State) -> Optional[str]:
    """A directory; a relative one is taken from where the command is."""
    place = str(state.get("checkpoint_root_dir") or "")
    if not place.strip():
        return "checkpoint_root_dir is empty: set it, as checkpoint_root_dir=./runs"
    if "://" in place:
        return f"checkpoint_root_dir={place!r} must be a directory"
    return None


@CONFIG_GENERATORS.register_check()
def check_model_path(state: State) -> Optional[str]:
    """A preset with ``prepare`` may make the model."""
    if not state.get("model.model_path"):
        return "model.model_path is empty: set model.model_path=<directory>"
    return None
