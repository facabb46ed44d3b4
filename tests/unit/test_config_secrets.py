"""Secrets of a configuration: who gets them, and who sees only that they are there."""

import copy
import logging
import pickle
from dataclasses import asdict

import pytest

from trinity_dask.cli.run import job_label, record_overrides
from trinity_dask.cluster.guard import LogFormatter
from trinity_dask.config import ConfigError, from_yaml, load_config, save, split_stages, to_yaml
from trinity_dask.config.compose import compose_tree, finish
from trinity_dask.config.fields import all_keys
from trinity_dask.config.schema import Config
from trinity_dask.config.secrets import (
    MASK,
    Veiled,
    is_secret,
    shown,
    shown_override,
    shown_text,
)
from trinity_dask.launcher.job_files import config_file, finished_message
from trinity_dask.launcher.status import describe
from trinity_dask.monitor.monitor import Monitor
from trinity_dask.monitor.sinks import SINKS, Sink

KEY, LITERAL = "s3-key-0123456789", "typed-7f3a9c"
STORE = "buffer.trainer_input.experience_buffer"


@pytest.fixture
def overrides(monkeypatch, tmp_path):
    monkeypatch.setenv("CASE_KEY", KEY)
    return [
        "engine=fake",
        f"checkpoint_root_dir={tmp_path}/runs",
        "name=secrets",
        "model.max_model_len=64",
        f"model.model_path={tmp_path}",
        f"buffer.explorer_input.taskset.path={tmp_path}/tasks.jsonl",
        f"++{STORE}.storage_options.secret=${{oc.env:CASE_KEY}}",
        f"++{STORE}.storage_options.endpoint=https://me:{LITERAL}@store.example:9000/b",
        f"++cluster.rollout.env.HUB_TOKEN={LITERAL}",
        f"++cluster.trainer.env.AGAIN=${{{STORE}.storage_options.secret}}",
        "++monitor.sink_args.wandb.where=at-${oc.env:CASE_KEY}",
    ]


def texts(folder):
    return "\n".join(p.read_text() for p in folder.rglob("*") if p.is_file())


def test_no_key_of_ours_is_named_like_a_secret():
    assert [key for key, _ in all_keys(Config) if is_secret(key.split("."))] == []


@pytest.mark.parametrize(
    "key",
    [
        *(
            "HF_TOKEN",
            "password",
            "aws.secretAccessKey",
            "AWS_ACCESS_KEY_ID",
            "api_key",
            "x.apiKey",
        ),
        *(
            "credentials.user",
            "client_kwargs.aws_session_token",
            "storage_options.key",
            "DB_PASSWD",
        ),
        *("headers.Authorization", "account_key", "GITHUB-TOKEN"),
    ],
)
def test_a_name_that_says_secret(key):
    assert is_secret(key.split("."))


@pytest.mark.parametrize("key", ["eos_token", "token_level", "max_tokens", "key", "format.key"])
def test_a_name_that_only_sounds_like_one(key):
    assert not is_secret(key.split("."))


def test_those_who_use_a_value_have_it_and_those_who_show_it_do_not(overrides):
    config = load_config(*overrides)
    options = config.buffer.trainer_input.experience_buffer.storage_options
    assert options["secret"] == KEY
    assert config.cluster.rollout.env["HUB_TOKEN"] == LITERAL
    assert config.cluster.trainer.env["AGAIN"] == KEY
    for same in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert same == config
        for seen in (repr(same), to_yaml(same), str(shown(asdict(same))), str(asdict(same))):
            assert KEY not in seen
            assert LITERAL not in seen
            assert "${oc.env:CASE_KEY}" in seen
            assert "https://me:***@store.example:9000/b" in seen


def test_a_saved_configuration_says_where_the_value_is(overrides, tmp_path, monkeypatch):
    config = load_config(*overrides)
    path = save(config, tmp_path / "config.yaml")
    assert KEY not in path.read_text()
    assert LITERAL not in path.read_text()
    monkeypatch.setenv("CASE_KEY", "another")
    with pytest.raises(ConfigError, match="HUB_TOKEN is masked"):
        from_yaml(path)  # it could not run
    again = from_yaml(path, lenient=True)
    assert again.buffer.trainer_input.experience_buffer.storage_options["secret"] == "another"
    monkeypatch.delenv("CASE_KEY")
    again = from_yaml(path, lenient=True)
    assert again.monitor.sink_args["wandb"]["where"] == "at-${oc.env:CASE_KEY}"
    assert to_yaml(again) == path.read_text()
    path.write_text(path.read_text().replace(MASK, "x"))
    with pytest.raises(ConfigError, match="CASE_KEY"):
        from_yaml(path)


def test_stages_have_the_value_and_write_the_interpolation(monkeypatch, tmp_path):
    monkeypatch.setenv("CASE_KEY", KEY)
    config = load_config(
        "+experiment=sort_digits",
        f"checkpoint_root_dir={tmp_path}",
        "++buffer.explorer_input.taskset.workflow_args.api_key=${oc.env:CASE_KEY}",
        "++stages.1.buffer.explorer_input.taskset.workflow_args.where=${oc.env:CASE_KEY}",
    )
    last = split_stages(config)[1]
    assert last.buffer.explorer_input.taskset.workflow_args["api_key"] == KEY
    assert last.buffer.explorer_input.taskset.workflow_args["where"] == KEY
    assert KEY not in to_yaml(last)
    assert to_yaml(last).count("${oc.env:CASE_KEY}") == 2


def test_another_value_of_the_variable_is_the_same_job(overrides, monkeypatch):
    config = load_config(*overrides)
    save(config, config_file(config))
    (config_file(config).parent / "stage_meta.json").write_text(
        '{"latest_stage": 0, "finished": true}'
    )
    monkeypatch.setenv("CASE_KEY", "rotated")
    assert "finished already" in finished_message(str(config.job_dir), [load_config(*overrides)])


def test_the_files_of_hydra_have_no_secret(overrides):
    from omegaconf import OmegaConf

    tree = compose_tree(overrides)
    config, _ = finish(tree, overrides)
    of_hydra = OmegaConf.create(
        {"overrides": {"task": overrides}, "job": {"override_dirname": ",".join(overrides)}}
    )
    record_overrides(config, tree, of_hydra, overrides)
    text = texts(config_file(config).parent / ".hydra")
    assert text.count("secret=${oc.env:CASE_KEY}") == 3  # in three places, as it was typed
    assert KEY not in text
    assert LITERAL not in text


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        (f"++a.token={LITERAL}", f"++a.token={MASK}"),
        ("++a.token=${oc.env:X}", "++a.token=${oc.env:X}"),
        (
            f"++a={{key: 1, password: '{LITERAL}, more', b: 2}}",
            f"++a={{key: 1, password: {MASK}, b: 2}}",
        ),
        (f"x=redis://:{LITERAL}@host/0", f"x=redis://:{MASK}@host/0"),
        (f"x=https://h/p?v=1&sas_token={LITERAL}&w=2", f"x=https://h/p?v=1&sas_token={MASK}&w=2"),
        ("trainer.total_steps=5", "trainer.total_steps=5"),
    ],
)
def test_an_override_as_it_is_shown(given, seen):
    assert shown_override(given) == seen


def test_a_job_of_a_sweep_is_not_named_by_a_secret():
    labels = [job_label(0, [f"++x.token={value}", "seed=1"]) for value in ("first", "second")]
    assert labels[0] != labels[1]
    assert all("first" not in label and "seed=1" in label for label in labels)


def test_trackers_are_given_no_secret(overrides, tmp_path, monkeypatch):
    given = {}

    class Mine(Sink):
        blocking = False

        def __init__(self, context):
            given.update(config=context.config, args=context.args)

    monkeypatch.setitem(SINKS, "wandb", Mine)
    config = load_config(*overrides, "monitor.sinks=[wandb]")
    Monitor(config.monitor, str(tmp_path / "job"), "trainer", "run", asdict(config)).close()
    assert KEY not in str(given["config"])
    assert LITERAL not in str(given["config"])
    assert given["args"]["where"] == f"at-{KEY}"  # what the tracker itself needs


def test_logs_and_errors_have_no_secret(overrides):
    config = load_config(*overrides)
    line = f"open(https://u:pw1234@h/x, secret={KEY}) of {config.monitor.sink_args} by {KEY}"
    record = logging.LogRecord("trinity_dask", logging.INFO, "f", 1, line, (), None)
    for seen in (LogFormatter().format(record), describe(OSError(line)), shown_text(line)):
        assert KEY not in seen
        assert "pw1234" not in seen
        assert "https://u:***@h/x" in seen


def test_a_path_from_the_environment_is_not_looked_for_in_logs(monkeypatch, tmp_path):
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    config = load_config(
        "engine=fake",
        "model.max_model_len=64",
        "model.model_path=${oc.env:SCRATCH}/model",
        "buffer.explorer_input.taskset.path=tasks.jsonl",
    )
    assert isinstance(config.model.model_path, Veiled)
    assert shown_text(f"no model in {tmp_path}/model") == f"no model in {tmp_path}/model"
