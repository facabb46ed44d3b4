"""A sharded model: each rank reads its own part, and a checkpoint is one of any number of ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sharded_ranks import run
from trainer_support import engine
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, Phi3Config

from trinity_dask.config.schema import LoraConfig
from trinity_dask.explorer.engine_weights import checkpoint_weights
from trinity_dask.trainer.checkpoints.checkpoint import is_complete, write_checkpoint
from trinity_dask.trainer.checkpoints.export import export_policy, read_engine, write_engine
from trinity_dask.trainer.checkpoints.shards import agree_on, saved_weights
from trinity_dask.trainer.model.policy_model import load_policy
from trinity_dask.trainer.model.value_model import load_value_model
from trinity_dask.trainer.ranks.parallel import Sharding, whole
from trinity_dask.weights.files import read_safetensors

pytestmark = pytest.mark.timeout(300)
SIZES = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {
    "n_routed_experts": 5,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
CONFIGS = {
    "tied": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True, num_key_value_heads=2),
    "fused": lambda: Phi3Config(**SIZES),
    # experts that lie apart in the files and together in the model, a buffer that is saved
    "experts": lambda: DeepseekV3Config(**SIZES, **EXPERTS),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    paths = {}
    for name, config in CONFIGS.items():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config())
        for label, buffer in model.named_buffers():
            if "correction" in label:
                buffer.uniform_()
        paths[name] = str(tmp_path_factory.mktemp(name))
        model.save_pretrained(paths[name])
    return paths


def differences(model: torch.nn.Module, sharded: torch.nn.Module, dtype: torch.dtype) -> list[str]:
    """Names of what is not the same to the last bit; gathers."""
    mine, its = dict(model.named_parameters()), dict(sharded.named_parameters())
    wrong = sorted(mine.keys() ^ its.keys())
    for name in mine.keys() & its.keys() if not wrong else sorted(mine):
        got = whole(its[name].detach())
        wrong += [] if torch.equal(got, mine[name].detach().to(dtype)) else [name]
    buffers = dict(sharded.named_buffers())
    for name, buffer in model.named_buffers():
        same = buffers[name].dtype == buffer.dtype and torch.equal(buffers[name], buffer)
        wrong += [] if same else [name]
    return wrong


def compare_loads(mesh, path: str) -> dict[str, list[str]]:
    """By kind of model, what a sharded load gave otherwise than a whole one."""
    found = {}
    plain, bf16 = Sharding(mesh), Sharding(mesh, torch.bfloat16)
    lora = LoraConfig(rank=2, alpha=4.0)
    cases = {
        "policy": (lambda **s: load_policy(path, **s), plain, torch.float32),
        "frozen": (lambda **s: load_policy(path, trained=False, **s), bf16, torch.bfloat16),
        "adapter": (lambda **s: load_policy(path, lora=lora, **s), plain, torch.float32),
        "critic": (lambda **s: load_value_model(path, **s), plain, torch.float32),
    }
    ids = torch.arange(3, 13)[None]
    for kind, (load, sharding, dtype) in cases.items():
        torch.manual_seed(5)
        expected = load()
        torch.manual_seed(5)
        got = load(sharding=sharding)
        found[kind] = differences(expected, got, dtype)
        with torch.no_grad():
            gap = expected(input_ids=ids).logits - got(input_ids=ids).logits
        found[kind] += ["logits"] if float(gap.abs().max()) > (1e-6, 0.1)[kind == "frozen"] else []
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_ranks_read_their_parts_of_what_one_rank_reads_whole(
    name: str, models: dict[str, str], tmp_path: Path
) -> None:
    # neither divides 67 rows or 5 experts
    for found in run(compare_loads, 3 if name == "experts" else 2, tmp_path, models[name]):
        assert found == {"policy": [], "frozen": [], "adapter": [], "critic": []}


def load_broken(mesh, path: str) -> str:
    try:
        load_policy(path, sharding=Sharding(mesh))
    except ValueError as error:
        return str(error)
    return "nothing was wrong"


def read_missing(mesh, path: str) -> torch.Tensor:
    torch.manual_seed(11)
    torch.rand(mesh.get_local_rank())  # generators that are not at one place
    return whole(
        load_policy(path, sharding=Sharding(mesh)).get_parameter("lm_head.weight")
    ).detach()


def test_what_the_files_lack_or_have_otherwise(models: dict[str, str], tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(models["fused"], broken)
    tensors = load_file(broken / "model.safetensors")
    head = tensors.pop("lm_head.weight")
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    one, two = run(read_missing, 2, tmp_path, str(broken))
    assert torch.equal(one, two)
    assert 0.005 < float(one.std()) < 0.05  # the config's initializer_range is 0.02
    save_file(tensors | {"lm_head.weight": head[:60]}, broken / "model.safetensors")
    for message in run(load_broken, 2, tmp_path, str(broken)):
        assert "lm_head.weight is [60, 32] in the files and [67, 32] in the model" in message


# checkpoints --------------------------------------------------------------------------
def state_of(trained) -> dict[str, torch.Tensor]:
    """Whole weights and moments."""
    policy = trained.policy
    return {n: t.clone() for n, t in [*policy.full_weights(), *policy.state_tensors()]}


def save_after_a_step(mesh, path: str, job: Path) -> dict[str, torch.Tensor]:
    trained = engine(model=load_policy(path, sharding=Sharding(mesh)))
    give_gradients(trained)

    def fill(directory: Path) -> None:
        agree_on(directory)
        write_engine(trained.trainables, directory, path)

    if mesh.get_local_rank() == 0:
        write_checkpoint(job, 1, {}, fill)
    else:
        write_engine(trained.trainables, agree_on(None), lead=False)
    return state_of(trained)


def give_gradients(trained) -> None:
    """One update by a gradient that depends on nothing but the weights."""
    for parameter in trained.policy.named.values():
        parameter.grad = parameter.detach() * 0.5
    trained.policy.finish_update(1)


def resume(mesh, path: str, checkpoint: Path) -> dict[str, torch.Tensor]:
    trained = engine(model=load_policy(path, sharding=Sharding(mesh)))
    read_engine(trained.trainables, checkpoint)
    before = state_of(trained)
    give_gradients(trained)  # the optimizer takes its moments
    return before


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    assert [n for n in got if not torch.equal(got[n], expected[n])] == []


def test_a_checkpoint_of_three_ranks_is_one_of_two_and_of_one(
    models: dict[str, str], tmp_path: Path
) -> None:
    path, job = models["experts"], tmp_path / "job"
    saved = run(save_after_a_step, 3, tmp_path, path, job)[0]
    checkpoint = job / "global_step_1"
    assert any(float(value.abs().max()) > 0 for n, value in saved.items() if "exp_avg_sq" in n)
    for got in run(resume, 2, tmp_path, path, checkpoint):
        assert_same(got, saved)

    alone = engine(model=load_policy(path))
    read_engine(alone.trainables, checkpoint)
    assert_same(state_of(alone), saved)

    # and back: what one rank saved whole is read in shards
    back = write_checkpoint(job, 2, {}, lambda d: write_engine(alone.trainables, d, path))
    assert (back / "actor/model.safetensors").is_file()
    for got in run(resume, 2, tmp_path, path, back):
        assert_same(got, saved)


def test_a_checkpoint_in_shards_is_exported_evaluated_and_checked(
    models: dict[str, str], tmp_path: Path
) -> None:
    path, job = models["tied"], tmp_path / "job"
    saved = run(save_after_a_step, 2, tmp_path, path, job)[0]
    checkpoint = job / "global_step_1"
    weights = {name: value for name, value in saved.items() if "|" not in name}
    assert_same(dict(saved_weights(checkpoint / "actor")), weights)
    export = export_policy(checkpoint, torch.float32)
    loaded = load_policy(export)
    assert_same({n: p.detach() for n, p in loaded.named_parameters()}, weights)
    assert_same(dict(read_safetensors(str(checkpoint_weights(checkpoint)))), weights)

    assert is_complete(checkpoint)
    part = next((checkpoint / "actor/shards").glob("*.distcp"))
    part.write_bytes(part.read_bytes()[:-1])
    assert not is_complete(checkpoint)


def fail_to_write(mesh, path: str, job: Path) -> str:
    trained = engine(model=load_policy(path, sharding=Sharding(mesh)))
    job.mkdir(exist_ok=True)
    directory = job / "partial"
    if mesh.get_local_rank() == 1:  # its file cannot be made
        (directory / "actor/shards/__1_0.distcp").mkdir(parents=True)
    torch.distributed.barrier()
    try:
        write_engine(trained.trainables, directory, path, lead=mesh.get_local_rank() == 0)
    except OSError as error:
        return str(error)
    return "nothing was wrong"


def test_a_rank_that_cannot_write_ends_the_save_on_all(
    models: dict[str, str], tmp_path: Path
) -> None:
    for message in run(fail_to_write, 2, tmp_path, models["tied"], tmp_path / "job"):
        assert "trainer rank 1 could not write its shards" in message
