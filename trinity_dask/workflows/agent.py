"""A run is a program of the user's that talks to the model by an OpenAI client.

Invariant: what is trained on is what the model sampled in that run and nothing else; an agent
that raises, asks nothing, or is given no reward is a failed run, never a reward of 0.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any, Optional

from trinity_dask.experience import RESPONSE_TRUNCATED, Experience
from trinity_dask.experience.task import Task
from trinity_dask.registry import load_object
from trinity_dask.serve.endpoint import Session, endpoint
from trinity_dask.workflows.scoring import Reward, score_all
from trinity_dask.workflows.simple import facts_of
from trinity_dask.workflows.threads import run_in_thread
from trinity_dask.workflows.workflow import Workflow


class AgentWorkflow(Workflow):
    """``workflow_args.agent`` names ``agent(task, client)``: a function, async or not, or a class
    whose instances are called so. ``client`` is an ``openai.AsyncOpenAI`` whose ``base_url`` and
    ``api_key`` any other client can use. It returns a number, a dict of named numbers whose sum
    is the reward, or None: then ``workflow_args.judge`` (``judge(task, messages)``) or the
    taskset's reward function says what the dialogue was worth.

    ``agent_args`` are passed to the agent by name. Every path through the dialogue is an
    experience with the run's reward.
    """

    is_async = True

    def __init__(
        self, task: Task, model: Any, auxiliary_models: Optional[Sequence[Any]] = None
    ) -> None:
        super().__init__(task, model, auxiliary_models)
        args = task.workflow_args
        if not args.get("agent"):
            raise ValueError(
                "workflow 'agent' needs workflow_args.agent: 'file.py:name' of an "
                "agent(task, client)"
            )
        self.agent = load_object(str(args["agent"]))
        self.judge = load_object(str(args["judge"])) if args.get("judge") else None
        self.agent_args = dict(args.get("agent_args") or {})

    async def run_async(self) -> list[Experience]:
        """The run's experiences.

        Raises:
            ValueError: the agent asked nothing, or nobody says what the run is worth.
        """
        here = endpoint()
        session = await here.open(self.model)
        try:
            found = await self._call(
                self._agent(), self.task, here.client(session), **self.agent_args
            )
            experiences = self.model.dialogue_experiences()
            if not experiences:
                raise ValueError(f"the agent {self.task.workflow_args['agent']} asked nothing")
            parts = await self._reward(found, experiences)
        finally:
            here.close(session)
        return [self._paid(e, step, parts, session) for step, e in enumerate(experiences)]

    def _agent(self) -> Any:
        return self.agent() if inspect.isclass(self.agent) else self.agent

    async def _call(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        """The function's value; one that is not async runs in a thread."""
        target = fn if inspect.isroutine(fn) else fn.__call__
        if inspect.iscoroutinefunction(target):
            return await fn(*args, **kwargs)
        value = await run_in_thread(
            lambda: fn(*args, **kwargs), timeout_s=self.time_limit_s, name="agent"
        )
        return await value if inspect.isawaitable(value) else value

    async def _reward(self, found: Any, experiences: Sequence[Experience]) -> dict[str, float]:
        last = experiences[-1]
        if found is None and self.judge is not None:
            found = await self._call(self.judge, self.task, last.messages)
        if found is None and self.task.reward_fn is not None:
            reward = Reward.load(self.task.reward_fn, self.task.reward_fn_args)
            assert last.messages is not None
            facts = facts_of(reward, self.task, last, self.model.tokenizer) | {
                "response": str(last.messages[-1].get("content") or ""),
                "prompt": self.task.task_desc,
            }
            (score,) = await score_all(reward, [facts], self.time_limit_s or math.inf)
            if isinstance(score, Exception):
                raise score
            return score
        if found is None:
            raise ValueError(
                "the agent returned None, and there is no workflow_args.judge and no reward_fn "
                "to say what the run is worth"
            )
        parts = {str(k): float(v) for k, v in found.items()} if isinstance(found, dict) else None
        return {"reward": float(found)} if parts is None else parts

    def _paid(
        self, experience: Experience, step: int, parts: dict[str, float], session: Session
    ) -> Experience:
        experience.eid.step = step
        experience.reward = sum(parts.values())
        if session.overflowed:  # the dialogue ended for want of room, not because it was done
            experience.truncate_status = experience.truncate_status or RESPONSE_TRUNCATED
        experience.metrics = {
            **parts,
            "reward": experience.reward,
            "agent/turns": float(experience.info["turns"]),
            "agent/requests": float(session.requests),
            "agent/overflowed": float(session.overflowed),
        }
        return experience
