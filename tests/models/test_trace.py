"""One task through its workflow, without a run: what is printed, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import trinity_dask
from trinity_dask.cli import main
from trinity_dask.config.errors import ConfigError
from trinity_dask.experience import Experience
from trinity_dask.run import Run
from trinity_dask.run.trace import turns

MINE = '''
from trinity_dask.workflows import Workflow

class Game(Workflow):
    """Two turns with a word of the game's in between, which the model did not sample."""

    is_async = True

    async def run_async(self):
        (first,) = await self.model.generate_async("sort 21=", max_tokens=3)
        if self.task.raw_task.get("fail"):
            raise KeyError("a mistake in line 12")
        first.reward, first.metrics = 0.5, {"luck": 0.25}
        return [first]

def strange(response, **_):
    return {"odd": 2.0}

def broken(response, **_):
    return response["no such thing"]
'''


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    (tmp_path / "mine.py").write_text(MINE)
    root = f"checkpoint_root_dir={tmp_path}"
    return ["try", "+experiment=sort_digits_tiny", "engine=torch", root]


def test_a_task_of_the_file_is_shown_turn_by_turn(words, capsys):
    assert main([*words, "task=3", "runs=2"]) == 0
    told = capsys.readouterr().out
    assert "train.jsonl, row 3, workflow simple_workflow" in told
    assert told.count("--- prompt, ") == 2
    assert told.count("--- model, ") == 2
    assert "mean log-prob -" in told
    assert "--- reward 0.0 (reward 0)" in told
    assert "2 of 2 runs" in told


def test_a_row_given_runs_through_the_workflow_and_reward_of_a_file(words, tmp_path, capsys):
    mine = "buffer.explorer_input.taskset"
    row = json.dumps({"prompt": "sort 31="})
    words += [f"task={row}", f"{mine}.reward_fn={tmp_path}/mine.py:strange"]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "sort 31=" in told
    assert "(odd 2" in told


def test_a_run_that_fails_shows_the_users_own_traceback(words, tmp_path, capsys):
    mine = "buffer.explorer_input.taskset"
    assert main([*words, f"{mine}.reward_fn={tmp_path}/mine.py:broken"]) == 1
    told = capsys.readouterr().out
    assert "failed: TypeError: string indices" in told
    assert 'return response["no such thing"]' in told
    assert "0 of 1 runs" in told
    game = f"{mine}.workflow={tmp_path}/mine.py:Game"
    assert main([*words, game, 'task={"prompt": "x", "fail": true}']) == 1
    told = capsys.readouterr().out
    assert "KeyError: 'a mistake in line 12'" in told
    assert main([*words, game]) == 0
    assert "--- reward 0.5 (luck 0.25)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("task=99999", "the taskset has 64 tasks"),
        ("task=[1]", "a number or a row as JSON"),
        ("task={", "a number or a row as JSON"),
        ("runs=0", "from 1 on"),
        ("checkpoint=7", "is no complete checkpoint"),
        ("taskset=none", "no eval taskset 'none'; there are: "),
        ("stage=nothing", "no stage that samples; there are: grpo"),
        ("checkpont=7", "checkpont"),
    ],
)
def test_what_cannot_be_tried_says_so(words, word, sentence, capsys):
    assert main([*words, word]) == 2
    assert sentence in capsys.readouterr().err


def test_of_a_run_the_weights_are_those_of_its_newest_checkpoint(tmp_path):
    cfg = trinity_dask.load_config(
        *("+experiment=sort_task", "engine=torch", "monitor=quiet", "name=job"),
        *("algorithm.repeat_times=2", "buffer.batch_size=4", "buffer.total_steps=2"),
        *("explorer.eval_interval=0", "explorer.eval_on_startup=false"),
        *("explorer.eval_at_end=false", "algorithm.optimizer.lr=0.05"),
        *("algorithm.optimizer.lr_warmup_steps=0", "explorer.rollout_model.deterministic=true"),
        f"checkpoint_root_dir={tmp_path}",
    )
    with Run(cfg) as run:
        run.wait(240)
        found = run.trace(1)
        assert found.weights.endswith("global_step_2")
        assert found.experiences[0].versions.tolist() == [2] * found.experiences[0].response_length
        before = run.trace(1, checkpoint="start")
        assert before.weights.endswith("/model")
        assert not np.array_equal(before.experiences[0].logprobs, found.experiences[0].logprobs)
        with pytest.raises(ConfigError, match="no complete checkpoint"):
            run.trace(1, checkpoint=1)


def test_turns_change_where_the_side_that_speaks_does():
    mask = [True, True, False, True]
    experience = Experience([1, 2, 3, 4, 5, 6], 2, logprobs=[-1, -2, 0, -3], action_mask=mask)
    found = [(turn.sampled, turn.token_ids, turn.logprobs) for turn in turns(experience)]
    assert found == [
        (False, (1, 2), ()),
        (True, (3, 4), (-1.0, -2.0)),
        (False, (5,), ()),
        (True, (6,), (-3.0,)),
    ]
