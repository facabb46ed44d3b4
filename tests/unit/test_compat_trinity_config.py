"""Configurations of Trinity-RFT come in whole: each key is told of, and what comes out runs.

Invariant: the files in ``trinity_configs`` are of the kinds that Trinity-RFT's examples have.
"""

from __future__ import annotations

import asyncio
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from trinity_dask.cli import main
from trinity_dask.cli.import_trinity import HEADER, read, to_yaml
from trinity_dask.compat.trinity_config import KEYS, convert
from trinity_dask.config.compose import compose_tree, finish, split_stages
from trinity_dask.config.hints import kind_at
from trinity_dask.demo.tokenizer import ascii_tokenizer
from trinity_dask.experience.schema import decode, from_table
from trinity_dask.explorer.rollout.workflow_runner import WorkflowRunner, outcome_of
from trinity_dask.models.fake_engine import FakeEngine
from trinity_dask.models.protocol import EngineSpec
from trinity_dask.models.wrapper import ModelWrapper
from trinity_dask.run.names import check_names
from trinity_dask.workflows import Task

HERE = Path(__file__).parent
CONFIGS = {path.stem: path for path in sorted((HERE / "trinity_configs").glob("*.yaml"))}
# what cannot be kept of some of them
LOST = {
    "judge": {"explorer.auxiliary_models.0"},
    "multi_turn": {
        f"explorer.rollout_model.{key}"
        for key in (
            "enable_openai_api",
            "enable_auto_tool_choice",
            "tool_call_parser",
            "reasoning_parser",
        )
    },
    "serve": {"explorer.rollout_model.enable_openai_api"},
}


def composed(tree, root, *more):
    """What ``run`` makes of a converted file."""
    (root / "experiment").mkdir(exist_ok=True)
    (root / "experiment" / "it.yaml").write_text(HEADER.format("it") + to_yaml(tree))
    words = ["+experiment=it", *more]
    return finish(compose_tree(words, config_dir=str(root)), words)[0]


def test_there_are_the_kinds_of_their_examples():
    assert len(CONFIGS) >= 20


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "serve"])
def test_an_example_converts_and_validates(name, tmp_path, monkeypatch):
    monkeypatch.chdir(HERE / "trinity_configs")  # where its workflows are
    config = composed(convert(read(CONFIGS[name])).tree, tmp_path)
    check_names(config)
    theirs = read(CONFIGS[name])
    assert config.name == theirs["name"]
    assert config.model.model_path
    if "algorithm" in theirs:
        assert config.algorithm.algorithm_type == theirs["algorithm"]["algorithm_type"]


def test_a_service_is_refused_by_the_validation_and_not_by_the_converter(tmp_path):
    with pytest.raises(ValueError, match="mode=serve is not there yet"):
        composed(convert(read(CONFIGS["serve"])).tree, tmp_path)


@pytest.mark.parametrize("name", CONFIGS)
def test_only_what_has_no_counterpart_is_lost(name):
    assert {note.key for note in convert(read(CONFIGS[name])).losses} == LOST.get(name, set())


def leaves(tree, path=""):
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for name, value in items:
        if isinstance(value, dict | list) and value:
            yield from leaves(value, f"{path}{name}.")
        elif value is not None:
            yield f"{path}{name}"


@pytest.mark.parametrize("name", CONFIGS)
def test_every_key_of_the_file_is_told_of(name):
    told = {note.key for note in convert(read(CONFIGS[name])).notes}
    silent = [
        key
        for key in leaves(read(CONFIGS[name]))
        if not any(key == t or key.startswith(f"{t}.") for t in told)
        and not re.fullmatch(r"stages\.\d+\.stage_name", key)
    ]
    assert silent == []


def test_every_row_leads_to_a_key_that_exists_or_gives_a_reason():
    for key in KEYS:
        if key.ours is None:
            assert key.note, key.theirs
        else:
            assert kind_at(key.ours.replace("*", "0")) is not None, key


def test_no_key_has_two_rows():
    names = [key.theirs for key in KEYS]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_the_reference_names_no_key_that_the_table_lacks():
    """Sections 11.1 to 11.9 of the description, as they name the keys."""
    known = {part for key in KEYS for part in key.theirs.split(".")}
    named = (
        "ray_namespace continue_from_checkpoint ignore_validator_suggestions repeat_times "
        "enable_router_replay bypass_old_logprobs rollout_correction custom_chat_template "
        "fully_sharded_loras max_cpu_loras rope_theta tinker external_model node_num "
        "total_gpu_num train_batch_size subset_name enable_progress_bar video_key tools_key "
        "reuse_cooldown_time task_pipeline priority_weights runner_prepare_max_retries "
        "service_status_check_interval min_running_model_num wait_after_min "
        "runner_state_report_interval weight_sync_buffer_size ulysses_sequence_parallel_size "
        "fix_actor_microbatch_loss_scale context_parallel_size enable_ray_timeline "
        "wait_for_checkpoint data_juicer group_by_node task_selector warmup_style"
    )
    assert set(named.split()) <= known


def test_gpus_are_shared_out_as_there():
    tree = convert(read(CONFIGS["grpo"])).tree
    assert tree["cluster"]["rollout"] == {"n_workers": 2, "gpus_per_worker": 1, "nthreads": 8}
    assert tree["cluster"]["trainer"] == {"n_workers": 6, "gpus_per_worker": 1}
    assert tree["trainer"]["micro_batch_tokens"] == 16384
    assert tree["trainer"]["parallel"] == {"strategy": "fsdp2"}


def test_one_gpu_is_a_shared_one():
    tree = convert(read(CONFIGS["eval_lists"])).tree
    assert tree["mode"] == "colocate"
    assert tree["explorer"]["rollout_model"]["gpu_memory_utilization"] == 0.25


def test_their_defaults_are_kept_where_ours_are_others():
    tree = convert({"algorithm": {"algorithm_type": "grpo"}}).tree
    assert tree["algorithm"]["bypass_old_logprobs"] is True
    assert tree["explorer"]["eval_interval"] == 100
    assert tree["synchronizer"]["sync_timeout_s"] == 3600
    assert tree["trainer"]["save_interval"] == 0
    assert "repeat_times" not in tree["algorithm"]


def test_what_a_stage_resets_is_written_out(tmp_path):
    config = composed(convert(read(CONFIGS["multi_stage"])).tree, tmp_path)
    warmup, rl = split_stages(config)
    assert (warmup.algorithm.algorithm_type, rl.algorithm.algorithm_type) == ("sft", "grpo")
    assert (warmup.buffer.train_batch_size, rl.buffer.train_batch_size) == (64, None)
    assert rl.algorithm.kl_loss_fn_args == {"kl_coef": 0.0}
    assert warmup.buffer.explorer_input.taskset.path == ""


def test_verls_own_keys_find_their_places():
    tree = convert(read(CONFIGS["ppo"])).tree
    assert tree["trainer"]["ppo_epochs"] == 2
    assert tree["trainer"]["offload"] is True
    assert tree["critic"]["optimizer"]["lr"] == 1e-5
    assert tree["algorithm"]["advantage_fn_args"] == {"gamma": 1.0, "lam": 0.95}


@pytest.mark.parametrize(
    ("theirs", "lost"),
    [
        ({"explorer": {"rollout_model": {"engine_type": "sglang"}}}, "no engine 'sglang'"),
        ({"trainer": {"trainer_strategy": "megatron"}}, "no strategy 'megatron'"),
        ({"monitor": {"monitor_type": "swanlab"}}, "no sink 'swanlab'"),
        ({"trainer": {"trainer_config": {"actor": {"colour": 1}}}}, "a key of verl"),
        ({"explorer": {"enjine": 1}}, "not a key of Trinity-RFT"),
        ({"model": {"repetition_penalty": 1.1}}, "distribution"),
        ({"service": {"data_juicer": {"auto_start": True}}}, None),
        ({"model": {"repetition_penalty": 1.0}}, None),
        (
            {"buffer": {"explorer_input": {"default_workflow_type": "sudoku_workflow"}}},
            "not built in",
        ),
    ],
)
def test_a_loss_says_why(theirs, lost):
    losses = [str(note) for note in convert(theirs).losses]
    assert len(losses) == (lost is not None)
    assert lost is None or lost in losses[0]


def test_the_command_writes_what_validate_takes(tmp_path, capsys, monkeypatch):
    out = tmp_path / "experiment" / "g.yaml"
    assert main(["import-trinity", str(CONFIGS["grpo"]), "-o", str(out), "--strict"]) == 0
    text = capsys.readouterr().out
    assert f"trinity-dask validate --config-dir {tmp_path} +experiment=g" in text
    assert yaml.safe_load(out.read_text()) == convert(read(CONFIGS["grpo"])).tree
    monkeypatch.chdir(tmp_path)
    assert main(["validate", "--config-dir", str(tmp_path), "+experiment=g"]) == 0


def test_strict_fails_on_a_loss_and_writes_all_the_same(tmp_path, capsys):
    assert main(["import-trinity", str(CONFIGS["judge"]), "--strict"]) == 1
    shown = capsys.readouterr()
    assert "LOST" in shown.err
    assert yaml.safe_load(shown.out)["name"] == "judge"


def test_a_file_that_is_none_is_told(tmp_path, capsys):
    assert main(["import-trinity", str(tmp_path / "no.yaml")]) == 2
    (tmp_path / "list.yaml").write_text("- 1")
    assert main(["import-trinity", str(tmp_path / "list.yaml")]) == 2
    assert "holds no mapping" in capsys.readouterr().err


def test_a_workflow_of_theirs_runs_unchanged():
    engine = FakeEngine(EngineSpec("engine-0", "fake", ""))
    limits = {"max_response_tokens": 4, "max_prompt_tokens": 2048}

    def model(args):
        return ModelWrapper(engine, ascii_tokenizer(), limits, args)

    path = HERE / "trinity_configs" / "trinity_workflows.py"
    task = Task(f"{path}:GridWorkflow", raw_task={"question": "where?"}, task_id=1)

    async def main_():
        runner = WorkflowRunner(model, "sequential")
        return (await runner.run_task(task, 1, 2, 0, True, 30.0))[1]

    payload = asyncio.run(main_())
    found = from_table(decode(payload)[0])
    assert outcome_of(payload).errors == ()
    assert [(exp.eid.run, exp.eid.step) for exp in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_sampling_arguments_are_attributes_too():
    task = Task(
        "simple_workflow", rollout_args={"temperature": 0.5}, format_args={"prompt_key": "q"}
    )
    assert (task.rollout_args.temperature, task.rollout_args.top_p) == (0.5, None)
    assert task.format_args.prompt_key == "q"


SHIM = """
import importlib, sys
assert importlib.util.find_spec("trinity") is None
import trinity_dask.compat.trinity as shim
for module, names in shim.MODULES.items():
    for name in names:
        getattr(importlib.import_module(f"trinity.{module}"), name)
import trinity.common
assert trinity.common.experience.Experience.__module__ == "trinity_dask.experience.experience"
try:
    import trinity.service
except ModuleNotFoundError as error:
    print(error)
"""


def test_the_shim_has_their_modules_and_no_others():
    code = SHIM.replace("import importlib,", "import importlib.util,")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "No module named 'trinity.service'\n"


def test_the_page_is_current():
    path = HERE.parents[1] / "docs" / "make_from_trinity.py"
    spec = importlib.util.spec_from_file_location("make_from_trinity", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = module.PAGE.read_text()
    assert module.page(text) == text, "run python docs/make_from_trinity.py"
