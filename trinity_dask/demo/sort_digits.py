"""The demo task: put random digits in ascending order.

Invariant: everything (weights, prompts, split) follows from the arguments, training and
held-out prompts are disjoint, and a directory that carries the marker is complete.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trinity_dask.demo.tokenizer import EOS_TOKEN, PAD_TOKEN, ascii_tokenizer, bpe_tokenizer
from trinity_dask.files import read_json, replacing, write_json, write_text

if TYPE_CHECKING:
    from trinity_dask.config.schema import Config

MARKER = "COMPLETE.json"
MAX_POSITIONS = 512


@dataclass(frozen=True)
class SortDigitsSpec:
    """What to build. Head size is ``hidden_size / n_heads``; vLLM on CPU needs 32 or more."""

    seed: int = 42
    n_train: int = 8000
    n_eval: int = 500
    n_digits: int = 6
    hidden_size: int = 64
    n_layers: int = 2
    n_heads: int = 2
    intermediate_size: int = 128
    # qwen2; qwen3_moe: four experts, two of them for each token; llama_chat: a byte-level BPE with
    # merges and a chat template
    kind: str = "qwen2"


KINDS = ("qwen2", "qwen3_moe", "llama_chat")


def prepare(cfg: Config, *, dir: str, **spec: Any) -> None:
    """Write the demo under ``dir`` unless it is there already.

    ``dir/model`` is a Hugging Face model directory with random weights and a tokenizer;
    ``dir/train.jsonl`` and ``dir/eval.jsonl`` hold rows ``{"prompt": "sort 407193=",
    "response": "013479"}``. ``spec`` overrides fields of :class:`SortDigitsSpec`; the seed
    defaults to ``cfg.seed``. Other arguments than those of the last call rebuild it.

    Raises:
        ValueError: unknown argument, or more prompts than there are digit strings.
    """
    wanted = _spec({"seed": cfg.seed, **spec})
    root = Path(dir)
    if read_json(root / MARKER) == asdict(wanted):
        return
    root.mkdir(parents=True, exist_ok=True)
    train, held_out = sort_rows(wanted)
    with replacing(root / "model", durable=False) as partial:
        write_model(wanted, partial)
        (root / MARKER).unlink(missing_ok=True)  # it comes back when every part is new
    write_jsonl(root / "train.jsonl", train)
    write_jsonl(root / "eval.jsonl", held_out)
    write_json(root / MARKER, asdict(wanted))


def sort_digits_reward(response: str, truth: str, finish_reason: str, **_: Any) -> float:
    """1.0 if ``response`` is ``truth`` and the model ended it itself, else 0.0."""
    return float(response == truth and finish_reason == "stop")


def sort_rows(spec: SortDigitsSpec) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Distinct training and held-out rows, drawn from ``spec.seed``."""
    n_rows = spec.n_train + spec.n_eval
    rng = np.random.default_rng(spec.seed)
    numbers = rng.choice(10**spec.n_digits, size=n_rows, replace=False)
    texts = [f"{number:0{spec.n_digits}d}" for number in numbers]
    rows = [{"prompt": f"sort {text}=", "response": "".join(sorted(text))} for text in texts]
    return rows[: spec.n_train], rows[spec.n_train :]


def write_model(spec: SortDigitsSpec, path: Path) -> None:
    """A model with random weights (std 0.02, float32) and its tokenizer."""
    import torch
    from transformers import (
        AutoModelForCausalLM,
        GenerationConfig,
        LlamaConfig,
        Qwen2Config,
        Qwen3MoeConfig,
    )

    from trinity_dask.models.hub_names import HubNames
    from trinity_dask.weights.broadcast import named_weights
    from trinity_dask.weights.files import write_safetensors

    tokenizer = bpe_tokenizer() if spec.kind == "llama_chat" else ascii_tokenizer()
    eos = tokenizer.convert_tokens_to_ids(EOS_TOKEN)
    pad = tokenizer.convert_tokens_to_ids(PAD_TOKEN)
    of_kind: dict[str, tuple[Any, dict[str, Any]]] = {
        "qwen2": (Qwen2Config, {}),
        "qwen3_moe": (
            Qwen3MoeConfig,
            {
                "head_dim": spec.hidden_size // spec.n_heads,
                "moe_intermediate_size": spec.intermediate_size // 2,
                "num_experts": 4,
                "num_experts_per_tok": 2,
            },
        ),
        "llama_chat": (LlamaConfig, {}),
    }
    made, more = of_kind[spec.kind]
    chats = spec.kind == "llama_chat"
    # a chat model's configuration often knows another end than the turn's, and a padded vocabulary
    own_end = pad if chats else eos
    config = made(
        vocab_size=-(-len(tokenizer) // 64) * 64 if chats else len(tokenizer),
        hidden_size=spec.hidden_size,
        num_hidden_layers=spec.n_layers,
        num_attention_heads=spec.n_heads,
        num_key_value_heads=spec.n_heads,
        intermediate_size=spec.intermediate_size,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        initializer_range=0.02,
        dtype="float32",
        bos_token_id=None,
        eos_token_id=own_end,
        pad_token_id=pad,
        **more,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        model = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    named = HubNames(model).to_hub(named_weights(model))
    write_safetensors(str(path / "model.safetensors"), named)
    config.save_pretrained(path)
    GenerationConfig(eos_token_id=own_end, pad_token_id=pad).save_pretrained(path)
    tokenizer.save_pretrained(path)


def _spec(values: dict[str, Any]) -> SortDigitsSpec:
    known = set(SortDigitsSpec.__dataclass_fields__)
    if unknown := sorted(set(values) - known):
        raise ValueError(f"prepare_args {unknown} are unknown; allowed: dir, {sorted(known)}")
    spec = SortDigitsSpec(**values)
    if spec.kind not in KINDS:
        raise ValueError(f"prepare_args kind={spec.kind!r} is unknown; allowed: {', '.join(KINDS)}")
    if not 0 < spec.n_train + spec.n_eval <= 10**spec.n_digits:
        raise ValueError(
            f"n_train + n_eval is {spec.n_train + spec.n_eval}, but there are "
            f"{10**spec.n_digits} strings of {spec.n_digits} digits; lower it or raise n_digits"
        )
    return spec


def write_jsonl(path: Path, rows: Iterable[dict[str, str]]) -> None:
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
