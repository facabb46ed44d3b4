"""A table of experiences as the padded tensors of one training batch.

Invariant: token ``t`` of row ``i`` lands at ``P - prompt_length[i] + t``, so every row's
response starts at column ``P`` and response column ``r`` of every ``[B, R]`` tensor
speaks about ``input_ids[:, P + r]``. Work is vectorised over the Arrow buffers; no Python
loop touches a token or a row.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trinity_dask.experience.schema import check_lengths, column, group_codes, list_values

if TYPE_CHECKING:
    import torch

# tensors that are present when every row has the field: destination name -> column
_IF_ALL_HAVE = {
    "rollout_logprobs": "logprobs",
    "advantages": "advantages",
    "returns": "returns",
    "token_level_reward": "token_level_reward",
    "teacher_logprobs": "teacher_logprobs",
}
UNKNOWN_VERSION = -1


def _scatter(
    out: np.ndarray, first_column: np.ndarray, values: np.ndarray, offsets: np.ndarray
) -> None:
    """Write row ``i``'s values into ``out[i]`` from ``first_column[i]`` on."""
    lengths = np.diff(offsets)
    rows = np.arange(len(lengths))
    start = rows * out.shape[1] + first_column - offsets[:-1]
    index = np.repeat(start, lengths)
    index += np.arange(len(values))
    out.reshape(-1)[index] = values


def _response_tensor(table: pa.Table, name: str, width: int, dtype: Any, pad: Any) -> np.ndarray:
    out = np.full((table.num_rows, width), pad, dtype)
    values, offsets = list_values(column(table, name))
    _scatter(out, np.zeros(table.num_rows, np.int64), values, offsets)
    return out


def _sequence_tensors(
    table: pa.Table, prompt: np.ndarray, width: int, pad_token_id: int
) -> dict[str, np.ndarray]:
    values, offsets = list_values(column(table, "tokens"))
    prompt_width = int(prompt.max(initial=0))
    first = prompt_width - prompt
    ids = np.full((table.num_rows, prompt_width + width), pad_token_id, np.int64)
    _scatter(ids, first, values, offsets)
    columns = np.arange(prompt_width + width)
    last = first + np.diff(offsets)
    mask = (columns >= first[:, None]) & (columns < last[:, None])
    position = np.clip(columns - first[:, None], 0, None)
    # right padding keeps the last real position: clip(cumsum(mask) - 1, 0)
    position = np.minimum(position, np.maximum(last - first - 1, 0)[:, None])
    return {
        "input_ids": ids,
        "attention_mask": mask.astype(np.int64),
        "position_ids": position,
        "response_mask": mask[:, prompt_width:],
    }


def flagged(table: pa.Table, key: str) -> np.ndarray:
    """Rows whose ``info[key]`` is true: bool ``[rows]``. Only candidates are parsed."""
    texts = column(table, "info")
    found = pc.match_substring(texts, f'"{key}"').to_numpy(zero_copy_only=False).astype(np.bool_)
    for row in np.flatnonzero(found):
        found[row] = json.loads(texts[int(row)].as_py()).get(key) is True
    return found


def _info_numbers(table: pa.Table, key: str) -> np.ndarray | None:
    """``info[key]`` of every row: float32 ``[rows]``; None unless all rows have it."""
    texts = column(table, "info")
    if table.num_rows == 0 or not pc.all(pc.match_substring(texts, f'"{key}"')).as_py():
        return None
    values = [json.loads(text).get(key) for text in texts.to_pylist()]
    return None if None in values else np.array(values, np.float32)


def collate(
    table: pa.Table, pad_token_id: int, step: pa.Table | None = None
) -> dict[str, torch.Tensor | int]:
    """Padded tensors of ``table``: prompts left-padded to P, responses right-padded to R.

    ``input_ids``, ``attention_mask``, ``position_ids`` int64 ``[B, P+R]``;
    ``prompt_width`` = P (an int); ``action_mask``, ``response_mask`` (real response
    tokens) bool ``[B, R]``; ``rollout_logprobs``, ``advantages``, ``returns``,
    ``token_level_reward``, ``teacher_logprobs`` float32 ``[B, R]``, each only when every
    row has it, 0 on padding; ``versions`` int32 ``[B, R]``, -1 where unknown or padding;
    ``expert_mask`` bool ``[B, R]``: the action mask of rows with ``info.is_expert``;
    ``reward`` float32 ``[B]``, NaN where there is none; ``reward_baselines`` float32
    ``[B]`` when every row has ``info.reward_baseline``; ``group``, ``run``, ``eid_step``
    int64 ``[B]``: index of the row's task, its run, its step in a multi-step run;
    ``lengths`` int64 ``[B]``, real tokens of the row.

    ``step``: the rows of which ``table`` is one rank's share, perhaps an empty one. "Every
    row" then means all of its rows, so that all ranks have the same tensors.

    Raises:
        ValueError: a column is missing, lengths do not fit, or the rows are pairs.
    """
    import torch

    if column(table, "chosen").null_count < table.num_rows:
        raise ValueError(
            "collate takes experiences with one response each; this table holds preference "
            "pairs (chosen/rejected)"
        )
    check_lengths(table)
    lengths = np.diff(list_values(column(table, "tokens"))[1])
    prompt = column(table, "prompt_length").to_numpy(zero_copy_only=False).astype(np.int64)
    width = int((lengths - prompt).max(initial=0))
    arrays = _sequence_tensors(table, prompt, width, pad_token_id)
    arrays["action_mask"] = _response_tensor(table, "action_mask", width, np.bool_, False)
    arrays["versions"] = _response_tensor(table, "versions", width, np.int32, UNKNOWN_VERSION)
    for key, name in _IF_ALL_HAVE.items():
        if column(table if step is None else step, name).null_count == 0:
            arrays[key] = _response_tensor(table, name, width, np.float32, 0.0)
    reward = pc.fill_null(column(table, "reward"), float("nan"))
    arrays["reward"] = reward.to_numpy(zero_copy_only=False).astype(np.float32)
    arrays["expert_mask"] = arrays["action_mask"] & flagged(table, "is_expert")[:, None]
    baselines = _info_numbers(table, "reward_baseline")
    if baselines is not None:
        arrays["reward_baselines"] = baselines
    arrays["group"] = group_codes(table)
    for key, name in (("run", "run"), ("eid_step", "step")):
        arrays[key] = column(table, name).to_numpy(zero_copy_only=False).astype(np.int64)
    arrays["lengths"] = lengths
    batch: dict[str, Any] = {name: torch.from_numpy(a) for name, a in arrays.items()}
    batch["prompt_width"] = int(prompt.max(initial=0))
    return batch
