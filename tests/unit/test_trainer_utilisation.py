"""Operations are counted from the model and its rows, and compared with the device's peak."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from trainer_support import batch_of, engine, rows, tiny_model

from trinity_dask.trainer.metrics import merge_rank_metrics
from trinity_dask.trainer.model.logprobs import Scorer
from trinity_dask.trainer.step.batching import sequence_batch
from trinity_dask.trainer.step.utilisation import Meter, model_flops, peak_tflops


def test_the_count_is_that_of_the_matrix_products():
    """torch counts what its kernels do: full attention, so twice the causal one."""
    model, tokens = tiny_model(), 40
    model.set_attn_implementation("eager")  # whose products torch knows on every device
    flops = model_flops(model)
    with FlopCounterMode(display=False) as counter:
        Scorer(model)(sequence_batch([list(range(tokens))])).logprob.sum().backward()
    # one position less: the last token predicts nothing
    length, scored = np.array([tokens - 1]), np.array([tokens - 1])
    expected = flops.of_updates(length, scored) + 6.0 * flops.attention * float(length[0]) ** 2
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.03)
    assert flops.of_updates(length, scored, whole=False) < flops.of_updates(length, scored)


def test_a_step_reports_its_share_of_the_peak():
    trained = engine()
    batch = batch_of(rows(12))
    plan = trained.planner.plan(batch["lengths"].numpy(), 1)
    meter = Meter(model_flops(trained.policy.module), peak=0.5)
    metrics = trained.train_step(batch, 1, plan)
    found = meter.of_step(batch, plan, metrics)
    assert 0 < found["perf/mfu/actor"] == found["perf/tflops/actor"] / 0.5
    assert meter.of_step(batch, plan, {}) == {}  # the critic's warm-up updates no policy
    assert "perf/mfu/actor" not in Meter(meter.flops).of_step(batch, plan, metrics)


def test_the_peak_is_the_configured_one_or_unknown_on_a_cpu():
    assert peak_tflops(12.5, "cpu", None) == 12.5
    assert peak_tflops(None, "cpu", torch.bfloat16) is None


def test_a_mixture_of_experts_is_not_counted():
    model = tiny_model()
    model.config.num_experts = 8
    assert model_flops(model) is None


def test_ranks_have_the_mean_share_and_the_largest_memory():
    ranks = [
        {"tokens": 1.0, "perf/mfu/actor": 0.4, "perf/max_memory_gb": 3.0},
        {"tokens": 3.0, "perf/mfu/actor": 0.2, "perf/max_memory_gb": 1.0},
    ]
    merged = merge_rank_metrics(ranks, 1.0)
    assert merged["perf/mfu/actor"] == pytest.approx(0.25)
    assert merged["perf/max_memory_gb"] == 3.0
