"""The fields about engines and about how explorer and trainer keep in step.

Invariant: a name of the table is a function of this module: state -> field.
"""

from __future__ import annotations

from typing import Optional

from trinity_dask.manager.config_registry.config_registry import (
    CONFIG_GENERATORS,
    VISIBLE,
    function_of,
    setters,
)
from trinity_dask.manager.config_registry.state import State

_NAMES = """
    set_runner_per_model explorer.runner_per_model samples
    set_eval_interval =explorer.eval_interval samples
    set_engine_num explorer.rollout_model.engine_num samples
    set_tensor_parallel_size =explorer.rollout_model.tensor_parallel_size samples
    set_enforce_eager =explorer.rollout_model.enforce_eager samples
    set_enable_prefix_caching =explorer.rollout_model.enable_prefix_caching samples
    set_enable_chunked_prefill explorer.rollout_model.enable_chunked_prefill samples
    set_gpu_memory_utilization =explorer.rollout_model.gpu_memory_utilization samples
    set_dtype =model.dtype
    set_seed =explorer.rollout_model.seed samples
    set_enable_thinking model.enable_thinking samples
    set_enable_history =explorer.rollout_model.enable_history samples
    set_enable_openai_api explorer.rollout_model.enable_openai_api samples
    set_enable_auto_tool_choice explorer.rollout_model.enable_auto_tool_choice samples
    set_tool_call_parser explorer.rollout_model.tool_call_parser samples
    set_reasoning_parser explorer.rollout_model.reasoning_parser samples
    set_auxiliary_models =model.teacher_model_path
    set_sync_method =synchronizer.sync_method samples trains
    set_sync_style =synchronizer.sync_style samples trains
    set_sync_interval =synchronizer.sync_interval samples trains
    set_sync_timeout synchronizer.sync_timeout samples trains
"""
globals().update(setters(__name__, _NAMES, {}))


def explorer_visible(state: State) -> bool:
    """Whether the run samples."""
    return VISIBLE["samples"](state)


@CONFIG_GENERATORS.register_check()
def check_tensor_parallel_size(state: State) -> Optional[str]:
    """As many GPUs per rollout worker as share its engine."""
    size = state.get("explorer.rollout_model.tensor_parallel_size")
    gpus = state.get("cluster.rollout.gpus_per_worker")
    if gpus and gpus != size:
        return f"explorer.rollout_model.tensor_parallel_size={size} needs {size} GPUs per worker"
    return None


@CONFIG_GENERATORS.register_check()
def check_auxiliary_models(state: State) -> Optional[str]:
    """Whoever learns from a teacher's distribution has one."""
    if function_of(state, "policy_loss_fn") == "jsd" and not state.get("model.teacher_model_path"):
        return "model.teacher_model_path is empty: policy_loss_fn jsd compares with a teacher"
    return None
