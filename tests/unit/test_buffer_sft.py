"""Supervised rows: what is context, what is learned, and that no quota is read twice."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trinity_dask.buffer.data.formats import SFTFormatter
from trinity_dask.buffer.data.row_file import RowFile
from trinity_dask.buffer.errors import DataError, EndOfData
from trinity_dask.config.schema import ExperienceBufferConfig, FormatConfig, SelectorConfig
from trinity_dask.experience import EID, RESPONSE_TRUNCATED, Experience
from trinity_dask.experience.schema import from_table

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A byte-level tokenizer: one token per byte and two special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = TEMPLATE
    return fast


def example(
    tokenizer: Any, row: dict[str, Any], limit: int | None = None, **fmt: Any
) -> Experience:
    formatter = SFTFormatter(tokenizer, FormatConfig(**fmt), limit)
    (experience,) = formatter.format_unit(row, EID(), "rows.jsonl, row 0")
    return experience


def split(tokenizer: Any, exp: Experience) -> tuple[str, str]:
    ids = exp.tokens.tolist()
    return tokenizer.decode(ids[: exp.prompt_length]), tokenizer.decode(ids[exp.prompt_length :])


ROW = {"prompt": "sort 21=", "response": "12"}


def test_plaintext_without_template(tokenizer: Any) -> None:
    exp = example(tokenizer, ROW, apply_chat_template=False)
    assert split(tokenizer, exp) == ("sort 21=", "12<|im_end|>")
    assert exp.action_mask is not None
    assert exp.action_mask.tolist() == [True] * 3
    assert (exp.prompt_text, exp.response_text) == ("sort 21=", "12")
    bare = example(tokenizer, ROW, apply_chat_template=False, append_eos=False)
    assert split(tokenizer, bare) == ("sort 21=", "12")


def test_plaintext_with_template_ends_where_sampling_ends(tokenizer: Any) -> None:
    exp = example(tokenizer, ROW, system_prompt="be brief")
    assert split(tokenizer, exp) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nsort 21=<|im_end|>\n"
        "<|im_start|>assistant\n",
        "12<|im_end|>",
    )


def test_an_eos_in_the_row_is_not_doubled(tokenizer: Any) -> None:
    exp = example(tokenizer, {**ROW, "response": "12<|im_end|>"}, apply_chat_template=False)
    assert split(tokenizer, exp)[1] == "12<|im_end|>"


@pytest.mark.parametrize("as_text", [False, True])
def test_the_last_assistant_turn_is_learned(tokenizer: Any, as_text: bool) -> None:
    messages = [
        {"role": "user", "content": "a", "name": None},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    value = json.dumps(messages) if as_text else messages
    prompt, response = split(
        tokenizer, example(tokenizer, {"messages": value}, prompt_type="messages")
    )
    assert prompt.endswith("<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n")
    assert response == "d<|im_end|>"  # the template's newline after it is never sampled


def test_conversations_that_teach_nothing_are_refused(tokenizer: Any) -> None:
    for messages in ([{"role": "user", "content": "a"}] * 2, [], "{broken"):
        with pytest.raises(DataError, match=r"rows\.jsonl, row 0: "):
            example(tokenizer, {"messages": messages}, prompt_type="messages")


def test_fault_23_a_template_that_rewrites_history_is_refused(tokenizer: Any) -> None:
    rewriting = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    rewriting.eos_token = "<|im_end|>"
    rewriting.chat_template = "{{ messages | length }}" + TEMPLATE
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(DataError, match="cannot be told apart"):
        example(rewriting, {"messages": messages}, prompt_type="messages")


def test_long_examples_are_cut_marked_and_counted(tokenizer: Any) -> None:
    exp = example(tokenizer, ROW, 9, apply_chat_template=False)
    assert split(tokenizer, exp) == ("sort 21=", "1")
    assert exp.truncate_status == RESPONSE_TRUNCATED
    with pytest.raises(DataError, match="8 prompt and 3 response tokens leave nothing to learn"):
        example(tokenizer, ROW, 8, apply_chat_template=False)


def test_an_empty_response_is_refused(tokenizer: Any) -> None:
    with pytest.raises(DataError, match="the answer is empty"):
        example(tokenizer, {**ROW, "response": ""}, apply_chat_template=False, append_eos=False)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    rows = [{"prompt": f"p{i}", "response": str(i)} for i in range(5)]
    (tmp_path / "sft.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path / "sft.jsonl"


def reader(path: Path, tokenizer: Any, selector: str = "shuffle", **kw: Any) -> RowFile:
    cfg = ExperienceBufferConfig(
        storage_type="file",
        path=str(path),
        format=FormatConfig(apply_chat_template=False),
        data_selector=SelectorConfig(selector, 42),
    )
    return RowFile(cfg, tokenizer, **{"batch_size": 2, "total_epochs": 2, **kw})


def drain(rows: RowFile, n: int = 2) -> list[list[str | None]]:
    batches = []
    while True:
        try:
            batches.append([e.response_text for e in from_table(rows.read(n))])
        except EndOfData:
            return batches


def test_epochs_are_counted_in_rows(path: Path, tokenizer: Any) -> None:
    assert drain(reader(path, tokenizer)) == [
        ["4", "2"], ["3", "1"], ["0", "4"], ["1", "2"], ["0", "3"],
    ]  # fmt: skip
    assert len(drain(reader(path, tokenizer, total_steps=9))) == 9
    with pytest.raises(EndOfData) as caught:
        reader(path, tokenizer).read(11)
    assert caught.value.left_rows == 10


@pytest.mark.parametrize("cut", range(6))
@pytest.mark.parametrize("selector", ["sequential", "shuffle", "random"])
def test_fault_35_a_resumed_job_reads_its_quota_once(
    path: Path, tokenizer: Any, selector: str, cut: int
) -> None:
    expected = drain(reader(path, tokenizer, selector))
    first, second = reader(path, tokenizer, selector), reader(path, tokenizer, selector)
    head = [[e.response_text for e in from_table(first.read(2))] for _ in range(cut - 1)]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert head + drain(second) == expected


def test_ids_are_unique_and_equal_after_a_resume(path: Path, tokenizer: Any) -> None:
    first = from_table(reader(path, tokenizer).read(10))
    again = from_table(reader(path, tokenizer).read(10))
    assert len({e.eid.uid for e in first}) == 10
    assert [e.eid for e in first] == [e.eid for e in again]


def test_missing_column_is_found_before_training(path: Path, tokenizer: Any) -> None:
    path.write_text('{"prompt": "a", "response": "b"}\n{"prompt": "a"}')
    with pytest.raises(DataError, match=r"sft\.jsonl, row 1: no value in column 'response'"):
        reader(path, tokenizer)
