"""The critic: a backbone with a scalar head, scored like the policy.

Invariant: value ``[i, r]`` is the value of the state *before* response token ``r`` is chosen:
it is read at the place that predicts the token, and never sees the token itself.

On disk it is a Hugging Face token-classification model with one label, so ``transformers``
loads and saves it. A head that the directory does not have starts at zero: the first
advantages then are those without a critic, whatever the seed.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor

from trinity_dask.algorithm.table import AlgorithmSpec
from trinity_dask.config.schema import Config
from trinity_dask.trainer.model.logprobs import positions
from trinity_dask.trainer.model.policy_model import LOADING, deterministic
from trinity_dask.trainer.step.batching import MicroBatch

HEAD_NAMES = ("score", "classifier")  # what transformers calls the head


def load_critic(cfg: Config, spec: AlgorithmSpec, path: str, device: str) -> Optional[Any]:
    """The value model, from ``critic.model_path`` or else the stage's start model."""
    if not spec.uses_critic:
        return None
    return load_value_model(
        cfg.critic.model_path or path,
        device=device,
        trust_remote_code=cfg.model.trust_remote_code,
        gradient_checkpointing=cfg.trainer.gradient_checkpointing,
    )


def load_value_model(
    model_path: str | Path,
    *,
    device: str = "cpu",
    trust_remote_code: bool = False,
    gradient_checkpointing: bool = False,
) -> Any:
    """A float32 critic on ``device``, from a critic's or a causal language model's directory.

    Raises:
        OSError, ValueError: no model, or one whose architecture has no scalar head in
            transformers (from transformers).
    """
    from transformers import AutoModelForTokenClassification
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    verbosity = transformers_logging.get_verbosity()
    with LOADING:
        transformers_logging.set_verbosity_error()  # "newly initialised head" is what we want
        try:
            model: Any = AutoModelForTokenClassification.from_pretrained(
                str(model_path),
                num_labels=1,
                dtype=torch.float32,
                attn_implementation="sdpa",
                trust_remote_code=trust_remote_code,
            )
        finally:
            transformers_logging.set_verbosity(verbosity)
    config = Path(model_path) / "config.json"
    known = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    names = known.get("architectures") or []
    if not any(name.endswith("ForTokenClassification") for name in names):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.partition(".")[0] in HEAD_NAMES:
                    parameter.zero_()
    return deterministic(model, device, gradient_checkpointing)


class ValueScorer:
    """Runs a critic over micro-batches. ``autocast`` is the dtype of the forward pass."""

    def __init__(self, model: Any, autocast: Optional[torch.dtype] = None) -> None:
        self.model = model
        self.autocast = autocast

    def __call__(self, micro: MicroBatch) -> Tensor:
        """Values of the response tokens: float32 ``[b, R]``."""
        inputs: dict[str, Any] = {"input_ids": micro.input_ids[:, :-1], "use_cache": False}
        if micro.padded_left:
            mask = micro.attention_mask[:, :-1]
            inputs |= {"attention_mask": mask, "position_ids": positions(mask)}
        device = micro.input_ids.device.type
        with torch.autocast(device, self.autocast, enabled=self.autocast is not None):
            values = self.model(**inputs).logits[:, -micro.response_width :, 0]
        return values.float()


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 − Var(R − V) / Var(R) over valid tokens; NaN when the returns do not vary."""
    target, error = returns[mask].double(), (returns - values)[mask].double()
    spread = float(target.var(unbiased=False)) if target.numel() else 0.0
    return math.nan if spread == 0.0 else 1.0 - float(error.var(unbiased=False)) / spread
