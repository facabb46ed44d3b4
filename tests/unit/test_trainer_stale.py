"""Tokens beyond the staleness limit, masked: they are counted, and no gradient sees them."""

from __future__ import annotations

import asyncio

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file
from trainer_support import grpo_config, rows, save_tiny_model

from trinity_dask.experience.schema import encode, from_table, to_table
from trinity_dask.trainer.ranks.rank import TrainerRank
from trinity_dask.trainer.sources import TrainInput, stale_metrics, without_stale
from trinity_dask.trainer.step.row_metrics import describe_rows


def aged(n: int = 8):
    """Rows whose first tokens are of version 2, the others of version 5; one of no version."""
    found = rows(n, seed=3)
    for experience in found:
        experience.versions[: len(experience.versions) // 2] = 2
        experience.versions[len(experience.versions) // 2 :] = 5
    found[-1].versions = None
    return found


def test_old_tokens_leave_the_action_mask_and_are_counted():
    experiences = aged()
    table = to_table(experiences)
    assert without_stale(table, 0) is table
    assert without_stale(table, 2) is table
    masked = from_table(without_stale(table, 3))
    stale = 0
    for before, after in zip(experiences[:-1], masked[:-1], strict=True):
        own = np.ones(len(before.versions), bool) if before.action_mask is None else (
            before.action_mask
        )  # fmt: skip
        np.testing.assert_array_equal(after.action_mask, own & (before.versions >= 3))
        stale += int((before.versions < 3).sum())
    assert masked[-1].versions is None
    told = stale_metrics(table, 3)
    assert told["sample/stale_tokens"] == stale
    assert told["sample/stale_rows"] == sum(len(e.versions) > 1 for e in experiences[:-1])
    assert stale_metrics(table, 2) == {}


def test_a_token_that_no_model_sampled_is_never_too_old():
    experiences = aged()
    for experience in experiences[:-1]:
        experience.versions[-1] = -1
    table = to_table(experiences)
    stale = sum(int(((e.versions >= 0) & (e.versions < 3)).sum()) for e in experiences[:-1])
    assert stale_metrics(table, 3)["sample/stale_tokens"] == stale
    for before, after in zip(experiences[:-1], from_table(without_stale(table, 3)), strict=False):
        assert after.action_mask[-1] == (before.action_mask is None or before.action_mask[-1])
    only = [e for e in experiences if e.versions is not None]
    for experience in only:
        experience.versions[:] = -1
    assert stale_metrics(to_table(only), 9) == {}
    described = describe_rows(to_table(only), 1)
    assert not [name for name in described if name.startswith("sample/model_version")]


def test_the_metrics_of_versions_are_over_sampled_tokens():
    experiences = aged(6)
    for experience in experiences[:-1]:
        experience.versions[-1] = -1
    known = [e.versions[e.versions >= 0] for e in experiences[:-1]]
    flat, drift = np.concatenate(known), [int(v.max() - v.min()) for v in known if len(v)]
    halves = [to_table(experiences[:2]), to_table(experiences[2:])]  # two chunks
    described = describe_rows(pa.concat_tables(halves), 1)
    assert described["sample/model_version/mean"] == pytest.approx(flat.mean())
    assert described["sample/model_version/min"] == flat.min()
    assert described["sample/model_version_drift/mean"] == pytest.approx(np.mean(drift))


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def test_masking_by_age_is_masking(tmp_path, model_path):
    experiences = aged()
    by_hand = from_table(without_stale(to_table(experiences), 3))

    async def train(train_input):
        rank = TrainerRank(grpo_config(tmp_path, model_path), 0, 1)
        await rank.prepare("127.0.0.1:0", 1, model_path, None)
        metrics = await rank.train_step(train_input, 6)
        path = str(tmp_path / "trained.safetensors")
        await rank.write_weights(path, 6)
        await rank.close()
        return metrics, load_file(path)

    payload = encode(experiences, {})
    metrics, weights = asyncio.run(train(TrainInput(payload=payload, min_version=3)))
    _, expected = asyncio.run(train(TrainInput(payload=encode(by_hand, {}))))
    _, whole = asyncio.run(train(TrainInput(payload=payload)))
    assert metrics["sample/stale_tokens"] > 0
    assert all(torch.equal(weights[n], expected[n]) for n in expected)
    assert any(not torch.equal(weights[n], whole[n]) for n in whole)
