"""Scores in parts: the plain formula's values and gradients without all of its logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from trainer_support import GRPO, batch_of, engine, gradients, rows, tiny_model

from trinity_dask.algorithm.entropy import token_entropy
from trinity_dask.config.schema import OptimizerConfig
from trinity_dask.trainer.model import token_scores
from trinity_dask.trainer.model.logprobs import Scorer
from trinity_dask.trainer.model.token_scores import score_tokens
from trinity_dask.trainer.step.batching import Widths, take

N, WIDTH, VOCAB = 23, 12, 40


def inputs(dtype=torch.float32, bias: bool = False):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(N, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, generator=generator).requires_grad_()
    offset = torch.randn(VOCAB, generator=generator).requires_grad_() if bias else None
    targets = torch.randint(0, VOCAB, (N,), generator=generator)
    return hidden, weight, offset, targets


def plain(hidden, weight, bias, targets, temperature):
    logits = torch.nn.functional.linear(
        hidden, weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
    )
    logits = logits.float() / temperature
    logprob = torch.log_softmax(logits, dim=-1).gather(1, targets[:, None])[:, 0]
    return logprob, token_entropy(logits)


def slopes(result, values):
    """Gradients of a loss in which every token weighs something else."""
    weights = torch.linspace(-1, 1, N)
    loss = sum((k + 1) * (part * weights.roll(k)).sum() for k, part in enumerate(result))
    found = torch.autograd.grad(loss, [v for v in values if v is not None])
    return found


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("tokens_per_part", [1, 7, 100])
def test_values_and_gradients_are_those_of_the_plain_formula(
    monkeypatch, tokens_per_part, temperature, bias
):
    monkeypatch.setattr(token_scores, "CHUNK_BYTES", 4 * VOCAB * tokens_per_part)
    hidden, weight, offset, targets = inputs(bias=bias)
    got = score_tokens(hidden, weight, offset, targets, temperature, entropy=True)
    expected = plain(hidden, weight, offset, targets, temperature)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    values = (hidden, weight, offset)
    for a, b in zip(slopes(got, values), slopes(expected, values), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_an_entropy_that_is_a_mere_metric_has_no_gradient():
    hidden, weight, _, targets = inputs()
    logprob, entropy = score_tokens(
        hidden, weight, None, targets, entropy=True, entropy_gradient=False
    )
    assert logprob.requires_grad
    assert not entropy.requires_grad
    assert score_tokens(hidden, weight, None, targets)[1].numel() == 0


def test_bfloat16_logits_are_reduced_in_float32():
    hidden, weight, _, targets = inputs(torch.bfloat16)
    got, entropy = score_tokens(hidden, weight, None, targets, entropy=True)
    expected = plain(hidden, weight, None, targets, 1.0)
    assert got.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(got, expected[0], atol=1e-3, rtol=1e-3)
    for a, b in zip(
        slopes((got,), (hidden, weight)), slopes(expected[:1], (hidden, weight)), strict=True
    ):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, atol=0.1, rtol=0.05)


def test_the_gradient_agrees_with_finite_differences(monkeypatch):
    monkeypatch.setattr(token_scores, "CHUNK_BYTES", 4 * VOCAB * 5)
    hidden, weight, _, targets = inputs()
    loss = sum(part.sum() for part in score_tokens(hidden, weight, None, targets, 0.7, True))
    (slope,) = torch.autograd.grad(loss, [hidden])
    direction = torch.randn(N, WIDTH, generator=torch.Generator().manual_seed(1)).double()

    def at(step):
        moved = hidden.detach().double() + step * direction
        return sum(p.sum() for p in plain64(moved, weight.detach().double(), targets, 0.7))

    numeric = (at(1e-4) - at(-1e-4)) / 2e-4
    assert float((slope.double() * direction).sum()) == pytest.approx(float(numeric), rel=1e-4)


def plain64(hidden, weight, targets, temperature):
    table = torch.log_softmax(hidden @ weight.t() / temperature, dim=-1)
    return table.gather(1, targets[:, None])[:, 0], -(table.exp() * table).sum(dim=-1)


@pytest.mark.parametrize("coef", [0.0, 0.05])
def test_an_engine_trains_alike_in_parts(monkeypatch, coef):
    """Entropy with and without gradient; left padding; several parts per forward pass."""
    monkeypatch.setattr(token_scores, "CHUNK_BYTES", 4 * VOCAB * 3)
    cfg = {**GRPO, "entropy_loss_fn": "default", "entropy_loss_fn_args": {"entropy_coef": coef}}
    found = []
    for limit in (1 << 30, 0):
        trained = engine(cfg, optimizer=OptimizerConfig(optimizer_type="sgd", lr=0.0))
        trained.scorer.logits_bytes = limit
        metrics = trained.train_step(batch_of(rows(12)), 1)
        found.append((gradients(trained), metrics))
    (expected, metrics), (got, same) = found
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, atol=1e-5, rtol=1e-4)
    assert same["actor/entropy"] == pytest.approx(metrics["actor/entropy"], rel=1e-4)


def test_no_tensor_of_all_logits_is_ever_made(monkeypatch):
    """Every tensor that any operation makes is small while the scores come in parts."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple | list) else [result]:
                if torch.is_tensor(tensor) and tensor.dim() and tensor.shape[-1] == VOCAB:
                    self.size = max(self.size, tensor.numel() // VOCAB)
            return result

    monkeypatch.setattr(token_scores, "CHUNK_BYTES", 4 * VOCAB * 5)
    batch = batch_of(rows(12))
    micro = take(batch, np.arange(12), Widths.of(batch))
    seen = {}
    for limit in (0, 1 << 30):
        with Largest() as largest:
            scores = Scorer(tiny_model(), logits_bytes=limit)(micro, entropy=True)
            (scores.logprob.sum() + scores.entropy.sum()).backward()
        seen[limit] = largest.size
    n_tokens = 12 * micro.response_width
    assert seen[1 << 30] == n_tokens
    assert seen[0] <= 16  # the head's own transpose is [width, vocabulary]


def test_a_model_that_caps_its_logits_is_scored_whole():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    model = Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            final_logit_softcapping=2.0,
        )
    ).eval()
    batch = batch_of(rows(3))
    micro = take(batch, np.arange(3), Widths.of(batch))
    whole, parts = Scorer(model), Scorer(model, logits_bytes=0)
    torch.testing.assert_close(parts(micro).logprob, whole(micro).logprob)
    torch.testing.assert_close(parts(micro).logprob, whole(micro).logprob)


def test_bfloat16_logprobs_are_within_a_hundredth_of_float32():
    """At the initial spread of a real model (0.02), and the ratio is formed in float32."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=512,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    ).eval()
    batch = batch_of(rows(16))
    micro = take(batch, np.arange(16), Widths.of(batch))
    with torch.no_grad():
        exact = Scorer(model)(micro).logprob
        for limit in (0, 1 << 30):
            rough = Scorer(model, autocast=torch.bfloat16, logits_bytes=limit)(micro).logprob
            assert rough.dtype == torch.float32
            assert 0 < (rough - exact).abs().max() < 1e-2
            ratio = (rough - rough.detach()).exp()
            assert ratio.dtype == torch.float32
            assert (ratio == 1).all()
