"""The names and parameters that users of Trinity-RFT know, by module, and that they are tried.

Invariant: a name of the tables is there with these parameters, in this order, with these
defaults, and is called in a test on live objects.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
# the same constructors and calls as Trinity-RFT's; "async" says which have to be awaited
SEED = {
    "manager.synchronizer:Synchronizer": """
        def __init__(config, module_ref)
        async add_module(module_ref)
        async set_trainer_status(status)
        def get_trainer_status()
        def trainer_requires_weight_sync()
        async set_explorer_status(status, old_status=None)
        def get_explorer_status_counts()
        def explorer_requires_sync()
        async set_model_state_dict(model_state_dict, trainer_step)
        async set_model_state_dict_with_step_num(step_num=None, world_size=None)
        def get_model_state_dict()
        def get_model_state_dict_iterator()
        async get_state_dict_meta()
        async setup_weight_sync_group(master_address, master_port, state_dict_meta=None)
        async coordinate_weight_sync_setup(timeout=None)
        async coordinate_weight_sync_teardown()
        async wait_new_model_state_dict(current_version, no_wait=False)
        async notify_no_new_model_state_dict()
        async get_latest_model_version()
        async get_latest_model_path(use_huggingface=False)
        async ready_to_nccl_sync(module, trainer_step=None)
        def get_actor(config=None, namespace=None)
    """,
    "manager.state_manager:StateManager": """
        def __init__(path, trainer_name=None, explorer_name=None, config=None, check_config=False)
        def save_explorer(current_step, taskset_states)
        def load_explorer()
        def save_explorer_server_url(url)
        def load_explorer_server_url()
        def save_trainer(current_step, sample_strategy_state)
        def load_trainer()
        def save_stage(current_stage)
        def load_stage()
    """,
    "explorer.explorer:Explorer": """
        def __init__(config)
        async setup_weight_sync_group(master_address, master_port, world_size=None, \
group_name=None, timeout=None)
        async set_state_dict_meta(state_dict_meta)
        async teardown_weight_sync_group()
        async setup_model_level_weight_sync_group()
        async prepare()
        async get_weight(name)
        async explore()
        async explore_step()
        async finish_current_steps()
        async need_sync()
        def need_eval()
        async eval()
        async benchmark()
        async save_checkpoint()
        async sync_weight()
        async shutdown()
        async is_alive()
        def get_actor(config)
    """,
    "explorer.rollout_coordinator:RolloutCoordinator": """
        def __init__(config)
        async prepare()
        async shutdown()
        async submit_batch(batch_id, tasks, batch_type, min_wait_num=None)
        async finalize_train_batch(batch_id, timeout=None)
        async finalize_eval_batch(batch_id, timeout=None)
        async abort_batch(batch_id, reason, keep_partial_results=False)
        async process_experiences(payloads)
        def get_actor(config)
    """,
    "explorer.scheduler:Scheduler": """
        def __init__(config)
        async start()
        async stop()
        def schedule(tasks, batch_id)
        def dynamic_timeout(timeout=None)
        async get_payload_results(batch_id, min_num=None, timeout=None, \
clear_timeout_tasks=True, return_partial_tasks=False)
        async get_statuses(batch_id, min_num=None, timeout=None, clear_timeout_tasks=True, \
return_partial_tasks=False)
        async drain_batch_payload_results(batch_id)
        def discard_completed_results(batch_id)
        async abort_batch(batch_id, return_partial_tasks=False, restart_runners=True)
        def has_step(batch_id)
        async wait_all(timeout=None, clear_timeout_tasks=True)
        def task_done_callback(async_task)
        def get_key_state(key)
        def get_runner_state(runner_id)
        def get_all_state()
        def print_all_state()
    """,
    "explorer.scheduler:RunnerWrapper": """
        def __init__(runner_id, rollout_model_id, auxiliary_model_ids, config)
        async prepare()
        async update_state()
        async run_with_retry(task, repeat_times, run_id_base, timeout, collect_partial_runs)
        async restart_runner()
    """,
    "explorer.scheduler:TaskWrapper": """
        def __init__(task, batch_id, sub_task_num=1, finished_sub_task_num=0, completed_runs=0, \
total_runs=0, metrics=<factory>, experience_payloads=<factory>, first_error=None, emitted=False)
    """,
    "explorer.scheduler:CompletedTaskResult": """
        def __init__(batch_id, task_id, status, experience_payloads=<factory>)
    """,
    "explorer.scheduler:RunningTaskState": """
        def __init__(task, runner_id, restart_runner_on_cancel=True)
    """,
    "explorer.workflow_runner:Status": """
        def __init__(completed_runs, total_runs, metrics=<factory>, message=None)
    """,
    "explorer.workflow_runner:WorkflowRunner": """
        def __init__(config, rollout_model_id, auxiliary_model_ids=None, runner_id=None)
        async prepare()
        def is_alive()
        async get_runner_state()
        async run_task(task, batch_id, repeat_times=1, run_id_base=0, collect_partial_runs=True)
    """,
    "explorer.workflow_runner:DebugWorkflowRunner": """
        def __init__(config, output_dir='debug_output', enable_profiling=False, \
disable_overwrite=False)
        async debug()
    """,
}
CALLS = [(cls, line.strip()) for cls, lines in SEED.items() for line in lines.strip().split("\n")]


@pytest.mark.parametrize(("cls", "line"), CALLS)
def test_a_call_has_its_parameters_and_is_awaited_as_there(cls: str, line: str) -> None:
    module, name = cls.split(":")
    found = getattr(importlib.import_module(f"trinity_dask.{module}"), name)
    kind, name = line.split("(")[0].split()
    call = getattr(found, name)
    own = [p for p in inspect.signature(call).parameters.values() if p.name != "self"]
    shown = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in own]
    known = line.split("(", 1)[1][:-1]
    n = len(known.split(", ")) if known else 0
    assert ", ".join(shown[:n]) == known
    assert all(p.default is not p.empty for p in own[n:]), "what we added may be left out"
    assert inspect.iscoroutinefunction(call) == (kind == "async")


def test_every_call_is_tried_on_live_objects() -> None:
    """In the cluster tests; for a few that need no cluster, in the unit tests."""
    files = [*TESTS.glob("cluster/*compat_*.py"), TESTS / "unit" / "test_compat_synchronizer.py",
             TESTS / "unit" / "test_manager_state_files.py"]  # fmt: skip
    tried = {
        node.attr
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute)
    }
    wanted = {line.split("(")[0].split()[1] for _, line in CALLS} - {"__init__"}
    assert wanted - tried == set()


def test_sort_batch_id_is_where_it_was() -> None:
    from trinity_dask.explorer.scheduler import sort_batch_id

    assert sort_batch_id("3/held_out") > sort_batch_id(3)
