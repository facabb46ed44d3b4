"""What the README shows works as it stands there.

Invariant: the code is taken out of README.md, never repeated here.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from trainer_support import batch_of, engine, rows

from trinity_dask.buffer.store.experience_store import ExperienceStore
from trinity_dask.experience.eid import EID
from trinity_dask.experience.experience import Experience
from trinity_dask.experience.schema import to_table

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def code_block(start: str) -> str:
    """The Python block of the README that begins with ``start``."""
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    return next(block for block in blocks if block.startswith(start))


@pytest.fixture
def job(tmp_path) -> str:
    """A job directory with two committed batches of three experiences."""
    store = ExperienceStore(str(tmp_path / "buffer/experience"))
    for batch in (2, 10):
        rows = [
            Experience(
                tokens=np.arange(5), prompt_length=2, reward=float(run), eid=EID(batch, 0, run)
            )
            for run in range(3)
        ]
        store.commit(batch, to_table(rows), {})
    return str(tmp_path)


def test_a_run_opens_with_arrow_duckdb_and_pandas(job, capsys):
    pytest.importorskip("duckdb")
    names = {"job": job}
    exec(code_block("import pyarrow.dataset"), names)
    assert names["rows"].num_rows == 6
    exec(code_block("import duckdb"), names)
    printed = capsys.readouterr().out
    assert re.search(r"2\D+1\.0\D+3", printed)
    assert printed.index(" 2 ") < printed.index(" 10 ")
    exec(code_block("import pandas"), names)
    assert names["frame"]["reward"].mean() == 1.0


def test_the_reward_of_the_readme_is_short_and_right():
    source = code_block('"""1 for a palindrome')
    assert source.count("\n") <= 20
    names: dict = {}
    exec(source, names)
    reward = names["palindrome_reward"]
    assert sum(reward("Level!", "lev", "stop").values()) == pytest.approx(1.0)
    assert sum(reward("lever", "lev", "stop").values()) == pytest.approx(0.3)
    assert sum(reward("Level!", "lev", "length").values()) == 0.0


def test_the_loss_of_the_readme_trains(tmp_path):
    (tmp_path / "floored.py").write_text(code_block('"""REINFORCE with the sampler'))
    experiences = rows(8)
    found = {}
    for floor in (0.1, 5.0):
        for tokens in (65_536, 40):
            algorithm = {
                "algorithm_type": "grpo",
                "policy_loss_fn": f"{tmp_path}/floored.py:floored",
                "policy_loss_fn_args": {"floor": floor},
                "kl_loss_fn": "none",
                "bypass_old_logprobs": True,
            }
            trained = engine(algorithm, micro_batch_tokens=tokens, grad_clip=0.0)
            metrics = trained.train_step(batch_of(experiences), 1)
            found[floor, tokens] = metrics["actor/floored_loss"], metrics["actor/grad_norm"]
    for floor in (0.1, 5.0):
        assert found[floor, 40] == pytest.approx(found[floor, 65_536], rel=1e-4, abs=1e-6)
        assert found[floor, 40][1] > 0
    assert found[0.1, 40] != pytest.approx(found[5.0, 40], rel=1e-2)


def test_links_lead_somewhere():
    links = re.findall(r"\]\(((?:docs/|[A-Z])[^)#]*)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
