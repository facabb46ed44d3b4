"""Tokenizers and chat templates as models of the hub have them, from a text to a sampled answer.

The tokenizer is the demo's byte-level BPE: merges, added tokens, neither a BOS nor a padding token,
fewer tokens than its model has places, and an end of turn that no configuration of the model names.
"""

import numpy as np
import pytest
from models_support import engine_spec, run

from trinity_dask.buffer.formats import FORMATTERS
from trinity_dask.config.schema import FormatConfig
from trinity_dask.demo.sort_digits import SortDigitsSpec, write_model
from trinity_dask.demo.tokenizer import EOS_TOKEN, PAD_TOKEN, bpe_tokenizer
from trinity_dask.experience import EID
from trinity_dask.models.checks import read_model_config
from trinity_dask.models.protocol import SamplingParams
from trinity_dask.models.tokenizer import chat_prompt, end_token_ids, load_tokenizer
from trinity_dask.models.torch.engine import TorchEngine
from trinity_dask.models.wrapper import ModelWrapper

USER = [{"role": "user", "content": "sort 407193="}]
SPECIAL_TURN = "<|im_start|>assistant\n"
THINKS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and not loop.last and '</think>' in m.content %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ m.role + ':' + m.content + '<|im_end|>' }}{% endfor %}"
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    root = tmp_path_factory.mktemp("chat")
    write_model(SortDigitsSpec(kind="llama_chat"), root)
    return str(root)


@pytest.fixture(scope="module")
def tokenizer(path):
    return load_tokenizer(path)


@pytest.mark.parametrize("text", ["sort 407193=", "the digits of\nsort", "x<think>y", "a  b"])
def test_texts_come_back_and_words_are_merged(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids == bpe_tokenizer().encode(text), "loading changes nothing"
    assert len(tokenizer.encode("sort")) == 1
    assert len(tokenizer.encode("<think>")) == 1


def test_the_end_of_a_turn_is_the_tokenizer_s(path, tokenizer):
    config = read_model_config(path)
    turn, text = (tokenizer.convert_tokens_to_ids(t) for t in (EOS_TOKEN, PAD_TOKEN))
    assert config["eos_token_id"] == text
    assert config["vocab_size"] > len(tokenizer)

    async def sampled():
        engine = TorchEngine(engine_spec(path))
        await engine.prepare()
        try:
            params = SamplingParams(n=200, max_tokens=40, temperature=5.0, seed=3)
            return await engine.generate(tokenizer.encode("sort 1="), params, "a")
        finally:
            await engine.close()

    ended = set()
    for answer in run(sampled()):
        assert not {turn, text} & set(answer.token_ids[:-1].tolist())
        if answer.finish_reason == "stop":
            ended.add(int(answer.token_ids[-1]))
        tokenizer.decode(answer.token_ids)  # an id beyond the tokens is no error
    assert ended == {turn, text}


def test_ends_of_all_configurations_are_joined():
    class Of:
        def __init__(self, eos):
            self.eos_token_id = eos

    assert end_token_ids((Of(3), Of([5, 3])), Of(9)) == (3, 5, 9)
    assert end_token_ids((Of(None), object()), Of(None)) == ()


def test_padding_is_the_end_where_there_is_none_and_nothing_needs_it(path, tmp_path):
    assert load_tokenizer(path).pad_token == EOS_TOKEN
    bare = bpe_tokenizer()
    bare.eos_token = None
    bare.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.encode("sort 1=") == bare.encode("sort 1=")


def chat(path, tokenizer, messages, template=None):
    async def use():
        engine = TorchEngine(engine_spec(path))
        await engine.prepare()
        try:
            wrapper = ModelWrapper(engine, tokenizer, {"max_response_tokens": 4})
            return (await wrapper.chat_async(messages))[0]
        finally:
            await engine.close()

    before, tokenizer.chat_template = tokenizer.chat_template, template or tokenizer.chat_template
    try:
        return run(use())
    finally:
        tokenizer.chat_template = before


def test_a_chat_is_sampled_from_the_template_s_own_ids(path, tokenizer):
    made = chat(path, tokenizer, USER)
    expected = tokenizer.apply_chat_template(
        USER, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert made.tokens[: made.prompt_length].tolist() == expected
    assert made.prompt_text.endswith(SPECIAL_TURN)


def test_a_prefilled_thought_belongs_to_the_prompt(path, tokenizer):
    made = chat(path, tokenizer, USER, THINKS)
    assert made.prompt_text.endswith("<think>\n")
    assert "<think>" not in made.response_text


def test_a_template_that_refuses_a_system_role_says_so(tokenizer):
    system = [{"role": "system", "content": "be brief"}, *USER]
    tokenizer.chat_template, before = NO_SYSTEM, tokenizer.chat_template
    try:
        with pytest.raises(Exception, match="System role not supported"):
            chat_prompt(tokenizer, system)
    finally:
        tokenizer.chat_template = before


def learned(tokenizer, template, messages):
    """Text that a supervised row of ``messages`` teaches."""
    tokenizer.chat_template, before = template, tokenizer.chat_template
    try:
        fmt = FormatConfig(prompt_type="messages", messages_key="messages")
        made = FORMATTERS.get("sft")(tokenizer, fmt).format_unit(
            {"messages": messages}, EID(batch=0, task=0, run=0), "row 0"
        )[0]
    finally:
        tokenizer.chat_template = before
    answer = made.tokens[made.prompt_length :]
    mask = np.ones(len(answer), bool) if made.action_mask is None else made.action_mask
    return tokenizer.decode(made.tokens[: made.prompt_length]), tokenizer.decode(answer[mask])


def test_a_template_that_strips_thoughts_teaches_the_last_turn_with_its_own(tokenizer):
    turns = [
        *USER,
        {"role": "assistant", "content": "<think>\nold</think>013479"},
        {"role": "user", "content": "sort 21="},
        {"role": "assistant", "content": "<think>\nnew</think>12"},
    ]
    prompt, answer = learned(tokenizer, THINKS, turns)
    assert "old" not in prompt
    assert prompt.endswith("<think>\n"), "as it is sampled"
    assert answer.startswith("new</think>12<|im_end|>")
