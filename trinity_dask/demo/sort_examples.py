"""What the examples beside the main demo need: pairs, plain text, a game, a teacher.

Invariant: everything follows from the arguments, and is in the demo's own directory, so an
example can be started after another without making the model and the rows anew.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trinity_dask.demo import sort_digits
from trinity_dask.demo.sort_digits import write_jsonl
from trinity_dask.files import read_json, replacing

if TYPE_CHECKING:
    from trinity_dask.config.schema import Config

Row = dict[str, str]
TEACHER_ROWS = 128
TEACHER_LR = 3e-3
TEACHER_WARMUP = 20


def prepare(cfg: Config, *, dir: str, teacher_steps: int = 0, **spec: Any) -> None:
    """Write the demo (see :func:`sort_digits.prepare`) and, beside its rows:

    * ``pairs.jsonl``: ``{"prompt", "chosen", "rejected"}``, the digits sorted and shuffled;
    * ``text.jsonl``: ``{"text"}``, whole lines to continue pre-training on;
    * ``pick.jsonl``, ``pick_eval.jsonl``: ``{"prompt": "pick 4071=", "response": "0"}``, the
      moves of the sorting game;
    * ``teacher/``: with ``teacher_steps``, the demo's model after so many supervised steps.
    """
    sort_digits.prepare(cfg, dir=dir, **spec)
    root = Path(dir)
    rows, held_out = (_read(root / name) for name in ("train.jsonl", "eval.jsonl"))
    seed = int(spec.get("seed", cfg.seed))
    write_jsonl(root / "pairs.jsonl", pairs(rows, seed))
    write_jsonl(root / "text.jsonl", ({"text": r["prompt"] + r["response"]} for r in rows))
    write_jsonl(root / "pick.jsonl", moves(rows, seed))
    write_jsonl(root / "pick_eval.jsonl", moves(held_out, seed))
    if teacher_steps:
        _teacher(root, rows, teacher_steps, seed)


def pairs(rows: Iterable[Row], seed: int) -> Iterable[Row]:
    """Each row with its answer as chosen and the digits in another order as rejected."""
    rng = np.random.default_rng(seed)
    for row in rows:
        right = row["response"]
        wrong = "".join(rng.permutation(list(right)))
        if wrong == right:
            wrong = right[::-1]
        if wrong != right:  # not for equal digits
            yield {"prompt": row["prompt"], "chosen": right, "rejected": wrong}


def moves(rows: Iterable[Row], seed: int) -> Iterable[Row]:
    """One position of the sorting game per row: the digits that are left, and the smallest."""
    rng = np.random.default_rng(seed)
    for row in rows:
        digits = row["prompt"].removeprefix("sort ").removesuffix("=")
        taken = int(rng.integers(len(digits)))
        left = digits
        for smallest in row["response"][:taken]:
            left = left.replace(smallest, "", 1)
        yield {"prompt": f"pick {left}=", "response": min(left)}


def _teacher(root: Path, rows: list[Row], steps: int, seed: int) -> None:
    """Train a copy of the demo's model on the rows; kept when it is there already."""
    marker = root / "teacher" / "TRAINED.json"
    wanted = {"steps": steps, "seed": seed, "rows": len(rows)}
    if read_json(marker) == wanted:
        return
    with replacing(root / "teacher", durable=False) as partial:
        shutil.copytree(root / "model", partial)
        _train(partial, rows, steps, seed)
        (partial / marker.name).write_text(json.dumps(wanted))


def _train(path: Path, rows: list[Row], steps: int, seed: int) -> None:
    """Maximum likelihood on ``prompt + response + end``, all rows of one length."""
    import torch
    import torch.nn.functional as F
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from trinity_dask.models.torch.engine import quiet_loading

    tokenizer = AutoTokenizer.from_pretrained(path)
    with quiet_loading():
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    texts = [row["prompt"] + row["response"] for row in rows]
    ids = [[*tokenizer.encode(t, add_special_tokens=False), tokenizer.eos_token_id] for t in texts]
    data, width = torch.tensor(ids), len(rows[0]["response"]) + 1
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=TEACHER_LR, betas=(0.9, 0.95), weight_decay=0.0
    )
    rng = np.random.default_rng(seed)
    for step in range(1, steps + 1):
        rate = min(step / TEACHER_WARMUP, 1.0) * (1.0 - 0.95 * step / steps)
        optimizer.param_groups[0]["lr"] = TEACHER_LR * rate
        batch = data[torch.from_numpy(rng.integers(0, len(data), TEACHER_ROWS))]
        logits = model(batch[:, :-1]).logits[:, -width:]
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[:, -width:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    # the weights alone: saving config or tokenizer anew could change the ids
    with quiet_loading():
        model.save_pretrained(path / "weights")
    os.replace(path / "weights" / "model.safetensors", path / "model.safetensors")
    shutil.rmtree(path / "weights")


def _read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]
