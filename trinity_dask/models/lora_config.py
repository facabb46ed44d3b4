"""Whether a model has an adapter, and peft's configuration of it.

Invariant: importing this module imports no heavy library, so an engine's front can ask
before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def wants_adapter(model: Mapping[str, Any]) -> bool:
    """``model``: the section ``model`` of the configuration, as a dict."""
    return int((model.get("lora") or {}).get("rank", 0)) > 0


def peft_config(lora: Mapping[str, Any], base: str = "") -> Any:
    """The ``peft.LoraConfig`` of the section ``model.lora``; ``base`` is the model's path.

    Raises:
        ImportError: peft is not installed.
    """
    try:
        from peft import LoraConfig, TaskType
    except ImportError as error:
        raise ImportError(
            "model.lora.rank > 0 needs peft: pip install 'trinity-dask[lora]' on trainer and "
            f"rollout workers ({error})"
        ) from error
    targets = list(lora["target_modules"])
    return LoraConfig(
        r=int(lora["rank"]),
        lora_alpha=lora["alpha"],
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        exclude_modules=list(lora["exclude_modules"]) or None,
        # a random mask would make the trainer's policy another one than the sampler's
        lora_dropout=0.0,
        task_type=TaskType.CAUSAL_LM,
        base_model_name_or_path=base or None,
    )
