"""What must be true of a model directory before an engine is started with it.

Invariant: a check names the path, what is missing and what to do; it loads no weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Optional

WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
# tekken.json is the vocabulary of a tokenizer whose template is code
TEMPLATE_FILES = (
    "chat_template.jinja", "chat_template.json", "additional_chat_templates", "tekken.json"
)  # fmt: skip
# by model type; seen with vLLM 0.32 on tiny models, see docs/models.md
VLLM_CPU_REFUSES = {
    "qwen3_next": "on a CPU vLLM computes its linear attention in bfloat16 only",
    "deepseek_v3": "on a CPU vLLM computes its latent attention to other log-probs (0.1 nats off)",
    "mamba": "vLLM has no kernel for its scan on a CPU",
    "gpt_neox": "vLLM computes other log-probs than transformers, by more than a nat",
    "bloom": "vLLM computes other log-probs than transformers, by more than a nat",
    "gpt_oss": "vLLM fills it past its own loaders, so a running engine takes no new weights",
}
# head sizes of vLLM's attention kernels for CPUs; others are accepted when the engine starts
# and kill it at the first request
VLLM_CPU_HEAD_SIZES: tuple[int, ...] = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
VLLM_CPU_LATENT_SIZES = (576,)


FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"


def attention_kinds(config: Any) -> set[str]:
    """Which kinds of layers a transformers text config names; where it names none (Mistral, Phi-3)
    a window that is set slides over all of them."""
    if named := getattr(config, "layer_types", None):
        return set(named)
    windows = ("sliding_window", "attention_chunk_size")
    slides = any(getattr(config, name, None) is not None for name in windows)
    slides = slides and bool(getattr(config, "use_sliding_window", True))
    return {SLIDING_ATTENTION if slides else FULL_ATTENTION}


def attention_implementation(config: Any, wanted: Optional[str] = None) -> Optional[str]:
    """What transformers is asked for: ``wanted`` (``model.attn_implementation``), else the one
    that computes what the architecture says. None is transformers' choice: sdpa where the class
    has it, else eager.

    Raises:
        ValueError: ``wanted`` would leave out a part of the architecture.
    """
    caps = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    if caps is not None and wanted == "sdpa":
        raise ValueError(
            f"model.attn_implementation=sdpa leaves out the soft-capping of {config.model_type}'s "
            f"attention (attn_logit_softcapping={caps}); use eager, or leave the key out"
        )
    return "eager" if caps is not None and wanted is None else wanted


def check_model_dir(path: str) -> None:
    """Raises ValueError unless ``path`` is a directory with config, weights and tokenizer."""
    root = Path(path)
    if not path or not root.is_dir():
        raise ValueError(
            f"model.model_path {path!r} is not a directory; give the path of a Hugging Face "
            "model directory (config.json, *.safetensors, tokenizer.json)"
        )
    missing = []
    if not (root / "config.json").is_file():
        missing.append("config.json")
    if not any(next(root.glob(pattern), None) for pattern in WEIGHT_PATTERNS):
        missing.append("weights (*.safetensors)")
    if not any((root / name).is_file() for name in TOKENIZER_FILES):
        missing.append("a tokenizer (tokenizer.json)")
    if missing:
        raise ValueError(
            f"model directory {path!r} lacks {', '.join(missing)}; save the model and its "
            "tokenizer there with save_pretrained"
        )


def has_chat_template(path: str) -> bool:
    """Whether the tokenizer in the model directory ``path`` has one, as far as files tell."""
    root = Path(path)
    if any((root / name).exists() for name in TEMPLATE_FILES):
        return True
    try:
        config = json.loads((root / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    # code of the model's own may bring one
    return bool(config.get("chat_template") or config.get("auto_map"))


def check_vllm_cpu(path: str) -> None:
    """Raises ValueError if vLLM cannot hold the model on a CPU, or has no attention kernel there
    for its head size."""
    config = read_model_config(path)
    kind = str((config.get("text_config") or config).get("model_type"))
    if reason := VLLM_CPU_REFUSES.get(kind):
        raise ValueError(
            f"model {path!r}: {reason}; use another model, or "
            "explorer.rollout_model.engine_type=torch"
        )
    size, sizes = head_size(config), VLLM_CPU_HEAD_SIZES
    if rank := config.get("kv_lora_rank"):  # attention over a latent of this size
        size, sizes = int(rank) + int(config["qk_rope_head_dim"]), VLLM_CPU_LATENT_SIZES
    if size is not None and size not in sizes:
        allowed = ", ".join(map(str, sizes))
        raise ValueError(
            f"model {path!r} has head size {size}; vLLM on a CPU handles {allowed}. Use "
            "another model, or explorer.rollout_model.engine_type=torch"
        )


def check_vllm_adapter(path: str) -> None:
    """Raises ValueError if an adapter on all linear layers would sit on experts, which transformers
    holds in one tensor and vLLM one by one."""
    config = read_model_config(path)
    counts = ("num_experts", "num_local_experts", "n_routed_experts")
    if any((config.get("text_config") or config).get(name) for name in counts):
        raise ValueError(
            f"model {path!r} is a mixture, and vLLM takes no adapter on its experts: name "
            "the layers, as model.lora.target_modules=[q_proj,k_proj,v_proj,o_proj], or use "
            "explorer.rollout_model.engine_type=torch"
        )


def head_size(config: dict[str, Any]) -> int | None:
    """Head size from the fields of ``config.json``; None if it cannot be told."""
    config = config.get("text_config") or config
    if config.get("head_dim"):
        return int(config["head_dim"])
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    return int(hidden) // int(heads) if hidden and heads else None


def read_model_config(path: str) -> dict[str, Any]:
    """The fields of ``config.json``.

    Raises:
        ValueError: it is missing or not JSON.
    """
    file = Path(path) / "config.json"
    try:
        return json.loads(file.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"cannot read {str(file)!r}: {error}") from error
