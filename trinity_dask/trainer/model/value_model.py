"""The critic: a backbone with a scalar head, scored like the policy.

Invariant: value ``[i, r]`` is the value of the state *before* response token ``r`` is chosen:
it is read at the place that predicts the token, and never sees the token itself.

On disk it is a Hugging Face token-classification model with one label, so ``transformers``
loads and saves it; where the architecture has no such class it is :class:`ValueModel`, on the base
model. A head that the directory does not have starts at zero: the first advantages then are those
without a critic, whatever the seed.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import torch
from torch import Tensor

from trinity_dask.algorithm.table import AlgorithmSpec
from trinity_dask.config.schema import Config
from trinity_dask.models.checks import attention_implementation
from trinity_dask.trainer.checkpoints.checkpoint import WEIGHTS_FILE
from trinity_dask.trainer.model.logprobs import padding_inputs
from trinity_dask.trainer.model.policy_model import LOADING, deterministic
from trinity_dask.trainer.model.sharded import Skeleton
from trinity_dask.trainer.ranks.parallel import Sharding, is_sharded, shard
from trinity_dask.trainer.step.batching import MicroBatch
from trinity_dask.weights.files import read_safetensors

HEAD_NAMES = ("score", "classifier")  # what transformers calls the head


def load_critic(
    cfg: Config,
    spec: AlgorithmSpec,
    path: str,
    device: str,
    sharding: Optional[Sharding] = None,
) -> Optional[Any]:
    """The value model, from ``critic.model_path`` or else the stage's start model."""
    if not spec.uses_critic:
        return None
    return load_value_model(
        cfg.critic.model_path or path,
        device=device,
        trust_remote_code=cfg.model.trust_remote_code,
        gradient_checkpointing=cfg.trainer.gradient_checkpointing,
        attention=cfg.model.attn_implementation,
        sharding=sharding,
    )


class ValueModel(torch.nn.Module):
    """A scalar head on the base model (without its output head) of any architecture."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base
        embedding = base.get_input_embeddings().weight
        self.score = torch.nn.Linear(embedding.shape[1], 1, bias=False, dtype=embedding.dtype)
        torch.nn.init.zeros_(self.score.weight)
        self.config = base.config
        self._no_split_modules = base._no_split_modules

    def gradient_checkpointing_enable(self, options: dict[str, Any]) -> None:
        self.base.gradient_checkpointing_enable(options)

    def forward(self, **inputs: Any) -> Any:
        """As a token-classification model: ``logits`` float ``[b, T, 1]``."""
        return SimpleNamespace(logits=self.score(self.base(**inputs)[0]))


def load_value_model(
    model_path: str | Path,
    *,
    device: str = "cpu",
    trust_remote_code: bool = False,
    gradient_checkpointing: bool = False,
    attention: Optional[str] = None,
    sharding: Optional[Sharding] = None,
) -> Any:
    """A float32 critic on ``device``, from a critic's or a causal language model's directory;
    with ``sharding`` only this rank's shards of it.

    Raises:
        OSError, ValueError: no model (from transformers).
    """
    from transformers import (
        MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
        AutoConfig,
        AutoModel,
        AutoModelForTokenClassification,
    )
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    verbosity = transformers_logging.get_verbosity()
    with LOADING:
        transformers_logging.set_verbosity_error()  # "newly initialised head" is what we want
        try:
            path = str(model_path)
            config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
            options: dict[str, Any] = {
                "dtype": torch.float32,
                "attn_implementation": attention_implementation(config, attention),
                "trust_remote_code": trust_remote_code,
            }
            names = config.architectures or []
            model: Any
            has_class = type(config) in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING
            if sharding is not None and has_class and names != [ValueModel.__name__]:
                config.num_labels = 1
                del options["dtype"]  # float32 as the skeleton is
                skeleton = Skeleton(AutoModelForTokenClassification, path, config, **options)
                model = skeleton.fill(sharding, device, new=HEAD_NAMES)
            elif names == [ValueModel.__name__]:
                model = ValueModel(AutoModel.from_config(config, **options))
                model.load_state_dict(dict(read_safetensors(str(Path(path) / WEIGHTS_FILE))))
            elif has_class:
                of_tokens = AutoModelForTokenClassification
                model = of_tokens.from_pretrained(path, num_labels=1, **options)
            else:
                model = ValueModel(AutoModel.from_pretrained(path, **options))
        finally:
            transformers_logging.set_verbosity(verbosity)
    is_new = not any(name.endswith("ForTokenClassification") for name in names)
    if is_new and not isinstance(model, ValueModel):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.partition(".")[0] in HEAD_NAMES:
                    parameter.zero_()
    if sharding is not None and not is_sharded(model):  # a head of our own, loaded whole
        shard(model.to(device), sharding.mesh, sharding.compute, sharding.reshard)
    return deterministic(model, device, gradient_checkpointing)


class ValueScorer:
    """Runs a critic over micro-batches. ``autocast`` is the dtype of the forward pass."""

    def __init__(self, model: Any, autocast: Optional[torch.dtype] = None) -> None:
        self.model = model
        self.autocast = autocast
        self._padding = padding_inputs(model.base if isinstance(model, ValueModel) else model)

    def __call__(self, micro: MicroBatch) -> Tensor:
        """Values of the response tokens: float32 ``[b, R]``."""
        inputs: dict[str, Any] = {"input_ids": micro.input_ids[:, :-1], "use_cache": False}
        if micro.padded_left:
            inputs |= self._padding(micro.attention_mask[:, :-1])
        device = micro.input_ids.device.type
        with torch.autocast(device, self.autocast, enabled=self.autocast is not None):
            values = self.model(**inputs).logits[:, -micro.response_width :, 0]
        return values.float()


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 − Var(R − V) / Var(R) over valid tokens; NaN when the returns do not vary."""
    target, error = returns[mask].double(), (returns - values)[mask].double()
    spread = float(target.var(unbiased=False)) if target.numel() else 0.0
    return math.nan if spread == 0.0 else 1.0 - float(error.var(unbiased=False)) / spread
