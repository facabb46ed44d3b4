"""Pairs, plain text, tools and many turns: what is learned of a row, and exact resume."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trinity_dask.buffer.data.formats import FORMATTERS, assistant_mask
from trinity_dask.buffer.data.row_file import RowFile
from trinity_dask.buffer.errors import DataError, EndOfData
from trinity_dask.config.schema import ExperienceBufferConfig, FormatConfig, SelectorConfig
from trinity_dask.experience import EID, RESPONSE_TRUNCATED, Experience
from trinity_dask.experience.schema import from_table

TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# keeps the thoughts of turns after the last user's only, as reasoning models do
THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>{{ m.thought }}</think>"
    "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = TEMPLATE.replace(
    "{{ m['content'] }}<|im_end|>\n",
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>"
    "{% endgeneration %}{{ '\n' }}{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}",
)


def tokenizer_with(template: str) -> Any:
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
    fast.chat_template = template
    return fast


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tokenizer_with(TEMPLATE)


def examples(
    tokenizer: Any, schema: str, row: dict[str, Any], limit: int | None = None, **fmt: Any
) -> list[Experience]:
    formatter = FORMATTERS.get(schema)(tokenizer, FormatConfig(**fmt), limit)
    assert set(formatter.columns) <= set(row)
    return formatter.format_unit(row, EID("x", 3, 0), "rows.jsonl, row 0")


def prompt_of(tokenizer: Any, exp: Experience) -> str:
    return tokenizer.decode(exp.tokens[: exp.prompt_length].tolist())


def learned(tokenizer: Any, exp: Experience) -> list[str]:
    """The text of each stretch of learned tokens."""
    assert exp.action_mask is not None
    found: list[list[int]] = [[]]
    for token, bit in zip(exp.tokens[exp.prompt_length :], exp.action_mask, strict=True):
        if bit:
            found[-1].append(int(token))
        elif found[-1]:
            found.append([])
    return [tokenizer.decode(ids) for ids in found if ids]


def turns(*roles_and_texts: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in roles_and_texts]


DIALOGUE = turns(
    ("system", "s"), ("user", "a"), ("assistant", "b"), ("tool", "t"), ("assistant", "c")
)


@pytest.mark.parametrize("template", [TEMPLATE, MARKED], ids=["by prefix", "by template"])
def test_every_assistant_turn_is_learned(template: str) -> None:
    tok = tokenizer_with(template)
    row = {"messages": [*DIALOGUE, *turns(("user", "bye"))]}
    (exp,) = examples(tok, "sft", row, prompt_type="messages", enable_concatenated_multi_turn=True)
    assert prompt_of(tok, exp).endswith("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n")
    assert learned(tok, exp) == ["b<|im_end|>", "c<|im_end|>"]
    assert exp.action_mask is not None
    assert exp.action_mask[-1]  # what follows the last turn is left out
    assert exp.messages == row["messages"]


def test_without_multi_turn_only_the_last_turn_is_learned(tokenizer: Any) -> None:
    (exp,) = examples(tokenizer, "sft", {"messages": DIALOGUE}, prompt_type="messages")
    assert learned(tokenizer, exp) == ["c<|im_end|>"]
    assert "tool\nt" in prompt_of(tokenizer, exp)


def test_a_thinking_template_learns_what_follows_the_last_user() -> None:
    tok = tokenizer_with(THINKING)
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "thought": "x"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "thought": "y"},
    ]
    (exp,) = examples(
        tok,
        "sft",
        {"messages": messages},
        prompt_type="messages",
        enable_concatenated_multi_turn=True,
    )
    assert learned(tok, exp) == ["<think>y</think>d<|im_end|>"]


def test_fault_23_a_template_that_changes_earlier_turns_is_refused() -> None:
    tok = tokenizer_with("{% set think = 0 %}{{ messages | length }}" + TEMPLATE)
    with pytest.raises(DataError, match="row 0: the chat template"):
        examples(
            tok,
            "sft",
            {"messages": DIALOGUE},
            prompt_type="messages",
            enable_concatenated_multi_turn=True,
        )


def test_masks_at_the_edges(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="no message"):
        assistant_mask(tokenizer, [])
    ids, mask = assistant_mask(tokenizer, turns(("user", "a")))
    assert not any(mask)
    assert len(ids) == len(mask)
    ids, mask = assistant_mask(tokenizer, turns(("assistant", "a"), ("user", "b")))
    assert tokenizer.decode([i for i, bit in zip(ids, mask, strict=True) if bit]) == "a<|im_end|>"
    with pytest.raises(DataError, match=r"no turn of the conversation can be learned"):
        examples(
            tokenizer,
            "sft",
            {"messages": turns(("user", "a"))},
            prompt_type="messages",
            enable_concatenated_multi_turn=True,
        )


@pytest.mark.parametrize("as_text", [False, True])
def test_tools_go_into_the_prompt(tokenizer: Any, as_text: bool) -> None:
    tools = [{"type": "function", "function": {"name": "add", "unused": None}}]
    row = {"messages": DIALOGUE, "tools": json.dumps(tools) if as_text else tools}
    (exp,) = examples(tokenizer, "sft", row, prompt_type="messages")
    assert '"name": "add"' in prompt_of(tokenizer, exp)
    assert "unused" not in prompt_of(tokenizer, exp)  # columnar files fill keys with null
    assert exp.tools == [{"type": "function", "function": {"name": "add"}}]
    (without,) = examples(tokenizer, "sft", {**row, "tools": ""}, prompt_type="messages")
    assert without.tools is None


def test_a_long_dialogue_is_cut_where_it_is(tokenizer: Any) -> None:
    fmt = {"prompt_type": "messages", "enable_concatenated_multi_turn": True}
    (whole,) = examples(tokenizer, "sft", {"messages": DIALOGUE}, **fmt)
    limit = whole.prompt_length + 5
    (cut,) = examples(tokenizer, "sft", {"messages": DIALOGUE}, limit, **fmt)
    assert (len(cut.tokens), cut.truncate_status) == (limit, RESPONSE_TRUNCATED)
    assert learned(tokenizer, cut) == ["b<|im_end|>"]


PAIR = {"prompt": "q", "chosen": "yes", "rejected": "no"}


def test_a_plaintext_pair(tokenizer: Any) -> None:
    chosen, rejected = examples(tokenizer, "dpo", PAIR, system_prompt="s")
    assert [e.eid.rid for e in (chosen, rejected)] == ["x/3/0", "x/3/1"]
    assert chosen.eid.tid == rejected.eid.tid
    prompt = (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt_of(tokenizer, chosen) == prompt_of(tokenizer, rejected) == prompt
    assert learned(tokenizer, chosen) == ["yes<|im_end|>"]
    assert learned(tokenizer, rejected) == ["no<|im_end|>"]


def test_a_pair_of_messages(tokenizer: Any) -> None:
    row = {
        "messages": turns(("user", "q")),
        "chosen": json.dumps(turns(("assistant", "yes"))),
        "rejected": turns(("assistant", "no"))[0],  # one turn needs no list
    }
    chosen, rejected = examples(tokenizer, "dpo", row, prompt_type="messages")
    assert learned(tokenizer, chosen) == ["yes<|im_end|>"]
    assert learned(tokenizer, rejected) == ["no<|im_end|>"]
    assert chosen.tokens[: chosen.prompt_length].tolist() == (
        rejected.tokens[: rejected.prompt_length].tolist()
    )
    with pytest.raises(DataError, match="last turn of 'chosen' must be the assistant's"):
        examples(tokenizer, "dpo", {**row, "chosen": turns(("user", "x"))}, prompt_type="messages")


@pytest.mark.parametrize("template", [TEMPLATE, MARKED])
def test_what_a_tool_replies_in_an_answer_is_not_learned(template: str) -> None:
    tok = tokenizer_with(template)
    answer = turns(("assistant", "call"), ("tool", "42"), ("assistant", "it is 42"))
    row = {"messages": turns(("user", "q")), "chosen": answer, "rejected": answer[:1]}
    chosen, rejected = examples(tok, "dpo", row, prompt_type="messages")
    assert learned(tok, chosen) == ["call<|im_end|>", "it is 42<|im_end|>"]
    assert "tool\n42" in tok.decode(chosen.tokens.tolist())
    assert learned(tok, rejected) == ["call<|im_end|>"]
    assert prompt_of(tok, chosen) == prompt_of(tok, rejected)


def test_the_rows_own_system_prompt_comes_first(tokenizer: Any) -> None:
    row = {**PAIR, "sys": "mine"}
    chosen, _ = examples(tokenizer, "dpo", row, system_prompt="s", system_prompt_key="sys")
    assert "system\nmine<|im_end|>" in prompt_of(tokenizer, chosen)


def test_plain_text_to_continue(tokenizer: Any) -> None:
    (exp,) = examples(tokenizer, "cpt", {"prompt": "once"})
    assert (exp.prompt_length, prompt_of(tokenizer, exp)) == (1, "o")
    assert learned(tokenizer, exp) == ["nce<|im_end|>"]
    (cut,) = examples(tokenizer, "cpt", {"prompt": "once"}, 3)
    assert (learned(tokenizer, cut), cut.truncate_status) == (["nc"], RESPONSE_TRUNCATED)
    with pytest.raises(DataError, match="nothing to learn"):
        examples(tokenizer, "cpt", {"prompt": "o"}, append_eos=False)
    with pytest.raises(DataError, match=r"set format\.prompt_type=plaintext"):
        examples(tokenizer, "cpt", {"prompt": "o"}, prompt_type="messages")


@pytest.mark.parametrize(
    ("schema", "value", "message"),
    [
        ("sft", "[1]", "must be a list of objects"),
        ("sft", "{", "is no JSON"),
        ("sft", [{"content": "a"}], "has no role"),
        ("sft", [], "has no message"),
        ("dpo", 5, "must be a list of objects"),
    ],
)
def test_what_is_no_conversation_names_its_row(
    tokenizer: Any, schema: str, value: Any, message: str
) -> None:
    row = {**PAIR, "messages": value}
    with pytest.raises(DataError, match=f"rows.jsonl, row 0: .*{message}"):
        examples(tokenizer, schema, row, prompt_type="messages")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    rows = [{"prompt": f"p{i}", "chosen": f"y{i}", "rejected": f"n{i}"} for i in range(5)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path / "rows.jsonl"


def rows_of(path: Path, tokenizer: Any, schema: str, **kw: Any) -> RowFile:
    cfg = ExperienceBufferConfig(
        path=str(path),
        format=FormatConfig(apply_chat_template=False),
        data_selector=SelectorConfig("shuffle", 42),
    )
    return RowFile(cfg, tokenizer, schema=schema, **{"batch_size": 4, "total_epochs": 2, **kw})


def drain(rows: RowFile, n: int) -> list[list[tuple[str, int, str | None]]]:
    batches = []
    while True:
        try:
            read = from_table(rows.read(n))
        except EndOfData:
            return batches
        batches.append([(e.eid.tid, e.eid.run, e.response_text) for e in read])


def test_pairs_are_read_together_and_epochs_do_not_mix(path: Path, tokenizer: Any) -> None:
    rows = rows_of(path, tokenizer, "dpo")
    assert (rows.unit, rows.total_rows) == (2, 20)
    batches = drain(rows, 4)
    assert batches[0] == [
        ("experience/4", 0, "y4"), ("experience/4", 1, "n4"),
        ("experience/2", 0, "y2"), ("experience/2", 1, "n2"),
    ]  # fmt: skip
    seen = [(tid, run) for batch in batches for tid, run, _ in batch]
    assert len(set(seen)) == len(seen) == 20  # the second epoch's pairs are other tasks
    with pytest.raises(ValueError, match=r"3 rows are no whole number of pairs"):
        rows.read(3)
    assert len(drain(rows_of(path, tokenizer, "dpo", total_steps=4), 4)) == 4


@pytest.mark.parametrize("schema", ["dpo", "cpt"])
@pytest.mark.parametrize("cut", range(6))
def test_fault_35_every_schema_resumes_at_every_point(
    path: Path, tokenizer: Any, schema: str, cut: int
) -> None:
    n = 4 if schema == "dpo" else 2
    expected = drain(rows_of(path, tokenizer, schema), n)
    assert len(expected) == 5  # the third batch crosses the epoch's edge
    first, second = rows_of(path, tokenizer, schema), rows_of(path, tokenizer, schema)
    head = []
    for _ in range(cut):
        if len(head) < len(expected):
            read = from_table(first.read(n))
            head.append([(e.eid.tid, e.eid.run, e.response_text) for e in read])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert head + drain(second, n) == expected


def test_an_unknown_schema_names_the_known_ones(path: Path, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="did you mean 'dpo'"):
        rows_of(path, tokenizer, "dpoo")


# -- pairs of whole conversations -------------------------------------------------------------
Q, A, B = ("user", "q"), ("assistant", "yes"), ("assistant", "no")
SYS = ("system", "s")


@pytest.mark.parametrize(
    ("given", "chosen", "rejected", "asked"),
    [
        (None, [Q, A], [Q, B], [Q]),
        (None, [SYS, Q, A], [SYS, Q, B], [SYS, Q]),
        (None, [Q, A, ("user", "more"), A], [Q, A, ("user", "more"), B], [Q, A, ("user", "more")]),
        ([Q], [Q, A], [Q, B], [Q]),
        ([SYS, Q], [Q, A], [Q, B], [SYS, Q]),
        ([Q], [SYS, Q, A], [SYS, Q, B], [SYS, Q]),
        ([Q, A], [A], [B], [Q]),  # its own last turn is one of the answers
        ([], [Q, A], [Q, B], [Q]),
        (None, [Q, A, ("user", "more"), A], [Q, A, ("tool", "more"), B], [Q]),
        (None, [Q, A], [Q, A], [Q]),
    ],
)
@pytest.mark.parametrize("as_text", [False, True])
def test_whole_conversations_are_told_apart(
    tokenizer: Any, given: Any, chosen: Any, rejected: Any, asked: Any, as_text: bool
) -> None:
    write = (lambda *t: json.dumps(turns(*t))) if as_text else turns
    row: dict[str, Any] = {"chosen": write(*chosen), "rejected": write(*rejected)}
    if given is not None:
        row["messages"] = write(*given)
    pair = examples(tokenizer, "dpo", row, prompt_type="messages")
    for experience, answer in zip(pair, (chosen, rejected), strict=True):
        wanted = "".join(f"<|im_start|>{r}\n{t}<|im_end|>\n" for r, t in asked)
        assert prompt_of(tokenizer, experience) == f"{wanted}<|im_start|>assistant\n"
        spoken = [t for r, t in answer if r == "assistant"]
        spoken = spoken[sum(r == "assistant" for r, _ in asked) :]
        assert learned(tokenizer, experience) == [f"{text}<|im_end|>" for text in spoken]


@pytest.mark.parametrize(
    ("given", "chosen", "rejected", "message"),
    [
        ([("user", "z")], [Q, A], [Q, B], "do not begin with the same turns as 'messages'"),
        (None, [Q, A], [("user", "z"), B], "do not begin with the same turns, so"),
        (None, [Q, A], [B], "do not begin with the same turns"),
        (None, [A], [B], r"no value in column 'messages', and .* begin with the answer"),
        ([Q, ("assistant", "draft")], [A], [B], "ends with a turn of the assistant's, which is"),
        (None, [Q], [Q, B], "last turn of 'chosen' must be the assistant's"),
        (None, [SYS, A], [SYS, B], "do not begin with the same turns"),
    ],
)
def test_pairs_whose_question_cannot_be_told(
    tokenizer: Any, given: Any, chosen: Any, rejected: Any, message: str
) -> None:
    row: dict[str, Any] = {"chosen": turns(*chosen), "rejected": turns(*rejected)}
    if given is not None:
        row["messages"] = turns(*given)
    with pytest.raises(DataError, match=message):
        examples(tokenizer, "dpo", row, prompt_type="messages")


def test_conversations_in_a_plaintext_pair_are_told_what_to_set(tokenizer: Any) -> None:
    row = {"prompt": "q", "chosen": turns(Q, A), "rejected": turns(Q, B)}
    with pytest.raises(DataError, match=r"prompt_type=messages .*need no other column"):
        examples(tokenizer, "dpo", row)
    assert len(examples(tokenizer, "dpo", row, prompt_type="messages")) == 2


# -- a prefix of every reply ------------------------------------------------------------------
@pytest.mark.parametrize("template", [TEMPLATE, MARKED, THINKING.replace("{{ m.thought }}", "")])
@pytest.mark.parametrize("written", [(), (0,), (0, 1)])
def test_every_reply_begins_with_the_prefix_and_does_not_learn_it(
    template: str, written: tuple[int, ...]
) -> None:
    tok, spoken = tokenizer_with(template), ["b", "c"]
    if "<think>" in template:
        tok.chat_template = TEMPLATE.replace("{{ m['content'] }}", "{{ m.content }}{# <think> #}")
    said = [f"> {text}" if n in written else text for n, text in enumerate(spoken)]
    chat = turns(SYS, ("user", "a"), ("assistant", said[0]), ("user", "t"), ("assistant", said[1]))
    fmt = {"prompt_type": "messages", "enable_concatenated_multi_turn": True, "reply_prefix": "> "}
    (e,) = examples(tok, "sft", {"messages": chat}, **fmt)
    only_last = "<think>" in str(tok.chat_template)  # earlier turns are as they are in the row
    assert learned(tok, e) == [f"{text}<|im_end|>" for text in spoken[only_last:]]
    assert prompt_of(tok, e).endswith("<|im_start|>assistant\n> ")
    whole = tok.decode(e.tokens.tolist())
    assert whole.count("> b") == (1 if not only_last or 0 in written else 0)
    assert whole.count("> c") == 1


def test_a_prefix_begins_every_reply_of_a_pairs_answer(tokenizer: Any) -> None:
    answer = turns(("assistant", "call"), ("tool", "42"), ("assistant", "it is 42"))
    row = {"messages": turns(Q), "chosen": answer, "rejected": turns(B)}
    chosen, rejected = examples(tokenizer, "dpo", row, prompt_type="messages", reply_prefix="> ")
    assert learned(tokenizer, chosen) == ["call<|im_end|>", "it is 42<|im_end|>"]
    assert "assistant\n> it is 42" in tokenizer.decode(chosen.tokens.tolist())
    assert prompt_of(tokenizer, chosen) == prompt_of(tokenizer, rejected)


@pytest.mark.parametrize("said", ["> ", ">  "])
def test_a_reply_of_nothing_but_the_prefix_is_empty(tokenizer: Any, said: str) -> None:
    chat = turns(Q, ("assistant", said), Q, A)
    fmt = {"prompt_type": "messages", "enable_concatenated_multi_turn": True, "reply_prefix": "> "}
    with pytest.raises(DataError, match="a turn of the assistant's is empty"):
        examples(tokenizer, "sft", {"messages": chat}, **fmt)


def test_a_template_that_writes_the_prefix_itself_is_told() -> None:
    tok = tokenizer_with(
        TEMPLATE.replace("{{ m['content'] }}", "{{ m.content | trim }}").replace(
            "assistant\n{% endif %}", "assistant\n> {% endif %}"
        )
    )
    fmt = {"prompt_type": "messages", "enable_concatenated_multi_turn": True, "reply_prefix": "> "}
    with pytest.raises(DataError, match=r"turn 2 differently when it is asked for with format\.re"):
        examples(tok, "sft", {"messages": turns(Q, A)}, **fmt)
