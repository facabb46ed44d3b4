"""One question, n sampled answers, one reward each.

Invariant: a group is one engine request with ``n`` samples; every answer that can be scored
is returned, and every answer that cannot is reported as a failed run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

from trinity_dask.buffer.data.prompts import Prompt, prompt_of
from trinity_dask.config.schema import FormatConfig
from trinity_dask.experience import PROMPT_TRUNCATED, RESPONSE_TRUNCATED, Experience
from trinity_dask.experience.task import Task
from trinity_dask.workflows.scoring import REWARD_TIMEOUT_S, Facts, Reward, Score, score_all
from trinity_dask.workflows.workflow import PartialGroupError, Workflow

WITH_SPECIAL_TOKENS = "response_with_special_tokens"
THINK_SYSTEM_PROMPT = (
    "Reason step by step inside <think> </think>, then give the final result inside "
    "<answer> </answer>, for example: <think> reasoning </think> <answer> result </answer>."
)


class SimpleWorkflow(Workflow):
    """System prompt and question in, one answer out; the reward function scores it.

    ``workflow_args``: ``reward_timeout_s`` (30) bounds the scoring of one answer;
    ``reward_in_process`` (false) calls the reward in a helper process that can be killed.
    """

    can_reset = True
    can_repeat = True
    is_async = True

    default_reward_fn: Optional[str] = None
    default_system_prompt: Optional[str] = None

    def __init__(
        self, task: Task, model: Any, auxiliary_models: Optional[Sequence[Any]] = None
    ) -> None:
        super().__init__(task, model, auxiliary_models)
        self.reset(task)

    def reset(self, task: Task) -> None:
        """Serve ``task``. Raises ValueError without a reward function, LoadError for a bad one."""
        self.task = task
        name = task.reward_fn or self.default_reward_fn
        if name is None:
            raise ValueError(
                f"workflow {task.workflow!r} needs a reward function; set taskset.reward_fn or "
                "explorer_input.default_reward_fn"
            )
        in_process = bool(task.workflow_args.get("reward_in_process", False))
        self.reward = Reward.load(name, task.reward_fn_args, in_process)
        self.reward_timeout_s = float(task.workflow_args.get("reward_timeout_s", REWARD_TIMEOUT_S))

    async def run_async(self) -> list[Experience]:
        """The group's experiences.

        Raises:
            PartialGroupError: some answers could not be scored.
            Exception: whatever the engine or, for all answers, the reward raised.
        """
        experiences = await self.sample(self.repeat_times)
        scores = await self.score(experiences)
        kept: list[Experience] = []
        errors: list[BaseException] = []
        for run, (experience, score) in enumerate(zip(experiences, scores, strict=True)):
            experience.eid.run = self.run_id_base + run
            if experience.truncate_status == PROMPT_TRUNCATED:
                score = {"reward": 0.0}  # nothing was sampled; the row is masked
            if isinstance(score, Exception):
                errors.append(score)
                continue
            experience.reward = sum(score.values())
            experience.metrics = {**score, "reward": experience.reward}
            kept.append(experience)
        if errors:
            raise PartialGroupError(kept, errors)
        return kept

    async def sample(self, n: int) -> list[Experience]:
        """``n`` answers to the task's prompt."""
        prompt = self.prompt()
        if prompt.text is not None:
            return await self.model.generate_async(prompt.text, n=n)
        return await self.model.chat_async(prompt.chat, tools=prompt.tools, n=n)

    def prompt(self) -> Prompt:
        """What the row asks. Raises DataError (file, row, column) when it is no text."""
        where = self.task.source or f"task {self.task.index}"
        fmt = FormatConfig(**self.task.format_args)
        return prompt_of(self.task.raw_task, fmt, where, self.default_system_prompt)

    async def score(self, experiences: Sequence[Experience]) -> list[Score]:
        """Reward parts, or the error, of each answer."""
        limit = self.reward_timeout_s
        if self.time_limit_s is not None:
            # a stuck reward must leave the attempt the time to report the others
            limit = min(limit, self.time_limit_s / 2)
        return await score_all(self.reward, [self.facts(e) for e in experiences], limit)

    def facts(self, experience: Experience) -> Facts:
        """What a reward function may ask for."""
        return facts_of(self.reward, self.task, experience, self.model.tokenizer)


def facts_of(reward: Reward, task: Task, experience: Experience, tokenizer: Any) -> dict[str, Any]:
    """What ``reward`` may ask for about an answer."""
    truncated = experience.truncate_status == RESPONSE_TRUNCATED
    tokens = experience.tokens[experience.prompt_length :]
    more: dict[str, Any] = {}
    if reward.names(WITH_SPECIAL_TOKENS):  # decoded again only for who asks
        more[WITH_SPECIAL_TOKENS] = tokenizer.decode(tokens, skip_special_tokens=False)
    return {
        **more,
        "response": experience.response_text or "",
        "truth": task.truth,
        "prompt": experience.prompt_text or task.task_desc,
        "finish_reason": "length" if truncated else "stop",
        "tokens": tokens,
        "raw_task": task.raw_task,
    }


class MathWorkflow(SimpleWorkflow):
    """Asks for reasoning and a final answer; ``math_reward`` scores it by default."""

    default_reward_fn = "math_reward"
    default_system_prompt = THINK_SYSTEM_PROMPT
