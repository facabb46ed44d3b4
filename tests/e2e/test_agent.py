"""An agent with an OpenAI client, trained on a cluster: what it said is what was learned."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from small_jobs import STEPS, SmallJobs

from trinity_dask.buffer.store.experience_store import ExperienceStore
from trinity_dask.experience.schema import from_table
from trinity_dask.monitor.history import load_metrics

AGENT = Path(__file__).parents[2] / "examples" / "sort_agent.py"
MOVES = 2


@pytest.mark.timeout(600)
def test_the_dialogues_of_an_agent_are_trained_on(jobs: SmallJobs) -> None:
    run = jobs.finish(
        "model.max_model_len=128",
        "model.max_prompt_tokens=120",
        "model.max_response_tokens=3",
        "buffer.explorer_input.taskset.workflow=agent",
        "buffer.explorer_input.taskset.reward_fn=null",
        f"+buffer.explorer_input.taskset.workflow_args={{agent: {AGENT}:play, "
        f"agent_args: {{moves: {MOVES}}}}}",
    )
    accounts = run.status["accounts"]
    assert accounts["failed"] == 0
    assert accounts["succeeded"] == accounts["scheduled"] == STEPS * 16
    assert accounts["trained"] == accounts["committed"] == accounts["produced"]
    store = ExperienceStore(str(jobs.dir() / "buffer" / "experience"))
    rows = from_table(store.read([manifest.ref() for manifest in store.manifests()]))
    assert len({(r.eid.batch, r.eid.task, r.eid.run) for r in rows}) == STEPS * 16
    for row in rows:
        assert row.version_span is not None
        assert row.reward in (0.0, 0.5, 1.0)
        assert np.isfinite(row.logprobs).all()
    whole = [row for row in rows if row.info["turns"] == MOVES]
    assert whole, "no dialogue went on from its sampled ids"
    for row in whole:
        assert (row.versions[~row.action_mask] == -1).all()
        assert (row.logprobs[~row.action_mask] == 0).all()
    frame = load_metrics(jobs.dir())
    gap = frame["correction/gap_max"].dropna()
    assert len(gap) == STEPS
    assert (gap < 1e-3).all()  # the trainer's one pass gives the log-probs of two requests
