"""Log-probs: the right token, the right temperature, no trace of padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from trainer_support import batch_of, engine, logprobs, rows, tiny_model

from trinity_dask.algorithm.entropy import token_entropy
from trinity_dask.trainer.model.logprobs import Scorer
from trinity_dask.trainer.model.policy_model import deterministic
from trinity_dask.trainer.step.batching import Widths, micro_batches, sequence_batch, take


def score(model, experiences, temperature=1.0, budget=1 << 30):
    batch = batch_of(experiences)
    widths = Widths.of(batch)
    scorer = Scorer(model, temperature)
    out = torch.zeros(batch["action_mask"].shape)
    for group in micro_batches(np.arange(len(experiences)), widths, budget):
        micro = take(batch, group, widths)
        with torch.no_grad():
            out[micro.rows, : micro.response_width] = scorer(micro).logprob
    return [out[k, : e.response_length].numpy() for k, e in enumerate(experiences)]


@pytest.mark.parametrize("equal_prompts", [True, False])
@pytest.mark.parametrize("budget", [1, 40, 1 << 30])
def test_fault_34_each_value_is_the_logprob_of_its_own_token(equal_prompts, budget):
    model = tiny_model()
    experiences = rows(12, equal_prompts=equal_prompts)
    for got, e in zip(score(model, experiences, budget=budget), experiences, strict=True):
        np.testing.assert_allclose(got, logprobs(model, e.tokens, e.prompt_length), atol=1e-5)


def test_fault_34_a_four_token_toy():
    model = tiny_model()
    tokens = [3, 1, 4, 1]
    got = Scorer(model)(sequence_batch([tokens])).logprob[0].detach()
    table = torch.log_softmax(model(torch.tensor([tokens])).logits[0].detach(), dim=-1)
    expected = [table[0, 1], table[1, 4], table[2, 1]]
    torch.testing.assert_close(got, torch.stack(expected))


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_fault_20_the_temperature_is_the_samplers(temperature):
    model = tiny_model()
    experiences = rows(6)
    for got, e in zip(score(model, experiences, temperature), experiences, strict=True):
        expected = logprobs(model, e.tokens, e.prompt_length, temperature)
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_greedy_sampling_is_scored_at_temperature_one():
    model = tiny_model()
    experiences = rows(3)
    for cold, plain in zip(
        score(model, experiences, 0.0), score(model, experiences, 1.0), strict=True
    ):
        np.testing.assert_array_equal(cold, plain)


def test_fault_22_micro_batch_sizes_change_logprobs_by_rounding_only():
    model = tiny_model()
    experiences = rows(32)
    small, large = (score(model, experiences, budget=b) for b in (30, 1 << 30))
    gap = max(float(np.abs(a - b).max()) for a, b in zip(small, large, strict=True))
    assert gap < 1e-5


def test_entropy_comes_from_the_scaled_logits():
    model = tiny_model()
    scores = Scorer(model, 0.5)(sequence_batch([[3, 1, 4, 1]]), entropy=True)
    logits = model(torch.tensor([[3, 1, 4, 1]])).logits[:, :-1].float() / 0.5
    torch.testing.assert_close(scores.entropy, token_entropy(logits))
    assert Scorer(model)(sequence_batch([[3, 1]]), entropy=True).entropy.requires_grad
    metric = Scorer(model)(sequence_batch([[3, 1]]), entropy=True, entropy_gradient=False)
    assert not metric.entropy.requires_grad


def test_sequences_are_probed_like_an_engine_does():
    trained = engine()
    sequences = [[5, 3, 1, 4, 1], [7, 2], [1, 1, 1, 9, 3, 8, 8]]
    for got, tokens in zip(trained.sequence_logprobs(sequences), sequences, strict=True):
        np.testing.assert_allclose(got, logprobs(trained.policy.module, tokens, 1), atol=1e-5)
        assert got.dtype == np.float32
        assert got.shape == (len(tokens) - 1,)


def test_a_model_with_dropout_scores_the_same_twice_while_training():
    model = deterministic(tiny_model(dropout=0.5), "cpu", gradient_checkpointing=False)
    model.train()
    experiences = rows(4)
    for first, second in zip(score(model, experiences), score(model, experiences), strict=True):
        np.testing.assert_array_equal(first, second)
