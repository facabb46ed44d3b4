"""Workflows of every kind through the runner, on a real wrapper over the fake engine."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time

import pytest

from trinity_dask.cluster.loop_watch import LoopWatch
from trinity_dask.demo.tokenizer import ascii_tokenizer
from trinity_dask.experience.schema import decode, from_table
from trinity_dask.explorer.rollout.user_code import recall, recallable
from trinity_dask.explorer.rollout.workflow_runner import WorkflowRunner, outcome_of
from trinity_dask.models.fake_engine import FakeEngine
from trinity_dask.models.protocol import EngineSpec
from trinity_dask.models.wrapper import ModelWrapper
from trinity_dask.rewards import REWARD_FUNCTIONS
from trinity_dask.workflows import WORKFLOWS, Task, Workflow

TOKENIZER = ascii_tokenizer()
MODES = ["sequential", "asynchronous", "multi-threading"]
CALLS: list[int] = []
INSTANCES: list[Workflow] = []


@REWARD_FUNCTIONS.register_module("length", force=True)
def length_reward(response, **_):
    return {"length": float(len(response)), "one": 1.0}


@REWARD_FUNCTIONS.register_module("flaky", force=True)
def flaky_reward(response, **_):
    CALLS.append(len(CALLS))
    if len(CALLS) == 2:
        raise RuntimeError("the second answer is bad luck")
    return 1.0


class Base(Workflow):
    """One answer per run; what happens is chosen by the row."""

    is_async = True

    def __init__(self, task, model, auxiliary_models=None):
        super().__init__(task, model, auxiliary_models)
        INSTANCES.append(self)

    def behave(self):
        CALLS.append(len(CALLS))
        self.number = len(CALLS)
        if self.number in self.task.raw_task.get("fail_calls", []):
            raise RuntimeError("this call fails")

    async def run_async(self):
        self.behave()
        await asyncio.sleep(self.task.raw_task.get("sleep_s", 0.0))
        if self.task.raw_task.get("hang") == self.number:
            await asyncio.Event().wait()
        (experience,) = await self.model.generate_async("hello", max_tokens=4)
        experience.metrics = {"call": float(len(CALLS))}
        return [experience]


@WORKFLOWS.register_module("async_one", force=True)
class AsyncOne(Base):
    pass


@WORKFLOWS.register_module("sync_one", force=True)
class SyncOne(Base):
    is_async = False

    def run(self):
        self.behave()
        time.sleep(self.task.raw_task.get("sleep_s", 0.0))
        experiences = self.model.generate("hello", max_tokens=4)
        experiences[0].metrics = {"thread": float(threading.get_ident())}
        return experiences


@WORKFLOWS.register_module("resettable", force=True)
class Resettable(AsyncOne):
    can_reset = True
    resets = 0

    def reset(self, task):
        self.task = task
        self.resets += 1


@WORKFLOWS.register_module("odd", force=True)
class Odd(Base):
    """Returns whatever the row says."""

    can_repeat = True

    async def run_async(self):
        if self.task.raw_task["returns"] == "cancelled":
            raise asyncio.CancelledError
        return self.task.raw_task["returns"]


@pytest.fixture(autouse=True)
def _forget():
    CALLS.clear()
    INSTANCES.clear()


def run(task, n=1, base=0, mode="asynchronous", partial=True, timeout_s=60.0):
    """Outcome and experiences of one ``run_task``."""

    async def main():
        runner = make_runner(mode)
        _, payload = await runner.run_task(task, 7, n, base, partial, timeout_s)
        assert all(lane["terminate_time"] for lane in runner.get_runner_state())
        return payload

    return unpack(asyncio.run(main()))


def make_runner(mode="asynchronous", enable_history=False):
    engine = FakeEngine(EngineSpec("engine-0", "fake", ""))
    cfg = {"max_response_tokens": 4, "max_prompt_tokens": 2048}

    def model(args):
        return ModelWrapper(engine, TOKENIZER, cfg, args, enable_history=enable_history)

    return WorkflowRunner(model, mode)


def unpack(payload):
    return outcome_of(payload), from_table(decode(payload)[0])


def simple(reward="length", **more):
    form = {"apply_chat_template": False}
    return Task(
        "simple_workflow",
        reward,
        {"prompt": "sort 1=", "response": "1"},
        format_args=form,
        task_id=3,
        index={"index": 11},
        **more,
    )


def test_a_group_is_one_request_and_every_experience_is_labelled():
    outcome, found = run(simple(), n=4, base=2)
    assert outcome.status.ok
    assert [e.eid.run for e in found] == [2, 3, 4, 5]
    assert {(e.eid.batch, e.eid.task) for e in found} == {(7, 3)}
    assert len({e.eid.uid for e in found}) == 4
    for experience in found:
        assert experience.reward == experience.metrics["length"] + 1.0
        assert experience.metrics["reward"] == experience.reward
        assert experience.info["model_version"] == 0
        assert experience.info["model_version_drift"] == 0
        assert experience.info["task_index"] == {"index": 11}
    assert len(outcome.status.metrics) == 4
    assert "time/run_execution" in outcome.status.metrics[0]


def test_a_chat_prompt_uses_system_prompt_and_template():
    task = simple()
    task.format_args = {"system_prompt": "be brief"}
    _, (experience,) = run(task)
    assert "be brief" in experience.prompt_text
    assert experience.prompt_text.endswith("<|im_start|>assistant\n")


def test_math_workflow_asks_for_an_answer_and_scores_it_by_default():
    task = simple(reward=None)
    task.workflow, task.format_args = "math_workflow", {}
    _, (experience,) = run(task)
    assert "<think>" in experience.prompt_text
    assert set(experience.metrics) == {"accuracy", "format_score", "reward"}


def test_an_eval_task_keeps_metrics_and_drops_experiences():
    outcome, found = run(simple(is_eval=True), n=2)
    assert outcome.status.completed_runs == 2
    assert found == []
    assert [m["one"] for m in outcome.status.metrics] == [1.0, 1.0]


def test_fault_10_one_bad_reward_fails_one_run_of_the_group():
    outcome, found = run(simple("flaky"), n=4)
    assert (outcome.status.completed_runs, outcome.status.total_runs) == (3, 4)
    assert [e.eid.run for e in found] == [0, 2, 3]
    assert [e.type for e in outcome.errors] == ["RuntimeError"]
    assert "bad luck" in outcome.errors[0].message
    assert "flaky_reward" in outcome.errors[0].traceback


def test_a_missing_reward_or_prompt_says_what_to_set():
    outcome, _ = run(simple(reward=None))
    assert "set taskset.reward_fn" in str(outcome.status.message)
    task = simple()
    task.raw_task = {"question": "?"}
    outcome, _ = run(task)
    assert "set format.prompt_key" in str(outcome.status.message)


def test_an_unknown_workflow_is_not_worth_a_retry():
    outcome, _ = run(Task("simple_workfow"))
    assert not outcome.retryable
    assert "did you mean 'simple_workflow'" in outcome.errors[0].message


@pytest.mark.parametrize("returns", [None, [], "text", [1], "cancelled"])
def test_fault_03_nonsense_from_a_workflow_is_a_failed_group(returns):
    outcome, found = run(Task("odd", raw_task={"returns": returns}), n=3)
    assert outcome.status.completed_runs == 0
    assert len(outcome.errors) == 3
    assert found == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("workflow", ["async_one", "sync_one"])
def test_modes_run_each_run_once(mode, workflow):
    outcome, found = run(Task(workflow, task_id=1), n=3, base=5, mode=mode)
    assert outcome.status.ok, outcome.errors
    assert sorted(e.eid.run for e in found) == [5, 6, 7]
    assert len(outcome.status.metrics) == 3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("workflow", ["async_one", "sync_one"])
def test_a_partial_failure_keeps_the_other_runs(mode, workflow):
    outcome, found = run(Task(workflow, raw_task={"fail_calls": [2]}), n=3, mode=mode)
    assert outcome.status.completed_runs == 2
    assert len(found) == 2
    assert "2/3 runs completed successfully" in str(outcome.status.message)
    assert [e.message for e in outcome.errors] == ["this call fails"]


def test_without_partial_runs_the_first_failure_ends_the_group():
    task = Task("async_one", raw_task={"fail_calls": [2]})
    outcome, _ = run(task, n=3, mode="sequential", partial=False)
    assert outcome.status.completed_runs == 1
    assert len(outcome.errors) == 2
    assert len(CALLS) == 2


def test_without_partial_runs_siblings_are_stopped():
    task = Task("async_one", raw_task={"fail_calls": [1], "sleep_s": 60.0})
    started = time.monotonic()
    outcome, _ = run(task, n=3, mode="asynchronous", partial=False)
    assert outcome.status.completed_runs == 0
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("mode", ["asynchronous", "multi-threading"])
@pytest.mark.parametrize("workflow", ["async_one", "sync_one"])
def test_parallel_modes_overlap(mode, workflow):
    task = Task(workflow, raw_task={"sleep_s": 0.5})
    started = time.monotonic()
    outcome, _ = run(task, n=8, mode=mode)
    assert outcome.status.ok, outcome.errors
    assert time.monotonic() - started < 8 * 0.5 / 2


def test_fault_02_a_run_that_never_returns_is_given_up_and_its_siblings_are_kept():
    task = Task("async_one", raw_task={"hang": 8})
    outcome, found = run(task, n=8, timeout_s=3.0)
    assert outcome.status.completed_runs == len(found) == 7
    assert [e.type for e in outcome.errors] == ["TimeoutError"]


def test_instances_are_reused_only_when_they_can_be_reset():
    async def main():
        runner = make_runner("sequential")
        for _ in range(3):
            await runner.run_task(Task("resettable"), 1, 2, 0)

    asyncio.run(main())
    assert len(INSTANCES) == 1
    assert INSTANCES[0].resets == 5


def test_an_instance_that_failed_is_not_used_again():
    async def main():
        runner = make_runner("sequential")
        task = Task("resettable", raw_task={"fail_calls": [1]})
        await runner.run_task(task, 1, 3, 0)

    asyncio.run(main())
    assert len(INSTANCES) == 2


def test_a_cancelled_sub_task_takes_its_workflow_with_it():
    async def main():
        runner = make_runner()
        task = Task("async_one", raw_task={"sleep_s": 600.0})
        running = asyncio.ensure_future(runner.run_task(task, 1, 2, 0))
        while len(CALLS) < 2:
            await asyncio.sleep(0)
        (state,) = runner.get_runner_state()
        assert state["workflow_id"] == "1//0"
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


def test_run_numbers_outside_the_group_are_refused():
    @WORKFLOWS.register_module("misnumbered", force=True)
    class Misnumbered(Base):
        can_repeat = True

        async def run_async(self):
            found = await self.model.generate_async("x", n=2)
            found[0].eid.run = 9
            return found

    outcome, _ = run(Task("misnumbered"), n=2)
    assert "run numbers [0, 9]" in str(outcome.status.message)


@WORKFLOWS.register_module("endless_group", force=True)
class EndlessGroup(Base):
    can_repeat = True

    async def run_async(self):
        self.task.raw_task["begun"].set()
        await asyncio.Event().wait()


@WORKFLOWS.register_module("endless_thread", force=True)
class EndlessThread(Base):
    can_repeat = True
    is_async = False

    def run(self):
        self.task.raw_task["loop"].call_soon_threadsafe(self.task.raw_task["begun"].set)
        while True:
            time.sleep(0.01)


@pytest.mark.parametrize("name", ["endless_group", "endless_thread", "simple_workflow"])
def test_a_recall_reaches_a_workflow_that_makes_all_runs_in_one_call(name):
    """Without it each cut batch waits until the patience for its attempts is over."""

    async def main():
        runner, begun = make_runner("asynchronous"), asyncio.Event()
        row = {"begun": begun, "loop": asyncio.get_running_loop(), "prompt": "hello"}
        task = Task(name, raw_task=row)
        if name == "simple_workflow":
            engine = FakeEngine(EngineSpec("e", "fake", "", {"fake_latency_s": 600.0}))
            cfg = {"max_response_tokens": 4, "max_prompt_tokens": 2048}
            runner = WorkflowRunner(lambda args: ModelWrapper(engine, TOKENIZER, cfg, args))
            task = simple()
            begun.set()
        with recallable("key"):
            attempt = asyncio.create_task(runner.run_task(task, 7, 3, timeout_s=600.0))
            await begun.wait()
            await asyncio.sleep(0.2)  # simple_workflow is then waiting for its answers
            assert not attempt.done()
            recall(["key"])
            _, payload = await asyncio.wait_for(attempt, 30)
        return outcome_of(payload)

    outcome = asyncio.run(main())
    assert [e.type for e in outcome.errors] == ["Recalled"] * 3


@WORKFLOWS.register_module("few", force=True)
class Few(Base):
    """A repeating workflow whose experiences have the (run, step) pairs of the row."""

    can_repeat = True

    async def run_async(self):
        pairs = self.task.raw_task["pairs"]
        found = await self.model.generate_async("x", n=len(pairs))
        for experience, (run_id, step) in zip(found, pairs, strict=True):
            experience.eid.run, experience.eid.step = run_id, step
            experience.metrics = {"run": float(run_id), "n:sum": 1.0}
        return found


@pytest.mark.parametrize(
    ("pairs", "completed", "runs"),
    [
        ([(0, 0), (0, 0)], 2, [0, 1]),  # not numbered: in order, the third run is missing
        ([(0, 0), (2, 0)], 2, [0, 2]),
        ([(0, 0), (0, 1), (0, 2)], 1, [0, 0, 0]),  # the steps of one run
        ([(0, 0), (0, 1), (1, 0), (2, 0), (2, 1)], 3, [0, 0, 1, 2, 2]),
        ([(0, 0), (0, 0), (0, 0), (0, 0)], 1, [0, 0, 0, 0]),
    ],
)
def test_a_repeating_workflow_counts_the_runs_that_came_back(pairs, completed, runs):
    outcome, found = run(Task("few", raw_task={"pairs": pairs}), n=3)
    assert (outcome.status.completed_runs, outcome.status.total_runs) == (completed, 3)
    assert [e.type for e in outcome.errors] == ["MissingRun"] * (3 - completed)
    assert [e.eid.run for e in found] == runs
    assert len(outcome.status.metrics) == completed
    assert outcome.status.ok is (completed == 3)


def test_more_experiences_than_runs_are_told_apart_from_missing_ones():
    outcome, _ = run(Task("few", raw_task={"pairs": [(0, 0)] * 7}), n=4)
    assert "4 runs were asked for and 7 experiences came back" in outcome.errors[0].message
    assert "run numbers [0]" in outcome.errors[0].message
    outcome, _ = run(Task("few", raw_task={"pairs": [(i, 0) for i in range(7)]}), n=4)
    assert "7 experiences carry run numbers" in outcome.errors[0].message


@WORKFLOWS.register_module("odd_ends", force=True)
class OddEnds(Base):
    """Fails with a very long message, or names a metric by a number."""

    async def run_async(self):
        if self.task.raw_task["long"]:
            raise ValueError("x" * 5_000_000)
        (experience,) = await self.model.generate_async("x")
        experience.metrics = {3: 1.0}
        return [experience]


@pytest.mark.parametrize("n", [1, 2])
def test_errors_are_short_and_say_what_is_wrong(n):
    outcome, _ = run(Task("odd_ends", raw_task={"long": True}), n=n)
    assert len(outcome.errors) == n
    assert outcome.errors[0].message == "x" * 2000 + "... (4998000 more characters)"
    assert len(str(outcome.status.message)) < 2200
    outcome, _ = run(Task("odd_ends", raw_task={"long": False}), n=n)
    assert outcome.errors[0].type == "TypeError"
    assert "a metric named 3, of type int; names" in outcome.errors[0].message


def test_metrics_of_a_run_with_several_steps_are_reduced_by_their_suffix():
    outcome, _ = run(Task("few", raw_task={"pairs": [(0, 0), (0, 1), (1, 0)]}), n=2)
    assert [(m["run"], m["n:sum"]) for m in outcome.status.metrics] == [(0.0, 2.0), (1.0, 1.0)]


@WORKFLOWS.register_module("temperature", force=True)
class Temperature(Base):
    """Its reward says how it sampled."""

    async def run_async(self):
        if self.task.raw_task.get("greedy_fails") and not self.heat():
            raise RuntimeError("greedy sampling fails here")
        (experience,) = await self.model.generate_async("hello", max_tokens=4)
        experience.reward = 10.0 + self.heat()
        others = [dataclasses.replace(experience) for _ in self.task.raw_task.get("more", [])]
        for other, reward in zip(others, self.task.raw_task.get("more", []), strict=True):
            other.reward = reward
        return [experience, *others]

    def heat(self):
        return self.model.generate_kwargs["temperature"]


@pytest.mark.parametrize("mode", MODES)
def test_remax_gets_the_reward_of_one_greedy_run_that_is_no_experience(mode):
    outcome, found = run(Task("temperature", greedy_baseline=True), n=3, base=1, mode=mode)
    assert outcome.status.completed_runs == len(found) == len(outcome.status.metrics) == 3
    assert len(INSTANCES) == 4
    assert [e.eid.run for e in found] == [1, 2, 3]
    assert {(e.reward, e.info["reward_baseline"]) for e in found} == {(11.0, 10.0)}
    assert {m["reward_baseline"] for m in outcome.status.metrics} == {10.0}


def test_the_reward_of_a_greedy_run_of_several_experiences_is_their_mean():
    row = {"more": [4.0, None]}
    _, found = run(Task("temperature", raw_task=row, greedy_baseline=True), n=1)
    assert len(found) == 3
    assert {e.info["reward_baseline"] for e in found} == {7.0}


def test_remax_without_its_baseline_is_a_failed_group_and_eval_needs_none():
    row = {"greedy_fails": True}
    outcome, found = run(Task("temperature", raw_task=row, greedy_baseline=True), n=3)
    assert outcome.status.completed_runs == 0
    assert found == []
    assert {e.message for e in outcome.errors} == {"greedy sampling fails here"}
    task = Task("temperature", raw_task=row, greedy_baseline=True, is_eval=True)
    outcome, _ = run(task, n=3)
    assert outcome.status.ok
    assert len(INSTANCES) == 4 + 3


@WORKFLOWS.register_module("remembers", force=True)
class Remembers(Base):
    """Two turns; returns what its model remembers, and shows a state meanwhile."""

    can_reset = True

    def reset(self, task):
        self.task = task

    async def run_async(self):
        self.behave()
        self.model.set_workflow_state({"turn": self.number, "runner_id": "mine"})
        await self.model.generate_async("a", max_tokens=4)
        await asyncio.sleep(0.01)
        await self.model.generate_async("b", max_tokens=4)
        if self.number in self.task.raw_task.get("fail_late", []):
            raise RuntimeError("late")
        return self.model.extract_experience_from_history(clear_history=False)


@pytest.mark.parametrize("mode", MODES)
def test_every_run_has_a_history_of_its_own_that_starts_empty(mode):
    async def main():
        runner = make_runner(mode, enable_history=True)
        task = Task("remembers", task_id=4, raw_task={"fail_late": [2]})
        payloads = [(await runner.run_task(task, 1, 4, 0))[1] for _ in range(2)]
        return payloads, runner.get_runner_state()

    payloads, (lane,) = asyncio.run(main())
    (first, found), (second, again) = map(unpack, payloads)
    assert (first.status.completed_runs, second.status.completed_runs) == (3, 4)
    assert len(found) == 6
    assert len(again) == 8
    assert len(INSTANCES[1].model.history) == 2  # of the failed run, for whoever looks
    assert lane["workflow_id"] == "1/4/0"
    assert lane["runner_id"] == "runner/0"  # a workflow cannot hide it
    assert 5 <= lane["turn"] <= 8
    assert (lane["repeat_cnt"], lane["model_version"]) == (4, 0)
    assert lane["terminate_time"] >= lane["begin_time"]


def test_runners_are_lanes_and_a_given_id_is_kept():
    async def main():
        runner = make_runner()
        slow = Task("async_one", raw_task={"sleep_s": 0.2})
        await asyncio.gather(*(runner.run_task(slow, 1, 1, 0) for _ in range(2)))
        await runner.run_task(Task("async_one"), 2, 1, 0)
        _, payload = await runner.run_task(Task("async_one"), 3, 1, 0, lane_number=17)
        return runner.get_runner_state(), unpack(payload)[0]

    lanes, outcome = asyncio.run(main())
    assert [lane["runner_id"] for lane in lanes] == ["runner/0", "runner/1", 17]
    assert [lane["workflow_id"] for lane in lanes] == ["2//0", "1//0", "3//0"]
    assert outcome.runner["runner_id"] == 17
    assert outcome.runner["workflow_id"] == "3//0"


def test_an_experience_without_versions_gets_those_of_the_model():
    @WORKFLOWS.register_module("handmade", force=True)
    class Handmade(Base):
        async def run_async(self):
            (experience,) = await self.model.generate_async("x")
            self.model.engine.model_version = 7
            experience.versions = None
            return [experience]

    _, (experience,) = run(Task("handmade"))
    assert experience.info["model_version"] == 0
    assert experience.info["model_version_drift"] == 7


def test_drift_is_that_of_the_tokens():
    @WORKFLOWS.register_module("drifting", force=True)
    class Drifting(Base):
        async def run_async(self):
            (experience,) = await self.model.generate_async("x", min_tokens=4)
            experience.versions[-1] = 3
            return [experience]

    _, (experience,) = run(Task("drifting"))
    assert (experience.info["model_version"], experience.info["model_version_drift"]) == (0, 3)


def test_tokens_that_no_model_sampled_have_no_part_in_version_and_drift():
    @WORKFLOWS.register_module("dialogue", force=True)
    class Dialogue(Base):
        async def run_async(self):
            (experience,) = await self.model.generate_async("x", min_tokens=8, max_tokens=8)
            experience.versions[:] = [5, 5, 5, -1, -1, *[6] * (len(experience.versions) - 5)]
            (other,) = await self.model.generate_async("x", min_tokens=2)
            other.versions[:] = -1
            return [experience, other]

    _, (experience, other) = run(Task("dialogue"))
    assert (experience.info["model_version"], experience.info["model_version_drift"]) == (5, 1)
    assert (other.info["model_version"], other.info["model_version_drift"]) == (0, 0)


@pytest.mark.parametrize("how", ["spin", "sleep"])
def test_fault_02_async_code_that_blocks_the_loop_is_interrupted_at_its_deadline(how):
    @WORKFLOWS.register_module("blocks", force=True)
    class Blocks(Base):
        async def run_async(self):
            if how == "sleep":
                time.sleep(600)
            while True:
                pass

    async def main():
        watch = LoopWatch("test")
        watch.start()
        try:
            runner = make_runner()
            neighbour = runner.run_task(Task("async_one", raw_task={"sleep_s": 0.3}), 1, 1, 0)
            stuck = runner.run_task(Task("blocks"), 1, 1, 0, True, 0.5)
            payloads = await asyncio.gather(neighbour, stuck)
            return [unpack(payload)[0] for _, payload in payloads], watch.max_lag_s(60)
        finally:
            watch.stop()

    (neighbour, stuck), lag = asyncio.run(main())
    assert neighbour.status.ok
    assert [e.type for e in stuck.errors] == ["LoopBlocked"]
    assert "asyncio.to_thread" in stuck.errors[0].message
    assert lag > 0.4
    assert stuck.runner["loop_lag_s"] > 0.4


def test_the_interruption_never_reaches_code_that_is_not_the_users():
    """A neighbour holds the loop while another one's deadline has passed."""

    @WORKFLOWS.register_module("waits", force=True)
    class Waits(Base):
        async def run_async(self):
            await asyncio.Event().wait()

    async def main():
        watch = LoopWatch("test")
        watch.start()
        try:
            runner = make_runner()
            late = asyncio.ensure_future(runner.run_task(Task("waits"), 1, 1, 0, True, 0.2))
            await asyncio.sleep(0.1)
            until = time.monotonic() + 2.0
            while time.monotonic() < until:  # ours, not user code
                pass
            return unpack((await late)[1])[0]
        finally:
            watch.stop()

    outcome = asyncio.run(main())
    assert [e.type for e in outcome.errors] == ["TimeoutError"]


@pytest.mark.parametrize("mode", MODES)
def test_a_blocking_thread_is_left_behind_and_counted(mode):
    release = threading.Event()

    @WORKFLOWS.register_module("stuck", force=True)
    class Stuck(Base):
        is_async = False

        def run(self):
            release.wait(60)  # a C call: nothing can interrupt it

    try:
        outcome, _ = run(Task("stuck"), n=2, mode=mode, timeout_s=0.3)
        assert {e.type for e in outcome.errors} <= {"StuckThread", "TimeoutError"}
        assert outcome.runner["abandoned_threads"] >= 1
    finally:
        release.set()


def test_without_partial_runs_the_others_say_why_they_ended():
    task = Task("async_one", raw_task={"fail_calls": [2]})
    for mode in MODES:
        CALLS.clear()
        outcome, _ = run(task, n=3, mode=mode, partial=False)
        assert not outcome.status.ok
        kinds = {e.type for e in outcome.errors}
        assert kinds <= {"RuntimeError", "SiblingFailed"}
        assert "RuntimeError" in kinds


def test_an_unknown_mode_names_the_modes():
    with pytest.raises(ValueError, match="sequential, asynchronous, multi-threading"):
        WorkflowRunner(lambda args: None, "parallel")


@WORKFLOWS.register_module("leaving", force=True)
class Leaving(Base):
    """Ends the process, or tries to, where the row says."""

    def __init__(self, task, model, auxiliary_models=None):
        super().__init__(task, model, auxiliary_models)
        self.leave("init")

    def leave(self, where):
        if self.task.raw_task["where"] == where:
            raise {"exit": SystemExit, "interrupt": KeyboardInterrupt}[self.task.raw_task["how"]](3)

    async def run_async(self):
        self.leave("call")
        await asyncio.sleep(0)
        self.leave("run")
        return await self.model.generate_async("hello", max_tokens=4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", ["init", "call", "run"])
@pytest.mark.parametrize("how", ["exit", "interrupt"])
def test_code_that_ends_the_process_costs_its_run_and_not_the_worker(mode, where, how):
    outcome, _ = run(Task("leaving", raw_task={"where": where, "how": how}), n=2, mode=mode)
    assert {error.type for error in outcome.errors} == {"RuntimeError"}
    name = {"exit": "SystemExit", "interrupt": "KeyboardInterrupt"}[how]
    assert {error.message for error in outcome.errors} == {f"user code raised {name}: 3"}
    assert len(outcome.errors) == 2


@pytest.mark.parametrize("how", ["gather", "create_task", "wait_for", "timeout", "group", "nested"])
def test_so_does_code_in_a_task_that_user_code_starts(how):
    async def leave():
        await asyncio.sleep(0)
        raise SystemExit(3)

    @WORKFLOWS.register_module("leaves_in_child", force=True)
    class LeavesInChild(Base):
        async def run_async(self):
            if how == "gather":
                await asyncio.gather(leave(), asyncio.sleep(5))
            elif how == "create_task":
                self.child = asyncio.create_task(leave())
                await asyncio.sleep(0.1)
                await self.child
            elif how == "wait_for":
                await asyncio.wait_for(leave(), 5)
            elif how == "timeout":
                async with asyncio.timeout(5):
                    await asyncio.ensure_future(leave())
            elif how == "nested":
                await asyncio.gather(asyncio.gather(leave()))
            else:
                async with asyncio.TaskGroup() as group:
                    group.create_task(leave())

    async def main():
        runner = make_runner()
        beside = runner.run_task(Task("async_one", raw_task={"sleep_s": 0.3}), 1)
        payloads = await asyncio.gather(beside, runner.run_task(Task("leaves_in_child"), 1))
        return [unpack(payload)[0] for _, payload in payloads]

    neighbour, outcome = asyncio.run(main())
    assert neighbour.status.ok
    (error,) = outcome.errors
    assert error.type == ("ExceptionGroup" if how == "group" else "RuntimeError")
    assert "user code raised SystemExit: 3" in error.traceback


@pytest.mark.parametrize("where", ["constructor", "reset"])
@pytest.mark.parametrize("is_asynchronous", [True, False])
def test_a_constructor_or_reset_that_does_not_return_costs_its_run(where, is_asynchronous):
    release = threading.Event()

    @WORKFLOWS.register_module("never_made", force=True)
    class NeverMade(Workflow):
        is_async, can_reset = is_asynchronous, True

        def __init__(self, task, model, auxiliary_models=None):
            super().__init__(task, model, auxiliary_models)
            self.block("constructor")

        def reset(self, task):
            self.task = task
            self.block("reset")

        def block(self, here):
            while here == where and not release.wait(0.05):
                continue

        def run(self):
            return self.model.generate("hello")

        async def run_async(self):
            return await self.model.generate_async("hello")

    async def main():
        watch = LoopWatch("test")
        watch.start()
        try:
            runner = make_runner()
            outcomes = []
            for _ in range(1 if where == "constructor" else 2):
                _, payload = await runner.run_task(Task("never_made"), 1, timeout_s=0.5)
                outcomes.append(unpack(payload)[0])
            _, healthy = await runner.run_task(Task("async_one"), 1, timeout_s=5.0)
            return outcomes, unpack(healthy)[0], watch.max_lag_s(60)
        finally:
            watch.stop()

    outcomes, healthy, lag = asyncio.run(main())
    release.set()
    expected = {True: "LoopBlocked", False: "TimeoutError"}[is_asynchronous]
    assert [e.type for e in outcomes[-1].errors] == [expected]
    assert all(outcome.status.ok for outcome in outcomes[:-1])
    assert healthy.status.ok
    assert is_asynchronous or lag < 0.4  # a thread holds nobody up


def test_a_blocking_workflow_that_waits_for_the_engine_can_be_given_up():
    cancelled = []

    @WORKFLOWS.register_module("asks_and_waits", force=True)
    class AsksAndWaits(Workflow):
        def run(self):
            return self.model.generate("hello")

    async def main():
        runner = make_runner()
        engine = runner._make_model({}).engine

        async def never(*_):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(True)
                raise

        engine.generate = never
        _, payload = await runner.run_task(Task("asks_and_waits"), 1, timeout_s=0.3)
        await asyncio.sleep(0.1)
        return unpack(payload)[0]

    outcome = asyncio.run(main())
    assert [e.type for e in outcome.errors] == ["TimeoutError"]
    assert outcome.runner["abandoned_threads"] == 0  # or its worker would be started again
    assert cancelled == [True]  # nor does the engine go on with it


def test_an_attempt_that_cleans_up_does_not_disturb_the_next_one_in_its_lane():
    @WORKFLOWS.register_module("slow_to_leave", force=True)
    class SlowToLeave(Base):
        async def run_async(self):
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0.3)

    async def main():
        runner = make_runner()
        cut = asyncio.ensure_future(runner.run_task(Task("slow_to_leave"), 1, lane_number=0))
        await asyncio.sleep(0.1)
        cut.cancel()
        await asyncio.sleep(0.05)
        task = Task("async_one", raw_task={"sleep_s": 0.6})
        _, payload = await runner.run_task(task, 2, lane_number=0)
        assert cut.done()
        (lane,) = runner.get_runner_state()
        return unpack(payload)[0], lane

    outcome, lane = asyncio.run(main())
    assert outcome.status.ok, outcome.errors
    assert lane["workflow_id"].startswith("2/")
    assert lane["model_version"] == 0


def test_a_cancelled_caller_of_a_workflow_is_cancelled():
    async def main():
        task = Task("async_one", raw_task={"hang": 1})
        call = asyncio.ensure_future(make_runner().run_task(task, 7, timeout_s=60.0))
        while not CALLS:
            await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(main())
