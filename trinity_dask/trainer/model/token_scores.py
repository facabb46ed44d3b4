"""Log-probs and entropies from hidden states, a few tokens' logits at a time.

Invariant: values and gradients are those of the plain formula on all logits at once, up to
rounding; at most :data:`CHUNK_BYTES` of logits exist at any moment, in the forward pass and
in the backward pass, which computes them again.

With z = Wh/T, p = softmax(z) and H = logsumexp(z) − Σ p·z the gradients are
∂log p_y/∂z_j = 1[j=y] − p_j and ∂H/∂z_j = −p_j (log p_j + H).
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

CHUNK_BYTES = 32 << 20  # float32 logits
_ALL = slice(None)


def score_tokens(
    hidden: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    targets: Tensor,
    temperature: float = 1.0,
    entropy: bool = False,
    entropy_gradient: bool = True,
) -> tuple[Tensor, Tensor]:
    """Log-prob of ``targets`` under softmax((hidden Wᵀ + bias) / temperature), and entropy.

    Args:
        hidden: ``[n, H]`` in the dtype that logits are computed in.
        weight: output head ``[V, H]``; bias ``[V]`` or None.
        targets: int64 ``[n]``.
        entropy: whether the second result is wanted; it is empty otherwise.

    Returns:
        float32 ``[n]`` each.
    """
    logprob, entropies = _ScoreTokens.apply(hidden, weight, bias, targets, temperature, entropy)
    return logprob, entropies if entropy_gradient else entropies.detach()


class _ScoreTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Optional[Tensor],
        targets: Tensor,
        temperature: float,
        entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        head = _Head(hidden, weight, bias, temperature)
        n = len(targets)
        logprob, total, entropies = hidden.new_empty(3, n, dtype=torch.float32)
        for part in _parts(n, len(head.weight)):
            logits = head.logits(hidden[part])
            highest = logits.amax(dim=1, keepdim=True)
            chosen = logits.gather(1, targets[part, None])
            mass, product = _mass(logits, highest, entropy)
            torch.add(mass.log(), highest[:, 0], out=total[part])
            torch.sub(chosen[:, 0], total[part], out=logprob[part])
            if entropy:
                torch.sub(total[part], product, out=entropies[part])
        ctx.save_for_backward(hidden, weight, bias, targets, total, entropies)
        ctx.temperature, ctx.entropy = temperature, entropy
        return logprob, entropies if entropy else entropies[:0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Optional[Tensor], ...]:
        hidden, weight, bias, targets, total, entropies = ctx.saved_tensors
        head = _Head(hidden, weight, bias, ctx.temperature)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        back = torch.zeros_like(hidden, dtype=torch.float32) if wants_hidden else None
        of_weight = torch.empty_like(weight) if wants_weight else None
        of_bias = torch.empty_like(bias) if wants_bias else None
        extra = (entropies, grads[1]) if ctx.entropy and bool(grads[1].any()) else None
        # here by parts of the vocabulary: each row of the weight's gradient is written once
        for part in _parts(len(head.weight), len(targets)):
            logits = head.logits(hidden, part)
            slope = _slope(logits, targets - part.start, total, grads[0], extra)
            slope = slope.div_(head.heat).to(hidden.dtype)
            if back is not None and back.dtype == slope.dtype:
                back.addmm_(slope, head.weight[part])
            elif back is not None:
                back += slope @ head.weight[part]
            if of_weight is not None and of_weight.dtype == slope.dtype:
                torch.mm(slope.t(), hidden, out=of_weight[part])
            elif of_weight is not None:
                of_weight[part].copy_(slope.t() @ hidden)
            if of_bias is not None:
                of_bias[part] = slope.sum(dim=0)
        return None if back is None else back.to(hidden.dtype), of_weight, of_bias, None, None, None


class _Head:
    """The output head: logits of a few tokens, or of a few words of the vocabulary."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Optional[Tensor], temperature: float
    ) -> None:
        self.weight = weight.to(hidden.dtype)
        self.bias = None if bias is None else bias.to(hidden.dtype)
        self.heat = temperature
        self._buffer = hidden.new_empty(0)  # fresh pages for every part would cost more

    def logits(self, hidden: Tensor, part: slice = _ALL) -> Tensor:
        """float32 ``[n, V of part]``, to be overwritten; the next call overwrites it too."""
        weight = self.weight[part]
        size = len(hidden) * len(weight)
        if self._buffer.numel() < size:
            self._buffer = hidden.new_empty(size)
        out = self._buffer[:size].view(len(hidden), len(weight))
        torch.mm(hidden, weight.t(), out=out)
        if self.bias is not None:
            out += self.bias[part]
        logits = out.float()
        return logits if self.heat == 1.0 else logits.div_(self.heat)


def _parts(n: int, width: int) -> list[slice]:
    """``n`` rows of ``width`` logits, in parts that fit into :data:`CHUNK_BYTES`."""
    size = max(CHUNK_BYTES // (4 * max(width, 1)), 1)
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


def _mass(logits: Tensor, highest: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
    """Σ exp(z − highest), and Σ p·z where it is wanted. Overwrites ``logits``."""
    if not entropy:
        mass = logits.sub_(highest).exp_().sum(dim=1)
        return mass, mass
    share = torch.exp(logits - highest)
    mass = share.sum(dim=1)
    return mass, share.mul_(logits).sum(dim=1) / mass


def _slope(
    logits: Tensor,
    targets: Tensor,
    total: Tensor,
    grad: Tensor,
    entropy: Optional[tuple[Tensor, Tensor]],
) -> Tensor:
    """Gradient of some columns' logits, in their own memory.

    targets ``[n]`` are counted from the first of these columns; the others lie outside.
    """
    logits.sub_(total[:, None])  # log p
    extra = None
    if entropy is not None:
        value, weight = entropy
        extra = (logits + value[:, None]).mul_(-weight[:, None])
    share = logits.exp_()
    if extra is not None:
        extra.mul_(share)
    slope = share.mul_(-grad[:, None])
    chosen = ((targets >= 0) & (targets < slope.shape[1])).nonzero()[:, 0]
    slope[chosen, targets[chosen]] += grad[chosen]
    return slope if extra is None else slope.add_(extra)
