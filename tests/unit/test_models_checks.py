"""A model directory that cannot work is refused with the reason."""

import json

import pytest
from models_support import save_model

from trinity_dask.models.checks import (
    attention_implementation,
    attention_kinds,
    check_model_dir,
    check_vllm_cpu,
    has_chat_template,
    head_size,
)


@pytest.fixture
def directory(tmp_path):
    save_model(tmp_path / "model")
    return tmp_path / "model"


def test_a_complete_directory_passes(directory):
    check_model_dir(str(directory))
    check_vllm_cpu(str(directory))


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("config.json", r"config\.json"),
        ("model.safetensors", "weights"),
        ("tokenizer.json", "tokenizer"),
    ],
)
def test_what_is_missing_is_named(directory, file, named):
    (directory / file).unlink()
    with pytest.raises(ValueError, match=f"lacks .*{named}"):
        check_model_dir(str(directory))


def test_no_directory(tmp_path):
    with pytest.raises(ValueError, match="not a directory"):
        check_model_dir(str(tmp_path / "none"))
    with pytest.raises(ValueError, match="not a directory"):
        check_model_dir("")


def test_head_size_16_is_refused_for_vllm_on_a_cpu(directory):
    config = json.loads((directory / "config.json").read_text())
    config["num_attention_heads"] = 4
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"head size 16.*engine_type=torch"):
        check_vllm_cpu(str(directory))


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({"hidden_size": 64, "num_attention_heads": 2}, 32),
        ({"hidden_size": 64, "num_attention_heads": 2, "head_dim": 128}, 128),
        ({"text_config": {"hidden_size": 128, "num_attention_heads": 2}}, 64),
        ({}, None),
    ],
)
def test_head_size(config, size):
    assert head_size(config) == size


def test_broken_config_is_named(directory):
    (directory / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"cannot read .*config\.json"):
        check_vllm_cpu(str(directory))


@pytest.mark.parametrize(
    ("name", "content", "there"),
    [
        ("chat_template.jinja", "x", True),
        ("chat_template.json", "{}", True),
        ("tokenizer_config.json", '{"chat_template": "x"}', True),
        (
            "tokenizer_config.json",
            '{"chat_template": [{"name": "default", "template": "x"}]}',
            True,
        ),
        ("tokenizer_config.json", '{"auto_map": {"AutoTokenizer": ["a", null]}}', True),
        ("tokenizer_config.json", '{"chat_template": null}', False),
        ("tokenizer_config.json", "{", False),
        ("tokenizer.json", "{}", False),
    ],
)
def test_a_chat_template_is_found_by_its_files(tmp_path, name, content, there):
    (tmp_path / name).write_text(content)
    assert has_chat_template(str(tmp_path)) is there


def test_a_run_that_asks_chats_of_a_tokenizer_without_template_is_refused(tmp_path):
    from trinity_dask.config.compose import resolve_config
    from trinity_dask.config.errors import ConfigError
    from trinity_dask.config.schema import (
        BufferConfig,
        Config,
        ExplorerInputConfig,
        FormatConfig,
        ModelConfig,
        TasksetConfig,
    )
    from trinity_dask.run.names import check_names

    (tmp_path / "tokenizer.json").write_text("{}")

    def config(workflow="simple_workflow", **fmt):
        taskset = TasksetConfig(
            path="a.jsonl", workflow=workflow, reward_fn="math_reward", format=FormatConfig(**fmt)
        )
        buffer = BufferConfig(explorer_input=ExplorerInputConfig(taskset=taskset))
        return resolve_config(Config(model=ModelConfig(str(tmp_path)), buffer=buffer))

    for bad in (config(), config("math_workflow", prompt_type="messages")):
        with pytest.raises(ConfigError, match=r"explorer_input\.taskset: .* has no chat template"):
            check_names(bad)
    check_names(config(apply_chat_template=False))
    (tmp_path / "chat_template.jinja").write_text("x")
    check_names(config())


def test_attention_follows_the_architecture():
    from transformers import Gemma2Config, LlamaConfig, MambaConfig, MistralConfig

    assert attention_implementation(LlamaConfig()) is None
    assert attention_implementation(LlamaConfig(), "sdpa") == "sdpa"
    assert attention_implementation(Gemma2Config()) == "eager"
    assert attention_implementation(Gemma2Config(attn_logit_softcapping=None)) is None
    with pytest.raises(ValueError, match="soft-capping of gemma2's"):
        attention_implementation(Gemma2Config(), "sdpa")
    assert attention_kinds(LlamaConfig()) == {"full_attention"}
    assert attention_kinds(MistralConfig(sliding_window=8)) == {"sliding_attention"}
    assert attention_kinds(MistralConfig(sliding_window=None)) == {"full_attention"}
    assert attention_kinds(MambaConfig()) == {"linear_attention"}


@pytest.mark.parametrize(
    ("fields", "engine", "setting", "message"),
    [
        ({"model_type": "qwen3_next"}, "vllm", None, "in bfloat16 only; use another model"),
        ({"model_type": "qwen3_next"}, "torch", None, None),
        ({"kv_lora_rank": 16, "qk_rope_head_dim": 32}, "vllm", None, "head size 48; vLLM .* 576"),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, "vllm", None, None),
        ({"model_type": "gemma2", "attn_logit_softcapping": 50.0}, "torch", "sdpa", "soft-capping"),
        ({"model_type": "gemma2", "attn_logit_softcapping": 50.0}, "torch", "eager", None),
    ],
)
def test_what_cannot_work_is_refused_by_validate(directory, fields, engine, setting, message):
    from trinity_dask.config.errors import ConfigError
    from trinity_dask.config.schema import Config, ModelConfig
    from trinity_dask.run.names import check_start_model

    (directory / "config.json").write_text(json.dumps({"head_dim": 32, **fields}))
    config = Config(model=ModelConfig(str(directory), attn_implementation=setting))
    config.explorer.rollout_model.engine_type = engine
    if message is None:
        check_start_model([config])
    else:
        with pytest.raises(ConfigError, match=message):
            check_start_model([config])


@pytest.mark.parametrize(
    ("targets", "engine", "refused"),
    [(["all-linear"], "vllm", True), (["q_proj"], "vllm", False), (["all-linear"], "torch", False)],
)
def test_an_adapter_on_experts_is_refused_for_vllm(directory, targets, engine, refused):
    from trinity_dask.config.errors import ConfigError
    from trinity_dask.config.schema import Config, LoraConfig, ModelConfig
    from trinity_dask.run.names import check_start_model

    fields = {"model_type": "qwen3_moe", "num_experts": 4, "head_dim": 32}
    (directory / "config.json").write_text(json.dumps(fields))
    lora = LoraConfig(rank=2, target_modules=targets)
    config = Config(model=ModelConfig(str(directory), lora=lora))
    config.explorer.rollout_model.engine_type = engine
    if refused:
        with pytest.raises(ConfigError, match="takes no adapter on its experts"):
            check_start_model([config])
    else:
        check_start_model([config])
