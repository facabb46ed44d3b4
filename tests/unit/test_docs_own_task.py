"""The page "your own task" works as it stands: its files are taken out of it and used.

Invariant: nothing of the page is repeated here; what it says a mistake looks like is compared
with what the program says.
"""

import json
import re
from pathlib import Path

import pytest

from trinity_dask.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "your-own-task.md").read_text()


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def task(tmp_path, monkeypatch):
    """The directory with the four files."""
    data, reward, *_ = blocks("python")
    (tmp_path / "vowels.py").write_text(reward)
    preset = tmp_path / "presets" / "experiment" / "vowels.yaml"
    preset.parent.mkdir(parents=True)
    preset.write_text(blocks("yaml")[0])
    monkeypatch.chdir(tmp_path)
    exec(data, {})
    return tmp_path


def validate(*overrides: str) -> int:
    return main(["validate", "--config-dir", "presets", "+experiment=vowels", *overrides])


def test_the_files_of_the_page_are_a_valid_job(task, capsys):
    assert validate("engine=torch") == 0
    said = capsys.readouterr().out
    assert "ok: sft: mode train, sft, in" in said
    assert "ok: grpo: mode both, grpo, engine torch, in" in said
    rows = [json.loads(line) for line in (task / "train.jsonl").read_text().splitlines()]
    assert len(rows) == 4000
    assert json.loads(blocks("json")[0]) in rows


def test_the_mistakes_of_the_page_are_refused_as_it_says(task, capsys):
    name = "buffer.explorer_input.taskset.reward_fn"
    assert validate(f"{name}=vowels.py:vowel_reward") == 2
    assert (
        "has no attribute 'vowel_reward'; did you mean 'vowels_reward'?" in capsys.readouterr().err
    )
    assert validate("algorithm.optimizer.learning_rate=1e-4") == 2
    said = capsys.readouterr().err
    assert "unknown key 'algorithm.optimizer.learning_rate'" in said
    assert "optimizer_type, lr, betas, eps" in said


def test_the_rewards_of_the_page_pay_what_it_says():
    first, second, third = (block for block in blocks("python")[1:])
    rewards = []
    for source in (first, second, third):
        names: dict = {}
        exec(source, names)
        rewards.append(names["vowels_reward"])
    with pytest.raises(ValueError, match="invalid literal"):
        rewards[0]("three", "3", "stop")
    totals = [[sum(r(a, "3", "stop").values()) for a in ("3", "2", "x")] for r in rewards[1:]]
    assert totals[0] == pytest.approx([1.0, 0.5, 0.0])
    assert totals[1] == pytest.approx([1.0, 0.1, 0.0])
    assert sum(rewards[2]("3", "3", "length").values()) == 0.0
