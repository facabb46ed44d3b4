"""The run as a notebook user has it: one small job, looked at from every side."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

import trinity_dask
from trinity_dask.run import Run, RunFailed

STEPS = 4


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("api")
    cfg = trinity_dask.load_config(
        "+experiment=sort_digits_tiny", "engine=torch", f"checkpoint_root_dir={root}"
    )
    run = Run(cfg)
    assert run.start() is run
    assert run.start() is run  # a cell that is run twice starts nothing twice
    assert run.wait(timeout=280)["state"] == "done"
    attached = Run.attach(run._cluster.scheduler_address)  # type: ignore[union-attr]
    assert attached.run_id == run.run_id
    assert attached.wait(timeout=30)["state"] == "done"
    attached.close()
    assert run.dashboard_link is not None
    run.close()
    return run


def stage(run: Run) -> Path:
    return Path(run.job_dirs[-1])


def test_status_and_card(finished: Run) -> None:
    status = finished.status
    assert status["step"] == status["explorer_step"] == status["model_version"] == STEPS
    assert status["in_flight"] == 0
    assert "heldout" in status["eval"]
    assert finished.run_id in finished._repr_mimebundle_()["text/html"]


def test_accounts_of_the_status_balance(finished: Run) -> None:
    accounts = finished.status["accounts"]
    assert accounts["scheduled"] == STEPS * 8 * 8
    assert accounts["scheduled"] == accounts["succeeded"] + accounts["failed"]
    assert accounts["produced"] == accounts["committed"] + accounts["filtered"]
    assert accounts["trained"] == accounts["committed"]
    assert accounts["queued"] == accounts["leased"] == 0


def test_metrics_frame(finished: Run) -> None:
    frame = finished.metrics
    assert set(frame["stage"]) == {"sft", "grpo"}
    grpo = frame[frame["stage"] == "grpo"]
    trained = grpo[grpo["role"] == "trainer"]
    assert sorted(trained["step"]) == list(range(1, STEPS + 1))
    evals = grpo.dropna(subset=["eval/heldout/reward/mean@1"])
    assert sorted(evals["step"]) == [0, 2, 4]
    # an evaluation at a boundary shows the weights of that version
    assert list(evals.sort_values("step")["eval/heldout/model_version"]) == [0.0, 2.0, 4.0]


def test_samples_of_a_step(finished: Run) -> None:
    rows = finished.samples(2)
    assert set(rows["batch"]) == {"2"}
    assert (rows["tokens"].map(len) - rows["prompt_length"] == rows["logprobs"].map(len)).all()
    # batch 2 was sampled from the weights after train step 1
    assert all(set(versions) == {1} for versions in rows["versions"])
    with pytest.raises(LookupError, match="no committed batch 99"):
        finished.samples(99)


def test_the_store_opens_with_three_tools(finished: Run) -> None:
    import duckdb
    import pyarrow.dataset

    data = stage(finished) / "buffer" / "experience" / "data"
    rows = pyarrow.dataset.dataset(data, format="ipc").to_table()
    assert rows.num_rows == finished.status["accounts"]["committed"]
    (answer,) = duckdb.sql("select count(*), avg(reward) from rows").fetchall()
    assert answer[0] == len(rows.to_pandas())


def test_files_of_the_job(finished: Run) -> None:
    base = Path(finished.base_dir)
    meta = json.loads((base / "stage_meta.json").read_text())
    assert meta == {"latest_stage": 1, "finished": True}
    assert (stage(finished) / "config.yaml").exists()
    assert list((stage(finished) / "monitor" / "tensorboard").rglob("*tfevents*"))
    curves = (base / "curves.png").read_bytes()
    assert curves.startswith(b"\x89PNG")


def test_the_export_loads_in_transformers_and_is_what_was_trained(finished: Run) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    checkpoint = stage(finished) / f"global_step_{STEPS}"
    model = AutoModelForCausalLM.from_pretrained(checkpoint / "huggingface")
    trained: dict[str, Any] = load_file(checkpoint / "actor" / "model.safetensors")
    own = model.state_dict()
    assert all(torch.equal(own[name], tensor) for name, tensor in trained.items())
    tokenizer = AutoTokenizer.from_pretrained(checkpoint / "huggingface")
    assert tokenizer.decode(tokenizer("sort 123=")["input_ids"]) == "sort 123="


def test_a_finished_job_is_not_run_again(finished: Run) -> None:
    with Run(finished.cfg) as again:
        assert again.wait(timeout=120)["state"] == "done"
    assert again.status.get("step") is None


def test_a_finished_job_with_another_configuration_is_refused(finished: Run) -> None:
    cfg = copy.deepcopy(finished.cfg)
    cfg.stages[1]["buffer"]["batch_size"] = 4
    with pytest.raises(RunFailed, match=r"different: buffer\.batch_size"):
        Run(cfg).start().wait(timeout=60)
