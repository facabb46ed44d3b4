"""The model as a workflow sees it: text or messages in, experiences out.

Invariant: an experience holds the ids that were sampled, never ids made from text again, and
the prompt of a later turn begins with exactly those of the turns before it
(:class:`~trinity_dask.models.conversation.Conversation`); an answer cut at its length limit
says so; and a prompt that is too long is never sampled from, it becomes experiences that no
loss can see.
"""

from __future__ import annotations

import asyncio
import bisect
import concurrent.futures
import copy
import hashlib
import itertools
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, is_dataclass, replace
from typing import Any, Optional

import numpy as np

from trinity_dask.experience import PROMPT_TRUNCATED, RESPONSE_TRUNCATED, Experience
from trinity_dask.models.conversation import Conversation, NextPrompt, Row, Turn
from trinity_dask.models.protocol import (
    FINISH_LENGTH,
    Completion,
    InferenceEngine,
    SamplingParams,
)
from trinity_dask.models.tokenizer import decode_all, load_tokenizer

__all__ = ["ModelWrapper", "Prompts", "load_tokenizer"]

log = logging.getLogger("trinity_dask.models")

Prompts = str | list[int] | list[str]
TRUNCATED_TEXT = "[the prompt was longer than model.max_prompt_tokens; nothing was sampled]"
_SAMPLING_NAMES = frozenset(SamplingParams.__dataclass_fields__)
STOPPED_BY_TEXT = "stop_text"  # a finish reason: the model has not ended its turn itself
PIECE_S = 0.1  # of a thread's wait
_ids = itertools.count()


class PromptTooLong(ValueError):
    """There is no room in the model for what was asked."""


class ModelWrapper:
    """Samples from one engine with one tokenizer and one set of sampling defaults.

    ``model_cfg`` is a :class:`~trinity_dask.config.schema.ModelConfig` or its dict;
    ``rollout_args`` (``temperature``, ``top_p``, ``top_k``, ``max_tokens``; None inherits)
    override it, and keywords of a call override both. With ``request_seed``, a request that
    brings no seed gets one made from it, the run's name and the request's number in the run.

    The coroutines run on the event loop that made the wrapper (or ``loop``); the plain
    methods are for threads and wait for that loop.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        tokenizer: Any,
        model_cfg: Any,
        rollout_args: Optional[Mapping[str, Any]] = None,
        *,
        enable_history: bool = False,
        request_seed: Optional[int] = None,
        loop: Optional[asyncio.AbstractEventLoop] = None,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.model_cfg: dict[str, Any] = as_dict(model_cfg)
        self.model_path: str = self.model_cfg.get("model_path", "")
        cfg, own = self.model_cfg, as_dict(rollout_args or {})
        self.generate_kwargs = {
            "temperature": cfg.get("temperature", 1.0),
            "top_p": cfg.get("top_p", 1.0),
            "top_k": cfg.get("top_k", -1),
            "max_tokens": cfg.get("max_response_tokens"),
            "min_tokens": cfg.get("min_response_tokens", 0),
        } | {name: value for name, value in own.items() if value is not None}
        self.enable_history = enable_history
        self.history: list[Experience] = []
        self.request_count = 0
        self._state: dict[str, Any] = {}
        self._request_seed = request_seed
        self._run_name, self._requests_of_run = "", itertools.count()
        self._loop = loop or _running_loop()
        self._warned: set[str] = set()
        self._conversation = Conversation(tokenizer)

    @property
    def model_version(self) -> int:
        """Version of the weights that the engine samples with now."""
        return self.engine.model_version

    # sampling ---------------------------------------------------------------------------
    async def generate_async(self, prompts: Prompts, **sampling: Any) -> list[Experience]:
        """Sample ``n`` (default 1) answers to each prompt, in order, prompt by prompt.

        ``prompts`` is one text, one list of token ids, or a list of texts; texts are
        tokenised as they are, without the chat template.

        Raises:
            ValueError: a prompt or a sampling parameter is out of range.
            TimeoutError: the engine did not answer in ``request_timeout_s``.
        """
        if isinstance(prompts, str):
            ids = self.tokenizer.encode(prompts)
            return await self._sample(ids, sampling, prompt_text=prompts)
        if not prompts:
            raise ValueError("generate needs a prompt (got an empty list)")
        if not isinstance(prompts[0], str):
            ids = [int(token) for token in prompts]
            return await self._sample(ids, sampling, prompt_text=self.tokenizer.decode(ids))
        encode = self.tokenizer.encode
        calls = [self._sample(encode(str(p)), sampling, prompt_text=str(p)) for p in prompts]
        return [experience for group in await asyncio.gather(*calls) for experience in group]

    async def chat_async(
        self,
        messages: list[dict[str, Any]],
        tools: Optional[list[dict[str, Any]]] = None,
        **sampling: Any,
    ) -> list[Experience]:
        """Sample ``n`` (default 1) assistant turns that follow ``messages``.

        The chat template is applied with the generation prompt. A last message of the
        assistant's is a reply that has begun, and is continued. Where ``messages`` go on from
        a turn of this run, the prompt begins with that turn's ids as they were sampled;
        ``info["parent"]`` is then that turn's number among the run's (from 0), else absent.
        """
        asked = self._conversation.prompt(messages, tools)
        extra = {"messages": messages, "tools": tools}
        return await self._sample(asked.ids, sampling, asked.text, asked, **extra)

    async def turns_async(
        self,
        messages: list[dict[str, Any]],
        tools: Optional[list[dict[str, Any]]] = None,
        *,
        stop: Sequence[str] = (),
        read: Optional[Callable[[str, str], dict[str, Any]]] = None,
        **sampling: Any,
    ) -> list[Turn]:
        """Sample ``n`` (default 1) replies as turns of the run's dialogue.

        An answer is cut after the token with which one of the texts ``stop`` is in it, and its
        message before that text. ``read`` makes the message of a reply from its text with special
        tokens and the prompt's text. ``max_tokens`` is at most the run's own.

        Raises:
            PromptTooLong: there is no room for the prompt, or for an answer to it.
        """
        asked = self._conversation.prompt(messages, tools)
        room = int(self.model_cfg.get("max_model_len") or 1 << 31) - 1
        limit = min(int(self.model_cfg.get("max_prompt_tokens") or room), room)
        if len(asked.ids) > limit:
            raise PromptTooLong(
                f"the prompt has {len(asked.ids)} tokens, and there is room for {limit} "
                "(model.max_prompt_tokens, model.max_model_len)"
            )
        wanted = sampling.pop("max_tokens", None)
        params = self._params(sampling, len(asked.ids))
        if wanted is not None:
            params = replace(params, max_tokens=min(int(wanted), params.max_tokens))
        self.request_count += 1
        completions = await self.engine.generate(asked.ids, params, f"r{next(_ids)}")
        turns = [self._turn(asked, c, messages, tools, stop, read) for c in completions]
        if self.enable_history:
            extra = {"messages": messages, "tools": tools}
            answers = [turn.completion for turn in turns]
            self.history.extend(self._experiences(asked.ids, answers, asked.text, extra))
        return turns

    def _turn(
        self,
        asked: NextPrompt,
        completion: Completion,
        messages: list[dict[str, Any]],
        tools: Optional[list[dict[str, Any]]],
        stop: Sequence[str],
        read: Optional[Callable[[str, str], dict[str, Any]]],
    ) -> Turn:
        completion, end = cut_at_stop(completion, stop, self.tokenizer)
        shown = self.tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=False)
        message = read(shown if end is None else shown[:end], asked.text) if read else None
        return self._conversation.add(asked, completion, messages, tools, message=message)

    async def logprobs_async(
        self, tokens: Sequence[int], temperature: Optional[float] = None
    ) -> np.ndarray:
        """Log-prob of every token after the first, float32 ``[len(tokens) - 1]``.

        ``temperature`` defaults to the sampling temperature.
        """
        heat = self.generate_kwargs["temperature"] if temperature is None else temperature
        return await self.engine.logprobs([int(token) for token in tokens], float(heat))

    async def _sample(
        self,
        prompt: list[int],
        overrides: dict[str, Any],
        prompt_text: str,
        asked: Optional[NextPrompt] = None,
        **extra: Any,
    ) -> list[Experience]:
        params = self._params(overrides, len(prompt))
        limit = self.model_cfg.get("max_prompt_tokens")
        if limit and len(prompt) > limit and self.model_cfg.get("enable_prompt_truncation", True):
            experiences = self._too_long(prompt, int(limit), params.n, prompt_text, extra)
        else:
            self.request_count += 1
            completions = await self.engine.generate(prompt, params, f"r{next(_ids)}")
            experiences = self._experiences(prompt, completions, prompt_text, extra)
            if asked is not None:
                self._note(asked, completions, experiences)
        if self.enable_history:
            self.history.extend(experiences)
        return experiences

    def _params(self, overrides: dict[str, Any], prompt_length: int) -> SamplingParams:
        for name in overrides.keys() - _SAMPLING_NAMES - self._warned:
            self._warned.add(name)
            log.warning("sampling parameter %r is not supported and has no effect", name)
        merged = {**self.generate_kwargs, **overrides}
        if merged.get("max_tokens") is None:
            length = self.model_cfg.get("max_model_len")
            if not length:
                raise ValueError(
                    "the longest answer is unknown; set model.max_response_tokens, "
                    "model.max_model_len, or pass max_tokens"
                )
            merged["max_tokens"] = max(int(length) - prompt_length, 1)
        if merged.get("seed") is None and self._request_seed is not None:
            text = f"{self._request_seed}/{self._run_name}/{next(self._requests_of_run)}"
            draw = hashlib.blake2b(text.encode(), digest_size=4).digest()
            merged["seed"] = int.from_bytes(draw, "little")
        merged["stop_token_ids"] = tuple(merged.get("stop_token_ids") or ())
        return SamplingParams(**{k: v for k, v in merged.items() if k in _SAMPLING_NAMES})

    def begin_run(self, name: str) -> None:
        """What is asked from now on belongs to run ``name`` (batch/task/run)."""
        self._run_name, self._requests_of_run = name, itertools.count()
        self._conversation = Conversation(self.tokenizer)

    def get_message_token_len(self, messages: list[dict[str, Any]]) -> int:
        """Tokens of ``messages`` under the chat template, with the generation prompt."""
        return len(self._conversation.prompt(messages).ids)

    # experiences ------------------------------------------------------------------------
    def _experiences(
        self,
        prompt: list[int],
        completions: list[Completion],
        prompt_text: str,
        extra: dict[str, Any],
    ) -> list[Experience]:
        head = np.asarray(prompt, dtype=np.int32)
        texts = decode_all(self.tokenizer, [c.token_ids.tolist() for c in completions])
        return [
            Experience(
                tokens=np.concatenate([head, completion.token_ids]),
                prompt_length=len(head),
                logprobs=completion.logprobs,
                versions=completion.versions,
                truncate_status=(
                    RESPONSE_TRUNCATED if completion.finish_reason == FINISH_LENGTH else None
                ),
                prompt_text=prompt_text,
                response_text=text,
                info={"finish_reason": completion.finish_reason},
                **extra,
            )
            for completion, text in zip(completions, texts, strict=True)
        ]

    def _note(
        self, asked: NextPrompt, completions: list[Completion], experiences: list[Experience]
    ) -> None:
        """The answers are turns of the run's dialogue."""
        for completion, experience in zip(completions, experiences, strict=True):
            if asked.parent is not None:
                experience.info["parent"] = asked.parent.number
            assert experience.messages is not None
            self._conversation.add(
                asked, completion, experience.messages, experience.tools, experience.response_text
            )

    def dialogue_experiences(self) -> list[Experience]:
        """What this run has sampled by :meth:`chat_async`, one experience for each path through
        its dialogue.

        A path's response is all that follows its first prompt; what nobody sampled in it, and
        what a path before it trains already, is out of its action mask. The log-prob of every
        sampled token is that of its sampling, and one pass over the path gives the same.
        """
        return [self._path(row) for row in self._conversation.rows()]

    def _path(self, row: Row) -> Experience:
        first, leaf = row.turns[0], row.turns[-1]
        reason = leaf.completion.finish_reason
        return Experience(
            tokens=row.tokens,
            prompt_length=row.prompt_length,
            logprobs=row.logprobs,
            versions=row.versions,
            action_mask=row.mask,
            truncate_status=RESPONSE_TRUNCATED if reason == FINISH_LENGTH else None,
            prompt_text=first.prompt_text,
            response_text=self.tokenizer.decode(
                row.tokens[row.prompt_length :].tolist(), skip_special_tokens=True
            ),
            messages=[*leaf.messages, leaf.message],
            tools=leaf.tools,
            info={"finish_reason": reason, "turns": len(row.turns)},
        )

    def _too_long(
        self, prompt: list[int], limit: int, n: int, prompt_text: str, extra: dict[str, Any]
    ) -> list[Experience]:
        """``n`` experiences that keep the group whole: one token that no loss sees."""
        return [
            Experience(
                tokens=np.asarray(prompt[: limit + 1], dtype=np.int32),
                prompt_length=limit,
                logprobs=np.zeros(1, dtype=np.float32),
                versions=np.full(1, self.model_version, dtype=np.int32),
                action_mask=np.zeros(1, dtype=np.bool_),
                reward=0.0,
                truncate_status=PROMPT_TRUNCATED,
                prompt_text=prompt_text,
                response_text=TRUNCATED_TEXT,
                info={"finish_reason": PROMPT_TRUNCATED},
                **extra,
            )
            for _ in range(n)
        ]

    # history and state ------------------------------------------------------------------
    def extract_experience_from_history(self, clear_history: bool = True) -> list[Experience]:
        """Everything sampled since history was last cleared.

        Raises:
            ValueError: the wrapper does not keep history.
        """
        if not self.enable_history:
            raise ValueError(
                "this ModelWrapper keeps no history; make it with enable_history=True or use "
                "clone_with_isolated_history()"
            )
        experiences = list(self.history)
        if clear_history:
            self.history.clear()
        return experiences

    def clone_with_isolated_history(self) -> ModelWrapper:
        """The same model and sampling defaults, with a history and state of its own."""
        clone = copy.copy(self)
        clone.generate_kwargs = dict(self.generate_kwargs)
        clone.history = []
        clone._state = {}
        clone._conversation = Conversation(self.tokenizer)
        return clone

    def set_workflow_state(self, state: Mapping[str, Any]) -> None:
        self._state.update(state)

    def get_workflow_state(self) -> dict[str, Any]:
        return dict(self._state)

    def clean_workflow_state(self) -> None:
        """Forget the workflow's state and the history."""
        self._state = {}
        self.history.clear()

    # for threads ------------------------------------------------------------------------
    def generate(self, prompts: Prompts, **sampling: Any) -> list[Experience]:
        """:meth:`generate_async` for a thread other than the event loop's."""
        return self._wait(self.generate_async(prompts, **sampling))

    def chat(self, messages: list[dict[str, Any]], **sampling: Any) -> list[Experience]:
        """:meth:`chat_async` for a thread other than the event loop's."""
        return self._wait(self.chat_async(messages, **sampling))

    def logprobs(self, tokens: Sequence[int], temperature: Optional[float] = None) -> np.ndarray:
        """:meth:`logprobs_async` for a thread other than the event loop's."""
        return self._wait(self.logprobs_async(tokens, temperature))

    def _wait(self, call: Coroutine[Any, Any, Any]) -> Any:
        if self._loop is None or _running_loop() is self._loop:
            call.close()
            raise RuntimeError(
                "the plain methods of ModelWrapper are for worker threads: they wait for the "
                "event loop, which here would wait for itself or is unknown. Use the *_async "
                "methods on the loop, or pass loop=... when the wrapper is made in a thread"
            )
        answer = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            # in pieces: a thread that waits in a lock cannot be interrupted
            while not concurrent.futures.wait([answer], timeout=PIECE_S).done:
                continue
        except BaseException:  # given up: the engine need not go on with it either
            answer.cancel()
            raise
        return answer.result()


def cut_at_stop(
    completion: Completion, stop: Sequence[str], tokenizer: Any
) -> tuple[Completion, Optional[int]]:
    """``completion`` up to the token that completes the first of ``stop``, and where in its text
    (with special tokens) that begins; None where none of them is in it."""

    def text(n: int) -> str:
        return tokenizer.decode(completion.token_ids[:n].tolist(), skip_special_tokens=False)

    def has_stop(n: int) -> bool:
        return any(end in text(n) for end in stop)

    n = len(completion.token_ids)
    if not stop or not has_stop(n):
        return completion, None
    n = bisect.bisect_left(range(n), True, key=has_stop)
    shown = text(n)
    cut = Completion(
        completion.token_ids[:n], completion.logprobs[:n], completion.versions[:n], STOPPED_BY_TEXT
    )
    return cut, min(shown.index(end) for end in stop if end in shown)


def as_dict(value: Any) -> dict[str, Any]:
    """The fields of a dataclass, or a copy of a mapping."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return dict(value)


def _running_loop() -> Optional[asyncio.AbstractEventLoop]:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
