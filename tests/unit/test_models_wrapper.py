"""What a workflow gets: experiences that hold what was sampled, and say when it was cut."""

import asyncio

import numpy as np
import pytest
from models_support import engine_spec, run, save_model

from trinity_dask.config.schema import ModelConfig
from trinity_dask.experience import PROMPT_TRUNCATED, RESPONSE_TRUNCATED
from trinity_dask.models.actor.actor import EngineActor
from trinity_dask.models.fake_engine import FakeEngine
from trinity_dask.models.protocol import Completion, SamplingParams
from trinity_dask.models.wrapper import TRUNCATED_TEXT, ModelWrapper, load_tokenizer

MODEL = ModelConfig(max_model_len=64, max_prompt_tokens=40, max_response_tokens=6)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(save_model(tmp_path_factory.mktemp("model")))


class Recorder(FakeEngine):
    """A fake engine that remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__(engine_spec("", "fake"))
        self.asked: list[tuple[list[int], SamplingParams]] = []

    async def generate(self, prompt_token_ids, sampling, request_id):
        self.asked.append((prompt_token_ids, sampling))
        return await super().generate(prompt_token_ids, sampling, request_id)


def use(tokenizer, action, model=MODEL, engine=None, **kwargs):
    async def main():
        return await action(ModelWrapper(engine or Recorder(), tokenizer, model, **kwargs))

    return run(main())


def test_a_text_prompt_becomes_n_experiences(tokenizer):
    engine = Recorder()
    experiences = use(tokenizer, lambda w: w.generate_async("sort 1=", n=3), engine=engine)
    assert len(experiences) == 3
    prompt = tokenizer.encode("sort 1=")
    assert engine.asked == [(prompt, SamplingParams(n=3, max_tokens=6))]
    for experience in experiences:
        n = experience.response_length
        assert experience.prompt_length == len(prompt)
        assert experience.tokens[: len(prompt)].tolist() == prompt
        assert len(experience.logprobs) == len(experience.versions) == n
        assert experience.action_mask.all()
        assert experience.prompt_text == "sort 1="
        response = experience.tokens[len(prompt) :]
        assert experience.response_text == tokenizer.decode(response, skip_special_tokens=True)
        cut = experience.info["finish_reason"] == "length"
        assert experience.truncate_status == (RESPONSE_TRUNCATED if cut else None)
    assert len({e.eid.uid for e in experiences}) == 3


def test_an_answer_cut_at_its_limit_is_marked_and_a_finished_one_is_not(tokenizer):
    """Over many prompts both kinds occur, and the mark follows the finish reason."""

    async def action(wrapper):
        return await wrapper.generate_async([f"sort {i}=" for i in range(40)])

    marks = {(e.info["finish_reason"], e.truncate_status) for e in use(tokenizer, action)}
    assert marks == {("stop", None), ("length", RESPONSE_TRUNCATED)}


def test_prompts_as_ids_and_as_a_list_of_texts(tokenizer):
    ids = tokenizer.encode("sort 12=")
    by_ids = use(tokenizer, lambda w: w.generate_async(ids, n=2))
    by_text = use(tokenizer, lambda w: w.generate_async(["sort 12=", "b"], n=2))
    assert [e.tokens.tolist() for e in by_ids] == [e.tokens.tolist() for e in by_text[:2]]
    assert by_ids[0].prompt_text == "sort 12="
    assert [e.prompt_text for e in by_text] == ["sort 12="] * 2 + ["b"] * 2
    with pytest.raises(ValueError, match="empty list"):
        use(tokenizer, lambda w: w.generate_async([]))


def test_chat_applies_the_template_with_the_generation_prompt(tokenizer):
    messages = [{"role": "user", "content": "hi"}]
    engine = Recorder()
    model = ModelConfig(max_model_len=99, max_response_tokens=6)
    (experience,) = use(tokenizer, lambda w: w.chat_async(messages), model=model, engine=engine)
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert experience.prompt_text == text
    assert tokenizer.decode(engine.asked[0][0]) == text
    assert experience.messages == messages
    with pytest.raises(ValueError, match="at least one message"):
        use(tokenizer, lambda w: w.chat_async([]))


def test_sampling_defaults_come_from_the_model_then_the_rollout_then_the_call(tokenizer, caplog):
    model = ModelConfig(
        temperature=0.9, top_p=0.8, top_k=7, max_response_tokens=6, min_response_tokens=2
    )
    rollout = {"temperature": 0.5, "top_p": None, "max_tokens": 5}
    engine = Recorder()

    async def action(wrapper):
        await wrapper.generate_async("a")
        await wrapper.generate_async("a", temperature=0.0, seed=3, stop_token_ids=[4], foo=1)
        await wrapper.generate_async("a", foo=2)

    use(tokenizer, action, model=model, engine=engine, rollout_args=rollout)
    base = SamplingParams(temperature=0.5, top_p=0.8, top_k=7, max_tokens=5, min_tokens=2)
    assert engine.asked[0][1] == base
    assert engine.asked[1][1] == SamplingParams(
        temperature=0.0,
        top_p=0.8,
        top_k=7,
        max_tokens=5,
        min_tokens=2,
        seed=3,
        stop_token_ids=(4,),
    )
    warnings = [r for r in caplog.records if "'foo'" in r.getMessage()]
    assert len(warnings) == 1


def test_without_a_response_limit_the_model_length_decides(tokenizer):
    engine = Recorder()
    model = {"max_model_len": 20}
    use(tokenizer, lambda w: w.generate_async("four"), model=model, engine=engine)
    assert engine.asked[0][1].max_tokens == 16
    with pytest.raises(ValueError, match="max_response_tokens"):
        use(tokenizer, lambda w: w.generate_async("four"), model={})


def test_a_prompt_that_is_too_long_is_not_sampled(tokenizer):
    engine = Recorder()
    text = "x" * 41
    experiences = use(tokenizer, lambda w: w.generate_async(text, n=3), engine=engine)
    assert engine.asked == []
    assert len(experiences) == 3
    for experience in experiences:
        assert experience.tokens.tolist() == tokenizer.encode(text)[:41]
        assert experience.prompt_length == 40
        assert experience.logprobs.tolist() == [0.0]
        assert experience.reward == 0.0
        assert not experience.action_mask.any()
        assert experience.truncate_status == PROMPT_TRUNCATED
        assert experience.response_text == TRUNCATED_TEXT
    longest = use(tokenizer, lambda w: w.generate_async("x" * 40), engine=engine)
    assert longest[0].truncate_status != PROMPT_TRUNCATED


def test_prompt_truncation_can_be_switched_off(tokenizer):
    model = ModelConfig(max_prompt_tokens=4, max_response_tokens=6, enable_prompt_truncation=False)
    engine = Recorder()
    use(tokenizer, lambda w: w.generate_async("longer", n=1), model=model, engine=engine)
    assert len(engine.asked[0][0]) == 6


class Scripted(FakeEngine):
    """Samples exactly these ids."""

    def __init__(self, ids) -> None:
        super().__init__(engine_spec("", "fake"))
        self.ids = np.array(ids, dtype=np.int32)

    async def generate(self, prompt_token_ids, sampling, request_id):
        ones = np.ones(len(self.ids))
        return [Completion(self.ids, -ones, ones.astype(np.int32), "stop")]


def test_fault_23_sampled_ids_are_stored_not_ids_of_the_text(tokenizer):
    """A padding token in mid-answer has no text, so encoding the text again would lose it."""
    a, b = tokenizer.encode("ab")
    ids = [a, tokenizer.pad_token_id, b, tokenizer.eos_token_id]
    (experience,) = use(tokenizer, lambda w: w.generate_async("p"), engine=Scripted(ids))
    assert experience.tokens[1:].tolist() == ids
    assert experience.response_text == "ab"
    assert tokenizer.encode(experience.response_text) != ids


def test_history_is_kept_only_when_asked_for(tokenizer):
    async def action(wrapper):
        with pytest.raises(ValueError, match="keeps no history"):
            wrapper.extract_experience_from_history()
        keeping = wrapper.clone_with_isolated_history()
        keeping.enable_history = True
        other = keeping.clone_with_isolated_history()
        made = await keeping.generate_async("a", n=2)
        await other.generate_async("b")
        assert wrapper.history == []
        assert keeping.extract_experience_from_history(clear_history=False) == made
        assert keeping.extract_experience_from_history() == made
        assert keeping.extract_experience_from_history() == []
        assert len(other.history) == 1

    use(tokenizer, action)


def test_workflow_state_belongs_to_one_clone(tokenizer):
    async def action(wrapper):
        clone = wrapper.clone_with_isolated_history()
        clone.set_workflow_state({"turn": 1})
        assert clone.get_workflow_state() == {"turn": 1}
        assert wrapper.get_workflow_state() == {}
        clone.clean_workflow_state()
        assert clone.get_workflow_state() == {}

    use(tokenizer, action)


def test_plain_methods_work_from_a_thread_and_refuse_the_loop(tokenizer):
    async def action(wrapper):
        text = await asyncio.to_thread(wrapper.generate, "a", n=2)
        chat = await asyncio.to_thread(wrapper.chat, [{"role": "user", "content": "hi"}])
        scores = await asyncio.to_thread(wrapper.logprobs, [1, 2, 3])
        with pytest.raises(RuntimeError, match="async methods"):
            wrapper.generate("a")
        return len(text), len(chat), len(scores)

    assert use(tokenizer, action) == (2, 1, 2)


def test_message_length_counts_the_template(tokenizer):
    messages = [{"role": "user", "content": "hi"}]

    async def action(wrapper):
        return wrapper.get_message_token_len(messages)

    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert use(tokenizer, action) == len(ids)


def test_logprobs_default_to_the_sampling_temperature(tmp_path, tokenizer):
    path = save_model(tmp_path / "model")

    async def main():
        actor = EngineActor(engine_spec(path))
        await actor.prepare()
        await actor.open()
        wrapper = ModelWrapper(actor, tokenizer, MODEL, {"temperature": 0.6})
        (experience,) = await wrapper.generate_async("sort 12=")
        scores = await wrapper.logprobs_async(experience.tokens)
        await actor.close()
        n = experience.prompt_length
        np.testing.assert_allclose(scores[n - 1 :], experience.logprobs, atol=1e-4)

    run(main())


def test_a_directory_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match="no tokenizer at"):
        load_tokenizer(str(tmp_path))


def test_with_a_request_seed_every_request_has_its_own_and_a_run_repeats_them(tokenizer):
    engine = Recorder()

    async def action(wrapper):
        for name in ("1/0/0", "1/0/1", "1/0/0"):
            wrapper.begin_run(name)
            await wrapper.generate_async("a")
            await wrapper.generate_async("a")
        await wrapper.generate_async("a", seed=5)

    use(tokenizer, action, engine=engine, request_seed=7)
    seeds = [sampling.seed for _, sampling in engine.asked]
    assert len(set(seeds[:4])) == 4
    assert seeds[4:] == [*seeds[:2], 5]
    other = Recorder()
    use(tokenizer, action, engine=other, request_seed=8)
    assert not {s.seed for _, s in other.asked[:4]} & set(seeds[:4])


CHAT = [{"role": "user", "content": "1+2="}]


def test_a_later_turn_begins_with_the_sampled_ids_and_one_pass_gives_their_logprobs(tmp_path):
    """What was sampled in several requests is one row whose log-probs are those of one pass."""
    path = save_model(tmp_path)
    tokenizer = load_tokenizer(path)
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{m.role}}\n{{m.content}}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    engine = EngineActor(engine_spec(path, "torch"))

    async def main():
        await engine.prepare()
        await engine.open()
        wrapper = ModelWrapper(engine, tokenizer, ModelConfig(max_model_len=128))
        turns, messages = [], []
        for question in ("1", "2"):
            messages = [*messages, {"role": "user", "content": question}]
            (turn,) = await wrapper.chat_async(messages, max_tokens=8)
            turns.append(turn)
            messages = [*messages, {"role": "assistant", "content": turn.response_text}]
        (whole,) = wrapper.dialogue_experiences()
        scores = await wrapper.logprobs_async(whole.tokens.tolist())
        wrapper.begin_run("2/0/1")
        assert wrapper.dialogue_experiences() == []
        await engine.close()
        return turns, whole, scores

    (first, second), whole, scores = run(main())
    assert second.tokens[: len(first.tokens)].tolist() == first.tokens.tolist()
    assert second.info["parent"] == 0
    assert "parent" not in first.info
    assert whole.tokens.tolist() == second.tokens.tolist()
    sampled = np.concatenate([first.logprobs, second.logprobs])
    np.testing.assert_array_equal(whole.logprobs[whole.action_mask], sampled)
    one_pass = scores[whole.prompt_length - 1 :][whole.action_mask]
    np.testing.assert_allclose(one_pass, sampled, atol=1e-4)
    assert whole.info["turns"] == 2
    assert whole.version_span == (0, 0)


def test_a_clone_has_a_dialogue_of_its_own(tokenizer):
    async def action(wrapper):
        clone = wrapper.clone_with_isolated_history()
        await wrapper.chat_async(CHAT)
        await clone.chat_async(CHAT, n=2)
        return wrapper.dialogue_experiences(), clone.dialogue_experiences()

    mine, its = use(tokenizer, action)
    assert (len(mine), len(its)) == (1, 2)


def test_a_dialogue_needs_a_message_and_a_request_draws_one_seed(tokenizer):
    engine = Recorder()

    async def action(wrapper):
        for ask in (wrapper.chat_async, wrapper.turns_async):
            with pytest.raises(ValueError, match="at least one message"):
                await ask([])
        with pytest.raises(ValueError, match="at least one message"):
            wrapper.get_message_token_len([])
        wrapper.begin_run("1/0/0")
        await wrapper.turns_async(CHAT, max_tokens=3)
        wrapper.begin_run("1/0/0")
        await wrapper.chat_async(CHAT, max_tokens=3)

    use(tokenizer, action, engine=engine, request_seed=7)
    (_, first), (_, second) = engine.asked
    assert first == second
