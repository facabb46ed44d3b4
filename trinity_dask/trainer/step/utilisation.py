"""How much of the device's arithmetic the policy's updates use (model FLOPs utilisation).

Invariant: what is counted follows from the model and its rows alone: the operations of one
forward and one backward pass over real tokens. Padding, recomputation (checkpointing, logits
in parts) and other models' passes take time and count nothing, so they lower the share.

Per token a weight costs 2 operations forward and 2 for the gradient of its input, and 2 more
where the weight itself is trained; a token at place s of its row attends to s others
(PaLM, arXiv 2204.02311, appendix B, with causal attention).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np
import torch

from trinity_dask.trainer.step.batching import Batch, UpdatePlan, Widths

# dense bfloat16 TFLOP/s by part of the device's name; the first that fits
PEAK_TFLOPS = {
    "B200": 2250.0,
    "GH200": 989.0,
    "H200": 989.0,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "A30": 165.0,
    "L40S": 362.0,
    "L4": 121.0,
}
SPARSE = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class ModelFlops:
    """A dense transformer's weights by who passes them.

    body: every token; head: the tokens that are scored; attention: layers × heads × head size.
    """

    body: int
    head: int
    attention: int

    def of_updates(self, lengths: np.ndarray, scored: np.ndarray, whole: bool = True) -> float:
        """Operations of forward and backward passes over rows of ``lengths`` tokens.

        Args:
            scored: tokens of each row whose log-probs are wanted.
            whole: all weights are trained, not only an adapter.
        """
        tokens, answers = float(lengths.sum()), float(scored.sum())
        per_weight = 6.0 if whole else 4.0
        of_weights = per_weight * (self.body * tokens + self.head * answers)
        # scores and mixing: 2 · 2 · s²/2 forward, twice that backward
        return of_weights + 6.0 * self.attention * float((lengths.astype(np.float64) ** 2).sum())


def model_flops(model: Any) -> Optional[ModelFlops]:
    """Of a Hugging Face causal model; None where the count does not follow from its sizes."""
    config = model.config.get_text_config()
    if any(getattr(config, name, None) for name in SPARSE):
        return None  # a token passes only some of the weights
    looked_up, head = model.get_input_embeddings(), model.get_output_embeddings()
    if looked_up is None or head is None or not getattr(config, "num_attention_heads", None):
        return None
    apart = {id(m.weight): m.weight.numel() for m in (looked_up, head)}
    total = sum(p.numel() for p in model.parameters())
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    return ModelFlops(
        body=total - sum(apart.values()),
        head=head.weight.numel(),
        attention=config.num_hidden_layers * width,
    )


def peak_tflops(
    configured: Optional[float], device: str, compute: Optional[torch.dtype]
) -> Optional[float]:
    """Of one rank's device: ``trainer.peak_tflops``, or that of a known GPU in bfloat16."""
    if configured is not None or device == "cpu" or compute != torch.bfloat16:
        return configured
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


@dataclass(frozen=True)
class Meter:
    """Of one rank: its model's operations (None: unknown), its device's peak in TFLOP/s."""

    flops: Optional[ModelFlops]
    peak: Optional[float] = None
    whole: bool = True

    def of_step(
        self, batch: Batch, plan: UpdatePlan, metrics: Mapping[str, float]
    ) -> dict[str, float]:
        """``perf/tflops/actor`` and, where the peak is known, ``perf/mfu/actor``.

        Args:
            batch: this rank's rows.
            metrics: of the train step; nothing without ``time/update_actor``.
        """
        seconds = metrics.get("time/update_actor", 0.0)
        if self.flops is None or seconds <= 0.0:
            return {}
        rows, widths = np.concatenate(plan.updates), Widths.of(batch)
        lengths = widths.prompt + widths.response
        operations = self.flops.of_updates(lengths[rows], widths.response[rows], self.whole)
        achieved = operations / seconds / 1e12
        found = {"perf/tflops/actor": achieved}
        return found if self.peak is None else found | {"perf/mfu/actor": achieved / self.peak}
