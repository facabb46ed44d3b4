"""Scoring answers with a user's reward function.

Invariant: a reward that raises, returns no number, or does not return in time is an error
of that one answer, never the number 0, and costs the other answers nothing.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trinity_dask.aio import ended
from trinity_dask.cluster.loop_watch import Interrupted, user_task
from trinity_dask.registry import load_plugin_files, plugin_files
from trinity_dask.rewards import REWARD_FUNCTIONS
from trinity_dask.rewards.process import WAITING, Waiting, call_in_process
from trinity_dask.workflows.threads import ThreadCall, explained

REWARD_TIMEOUT_S = 30.0
LOOK_S = 0.25

Facts = Mapping[str, Any]


class RewardError(RuntimeError):
    """A reward function raised, returned something that is no number, or never returned."""


class Reward:
    """A reward function with its fixed arguments.

    ``fn`` is a function (or a class, then constructed with ``args``) called with the facts
    it names out of ``response``, ``truth``, ``prompt``, ``finish_reason``, ``tokens`` and
    ``raw_task``; with ``**kwargs`` it gets all of them. ``response_with_special_tokens`` it gets
    only by that name. It returns a number, or a dict of
    named numbers whose sum is the reward.
    """

    def __init__(self, name: str, fn: Any, args: Mapping[str, Any]) -> None:
        self.name = name
        is_class = inspect.isclass(fn)
        self._fn: Callable[..., Any] = fn(**args) if is_class else fn
        self._fixed = {} if is_class else dict(args)
        self.is_async = inspect.iscoroutinefunction(self._fn) or inspect.iscoroutinefunction(
            getattr(self._fn, "__call__", None)  # noqa: B004  (an instance with an async __call__)
        )
        parameters = inspect.signature(self._fn).parameters.values()
        self._named = frozenset(p.name for p in parameters if p.kind not in _VARIADIC)
        self._takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)

    @classmethod
    def load(cls, name: str, args: Mapping[str, Any], in_process: bool = False) -> Reward:
        """By registered name, dotted path or ``file.py:name``. Raises LoadError.

        With ``in_process`` it is called in a helper process, which is killed when a call does
        not return.
        """
        kind = ProcessReward if in_process else cls
        return kind(name, REWARD_FUNCTIONS.get(name), args)

    def names(self, parameter: str) -> bool:
        """Whether the function has a parameter of that name (``**kwargs`` does not count)."""
        return parameter in self._named

    def arguments(self, facts: Facts) -> dict[str, Any]:
        if self._takes_all:
            return {**facts, **self._fixed}
        known = {key: value for key, value in facts.items() if key in self._named}
        return {**known, **self._fixed}

    def call(self, facts: Facts) -> Any:
        """The raw value (a coroutine when ``is_async``)."""
        return self._fn(**self.arguments(facts))

    def parts(self, value: Any) -> dict[str, float]:
        """The named parts of a returned value; a bare number is named ``reward``.

        Raises:
            RewardError: a part is not a finite number, or there is none.
        """
        named = dict(value) if isinstance(value, Mapping) else {"reward": value}
        if not named:
            raise RewardError(f"reward {self.name} returned an empty dict; it needs a number")
        return {str(key): self._number(key, part) for key, part in named.items()}

    def _number(self, key: Any, value: Any) -> float:
        if not isinstance(value, numbers.Real) and not hasattr(value, "item"):
            raise RewardError(
                f"reward {self.name} returned {type(value).__name__} for {key!r}; it must be a "
                "number (or a dict of numbers)"
            )
        number = float(value)
        if not math.isfinite(number):
            raise RewardError(f"reward {self.name} returned {number} for {key!r}, not a number")
        return number


class ProcessReward(Reward):
    """A reward that is called in a helper process. It must be found by its name there."""

    def __init__(self, name: str, fn: Any, args: Mapping[str, Any]) -> None:
        super().__init__(name, fn, args)
        self._args = dict(args)
        if self.is_async:
            raise RewardError(f"reward {name} is async and cannot be called in a process")

    def call(self, facts: Facts) -> Any:
        reward = (tuple(plugin_files()), self.name, self._args)
        target = f"{__name__}:call_here"
        return call_in_process(
            target, (*reward, dict(facts)), first=(f"{__name__}:load_here", reward)
        )


def load_here(plugins: Sequence[str], name: str, args: dict[str, Any]) -> None:
    """In the helper process: have the reward ``name`` ready."""
    key = (tuple(plugins), name, repr(args))
    if key not in _rewards_here:
        load_plugin_files(plugins)
        _rewards_here[key] = Reward.load(name, args)


def call_here(plugins: Sequence[str], name: str, args: dict[str, Any], facts: Facts) -> Any:
    """In the helper process: the raw value of the reward ``name``."""
    return _rewards_here[tuple(plugins), name, repr(args)].call(facts)


_rewards_here: dict[Any, Reward] = {}


_VARIADIC = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
Score = dict[str, float] | Exception


async def score_all(
    reward: Reward, facts: Sequence[Facts], timeout_s: float = REWARD_TIMEOUT_S
) -> list[Score]:
    """The parts of every answer's reward, or the exception that answer's reward failed with.

    ``timeout_s`` bounds each answer, without the time it waits for a helper process. A
    synchronous reward runs in a thread (one for all answers, and a new one after an answer that
    ran out of time).
    """
    if reward.is_async:
        return list(await asyncio.gather(*(_score_async(reward, f, timeout_s) for f in facts)))
    scores: list[Score] = []
    while len(scores) < len(facts):
        scores += await _score_until_stuck(reward, facts[len(scores) :], timeout_s)
    return scores


async def _score_async(reward: Reward, facts: Facts, timeout_s: float) -> Score:
    started = time.monotonic()
    WAITING.set(waiting := Waiting())  # of what it calls in threads
    call = user_task(_awaited(reward, facts), started + timeout_s, f"reward {reward.name}")
    try:
        while (left := _left_s(started + timeout_s, waiting)) > 0:
            if (await asyncio.wait({call}, timeout=left))[0]:
                return reward.parts(call.result())
        return _too_slow(reward, timeout_s)
    except (TimeoutError, Interrupted):
        return _too_slow(reward, timeout_s)
    except Exception as error:  # a failed answer is data for the caller
        return error
    finally:
        await ended([call])


def _left_s(deadline: float, waiting: Waiting) -> float:
    """Seconds until it is time to look again; 0 when the time is over, without what waited."""
    left = deadline + waiting.seconds() - time.monotonic()
    # as much remains as long as it waits
    return max(left, LOOK_S) if waiting.now and left > 0 else max(left, 0.0)


async def _awaited(reward: Reward, facts: Facts) -> Any:
    return await reward.call(facts)


async def _score_until_stuck(
    reward: Reward, facts: Sequence[Facts], timeout_s: float
) -> list[Score]:
    """Scores of the first answers; the last one is an error if its reward got stuck."""
    progress = _Progress()
    call = ThreadCall(_score_each, reward, facts, progress, name=f"reward {reward.name}")
    try:
        while True:
            index, started, waiting = progress.current
            left = _left_s(started + timeout_s, waiting)
            if left <= 0:
                scored = progress.scores[:index]
                await call.give_up()
                return [*scored, _too_slow(reward, timeout_s)]
            done, _ = await asyncio.wait({call.future}, timeout=left)
            if done:
                call.future.result()
                return progress.scores
    except asyncio.CancelledError:
        call.leave()
        raise


class _Progress:
    """Written by the scoring thread, read by the event loop.

    ``current`` is the answer being scored, since when, and how long of that it waited for a
    helper process; replaced as one object so that the reader never blames an answer for the
    time of its neighbour.
    """

    def __init__(self) -> None:
        self.scores: list[Score] = []
        self.current = (0, time.monotonic(), Waiting())


def _score_each(reward: Reward, facts: Sequence[Facts], progress: _Progress) -> None:
    for index, answer in enumerate(facts):
        progress.current = (index, time.monotonic(), waiting := Waiting())
        WAITING.set(waiting)
        try:
            score: Score = reward.parts(reward.call(answer))
        except Exception as error:  # a failed answer is data for the caller
            score = RewardError(str(better)) if (better := explained(error)) is not error else error
        except SystemExit as error:  # no reason to end the worker
            score = RewardError(f"reward {reward.name} called sys.exit({error.code!r})")
        progress.scores.append(score)


def _too_slow(reward: Reward, timeout_s: float) -> RewardError:
    return RewardError(f"reward {reward.name} did not return within {timeout_s:g} s")
