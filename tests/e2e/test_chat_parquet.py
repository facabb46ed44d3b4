"""The demo's task from a parquet file of conversations with system prompts and tools: supervised
steps, then rollouts, both asked in the same words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_jobs import STEPS, SmallJobs

from trinity_dask.buffer.store.experience_store import ExperienceStore
from trinity_dask.demo.tokenizer import ascii_tokenizer
from trinity_dask.monitor.history import load_metrics

SORTER = {"type": "function", "function": {"name": "sorter", "parameters": {"type": "object"}}}
TEMPLATE = (
    "{% if tools %}<|im_start|>tools {{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}"
    "{% for call in m.tool_calls or [] %} calls {{ call.function.name }}"
    "({{ call.function.arguments | tojson }}){% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


def conversation(number: int) -> dict[str, Any]:
    """Every second row has a system prompt of its own and a tool that has been called."""
    question = {"role": "user", "content": f"sort {number:02d}"}
    answer = {"role": "assistant", "content": "".join(sorted(f"{number:02d}"))}
    truth = {"response": answer["content"]}
    if number % 2:
        return {"messages": [question, answer], "tools": None, "system": None, **truth}
    called = {"name": "sorter", "arguments": json.dumps({"of": number})}
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": called}]}
    told = {"role": "tool", "content": answer["content"]}
    messages = [question, call, told, answer]
    return {"messages": messages, "tools": json.dumps([SORTER]), "system": "be brief", **truth}


def as_asked(tokenizer: Any, row: dict[str, Any]) -> str:
    messages = json.loads(json.dumps(row["messages"][:-1]))
    for message in messages:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    system = [{"role": "system", "content": row["system"] or "you sort"}]
    tools = json.loads(row["tools"]) if row["tools"] else None
    return str(
        tokenizer.apply_chat_template(
            system + messages, tools=tools, add_generation_prompt=True, tokenize=False
        )
    )


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory, data: Path) -> tuple[Path, Path]:
    """The file, whose columns fill up with nulls, and the model with a template for tools."""
    home = tmp_path_factory.mktemp("chat")
    pq.write_table(pa.Table.from_pylist([conversation(n) for n in range(32)]), home / "c.parquet")
    shutil.copytree(data / "model", home / "model")
    tokenizer = ascii_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(home / "model")
    return home / "c.parquet", home / "model"


@pytest.mark.timeout(600)
def test_supervised_rows_and_rollouts_are_asked_alike(
    jobs: SmallJobs, rows: tuple[Path, Path]
) -> None:
    file, model = rows
    form = {"prompt_type": "messages", "apply_chat_template": "true", "system_prompt_key": "system"}
    form["system_prompt"] = "you sort"
    store, tasks = "buffer.trainer_input.experience_buffer", "buffer.explorer_input.taskset"
    same = ["model.max_model_len=400", "model.max_prompt_tokens=390", f"model.model_path={model}"]
    learned = [
        *("mode=train", "algorithm=sft", "buffer.train_batch_size=16", *same),
        *(f"{store}.storage_type=file", f"{store}.path={file}"),
        *(f"{store}.format.{key}={value}" for key, value in form.items()),
    ]
    jobs.finish(*learned, name="learned")
    frame = load_metrics(jobs.dir("learned"))
    assert frame["step"].max() == STEPS
    sampled = [
        *(*same, f"{tasks}.path={file}", "buffer.explorer_input.eval_tasksets=[]"),
        *(f"{tasks}.format.{key}={value}" for key, value in form.items()),
    ]
    jobs.finish(*sampled, name="sampled")
    found = ExperienceStore(f"{jobs.dir('sampled')}/buffer/experience")
    table = found.read([m.ref() for m in found.manifests()]).select(["tokens", "prompt_length"])
    tokenizer = ascii_tokenizer()
    asked = {tokenizer.decode(r["tokens"][: r["prompt_length"]]) for r in table.to_pylist()}
    tokenizer.chat_template = TEMPLATE
    expected = {as_asked(tokenizer, conversation(n)) for n in range(32)}
    assert asked <= expected
    assert len(asked) == 4 * STEPS
    assert {"tools" in text for text in asked} == {True, False}
