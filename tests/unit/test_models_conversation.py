"""A dialogue's next prompt begins with the sampled ids, or it is an honest new beginning."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_buffer_prompts import CLOCK, TEMPLATES
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from trinity_dask.models.conversation import Conversation, NextPrompt, Turn
from trinity_dask.models.protocol import Completion
from trinity_dask.models.tokenizer import chat_prompt

S, E = "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for m in messages %}" + S + "{{m.role}}\n{{m.content}}{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}" + E
    + "\n{% endfor %}{% if add_generation_prompt %}" + S + "assistant\n{% endif %}"
)  # fmt: skip
# as published models for thinking do it: what was thought before the last question is not shown
FORGETS = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}" + S
    + "{{m.role}}\n{% if m.role == 'assistant' and loop.index0 < ns.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{m.content}}{% endif %}" + E
    + "\n{% endfor %}{% if add_generation_prompt %}" + S + "assistant\n{% endif %}"
)  # fmt: skip


def bpe() -> PreTrainedTokenizerFast:
    """Words have many spellings here: its merges are learned, and a sampler need not use them."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<pad>", S, E],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = ["the answer is user assistant system tool eighteen eggs and twelve more eggs " * 20]
    core.train_from_iterator(text, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=E, pad_token="<pad>")


TOKENIZER = bpe()


def tokenizer(template: str) -> Any:
    TOKENIZER.chat_template = template.replace("<eos>", E)
    return TOKENIZER


def spelled(text: str, end: bool = True) -> Completion:
    """``text`` sampled character by character, as no tokenizer would write it."""
    ids = [i for character in text for i in TOKENIZER.encode(character)]
    ids += [TOKENIZER.eos_token_id] * end
    n = np.arange(len(ids))
    logprobs = -np.asarray(n % 7 + 1, np.float32)
    reason = "stop" if end else "length"
    return Completion(np.asarray(ids, np.int32), logprobs, np.asarray(n // 5, np.int32), reason)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def talk(
    conversation: Conversation, turns: list[tuple[str, Completion]], tools: Any = None
) -> list[tuple[NextPrompt, Turn]]:
    """Questions and their sampled answers, the replies given back as text."""
    messages: list[dict[str, Any]] = []
    found = []
    for question, completion in turns:
        messages.append(user(question))
        asked = conversation.prompt(messages, tools)
        turn = conversation.add(asked, completion, messages, tools)
        found.append((asked, turn))
        messages = [*messages, turn.message]
    return found


@pytest.mark.parametrize("template", [CHATML, FORGETS])
def test_later_prompts_begin_with_the_sampled_ids(template: str) -> None:
    conversation = Conversation(tokenizer(template))
    answers = ["the <think>eggs</think> answer is 18", " eighteen eggs", "and more"]
    found = talk(conversation, [(f"question {i}", spelled(a)) for i, a in enumerate(answers)])
    for (_, before), (asked, turn) in itertools.pairwise(found):
        assert asked.parent is before
        assert asked.ids[: len(before.ids)] == before.ids
        rendered = TOKENIZER.encode(asked.text)
        assert rendered != asked.ids  # else this shows nothing
        since = TOKENIZER.decode(asked.ids[len(before.ids) :])
        assert since == f"\n{S}user\n{turn.messages[-1]['content']}{E}\n{S}assistant\n"
    (row,) = conversation.rows()
    assert row.tokens.tolist() == found[-1][1].ids
    sampled = [t for _, turn in found for t in turn.completion.token_ids.tolist()]
    assert row.tokens[row.prompt_length :][row.mask].tolist() == sampled
    lps = np.concatenate([turn.completion.logprobs for _, turn in found])
    np.testing.assert_array_equal(row.logprobs[row.mask], lps)
    assert (row.logprobs[~row.mask] == 0).all()
    assert (row.versions[~row.mask] == -1).all()
    assert (row.versions[row.mask] >= 0).all()


def test_an_answer_that_was_cut_is_ended_by_the_template_and_nobody_learns_that() -> None:
    conversation = Conversation(tokenizer(CHATML))
    (_, first), (asked, _) = talk(
        conversation, [("a", spelled("the answ", end=False)), ("b", spelled("eggs"))]
    )
    assert asked.parent is first
    assert TOKENIZER.decode(asked.ids[len(first.ids) :]).startswith(f"{E}\n{S}user")
    (row,) = conversation.rows()
    end = len(first.ids) - row.prompt_length
    assert row.tokens[row.prompt_length + end] == TOKENIZER.eos_token_id
    assert not row.mask[end]


def test_a_cut_reply_that_is_to_be_continued_goes_on_from_its_ids() -> None:
    conversation = Conversation(tokenizer(CHATML))
    messages = [user("a")]
    first = conversation.add(
        conversation.prompt(messages), spelled("the answ", end=False), messages
    )
    asked = conversation.prompt([*messages, first.message])
    assert (asked.parent, asked.ids) == (first, first.ids)
    ended = conversation.add(conversation.prompt(messages), spelled("whole"), messages)
    again = conversation.prompt([*messages, ended.message])
    assert again.parent is None  # its end is in the ids, so they cannot be continued
    assert TOKENIZER.decode(again.ids).endswith(f"{S}assistant\nwhole")


@settings(max_examples=120, deadline=None)
@given(
    name=st.sampled_from(sorted(TEMPLATES)),
    texts=st.lists(st.text("egs 18.\n<|é", min_size=1, max_size=9), min_size=4, max_size=4),
    ends=st.lists(st.booleans(), min_size=2, max_size=2),
    system=st.booleans(),
)
def test_with_any_template_a_prompt_is_exact_or_written_from_the_beginning(
    name: str, texts: list[str], ends: list[bool], system: bool
) -> None:
    chat = Conversation(tokenizer(TEMPLATES[name]))
    messages = [{"role": "system", "content": "Count."}] * system
    for question, answer, end in zip(texts[:2], texts[2:], ends, strict=True):
        messages = [*messages, user(question)]
        try:
            whole = chat_prompt(TOKENIZER, messages)
        except Exception as refusal:
            with pytest.raises(type(refusal)):
                chat.prompt(messages)
            return
        asked = chat.prompt(messages)
        if asked.parent is None:
            assert asked.ids == TOKENIZER.encode(whole, add_special_tokens=False)
        else:
            before = asked.parent.ids
            assert asked.ids[: len(before)] == before
            new = TOKENIZER.decode(asked.ids[len(before) :])
            assert whole.endswith(new.removeprefix(E))
            assert question.strip() in new
        messages = [*messages, chat.add(asked, spelled(answer, end), messages).message]
    n = sum(int(row.mask.sum()) for row in chat.rows())
    assert n == sum(len(turn.completion.token_ids) for turn in chat.turns)


def test_most_templates_are_followed_exactly() -> None:
    exact = []
    for name, template in TEMPLATES.items():
        chat = Conversation(tokenizer(template))
        _, (asked, _) = talk(chat, [("one", spelled("two")), ("three", spelled("four"))])
        exact += [name] * (asked.parent is not None)
    # the others write something between a reply and its end, or no end, or thoughts of their own
    assert set(TEMPLATES) - set(exact) <= {"sections"}


def called(text: str, *calls: tuple[str, str, dict[str, Any]]) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": text,
        "tool_calls": [
            {"id": i, "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, name, arguments in calls
        ],
    }


def test_a_reply_with_calls_is_found_by_their_ids_however_it_was_rewritten() -> None:
    chat = Conversation(tokenizer(CHATML))
    messages, tools = [user("what time")], [CLOCK]
    asked = chat.prompt(messages, tools)
    said = '<think>hm</think><call>clock {"at": 1e1}</call><call>clock {"at": 2}</call>'
    message = called("", ("c1", "clock", {"at": 10.0}), ("c2", "clock", {"at": 2}))
    turn = chat.add(asked, spelled(said), messages, tools, message=message)
    results = [
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
        {"role": "tool", "tool_call_id": "c2", "content": "one"},
    ]
    # a program between has dropped the thought, compacted the arguments, made content null
    rewritten = called(None, ("c1", "clock", {"at": 10}), ("c2", "clock", {"at": 2}))  # type: ignore[arg-type]
    rewritten["tool_calls"][0]["function"]["arguments"] = json.dumps({"at": 10})
    after = chat.prompt([*messages, rewritten, *results], tools)
    assert after.parent is turn
    new = TOKENIZER.decode(after.ids[len(turn.ids) :])
    assert new == f"\n{S}tool\nnoon{E}\n{S}tool\none{E}\n{S}assistant\n"
    # other calls, other tools and another question are another dialogue
    other = called("", ("c9", "clock", {"at": 10}), ("c2", "clock", {"at": 2}))
    assert chat.prompt([*messages, other, *results], tools).parent is None
    assert chat.prompt([*messages, rewritten, *results], None).parent is None
    assert chat.prompt([user("who"), rewritten, *results], tools).parent is None


def test_branches_share_a_turn_that_is_trained_once() -> None:
    chat = Conversation(tokenizer(CHATML))
    messages = [user("a")]
    root = chat.add(chat.prompt(messages), spelled("the root"), messages)
    leaves = []
    for question in ("b", "c"):
        longer = [*messages, root.message, user(question)]
        leaves.append(chat.add(chat.prompt(longer), spelled(f"to {question}"), longer))
    rows = chat.rows()
    assert [row.turns for row in rows] == [(root, leaves[0]), (root, leaves[1])]
    counted = [int(row.mask.sum()) for row in rows]
    n_root = len(root.completion.token_ids)
    assert counted[0] == n_root + len(leaves[0].completion.token_ids)
    assert counted[1] == len(leaves[1].completion.token_ids)
    # what nobody trains twice is still known to be sampled
    assert (rows[1].versions[:n_root] >= 0).all()
    np.testing.assert_array_equal(rows[1].logprobs[:n_root], root.completion.logprobs)


def test_of_two_equal_replies_the_nearest_and_of_two_dialogues_the_longest_is_gone_on_from() -> (
    None
):
    chat = Conversation(tokenizer(CHATML))
    found = talk(chat, [("a", spelled("yes")), ("a", spelled("yes")), ("a", spelled("yes"))])
    messages = [*found[-1][1].messages, found[-1][1].message, user("a")]
    assert chat.prompt(messages).parent is found[-1][1]
    assert chat.prompt(messages[:3]).parent is found[0][1]


def test_old_turns_are_forgotten_beyond_the_limit() -> None:
    chat = Conversation(tokenizer(CHATML), limit=3)
    for i in range(5):
        messages = [user(str(i))]
        turn = chat.add(chat.prompt(messages), spelled("x"), messages)
        assert turn.number == i
    assert [turn.number for turn in chat.turns] == [2, 3, 4]
