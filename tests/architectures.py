"""Tiny random models of many architectures, and what each has to stand in this house.

Invariant: a model is made from its transformers configuration alone, saved as the hub has it, with
weights spread so that tokens differ in likelihood, a window shorter than the rows and dropout where
the architecture has it. Every check compares with the plain model in eager attention.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from models_support import engine_spec, hf_logprobs, run, send_named
from safetensors.torch import load_file
from trainer_support import batch_of, engine, gradients

from trinity_dask.algorithm import resolve_algorithm
from trinity_dask.config.schema import Config, LoraConfig, OptimizerConfig
from trinity_dask.demo.tokenizer import ascii_tokenizer
from trinity_dask.experience import EID, Experience
from trinity_dask.models.lora import adapter_parameters
from trinity_dask.models.protocol import SamplingParams
from trinity_dask.models.torch.engine import TorchEngine, load_model
from trinity_dask.trainer.checkpoints.checkpoint import write_checkpoint
from trinity_dask.trainer.checkpoints.export import export_policy, read_engine, write_engine
from trinity_dask.trainer.model.logprobs import Scorer
from trinity_dask.trainer.model.policy_model import load_policy
from trinity_dask.trainer.model.value_model import ValueScorer, load_value_model
from trinity_dask.trainer.step.shared_prompts import may_share
from trinity_dask.trainer.step.utilisation import model_flops

PROMPTS = ([84, 80, 83, 85, 1, 21, 17, 24, 12], [85, 1, 21, 40])
ANSWER_TOKENS = 12
TOLERANCE = 1e-4
METHODS = ("nccl", "memory", "checkpoint")
SGD = OptimizerConfig(optimizer_type="sgd", lr=0.05, momentum=0.9)

VOCAB, WIDTH, WINDOW = 99, 64, 8
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
ALTERNATE = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
DEEPSEEK: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


@dataclass(frozen=True)
class Architecture:
    """A transformers configuration class and its values; names that its hub files must have."""

    config: str
    values: dict[str, Any] = field(default_factory=dict)
    hub_name: str = ""
    plain: bool = False  # the sizes are all in values
    lora: tuple[str, ...] = ("all-linear",)


ARCHITECTURES = {
    "llama": Architecture("LlamaConfig"),
    "mistral": Architecture("MistralConfig", {"sliding_window": WINDOW, "head_dim": 32}),
    "qwen2": Architecture("Qwen2Config", {"attention_dropout": 0.1}),
    "qwen2.5": Architecture("Qwen2Config", {"tie_word_embeddings": True, "rope_theta": 1e6}),
    "qwen3": Architecture("Qwen3Config", {"head_dim": 32}),
    "qwen3-moe": Architecture(
        "Qwen3MoeConfig",
        {"head_dim": 32, **EXPERTS},
        "model.layers.1.mlp.experts.3.gate_proj.weight",
    ),
    "qwen3-next": Architecture(
        "Qwen3NextConfig",
        {
            **EXPERTS,
            "head_dim": 32,
            "shared_expert_intermediate_size": 32,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
        },
        "model.layers.1.mlp.experts.3.down_proj.weight",
    ),
    "gemma2": Architecture(
        "Gemma2Config",
        {"head_dim": 32, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 8, **ALTERNATE},
    ),
    "gemma3": Architecture("Gemma3TextConfig", {"head_dim": 32, **ALTERNATE}),
    "phi3": Architecture(
        "Phi3Config", {"sliding_window": WINDOW, "pad_token_id": 96, "resid_pdrop": 0.1}
    ),
    "phi4": Architecture("Phi3Config", {"pad_token_id": 96, "partial_rotary_factor": 0.75}),
    "olmo2": Architecture("Olmo2Config", {"pad_token_id": 96}),
    "olmo3": Architecture("Olmo3Config", {"pad_token_id": 96, **ALTERNATE}),
    "smollm3": Architecture("SmolLM3Config", {"pad_token_id": 96}),
    "granite": Architecture("GraniteConfig", {"residual_multiplier": 0.5, "logits_scaling": 2.0}),
    "glm4": Architecture("Glm4Config", {"head_dim": 32, "pad_token_id": 96}),
    "glm4-moe": Architecture(
        "Glm4MoeConfig",
        {"head_dim": 32, "pad_token_id": 96, **DEEPSEEK},
        "model.layers.1.mlp.experts.3.gate_proj.weight",
    ),
    "deepseek-v3": Architecture(
        "DeepseekV3Config",
        {
            **DEEPSEEK,
            "num_key_value_heads": 2,
            "topk_method": "noaux_tc",  # vLLM reads what the hub has and transformers does not
            "scoring_func": "sigmoid",
            "kv_lora_rank": 512,  # with 64 the only size of vLLM's kernel
            "q_lora_rank": 16,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
        },
        "model.layers.1.mlp.gate.e_score_correction_bias",
    ),
    "gpt-oss": Architecture(
        "GptOssConfig",
        {
            "head_dim": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 64,
            "pad_token_id": 96,
            **ALTERNATE,
        },
    ),
    "mixtral": Architecture(
        "MixtralConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        "model.layers.1.block_sparse_moe.experts.3.w1.weight",
    ),
    "gpt2": Architecture(
        "GPT2Config",
        {"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 64},
        plain=True,
    ),
    "falcon": Architecture(
        "FalconConfig",
        {"new_decoder_architecture": False, "multi_query": True, "hidden_dropout": 0.1},
    ),
    "opt": Architecture(
        "OPTConfig",
        {"ffn_dim": 96, "word_embed_proj_dim": WIDTH, "dropout": 0.1, "pad_token_id": 96},
    ),
    "mamba": Architecture(
        "MambaConfig",
        {"vocab_size": VOCAB, "hidden_size": WIDTH, "state_size": 8, "num_hidden_layers": 2},
        plain=True,
        lora=("in_proj", "x_proj"),  # peft refuses the others
    ),
    "gpt-neox": Architecture("GPTNeoXConfig", {"hidden_dropout": 0.1}, "embed_out.weight"),
    "bloom": Architecture(
        "BloomConfig",
        {"vocab_size": VOCAB, "hidden_size": WIDTH, "n_layer": 2, "n_head": 2},
        plain=True,
    ),
}


def write_architecture(name: str, path: Path, seed: int = 0) -> str:
    """The model directory of ``name``."""
    import transformers

    made = ARCHITECTURES[name]
    ends = {"bos_token_id": None, "eos_token_id": 98, "pad_token_id": 96}
    values = (ends | made.values) if made.plain else (SIZES | ends | made.values)
    config = getattr(transformers, made.config)(**values)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    spread(model, seed)
    model.generation_config.eos_token_id = 98
    model.save_pretrained(path)
    ascii_tokenizer().save_pretrained(path)
    return str(path)


@torch.no_grad()
def spread(model: Any, seed: int, share: float = 1.0) -> Any:
    """Other weights, in place, such that the model has opinions."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_(share * (0.1 if parameter.ndim >= 2 else 0.05) * noise)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(0.5, 0, buffer.numel()))
    return model


class Stand:
    """One architecture's model directory and what is made of it once."""

    def __init__(self, name: str, root: Path) -> None:
        self.name, self.root = name, root
        self.made = ARCHITECTURES[name]
        self.path = write_architecture(name, root / "model")

    @cached_property
    def eager(self) -> Any:
        """The plain model."""
        return load_model(self.path, "float32", "cpu", attention="eager")

    def policy(self, **options: Any) -> Any:
        return load_policy(self.path, **options)

    @cached_property
    def rows(self) -> list[Experience]:
        """What the torch engine samples, three answers to each prompt."""
        groups = run(self._sampled())
        made = []
        for task, (prompt, group) in enumerate(zip(PROMPTS, groups, strict=True)):
            for number, answer in enumerate(group):
                made.append(
                    Experience(
                        tokens=np.concatenate([prompt, answer.token_ids]),
                        prompt_length=len(prompt),
                        eid=EID(batch=1, task=task, run=number),
                        reward=float(number),
                        logprobs=answer.logprobs,
                        versions=answer.versions,
                        advantages=np.full(len(answer.token_ids), number - 1.0, np.float32),
                    )
                )
        return made

    async def _sampled(self) -> list[Any]:
        torch_engine = TorchEngine(engine_spec(self.path))
        await torch_engine.prepare()
        try:
            return await asyncio.gather(*(sampled(torch_engine, prompt) for prompt in PROMPTS))
        finally:
            await torch_engine.close()


def sampled(any_engine: Any, prompt: list[int], n: int = 3) -> Any:
    params = SamplingParams(
        n=n, max_tokens=ANSWER_TOKENS, min_tokens=0, temperature=0.8, seed=len(prompt)
    )
    return any_engine.generate(prompt, params, f"{prompt}")


def assert_same(model: Any, prompt: list[int], answers: list[Any], tolerance: float) -> None:
    """The answers' log-probs are those of ``model``."""
    for answer in answers:
        expected = hf_logprobs(model, prompt, answer.token_ids, 0.8)
        np.testing.assert_allclose(answer.logprobs, expected, atol=tolerance)


# ------------------------------------------------------------------------------- the columns
def rollout(stand: Stand) -> str:
    """The torch engine's log-probs are the plain model's."""
    for row in stand.rows:
        prompt = row.tokens[: row.prompt_length].tolist()
        expected = hf_logprobs(stand.eager, prompt, row.tokens[row.prompt_length :], 0.8)
        np.testing.assert_allclose(row.logprobs, expected, atol=TOLERANCE)
    assert max(len(row.logprobs) for row in stand.rows) > 2
    return "✓"


def lag_0(stand: Stand) -> str:
    """The trainer's log-probs of padded micro-batches are the engine's."""
    trained = engine(model=stand.policy(), temperature=0.8, share_prompts=False, optimizer=SGD)
    metrics = trained.train_step(batch_of(stand.rows), 1)
    gaps = [value for key, value in metrics.items() if key.endswith("/gap_max")]
    assert max(gaps) <= TOLERANCE
    found = trained_logprobs(stand.policy(), stand.rows)
    for row, got in zip(stand.rows, found, strict=True):
        np.testing.assert_allclose(got[: len(row.logprobs)], row.logprobs, atol=TOLERANCE)
    return "✓"


def trained_logprobs(model: Any, rows: list[Experience], temperature: float = 0.8) -> np.ndarray:
    from trinity_dask.trainer.step.batching import Widths, take

    batch = batch_of(rows)
    micro = take(batch, np.arange(len(rows)), Widths.of(batch))
    with torch.no_grad():
        return Scorer(model, temperature)(micro).logprob.numpy()


def stepped(stand: Stand, share: bool, **options: Any) -> Any:
    trained = engine(
        model=stand.policy(**options), temperature=0.8, share_prompts=share, optimizer=SGD
    )
    trained.train_step(batch_of(stand.rows), 1)
    return trained


def assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Gradients are equal up to rounding, measured against the largest of all."""
    assert found.keys() == wanted.keys()
    largest = max(float(value.abs().max()) for value in wanted.values())
    for name, value in wanted.items():
        assert float((found[name] - value).abs().max()) <= 1e-3 * largest, name


def train_step(stand: Stand) -> str:
    """The gradient is eager attention's, row by row, and gradient checkpointing changes nothing."""
    plain = gradients(stepped(stand, False, attention="eager"))
    model_flops(stand.policy())
    assert_close(gradients(stepped(stand, False)), plain)
    assert_close(gradients(stepped(stand, False, gradient_checkpointing=True)), plain)
    return "✓"


def sharing(stand: Stand) -> str:
    """Sharing the prompt's pass changes nothing, or is refused."""
    if not may_share(stand.policy()):
        return "–"
    assert_close(gradients(stepped(stand, True)), gradients(stepped(stand, False)))
    return "✓"


def torch_sync(stand: Stand) -> str:
    """After an update by each method the torch engine computes what the trainer does."""
    run(_synced(stand, TorchEngine(engine_spec(stand.path)), TOLERANCE))
    return "✓"


async def _synced(stand: Stand, any_engine: Any, tolerance: float) -> None:
    await any_engine.prepare()
    try:
        for prompt in PROMPTS:
            assert_same(stand.eager, prompt, await sampled(any_engine, prompt), tolerance)
        for version, method in enumerate(METHODS, 1):
            trained = engine(model=spread(stand.policy(), version, 0.3)).policy
            named = list(trained.full_weights(hub=True))
            assert [m.shape for m in trained.wire_meta("float32")] == [t.shape for _, t in named]
            path = stand.root / f"{type(any_engine).__name__}-{version}.safetensors"
            await send_named(any_engine, named, version, path, method)
            for prompt in PROMPTS:
                answers = await sampled(any_engine, prompt)
                assert_same(trained.module, prompt, answers, tolerance)
                assert {int(v) for a in answers for v in a.versions} == {version}
    finally:
        await any_engine.close()


def lora_sync(stand: Stand) -> str:
    """An adapter reaches the torch engine, and merged into its base computes the same."""
    from dataclasses import asdict

    lora = LoraConfig(rank=2, alpha=8.0, target_modules=list(stand.made.lora))
    trained = engine(model=stand.policy(lora=lora), temperature=0.8)
    stirred(trained.policy.module)
    trained.train_step(batch_of(stand.rows), 1)

    spec = engine_spec(stand.path)
    spec.model["lora"] = asdict(lora)
    run(_adapted(stand, TorchEngine(spec), trained.policy, TOLERANCE))
    where = stand.root / "lora"
    write_engine(trained.trainables, where, stand.path)
    merged = load_model(str(export_policy(where, torch.float32, merge=True)), "float32", "cpu")
    expected = trained_logprobs(trained.policy.module, stand.rows)
    np.testing.assert_allclose(trained_logprobs(merged, stand.rows), expected, atol=TOLERANCE)
    return "✓"


async def _adapted(stand: Stand, any_engine: Any, policy: Any, tolerance: float) -> None:
    """The adapter of ``policy`` in an engine."""
    await any_engine.prepare()
    try:
        named = list(policy.full_weights(hub=True))
        await send_named(any_engine, named, 1, stand.root / "lora.safetensors", "memory")
        for prompt in PROMPTS:
            assert_same(policy.module, prompt, await sampled(any_engine, prompt), tolerance)
    finally:
        await any_engine.close()


def stirred(model: Any) -> None:
    """The adapter has an effect, and is not square to it."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in adapter_parameters(model).values():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


def critic(stand: Stand) -> str:
    """A value model learns, and its directory gives the same values again."""
    from trinity_dask.trainer.step.batching import Widths, take

    spec, cfg = resolve_algorithm({"algorithm_type": "ppo", "kl_loss_fn": "none"}), Config()
    cfg.critic.optimizer = OptimizerConfig(lr=1e-2, weight_decay=0.0)
    cfg.trainer.gradient_checkpointing = True
    from trinity_dask.trainer.model.value_model import load_critic
    from trinity_dask.trainer.step.engine import StepEngine

    made = load_critic(cfg, spec, stand.path, "cpu")
    trained = StepEngine(cfg, spec, stand.policy(), critic=made)
    batch = batch_of(stand.rows)
    trained.train_step(batch, 1)
    micro = take(batch, np.arange(len(stand.rows)), Widths.of(batch))
    with torch.no_grad():
        values = ValueScorer(made)(micro)
    assert float(values.abs().max()) > 0
    write_engine({"critic": trained.trainables["critic"]}, stand.root / "of_critic", stand.path)
    again = load_value_model(stand.root / "of_critic" / "critic")
    with torch.no_grad():
        torch.testing.assert_close(ValueScorer(again)(micro), values, atol=1e-5, rtol=1e-5)
    return "✓"


def resume(stand: Stand) -> str:
    """A policy continues from its checkpoint bit for bit."""
    first = stepped(stand, False)
    path = write_checkpoint(
        stand.root / "job", 1, {}, lambda d: write_engine(first.trainables, d, stand.path)
    )
    second = engine(
        model=spread(stand.policy(), 9), temperature=0.8, share_prompts=False, optimizer=SGD
    )
    read_engine(second.trainables, path)
    for trained in (first, second):
        trained.train_step(batch_of(stand.rows), 2)
    both = (dict(each.policy.full_weights()) for each in (first, second))
    for (a, value), (b, same) in zip(*(each.items() for each in both), strict=True):
        assert a == b
        torch.testing.assert_close(same, value, atol=0, rtol=0)
    return "✓"


def export(stand: Stand) -> str:
    """The export has the hub's names, and transformers makes the same model of it."""
    trained = stepped(stand, False)
    write_engine(trained.trainables, stand.root / "trained", stand.path)
    target = export_policy(stand.root / "trained", torch.float32)
    names = set(load_file(target / "model.safetensors"))
    assert names == set(load_file(Path(stand.path) / "model.safetensors"))
    assert not stand.made.hub_name or stand.made.hub_name in names
    again = load_model(str(target), "float32", "cpu")
    expected = trained_logprobs(trained.policy.module, stand.rows)
    np.testing.assert_allclose(trained_logprobs(again, stand.rows), expected, atol=1e-5)
    return "✓"


def vllm_sync(stand: Stand) -> str:
    """As :func:`torch_sync` with vLLM on a CPU."""
    from trinity_dask.models.vllm.engine import VLLMEngine

    run(_synced(stand, VLLMEngine(engine_spec(stand.path, "vllm")), 1e-3), 300)
    return "✓"


def vllm_lora(stand: Stand) -> str:
    """An adapter reaches vLLM."""
    from dataclasses import asdict

    from trinity_dask.models.vllm.engine import VLLMEngine

    lora = LoraConfig(rank=2, alpha=8.0, target_modules=list(stand.made.lora))
    trained = engine(model=stand.policy(lora=lora))
    stirred(trained.policy.module)
    spec = engine_spec(stand.path, "vllm")
    spec.model["lora"] = asdict(lora)
    run(_adapted(stand, VLLMEngine(spec), trained.policy, 1e-3), 300)
    return "✓"


COLUMNS: dict[str, Callable[[Stand], str]] = {
    "torch rollout": rollout,
    "lag 0": lag_0,
    "train step": train_step,
    "shared prompts": sharing,
    "sync": torch_sync,
    "LoRA": lora_sync,
    "critic": critic,
    "resume": resume,
    "export": export,
}
