"""Plans and micro-batches: every row once, whatever the ranks and sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_support import batch_of, plan_updates, rows

from trinity_dask.trainer.step.batching import (
    Widths,
    micro_batches,
    n_mini_batches,
    take,
)

PLAN = {"seed": 3, "step": 5}


def lengths(n, seed=0):
    return np.random.default_rng(seed).integers(2, 50, n)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 40),
    world=st.integers(1, 4),
    parts=st.integers(1, 5),
    epochs=st.integers(1, 3),
    least=st.integers(1, 20),
    grouped=st.booleans(),
)
def test_every_row_is_trained_once_per_epoch_on_one_rank(n, world, parts, epochs, least, grouped):
    options = {
        **PLAN,
        "groups": np.arange(n) // 3 if grouped else None,
        "epochs": epochs,
        "mini_batches": parts,
        "min_mini_batch_rows": least,
    }
    plans = [plan_updates(lengths(n), rank=r, world_size=world, **options) for r in range(world)]
    alone = plan_updates(lengths(n), **options)
    expected = n_mini_batches(n, parts, least)
    assert {len(plan.updates) for plan in plans} == {epochs * expected}
    seen = []
    for index, whole in enumerate(alone.updates):
        mine = [plan.rows[plan.updates[index]] for plan in plans]
        assert sorted(np.concatenate(mine)) == sorted(alone.rows[whole])
        seen.extend(np.concatenate(mine))
        if not grouped:
            assert max(map(len, mine)) - min(map(len, mine)) <= 1
    assert sorted(seen) == sorted(list(range(n)) * epochs)


def test_steps_and_seeds_shuffle_differently_and_repeatably():
    def first(**changes):
        return plan_updates(lengths(64), mini_batches=4, **{**PLAN, **changes}).updates[0].tolist()

    assert first() == first()
    assert first() != first(step=6)
    assert first() != first(seed=4)


def test_ranks_get_equal_work_from_unequal_rows():
    long_tail = np.sort(np.random.default_rng(1).lognormal(4, 1, 512).astype(np.int64))
    work = [
        long_tail[plan_updates(long_tail, rank=r, world_size=4, **PLAN).rows].sum()
        for r in range(4)
    ]
    assert max(work) < 1.1 * min(work)


def test_rows_of_one_prompt_go_to_one_rank_as_far_as_work_stays_equal():
    groups, tokens = np.repeat(np.arange(64), 32), lengths(2048)
    options = {**PLAN, "mini_batches": 4, "groups": groups}
    plans = [plan_updates(tokens, rank=r, world_size=2, **options) for r in range(2)]
    for update in range(4):
        rows_of = [plan.rows[plan.updates[update]] for plan in plans]
        both = np.intersect1d(*(groups[r] for r in rows_of))
        assert len(both) <= 1  # the group that the cut goes through
        work = [tokens[r].sum() for r in rows_of]
        assert max(work) - min(work) <= 2 * tokens.max()


@pytest.mark.parametrize(
    ("n", "wanted", "least", "expected"), [(2048, 4, 256, 4), (900, 4, 256, 3), (200, 4, 256, 1)]
)
def test_mini_batches_become_fewer_rather_than_small(n, wanted, least, expected):
    assert n_mini_batches(n, wanted, least) == expected


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=40),
    budget=st.integers(1, 400),
)
def test_micro_batches_cover_all_rows_within_the_budget(sizes, budget):
    widths = Widths(np.array([p for p, _ in sizes]), np.array([r for _, r in sizes]))
    every = np.arange(len(sizes))
    groups = micro_batches(every, widths, budget)
    assert sorted(np.concatenate(groups)) == every.tolist()
    for group in groups:
        padded = len(group) * (widths.prompt[group].max() + widths.response[group].max())
        assert padded <= budget or len(group) == 1


def test_no_rows_make_no_micro_batch():
    widths = Widths(np.array([3]), np.array([3]))
    assert micro_batches(np.array([], dtype=np.int64), widths, 10) == []


def test_taking_rows_keeps_their_tokens_and_drops_only_padding():
    experiences = rows(8)
    batch = batch_of(experiences)
    widths = Widths.of(batch)
    chosen = np.array([5, 1, 6])
    micro = take(batch, chosen, widths)
    assert micro.input_ids.shape[1] == micro.prompt_width + micro.response_width
    for place, row in enumerate(chosen):
        experience = experiences[row]
        real = micro.attention_mask[place].bool()
        assert micro.input_ids[place][real].tolist() == experience.tokens.tolist()
        n = experience.response_length
        response = micro.input_ids[place, micro.prompt_width :][:n]
        assert response.tolist() == experience.tokens[experience.prompt_length :].tolist()
        torch.testing.assert_close(
            micro.fields["rollout_logprobs"][place, :n], torch.from_numpy(experience.logprobs)
        )
    assert micro.padded_left == (len({experiences[r].prompt_length for r in chosen}) > 1)
