"""Collation against a plain per-token reference."""

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_dask.experience import EID, Experience
from trinity_dask.experience.schema import to_table
from trinity_dask.trainer.step.batching import collate

PAD = 99


def make(prompt: int, response: int, seed: int, task: Any = 0) -> Experience:
    rng = np.random.default_rng(seed)
    return Experience(
        tokens=rng.integers(0, 50, prompt + response),
        prompt_length=prompt,
        eid=EID(1, task),
        reward=float(seed),
        logprobs=rng.normal(size=response),
        versions=rng.integers(0, 9, response),
        action_mask=rng.integers(0, 2, response).astype(bool),
        advantages=rng.normal(size=response),
    )


def reference(exps: list[Experience]) -> dict[str, list[list[float]]]:
    width_p = max(e.prompt_length for e in exps)
    width_r = max(e.response_length for e in exps)
    out: dict[str, list[list[float]]] = {
        k: [] for k in ("input_ids", "attention_mask", "position_ids", "action_mask",
                        "response_mask", "rollout_logprobs", "advantages", "versions")
    }  # fmt: skip
    for e in exps:
        left, right = width_p - e.prompt_length, width_r - e.response_length
        mask = [0] * left + [1] * len(e.tokens) + [0] * right
        out["input_ids"].append([PAD] * left + e.tokens.tolist() + [PAD] * right)
        out["attention_mask"].append(mask)
        out["position_ids"].append([max(sum(mask[: i + 1]) - 1, 0) for i in range(len(mask))])
        out["response_mask"].append([True] * e.response_length + [False] * right)
        for key, field, pad in (
            ("action_mask", "action_mask", False),
            ("rollout_logprobs", "logprobs", 0.0),
            ("advantages", "advantages", 0.0),
            ("versions", "versions", -1),
        ):
            out[key].append(getattr(e, field).tolist() + [pad] * right)
    return out


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=6))
def test_collate_equals_the_reference(shapes: list[tuple[int, int]]) -> None:
    exps = [make(p, r, seed) for seed, (p, r) in enumerate(shapes)]
    batch = collate(to_table(exps), PAD)
    for key, expected in reference(exps).items():
        assert batch[key].tolist() == expected, key
    assert batch["prompt_width"] == max(p for p, _ in shapes)
    assert batch["lengths"].tolist() == [p + r for p, r in shapes]


def test_dtypes_and_optional_fields() -> None:
    import torch

    exps = [make(2, 3, 0), make(1, 2, 1)]
    exps[1].advantages = None
    exps[1].reward = None
    exps[1].versions = None
    batch = collate(to_table(exps), PAD)
    assert "advantages" not in batch  # present only when all rows have it
    assert "teacher_logprobs" not in batch
    assert batch["versions"][1].tolist() == [-1, -1, -1]
    assert batch["reward"][0] == 0.0
    assert math.isnan(batch["reward"][1])
    expected = {"input_ids": torch.int64, "attention_mask": torch.int64, "lengths": torch.int64,
                "position_ids": torch.int64, "action_mask": torch.bool, "group": torch.int64,
                "response_mask": torch.bool, "rollout_logprobs": torch.float32,
                "versions": torch.int32, "reward": torch.float32}  # fmt: skip
    assert {k: batch[k].dtype for k in expected} == expected


def test_groups_are_numbered_in_order_of_appearance() -> None:
    exps = [make(1, 1, 0, task) for task in ("b", "a", "b", 3, "a")]
    assert collate(to_table(exps), PAD)["group"].tolist() == [0, 1, 0, 2, 1]


def test_fault_34_mask_selects_exactly_the_sampled_tokens() -> None:
    exps = [
        Experience(tokens=[10, 11, 12, 13], prompt_length=2, logprobs=[-1, -2]),
        Experience(tokens=[20, 21, 22, 23], prompt_length=1, logprobs=[-3, -4, -5]),
    ]
    batch = collate(to_table(exps), PAD)
    responses = batch["input_ids"][:, batch["prompt_width"] :]
    assert responses[batch["action_mask"]].tolist() == [12, 13, 21, 22, 23]
    assert batch["rollout_logprobs"][batch["action_mask"]].tolist() == [-1, -2, -3, -4, -5]


def test_fault_26_padding_a_batch_changes_nothing_but_padding() -> None:
    short = collate(to_table([make(2, 3, 5)]), PAD)
    padded = collate(to_table([make(2, 3, 5), make(9, 9, 6)]), PAD)
    real = padded["response_mask"][0]
    for key in ("rollout_logprobs", "advantages", "versions", "action_mask"):
        assert padded[key][0][real].tolist() == short[key][0].tolist()
        assert not padded[key][0][~real].clamp(min=0).any()
    attended = padded["attention_mask"][0].bool()
    for key in ("input_ids", "position_ids"):
        assert padded[key][0][attended].tolist() == short[key][0].tolist()


def test_slices_and_chunks_collate_alike() -> None:
    table = to_table([make(1 + i % 3, 2 + i % 4, i) for i in range(8)])
    parts = pa.concat_tables([table.slice(3, 2), table.slice(5, 3)])
    whole = collate(table.slice(3), PAD)
    for key, value in collate(parts, PAD).items():
        assert value == whole[key] if key == "prompt_width" else value.equal(whole[key])


def test_empty_table_collates_to_empty_tensors() -> None:
    batch = collate(to_table([]), PAD)
    assert tuple(batch["input_ids"].shape) == (0, 0)
    assert tuple(batch["action_mask"].shape) == (0, 0)


def test_preference_pairs_are_refused() -> None:
    pair = Experience(tokens=[1, 2], chosen=[3], rejected=[4])
    with pytest.raises(ValueError, match="preference pairs"):
        collate(to_table([pair]), PAD)


def test_expert_rows_runs_steps_and_baselines() -> None:
    exps = [
        Experience(tokens=[1, 2, 3], eid=EID(1, 0, run, step), action_mask=[True, run == 0])
        for run, step in ((0, 3), (1, 4), (2, 5))
    ]
    exps[1].info = {"is_expert": True, "step": 7}
    exps[2].info = {"note": 'says "is_expert": true', "is_expert": False}
    batch = collate(to_table(exps), pad_token_id=0)
    assert batch["expert_mask"].tolist() == [[False, False], [True, False], [False, False]]
    assert (batch["run"].tolist(), batch["eid_step"].tolist()) == ([0, 1, 2], [3, 4, 5])
    assert "reward_baselines" not in batch
    for value, exp in enumerate(exps):
        exp.info = {"reward_baseline": value / 4}
    baselines = collate(to_table(exps), pad_token_id=0)["reward_baselines"]
    assert baselines.tolist() == [0.0, 0.25, 0.5]
    assert "reward_baselines" not in collate(to_table([]), pad_token_id=0)


def test_a_share_of_the_rows_has_the_tensors_that_all_rows_have() -> None:
    one, other = make(2, 3, 1), make(1, 2, 2)
    one.teacher_logprobs = np.zeros(3, np.float32)  # the other has none
    step = to_table([one, other])
    for rows in ([one], [other], []):
        share = collate(to_table(rows), PAD, step)
        assert share.keys() == collate(step, PAD).keys()
        assert "teacher_logprobs" not in share
