"""One prompt from one row, whoever asks: rollouts, supervised rows and pairs."""

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError

from trinity_dask.buffer.data.formats import FORMATTERS
from trinity_dask.buffer.data.prompts import prompt_of
from trinity_dask.buffer.data.taskset import Taskset
from trinity_dask.buffer.errors import DataError
from trinity_dask.config.schema import FormatConfig, TasksetConfig
from trinity_dask.demo.tokenizer import ascii_tokenizer
from trinity_dask.experience import EID
from trinity_dask.models.fake_engine import FakeEngine
from trinity_dask.models.protocol import EngineSpec
from trinity_dask.models.wrapper import ModelWrapper
from trinity_dask.workflows import Task
from trinity_dask.workflows.simple import MathWorkflow, SimpleWorkflow

S, E = "<|im_start|>", "<|im_end|>"
EACH, END = "{% for m in messages %}", "{% endfor %}"
ASK = "{% if add_generation_prompt %}"
TOOLS = "{% if tools %}" + S + "tools {{ tools | tojson }}" + E + "{% endif %}"
CALLS = (
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}</call>{% endfor %}"
)
# the ways in which the templates of published models differ, shortened
TEMPLATES = {
    "chatml": EACH + S + "{{m.role}}\n{{m.content}}" + E + "\n" + END + ASK + S
    + "assistant\n{% endif %}",
    "chatml with tools": TOOLS + EACH + S + "{{m.role}}\n{{m.content}}" + CALLS + E + "\n" + END
    + ASK + S + "assistant\n{% endif %}",
    "a default system prompt": "{% if messages[0].role != 'system' %}" + S
    + "system\nYou help." + E + "\n{% endif %}" + EACH + S + "{{m.role}}\n{{m.content}}" + E
    + "\n" + END + ASK + S + "assistant\n{% endif %}",
    "headers": EACH + "<h>{{m.role}}</h>\n\n{{ m.content | trim }}" + E + END + ASK
    + "<h>assistant</h>\n\n{% endif %}",
    "tools by key": EACH + "<h>{{m.role}}</h>{% if 'tool_calls' in m %}{% if m.tool_calls|length"
    " != 1 %}{{ raise_exception('one call') }}{% endif %}" + CALLS + "{% else %}{{m.content}}"
    "{% endif %}" + E + END + ASK + "<h>assistant</h>{% endif %}",
    "brackets": EACH + "{% if m.role == 'assistant' %} {{m.content}}" + E
    + "{% else %}[INST] {{m.content}} [/INST]{% endif %}" + END,
    "no system role": EACH + "{% if m.role == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{m.content}}" + E
    + END + ASK + "<turn>model\n{% endif %}",
    "alternating only": EACH + "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('turns must alternate') }}{% endif %}<{{m.role}}>{{m.content}}" + E + END
    + ASK + "<assistant>{% endif %}",
    "joined by +": EACH + "{{ S + m['role'] + '\n' + m['content'] + E }}".replace(
        "S", f"'{S}'"
    ).replace("E }", f"'{E}' }}") + END + ASK + S + "assistant\n{% endif %}",
    "bars": EACH + "<|{{m.role}}|>\n{{m.content}}" + E + "\n" + END + ASK
    + "<|assistant|>\n{% endif %}",
    "words": EACH + "{{ m.role | upper }}: {{m.content}}{% if m.role == 'assistant' %}" + E
    + "{% else %} {% endif %}" + END + ASK + "ASSISTANT:{% endif %}",
    "words and a space": EACH + "{{ m.role }}: {{m.content}}" + E + END + ASK
    + "assistant: {% endif %}",
    "sections": EACH + "### {{ m.role | title }}:\n{{m.content}}\n" + E + "\n" + END + ASK
    + "### Assistant:\n{% endif %}",
    "an end for the assistant only": EACH + S + "{{m.role}}\n{{m.content}}{% if m.role == "
    "'assistant' %}" + E + "{% endif %}\n" + END + ASK + S + "assistant\n{% endif %}",
    "a first token": S + EACH + "<{{m.role}}>{{m.content}}" + E + END + ASK
    + "<assistant>{% endif %}",
    "thinking": EACH + S + "{{m.role}}\n{% if m.role == 'assistant' and loop.last %}<think>\n\n"
    "</think>\n\n{% endif %}{{m.content}}" + E + "\n" + END + ASK + S + "assistant\n{% endif %}",
    "an empty thought is begun": EACH + S + "{{m.role}}\n{{ '<think>' if m.role == 'assistant' }}"
    "{{m.content}}" + E + END + ASK + S + "assistant\n<think>{% endif %}",
    "tools as a turn": "{% if tools %}<sys>{% for t in tools %}{{ t.function.name }} {% endfor %}"
    "</sys>{% endif %}" + EACH + "<{{m.role}}>{{m.content}}" + CALLS + E + END + ASK
    + "<assistant>{% endif %}",
    "with a name": EACH + S + "{{m.role}}{{ ' ' + m.name if m.name is defined }}\n{{m.content}}"
    + CALLS + E + END + ASK + S + "assistant\n{% endif %}",
    "content if it is there": EACH + S + "{{m.role}}\n{% if m.content is string %}{{m.content}}"
    "{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}" + E + END + ASK + S
    + "assistant\n{% endif %}",
}  # fmt: skip
TOKENIZER = ascii_tokenizer()
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"properties": {}}}}


def tokenizer_with(template: str | None) -> Any:
    tokenizer = ascii_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


TOKENIZERS = {name: tokenizer_with(template) for name, template in TEMPLATES.items()}


def rollout_ids(row: dict[str, Any], fmt: FormatConfig, tokenizer: Any) -> list[int]:
    """The ids that an engine is really asked with."""
    engine = FakeEngine(EngineSpec("engine-0", "fake", ""))
    model = ModelWrapper(engine, tokenizer, {"max_response_tokens": 2})
    task = Task("simple_workflow", "math_reward", row, format_args=asdict(fmt))
    (experience,) = asyncio.run(SimpleWorkflow(task, model).sample(1))
    return experience.tokens[: experience.prompt_length].tolist()


def trained_ids(
    schema: str, row: dict[str, Any], fmt: FormatConfig, tokenizer: Any
) -> list[list[int]]:
    found = FORMATTERS.get(schema)(tokenizer, fmt).format_unit(row, EID("b", 0, 0), "f, row 0")
    return [e.tokens[: e.prompt_length].tolist() for e in found]


text = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=12)
no_space = text.map(lambda s: s.strip() or "x")


@st.composite
def rows(draw: Any) -> dict[str, Any]:
    """A conversation with its answer, its columns partly JSON text and partly null."""
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(no_space)})
    for _ in range(draw(st.integers(0, 2))):
        messages.append({"role": "user", "content": draw(no_space), "name": None})
        turn: dict[str, Any] = {"role": "assistant", "content": draw(no_space)}
        if draw(st.booleans()):
            arguments: Any = {"zone": draw(no_space)}
            if draw(st.booleans()):
                arguments = json.dumps(arguments)
            turn["tool_calls"] = [{"function": {"name": "clock", "arguments": arguments}}]
        messages.append(turn)
    messages.append({"role": "user", "content": [{"type": "text", "text": draw(no_space)}]})
    tools = draw(st.sampled_from([None, "", [CLOCK], json.dumps([CLOCK])]))
    asked: Any = json.dumps(messages) if draw(st.booleans()) else messages
    answer = {"role": "assistant", "content": draw(no_space), "tool_calls": None}
    return {"messages": asked, "whole": [*messages, answer], "answer": [answer], "tools": tools,
            "prompt": draw(no_space), "sys": draw(st.none() | no_space),
            "response": draw(no_space)}  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(
    row=rows(),
    system=st.none() | no_space,
    prefix=st.sampled_from([None, "Well, ", "<think>"]),
    plain=st.booleans(),
)
@pytest.mark.parametrize("template", TEMPLATES)
def test_rollouts_rows_and_pairs_are_asked_the_same(
    template: str, row: dict[str, Any], system: str | None, prefix: str | None, plain: bool
) -> None:
    tokenizer = TOKENIZERS[template]
    fmt = FormatConfig(system_prompt=system, system_prompt_key="sys", reply_prefix=prefix)
    if not plain:
        fmt.prompt_type = "messages"
    try:
        asked = rollout_ids(row, fmt, tokenizer)
    except TemplateError:
        asked = None
    pair = {**row, "chosen": row["answer"], "rejected": row["answer"]}
    if plain:
        pair |= {"chosen": "yes", "rejected": "no"}
    with_answer = {**row, "messages": row["whole"]}
    for schema, trained in (("sft", with_answer), ("dpo", pair)):
        if asked is None:
            with pytest.raises(DataError, match="f, row 0: the chat template refuses"):
                trained_ids(schema, trained, fmt, tokenizer)
            continue
        try:
            found = trained_ids(schema, trained, fmt, tokenizer)
        except DataError as error:
            # a template may write an answer that it does not begin like this
            if plain or "cannot be told apart" not in str(error):
                raise
            continue
        assert found == [asked] * len(found)
    if asked is not None:  # the answer at the end of the row's conversation is not asked for
        assert rollout_ids(with_answer, fmt, tokenizer) == asked


def test_the_templates_differ() -> None:
    assert len(TEMPLATES) == 20
    chat = [{"role": "user", "content": "a"}]
    written = {t.apply_chat_template(chat, tokenize=False) for t in TOKENIZERS.values()}
    assert len(written) > 12


# -- what each kind of cell becomes ----------------------------------------------------------
def prompt(row: dict[str, Any], **fmt: Any) -> Any:
    return prompt_of(row, FormatConfig(**fmt), "rows.jsonl, row 7")


def chat(row: dict[str, Any], **fmt: Any) -> list[dict[str, Any]]:
    return prompt({"messages": row}, prompt_type="messages", **fmt).messages


USER = {"role": "user", "content": "q"}


@pytest.mark.parametrize(
    ("fmt", "row", "system"),
    [
        ({"system_prompt": "s"}, {}, "s"),
        ({"system_prompt": "s", "system_prompt_key": "sys"}, {"sys": "own"}, "own"),
        ({"system_prompt": "s", "system_prompt_key": "sys"}, {"sys": None}, "s"),
        ({"system_prompt": "s", "system_prompt_key": "sys"}, {"sys": ""}, "s"),
        ({"system_prompt": "s", "system_prompt_key": "sys"}, {}, "s"),
        ({"system_prompt_key": "sys"}, {"sys": "own"}, "own"),
        ({}, {"sys": "own"}, None),
    ],
)
@pytest.mark.parametrize("kind", ["plaintext", "messages"])
def test_whose_system_prompt_comes_first(
    kind: str, fmt: dict[str, Any], row: dict[str, Any], system: str | None
) -> None:
    messages = prompt({"prompt": "q", "messages": [USER], **row}, prompt_type=kind, **fmt).messages
    expected = [{"role": "system", "content": system}] if system else []
    assert messages == [*expected, USER]


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_conversation_keeps_its_own_system_prompt(role: str) -> None:
    own = [{"role": role, "content": "mine"}, USER]
    assert chat(own, system_prompt="s") == own


@pytest.mark.parametrize(
    ("given", "turn"),
    [
        ({"content": None}, {"content": ""}),
        ({}, {"content": ""}),
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
         {"content": "ab"}),
        ({"content": "x", "tool_calls": [], "name": None}, {"content": "x"}),
        ({"content": "x", "tool_calls": None, "refusal": None}, {"content": "x"}),
        ({"tool_calls": [{"function": {"name": "f", "arguments": '{"a": null}'}}]},
         {"content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}),
        ({"tool_calls": [{"function": {"name": "f", "arguments": {"a": 1, "b": None}}}]},
         {"content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}),
        ({"tool_calls": [{"name": "f", "arguments": ""}]},
         {"content": "", "tool_calls": [{"name": "f", "arguments": {}}]}),
        ({"tool_calls": '[{"function": {"name": "f"}}]'},
         {"content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}),
        ({"function_call": {"name": "f", "arguments": "{}"}},
         {"content": "", "function_call": {"name": "f", "arguments": {}}}),
    ],
)  # fmt: skip
def test_what_a_turn_becomes(given: dict[str, Any], turn: dict[str, Any]) -> None:
    for form in (lambda v: v, json.dumps):
        messages = chat(form([USER, {"role": "assistant", **given}, USER]))
        assert messages == [USER, {"role": "assistant", **turn}, USER]


@pytest.mark.parametrize(
    ("row", "fmt", "message"),
    [
        ({"prompt": [USER]}, {}, "column 'prompt' holds a list"),
        ({"prompt": {"text": "q"}}, {}, "column 'prompt' holds a dict"),
        ({"prompt": 7}, {}, "column 'prompt' holds a int"),
        ({"prompt": b"q"}, {"apply_chat_template": False}, "column 'prompt' holds a bytes"),
        ({"question": "q"}, {}, "column 'prompt' has no text .* question.* set format.prompt_key"),
        ({"prompt": "q", "sys": ["s"]}, {"system_prompt_key": "sys"}, "column 'sys' holds a list"),
        ({"prompt": "q", "tools": "clock"}, {}, "column 'tools' is no JSON"),
        ({"prompt": "q", "tools": ["clock"]}, {}, "column 'tools' must be a list of objects"),
        ({"messages": None}, {"prompt_type": "messages"}, "column 'messages' has no message"),
        ({"messages": "hello"}, {"prompt_type": "messages"}, "column 'messages' is no JSON"),
        ({"messages": ["hello"]}, {"prompt_type": "messages"}, "must be a list of objects"),
        ({"messages": [{"role": "user", "content": 5}]}, {"prompt_type": "messages"},
         "column 'messages', message 0: its content is no text .got int"),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, {"prompt_type": "messages"},
         "message 0: its content is no text .got dict"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "url": "u"}]}]},
         {"prompt_type": "messages"}, "message 0: its content is no text"),
        ({"messages": [{"from": "human", "value": "q"}]}, {"prompt_type": "messages"},
         "message 0: it has no role"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"arguments": "now"}]}]},
         {"prompt_type": "messages"}, "arguments of a tool call are no JSON object .got 'now'"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"arguments": "[1]"}]}]},
         {"prompt_type": "messages"}, "arguments of a tool call are no JSON object"),
    ],
)  # fmt: skip
def test_what_is_no_text_names_file_row_and_column(
    row: dict[str, Any], fmt: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=f"rows.jsonl, row 7.*{message}"):
        prompt(row, **fmt)


@pytest.mark.parametrize("schema", ["sft", "dpo", "cpt"])
@pytest.mark.parametrize("value", [7, 1.5, True, ["2"], {"text": "2"}, b"2"])
def test_no_answer_is_trained_on_as_python_prints_it(schema: str, value: Any) -> None:
    row = {"prompt": "q", "response": value, "chosen": "a", "rejected": value}
    if schema == "cpt":
        row["prompt"] = value
    column = {"sft": "response", "dpo": "rejected", "cpt": "prompt"}[schema]
    with pytest.raises(DataError, match=f"f, row 0: column '{column}' holds a "):
        trained_ids(schema, row, FormatConfig(), TOKENIZER)


def test_tools_go_into_plaintext_prompts_and_pairs_as_well() -> None:
    tokenizer = TOKENIZERS["chatml with tools"]
    row = {"prompt": "q", "tools": [CLOCK], "response": "r", "chosen": "a", "rejected": "b"}
    for schema in ("sft", "dpo"):
        ids = trained_ids(schema, row, FormatConfig(), tokenizer)[0]
        assert '"name": "clock"' in tokenizer.decode(ids)


@pytest.mark.parametrize("answer", ["<think>hm", "hm"])
@pytest.mark.parametrize("kind", ["plaintext", "messages", "text"])
def test_a_reply_prefix_is_asked_and_not_learned(kind: str, answer: str) -> None:
    """Once, whether the row's answer already begins with it or not."""
    row = {"prompt": "q", "response": answer,
           "messages": [USER, {"role": "assistant", "content": answer}]}  # fmt: skip
    fmt = FormatConfig(reply_prefix="<think>", apply_chat_template=kind != "text")
    if kind == "messages":
        fmt.prompt_type = "messages"
    (e,) = FORMATTERS.get("sft")(TOKENIZER, fmt).format_unit(row, EID(), "row 0")
    whole = TOKENIZER.decode(e.tokens.tolist())
    assert whole.endswith("<think>hm<|im_end|>")
    assert whole.count("<think>") == 1
    assert TOKENIZER.decode(e.tokens[e.prompt_length :].tolist()) == "hm<|im_end|>"
    assert rollout_ids(row, fmt, TOKENIZER) == e.tokens[: e.prompt_length].tolist()


def test_an_answer_that_shares_a_token_with_the_prompt_is_told_apart() -> None:
    """ "a" ends the prompt and "ab" is one token: what is sampled begins behind the "a"."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocab = {c: i for i, c in enumerate("abqx")}
    backend = Tokenizer(models.BPE(vocab={**vocab, "ab": 4}, merges=[("a", "b")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="x")
    tokenizer.chat_template = (
        EACH
        + "{{m.content}}{{ 'a' if m.role == 'user' and (not loop.last or add_generation_prompt) }}"
        + END
    )
    row = {"messages": [USER, {"role": "assistant", "content": "b"}]}
    fmt = FormatConfig(prompt_type="messages", append_eos=False)
    (e,) = FORMATTERS.get("sft")(tokenizer, fmt).format_unit(row, EID(), "row 0")
    assert e.tokens.tolist() == tokenizer.encode("qa") + tokenizer.encode("b")


def test_a_workflows_own_system_prompt_gives_way() -> None:
    task = Task("math_workflow", None, {"prompt": "q"})
    assert "Reason step by step" in MathWorkflow(task, None).prompt().messages[0]["content"]
    task.format_args = {"system_prompt": "mine"}
    assert MathWorkflow(task, None).prompt().messages[0]["content"] == "mine"


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_task_is_refused_when_it_is_read(tmp_path: Path, suffix: str) -> None:
    rows = [{"prompt": ["q"], "response": "r"}]
    file = tmp_path / f"tasks.{suffix}"
    if suffix == "jsonl":
        file.write_text("\n".join(map(json.dumps, rows)))
    else:
        pq.write_table(pa.Table.from_pylist(rows), file)
    with pytest.raises(DataError, match=rf"tasks.{suffix}, row 0: column 'prompt' holds a list"):
        Taskset(TasksetConfig(path=str(file), workflow="simple_workflow"), batch_size=1).read()


def test_a_workflow_of_ones_own_may_read_other_columns(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"board": [[1, 2], [3, 4]]}')
    cfg = TasksetConfig(path=str(tmp_path / "t.jsonl"), workflow="mine",
                        format=FormatConfig(prompt_key=""))  # fmt: skip
    assert Taskset(cfg, batch_size=1).read()[0].raw_task == {"board": [[1, 2], [3, 4]]}


HALF = "sort \ud83d"


@pytest.mark.parametrize(
    ("schema", "row", "column"),
    [
        ("sft", {"prompt": HALF}, "prompt"),
        ("sft", {"response": HALF}, "response"),
        ("dpo", {"rejected": HALF}, "rejected"),
        ("cpt", {"prompt": HALF}, "prompt"),
        ("sft", {"tools": [{"function": {"name": HALF}}]}, "tools"),
        ("sft", {"messages": [{"role": "user", "content": HALF}]}, "messages"),
        ("dpo", {"messages": [USER], "chosen": [{"role": "assistant", "content": HALF}]}, "chosen"),
    ],
)
def test_half_a_character_is_no_text(schema: str, row: dict[str, Any], column: str) -> None:
    fmt = FormatConfig(prompt_type="messages" if "messages" in row else "plaintext")
    whole = {"prompt": "q", "response": "r", "chosen": "a", "rejected": "b", **row}
    with pytest.raises(DataError, match=rf"f, row 0: column '{column}'.* \(.ud83d\) at 5"):
        trained_ids(schema, whole, fmt, TOKENIZER)


@pytest.mark.parametrize("column", ["prompt", "response"])
def test_a_task_with_half_a_character_is_refused(tmp_path: Path, column: str) -> None:
    row = {"prompt": "q", "response": "r", column: HALF}
    (tmp_path / "t.jsonl").write_text(json.dumps(row))
    cfg = TasksetConfig(path=str(tmp_path / "t.jsonl"), workflow="w", reward_fn="r")
    with pytest.raises(DataError, match=rf"t.jsonl, row 0: column '{column}' holds no text"):
        Taskset(cfg, batch_size=1).read()


@pytest.mark.parametrize("nothing", ["null", " ", "[]", [], None])
def test_tools_that_are_none(nothing: Any) -> None:
    assert prompt({"prompt": "q", "tools": nothing}).tools is None


@pytest.mark.parametrize("prefix", [None, "Well, "])
def test_only_the_last_of_two_turns_of_the_assistants_is_the_answer(prefix: str | None) -> None:
    first, last = ({"role": "assistant", "content": text} for text in ("one", "two"))
    row = {"messages": [USER, first, last], "response": "r"}
    fmt = FormatConfig(prompt_type="messages", reply_prefix=prefix)
    (e,) = FORMATTERS.get("sft")(TOKENIZER, fmt).format_unit(row, EID(), "row 0")
    closed = TOKENIZER.apply_chat_template(
        [USER, first], tokenize=False, add_generation_prompt=True
    ) + (prefix or "")
    asked = e.tokens[: e.prompt_length].tolist()
    assert TOKENIZER.decode(asked) == closed
    assert rollout_ids(row, fmt, TOKENIZER) == asked
    assert TOKENIZER.decode(e.tokens[e.prompt_length :].tolist()) == "two<|im_end|>"


def test_a_tokenizer_without_a_chat_template_is_told() -> None:
    answer = {"role": "assistant", "content": "a"}
    row = {"prompt": "q", "response": "r", "messages": [USER, answer]}
    chats: dict[str, Any] = {"prompt_type": "messages"}
    for fmt in ({}, chats, {**chats, "enable_concatenated_multi_turn": True}):
        with pytest.raises(DataError, match="row 0: the tokenizer has no chat template"):
            trained_ids("sft", row, FormatConfig(**fmt), tokenizer_with(None))


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        (None, {}), ("", {}), ("null", {}), ("{}", {}), ({}, {}), (float("nan"), {}),
        ({"zone": None, "at": 3}, {"at": 3}), ('{"zone": null, "at": 3}', {"at": 3}),
        ({"all": [1, None], "in": {"b": None}}, {"all": [1, None], "in": {}}),
        ('{"all": [1, null], "in": {"b": null}}', {"all": [1, None], "in": {}}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["tool_calls", "function_call", "text of the conversation"])
def test_a_null_argument_is_none_however_it_is_written(given: Any, seen: Any, kind: str) -> None:
    function = {"name": "clock", "arguments": given}
    turn: dict[str, Any] = {"role": "assistant", "content": ""}
    turn |= {"function_call": function} if kind == "function_call" else {
        "tool_calls": [{"function": function}]}  # fmt: skip
    chat: Any = [USER, turn, {"role": "tool", "content": "4"}]
    if kind.startswith("text"):
        chat = json.dumps(chat)
    prompt = prompt_of({"messages": chat}, FormatConfig(prompt_type="messages"), "row 0")
    call = prompt.messages[1]
    found = call["function_call"] if kind == "function_call" else call["tool_calls"][0]["function"]
    assert found == {"name": "clock", "arguments": seen}


def test_arguments_of_a_call_without_any_can_be_written_out() -> None:
    turn = {"role": "assistant", "tool_calls": [{"function": {"name": "clock", "arguments": None}}]}
    row = {"messages": [USER, turn, {"role": "tool", "content": "4"}]}
    ids = rollout_ids(row, FormatConfig(prompt_type="messages"), TOKENIZERS["chatml with tools"])
    assert "<call>clock {}</call>" in TOKENIZER.decode(ids)


@pytest.mark.parametrize("depth", [102, 10_000, 100_000])
@pytest.mark.parametrize("place", ["messages", "tools", "arguments"])
def test_what_is_nested_too_deep_is_refused(depth: int, place: str) -> None:
    deep = '{"a": ' * depth + "1" + "}" * depth
    call = {"function": {"name": "f", "arguments": deep}}
    row: dict[str, Any] = {"messages": [USER], "tools": f"[{deep}]" if place == "tools" else None}
    if place == "messages":
        row["messages"] = f'[{{"role": "user", "content": "q", "x": {deep}}}]'
    if place == "arguments":
        row["messages"] = [{"role": "assistant", "tool_calls": [call]}, USER]
    with pytest.raises(DataError, match=r"row 0: .*(levels deep|is no JSON|no JSON object)"):
        prompt_of(row, FormatConfig(prompt_type="messages"), "row 0")


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('roles must alternate') }}", "{{ 1 / 0 }}", "{{ messages[0].nothing.x }}",
     "{{ '%d' % 'roles must alternate' }}", "{{ [1].index(2) }}"],
)  # fmt: skip
@pytest.mark.parametrize("multi", [False, True])
def test_what_a_template_says_is_told_as_what_it_says(template: str, multi: bool) -> None:
    row = {
        "prompt": "q",
        "response": "r",
        "messages": [USER, {"role": "assistant", "content": "a"}],
    }
    fmt = FormatConfig(prompt_type="messages", enable_concatenated_multi_turn=multi)
    with pytest.raises(DataError, match="the chat template refuses the conversation") as refused:
        trained_ids("sft", row, fmt, tokenizer_with(template))
    assert "no chat template" not in str(refused.value)


def test_a_rollout_without_a_chat_template_is_told_as_well() -> None:
    for kind in ("plaintext", "messages"):
        fmt = FormatConfig(prompt_type=kind)
        with pytest.raises(ValueError, match=r"has no chat template; .*apply_chat_template=false"):
            rollout_ids({"prompt": "q", "messages": [USER]}, fmt, tokenizer_with(None))
    plain = FormatConfig(apply_chat_template=False)
    assert rollout_ids({"prompt": "q"}, plain, tokenizer_with(None))
