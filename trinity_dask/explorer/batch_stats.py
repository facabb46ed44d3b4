"""What a batch looks like, computed from its rows.

Invariant: vectorised over Arrow buffers; no loop over rows.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trinity_dask.experience import PROMPT_TRUNCATED, RESPONSE_TRUNCATED


def row_statistics(table: pa.Table, prefix: str = "rollout") -> dict[str, float]:
    """Lengths in tokens, share of truncated responses, spread of the rewards.

    ``response_tokens`` is the sum over the batch. An empty table gives an empty dict.
    """
    if table.num_rows == 0:
        return {}
    prompts = _numpy(table["prompt_length"])
    responses = _numpy(pc.list_value_length(table["tokens"])) - prompts
    truncated = pc.equal(table["truncate_status"], RESPONSE_TRUNCATED).fill_null(False)
    too_long = pc.equal(table["truncate_status"], PROMPT_TRUNCATED).fill_null(False)
    rewards = _numpy(table["reward"].drop_null())
    found = {
        "prompt_length/mean": prompts.mean(),
        "prompt_length/max": prompts.max(),
        "response_length/mean": responses.mean(),
        "response_length/max": responses.max(),
        "response_tokens": responses.sum(),
        "truncated_share": pc.mean(truncated).as_py(),
        "prompt_truncated_share": pc.mean(too_long).as_py(),
        "reward/std": rewards.std() if len(rewards) else 0.0,
    }
    return {f"{prefix}/{name}": float(value) for name, value in found.items()}


def _numpy(column: pa.ChunkedArray) -> np.ndarray:
    return column.to_numpy()
