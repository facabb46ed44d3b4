"""Sampling follows the processed distribution, and padding does not change it."""

import numpy as np
import pytest
import torch
from models_support import PROMPT, save_model

from trinity_dask.models.protocol import SamplingParams
from trinity_dask.models.torch.engine import load_model
from trinity_dask.models.torch.sampler import BatchSampler, SampleRequest, filter_top


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(save_model(tmp_path_factory.mktemp("model")), "float32", "cpu")


def next_token_distribution(model, prompt, temperature=1.0) -> np.ndarray:
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt])).logits[0, -1]
    return (logits / temperature).softmax(-1).double().numpy()


def sample_first_tokens(model, sampling: SamplingParams):
    (answers,) = BatchSampler(model, (98,), seed=3).sample([SampleRequest(PROMPT, sampling)], 0)
    tokens = np.array([completion.token_ids[0] for completion in answers])
    return tokens, np.array([completion.logprobs[0] for completion in answers])


def total_variation(tokens: np.ndarray, expected: np.ndarray) -> float:
    observed = np.bincount(tokens, minlength=len(expected)) / len(tokens)
    return float(np.abs(observed - expected).sum() / 2)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_frequencies_are_those_of_the_softmax(model, temperature):
    n = 20_000
    tokens, logprobs = sample_first_tokens(
        model, SamplingParams(n=n, temperature=temperature, max_tokens=1)
    )
    expected = next_token_distribution(model, PROMPT, temperature)
    # a multinomial's expected distance is at most sqrt(k / (2 pi n)) for k outcomes
    bound = 2 * np.sqrt(len(expected) / (2 * np.pi * n))
    assert total_variation(tokens, expected) < bound
    assert total_variation(tokens, np.roll(expected, 1)) > bound  # the test can fail
    np.testing.assert_allclose(logprobs, np.log(expected[tokens]), atol=1e-4)


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (-1, 0.7), (20, 0.8)])
def test_top_k_and_top_p_renormalise(model, top_k, top_p):
    expected = next_token_distribution(model, PROMPT)
    order = np.argsort(-expected)
    kept = order[:top_k] if top_k > 0 else order
    share = expected[kept] / expected[kept].sum()
    kept = kept[: np.searchsorted(np.cumsum(share), top_p) + 1] if top_p < 1 else kept
    filtered = np.zeros_like(expected)
    filtered[kept] = expected[kept] / expected[kept].sum()
    tokens, logprobs = sample_first_tokens(
        model, SamplingParams(n=5000, top_k=top_k, top_p=top_p, max_tokens=1)
    )
    assert set(tokens) <= set(kept)
    assert total_variation(tokens, filtered) < 0.06
    np.testing.assert_allclose(logprobs, np.log(filtered[tokens]), atol=1e-4)


def test_filters_are_per_row():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]]).repeat(4, 1)
    top_k = torch.tensor([[0], [2], [0], [1]])
    top_p = torch.tensor([[1.0], [1.0], [0.5], [1.0]])
    kept = filter_top(logits, top_k, top_p).isfinite()
    assert kept.sum(dim=1).tolist() == [4, 2, 1, 1]
    assert kept[:, 0].all()


def test_prompts_of_unequal_length_do_not_influence_each_other(model):
    """Greedy answers and log-probs in a padded batch equal those of each prompt alone."""
    prompts = [PROMPT, PROMPT[:3], [7], PROMPT[::-1] + PROMPT]
    sampling = SamplingParams(temperature=0, max_tokens=10)
    sampler = BatchSampler(model, (98,), seed=0)
    together = sampler.sample([SampleRequest(p, sampling) for p in prompts], 0)
    for prompt, (answer,) in zip(prompts, together, strict=True):
        ((alone,),) = sampler.sample([SampleRequest(prompt, sampling)], 0)
        assert np.array_equal(answer.token_ids, alone.token_ids)
        np.testing.assert_allclose(answer.logprobs, alone.logprobs, atol=1e-4)


def test_rows_that_end_early_are_dropped_and_the_rest_is_right(model):
    """Limits of 1 to 8 tokens in one batch: every row equals the same row with one limit."""
    limits = [1, 2, 2, 3, 8, 1, 5, 1]
    sampler = BatchSampler(model, (), seed=0)
    greedy = [SamplingParams(temperature=0, max_tokens=limit) for limit in limits]
    mixed = sampler.sample([SampleRequest(PROMPT, s) for s in greedy], 0)
    ((longest,),) = sampler.sample(
        [SampleRequest(PROMPT, SamplingParams(temperature=0, max_tokens=8))], 0
    )
    for limit, (answer,) in zip(limits, mixed, strict=True):
        assert np.array_equal(answer.token_ids, longest.token_ids[:limit])
        np.testing.assert_allclose(answer.logprobs, longest.logprobs[:limit], atol=1e-4)
