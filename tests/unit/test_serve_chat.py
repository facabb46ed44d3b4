"""Programs that speak OpenAI's protocol: what they get is what was sampled and is trained on."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from models_support import engine_spec, run
from test_models_conversation import CHATML, CLOCK, TOKENIZER, spelled, tokenizer

from trinity_dask.config.schema import ModelConfig
from trinity_dask.experience import RESPONSE_TRUNCATED
from trinity_dask.experience.task import Task
from trinity_dask.models.fake_engine import FakeEngine
from trinity_dask.models.protocol import Completion
from trinity_dask.models.wrapper import ModelWrapper
from trinity_dask.serve.endpoint import MAX_BODY_BYTES, endpoint
from trinity_dask.serve.openai_api import reply_message
from trinity_dask.workflows.agent import AgentWorkflow

MODEL = ModelConfig(max_model_len=400, max_response_tokens=40)
ASK = [{"role": "user", "content": "how many eggs"}]


class Scripted(FakeEngine):
    """Answers with what it is given to say, spelled as no tokenizer would."""

    def __init__(self, *says: str | Completion, delay_s: float = 0.0) -> None:
        super().__init__(engine_spec("", "fake"))
        self.says, self.delay_s = list(says), delay_s
        self.asked: list[Any] = []

    async def generate(self, prompt_token_ids: Any, sampling: Any, request_id: str) -> Any:
        self.asked.append((list(prompt_token_ids), sampling))
        await asyncio.sleep(self.delay_s)
        text = self.says[(len(self.asked) - 1) % len(self.says)]
        return [text if isinstance(text, Completion) else spelled(text)] * sampling.n


def talk(engine: Any, action: Any, model: ModelConfig = MODEL, **options: Any) -> Any:
    """``action(client, wrapper)`` with a real client over HTTP."""

    async def main() -> Any:
        wrapper = ModelWrapper(engine, tokenizer(CHATML), model, **options)
        session = await endpoint().open(wrapper)
        try:
            return await action(endpoint().client(session), wrapper)
        finally:
            endpoint().close(session)
            await endpoint().stop()

    return run(main())


def test_a_dialogue_by_the_openai_client_is_one_row_of_sampled_ids() -> None:
    engine = Scripted("eighteen eggs", " and more")

    async def action(client: Any, wrapper: ModelWrapper) -> Any:
        first = await client.chat.completions.create(model="any", messages=ASK, logprobs=True)
        said = first.choices[0].message
        messages = [*ASK, said.to_dict(), {"role": "user", "content": "more?"}]
        second = await client.chat.completions.create(model="any", messages=messages)
        return first, second, wrapper.dialogue_experiences()

    first, second, (row,) = talk(engine, action)
    assert first.choices[0].message.content == "eighteen eggs"
    assert second.choices[0].finish_reason == "stop"
    answers = [spelled("eighteen eggs"), spelled(" and more")]
    shown = [entry.logprob for entry in first.choices[0].logprobs.content]
    assert shown == pytest.approx(answers[0].logprobs.tolist())
    assert "".join(entry.token for entry in first.choices[0].logprobs.content).startswith("eight")
    sampled = np.concatenate([a.token_ids for a in answers])
    assert row.tokens[row.prompt_length :][row.action_mask].tolist() == sampled.tolist()
    (one, _), (two, _) = engine.asked
    assert two[: len(one) + len(answers[0].token_ids)] == [*one, *answers[0].token_ids.tolist()]
    assert first.usage.prompt_tokens == len(one)
    assert second.usage.completion_tokens == len(answers[1].token_ids)


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_tools_come_as_calls_and_go_on_exactly(stream: bool) -> None:
    call = '<tool_call>{"name": "clock", "arguments": {"at": [1e1, "é"]}}</tool_call>'
    engine = Scripted(f"let me see {call}{call}", "noon")

    async def ask(client: Any, messages: Any) -> dict[str, Any]:
        if not stream:
            reply = await client.chat.completions.create(
                model="m", messages=messages, tools=[CLOCK]
            )
            return reply.choices[0].message.to_dict()
        message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
        ends = []
        async for chunk in await client.chat.completions.create(
            model="m",
            messages=messages,
            tools=[CLOCK],
            stream=True,
            stream_options={"include_usage": True},
        ):
            if not chunk.choices:
                assert chunk.usage.completion_tokens > 0
                continue
            delta = chunk.choices[0].delta
            message["content"] += delta.content or ""
            message["tool_calls"] += [c.to_dict() for c in delta.tool_calls or []]
            ends.append(chunk.choices[0].finish_reason)
        assert ends[:-1] == [None] * (len(ends) - 1)
        return {key: value for key, value in message.items() if value}

    async def action(client: Any, wrapper: ModelWrapper) -> Any:
        message = await ask(client, ASK)
        results = [
            {"role": "tool", "tool_call_id": c["id"], "content": f"r{i}"}
            for i, c in enumerate(message["tool_calls"])
        ]
        end = await ask(client, [*ASK, message, *results])
        return message, end, wrapper.dialogue_experiences()

    message, end, rows = talk(engine, action)
    assert message["content"] == "let me see"
    functions = [c["function"] for c in message["tool_calls"]]
    assert [json.loads(f["arguments"]) for f in functions] == [{"at": [10.0, "é"]}] * 2
    assert end["content"] == "noon"
    assert [row.info["turns"] for row in rows] == [2]


def test_a_request_that_is_sent_again_gets_the_same_turn() -> None:
    engine = Scripted("one", "two", delay_s=0.3)

    async def action(client: Any, wrapper: ModelWrapper) -> Any:
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(timeout=0.1, max_retries=0).chat.completions.create(
                model="m", messages=ASK
            )
        again = {"x-stainless-retry-count": "1"}
        same = await client.chat.completions.create(model="m", messages=ASK, extra_headers=again)
        asked_anew = await client.chat.completions.create(model="m", messages=ASK)
        return same, asked_anew, wrapper.dialogue_experiences()

    same, anew, rows = talk(engine, action)
    assert (same.choices[0].message.content, anew.choices[0].message.content) == ("one", "two")
    assert len(engine.asked) == len(rows) == 2


def test_a_failure_is_no_reply_that_is_given_again() -> None:
    class Fails(Scripted):
        async def generate(self, *args: Any) -> Any:
            if not self.asked:
                self.asked.append(args)
                raise RuntimeError("the engine died")
            return await super().generate(*args)

    engine = Fails("one")

    async def action(client: Any, wrapper: ModelWrapper) -> Any:
        return await client.chat.completions.create(model="m", messages=ASK)  # it tries again

    assert talk(engine, action).choices[0].message.content == "one"


def test_nothing_is_sampled_for_a_session_that_has_ended() -> None:
    engine = Scripted("late", delay_s=30.0)

    async def action(client: Any, wrapper: ModelWrapper) -> Any:
        session = await endpoint().open(wrapper)
        own = endpoint().client(session).with_options(max_retries=0)
        call = asyncio.ensure_future(own.chat.completions.create(model="m", messages=ASK))
        while not engine.asked:
            await asyncio.sleep(0.01)
        endpoint().close(session)
        with pytest.raises(openai.InternalServerError, match="the run is over"):
            await asyncio.wait_for(call, 10.0)
        return wrapper.dialogue_experiences()

    assert talk(engine, action) == []


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        ({"messages": []}, 400, "message"),
        ({"messages": "[{"}, 400, "JSON"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "no text"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "wizard"),
        ({"messages": [{"content": "x"}]}, 400, "role"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, "half a character"),
        ({"messages": ASK, "seed": 3}, 400, "seed"),
        ({"messages": ASK, "response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"messages": ASK, "tools": [CLOCK], "tool_choice": "required"}, 400, "tool_choice"),
        ({"messages": ASK, "logit_bias": {"5": 100}}, 400, "logit_bias"),
        ({"messages": ASK, "n": 0}, 400, "n is"),
        ({"messages": ASK, "n": True}, 400, "n is"),
        ({"messages": ASK, "n": 10**9}, 400, "n is"),
        ({"messages": ASK, "max_tokens": "many"}, 400, "max_tokens"),
        ({"messages": ASK, "stop": [3]}, 400, "stop"),
        ({"messages": ASK, "tools": [3]}, 400, "tools"),
        ({"messages": ASK, "kv_transfer_params": {}}, 400, "kv_transfer_params"),
        ([], 400, "object"),
        ("[" * 100_000, 400, "JSON"),
        ({"messages": [{"role": "user", "content": "x" * 9 * 2**20}]}, 413, "longer"),
    ],
)
def test_what_cannot_be_right_is_refused_and_the_engine_is_not_asked(
    body: Any, status: int, named: str
) -> None:
    engine = Scripted("never")

    async def action(client: Any, wrapper: ModelWrapper) -> Any:
        raw = (body if isinstance(body, str) else json.dumps(body)).encode()
        return await asyncio.to_thread(post, client, raw, client.api_key)

    got, reply = talk(engine, action)
    assert (got, named in reply["error"]["message"]) == (status, True), reply
    assert engine.asked == []


def post(client: Any, raw: bytes, key: str) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(
        f"{client.base_url}chat/completions", raw, {"Authorization": f"Bearer {key}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=20) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_a_key_is_needed_and_ends_with_its_session() -> None:
    async def action(client: Any, wrapper: ModelWrapper) -> Any:
        raw = json.dumps({"messages": ASK}).encode()
        other = await endpoint().open(wrapper)
        endpoint().close(other)
        keys = ("", "nonsense", other.key, client.api_key)
        return [(await asyncio.to_thread(post, client, raw, key))[0] for key in keys]

    assert talk(Scripted("x"), action) == [401, 401, 401, 200]


def test_a_prompt_without_room_is_refused_by_its_code_and_the_sampling_is_the_run_s() -> None:
    engine = Scripted("x")

    async def action(client: Any, wrapper: ModelWrapper) -> Any:
        create = client.chat.completions.create
        await create(model="m", messages=ASK, temperature=0.0, top_p=0.1, max_tokens=10**6)
        await create(model="m", messages=ASK, max_completion_tokens=3, n=2)
        with pytest.raises(openai.BadRequestError) as refused:
            await create(model="m", messages=[{"role": "user", "content": "egg " * 400}])
        return refused.value.code

    assert talk(engine, action, rollout_args={"temperature": 0.7}) == "context_length_exceeded"
    used = [sampling for _, sampling in engine.asked]
    assert [(s.temperature, s.top_p, s.max_tokens, s.n) for s in used] == [
        (0.7, 1.0, 40, 1),
        (0.7, 1.0, 3, 2),
    ]


def test_a_stop_text_cuts_the_answer_at_its_token_and_is_not_the_model_s_end() -> None:
    engine = Scripted("one STOP two", "three")

    async def action(client: Any, wrapper: ModelWrapper) -> Any:
        reply = await client.chat.completions.create(model="m", messages=ASK, stop=["zz", "STOP"])
        said = reply.choices[0].message.to_dict()
        messages = [*ASK, said, {"role": "user", "content": "go"}]
        await client.chat.completions.create(model="m", messages=messages)
        return reply, wrapper.dialogue_experiences()

    reply, (row,) = talk(engine, action)
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("one ", "stop")
    text = TOKENIZER.decode(row.tokens[row.prompt_length :])
    assert text.startswith("one STOP<|im_end|>\n<|im_start|>user")
    assert TOKENIZER.decode(row.tokens[row.prompt_length :][row.action_mask]).startswith(
        "one STOPthree"
    )


def test_a_call_that_the_model_broke_is_the_text_that_it_is() -> None:
    for text in (
        '<tool_call>{"name": "clock", </tool_call>',
        "<tool_call>" + "[" * 10_000 + "</tool_call>",
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "clock", "arguments": [1]}</tool_call>',
        '<tool_call>["clock"]</tool_call>',
    ):
        message = reply_message(tokenizer(CHATML), text + "<|im_end|>", "", [CLOCK])
        assert message == {"role": "assistant", "content": text}
    fine = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
    assert "tool_calls" not in reply_message(tokenizer(CHATML), fine, "", None)


# agents -----------------------------------------------------------------------------------
AGENT = """
async def agent(task, client, extra=0):
    messages = [{"role": "user", "content": task.raw_task["question"]}]
    for _ in range(2):
        reply = await client.chat.completions.create(model="policy", messages=messages)
        messages.append(reply.choices[0].message.to_dict())
        messages.append({"role": "user", "content": "again"})
    return {"right": float("noon" in messages[-2]["content"]), "extra": extra}

class Blocking:
    def __call__(self, task, client):
        import openai
        own = openai.OpenAI(base_url=str(client.base_url), api_key=client.api_key)
        own.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}])
        own.close()

async def judge(task, messages):
    return len(messages)

async def silent(task, client):
    return 1.0

async def overflows(task, client):
    import openai
    messages = [{"role": "user", "content": "a"}]
    await client.chat.completions.create(model="m", messages=messages)
    try:
        await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "a" * 500}]
        )
    except openai.BadRequestError:
        return 0.5
"""


@pytest.fixture
def agents(tmp_path: Path) -> Path:
    (tmp_path / "agents.py").write_text(AGENT)
    return tmp_path / "agents.py"


def work(
    engine: Any, path: Path, name: str, task_of: dict[str, Any] | None = None, **args: Any
) -> Any:
    async def main() -> Any:
        task = Task(
            "agent",
            raw_task={"question": "what time", "prompt": "what time", "response": "noon"},
            **(task_of or {}),
            workflow_args={"agent": f"{path}:{name}", **args},
        )
        workflow = AgentWorkflow(task, ModelWrapper(engine, tokenizer(CHATML), MODEL))
        try:
            return await workflow.run_async()
        finally:
            await endpoint().stop()

    return run(main())


def test_an_agent_s_run_is_its_dialogue_with_its_reward(agents: Path) -> None:
    (row,) = work(Scripted("hm", "noon"), agents, "agent", agent_args={"extra": 0.25})
    assert row.reward == 1.25
    assert row.metrics["right"] == 1.0
    assert (row.metrics["agent/turns"], row.metrics["agent/requests"]) == (2.0, 2.0)
    assert row.messages[0] == {"role": "user", "content": "what time"}


def test_an_agent_that_blocks_runs_in_a_thread_and_a_judge_pays_it(agents: Path) -> None:
    (row,) = work(Scripted("x"), agents, "Blocking", judge=f"{agents}:judge")
    assert row.reward == 2.0
    with pytest.raises(ValueError, match="to say what the run is worth"):
        work(Scripted("x"), agents, "Blocking")


def test_a_reward_function_pays_an_agent_that_says_nothing(agents: Path, tmp_path: Path) -> None:
    (tmp_path / "pays.py").write_text(
        "def pays(response, truth, finish_reason, response_with_special_tokens):\n"
        "    ends = response_with_special_tokens.endswith('<|im_end|>')\n"
        "    return float(response == truth and finish_reason == 'stop' and ends)\n"
    )
    reward = {"reward_fn": f"{tmp_path}/pays.py:pays"}
    (row,) = work(Scripted("noon"), agents, "Blocking", reward)
    assert row.reward == 1.0


def test_an_agent_that_asks_nothing_is_a_failed_run(agents: Path) -> None:
    with pytest.raises(ValueError, match="asked nothing"):
        work(Scripted("x"), agents, "silent")


def test_a_dialogue_that_ran_out_of_room_says_so(agents: Path) -> None:
    (row,) = work(Scripted("x"), agents, "overflows")
    assert (row.truncate_status, row.metrics["agent/overflowed"]) == (RESPONSE_TRUNCATED, 1.0)
    assert row.action_mask.all()


def test_the_limit_of_a_body_is_in_bytes() -> None:
    assert MAX_BODY_BYTES == 8 * 2**20
