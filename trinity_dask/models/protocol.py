"""What an engine is: token ids in, token ids with log-probs and versions out.

Invariant: an engine never sees text. The ids it returns are the ids it sampled, and
every returned token carries its log-prob under the processed distribution (temperature
applied) and the model version that produced it. A request that passes :func:`checked` cannot
fail the batch it is put into.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Optional, Protocol

import numpy as np

from trinity_dask.config.schema import SynchronizerConfig

FINISH_STOP = "stop"  # the model ended the answer
FINISH_LENGTH = "length"  # cut at max_tokens or at the model length: truncated


class EngineDead(RuntimeError):
    """The engine's own process died; it must be built again, requests cannot be retried on it."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request.

    ``temperature`` 0 is greedy. ``max_tokens`` bounds the response. ``stop_token_ids``
    is added to the model's own end-of-sequence ids. ``seed`` makes a request repeatable.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    seed: Optional[int] = None


@dataclass(frozen=True)
class Completion:
    """One sampled answer.

    token_ids int32 ``[response]``, logprobs float32 ``[response]`` at the sampling
    temperature (0 entropy convention at temperature 0: log-prob at temperature 1),
    versions int32 ``[response]``, finish_reason ``stop`` or ``length``.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: str


@dataclass(frozen=True)
class WeightGroupSpec:
    """Rendezvous of one generation of the weight-transfer group.

    Rank 0 is trainer rank 0; ``rank_offset`` is the first rank of the engine this spec
    is handed to. The TCP store is served by rank 0 at ``host:port``.
    """

    host: str
    port: int
    world_size: int
    rank_offset: int
    generation: int
    backend: str  # gloo | nccl
    timeout_s: float
    floor_bytes: int = 0  # broadcast so many once, bare, to know the link; 0 = do not


@dataclass(frozen=True)
class TensorMeta:
    name: str
    dtype: str  # torch dtype without the prefix, e.g. "float32"
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        bits = re.search(r"\d+", self.dtype)  # only bool has none, and is a byte
        return prod(self.shape) * (int(bits[0]) // 8 if bits else 1)


@dataclass(frozen=True)
class WeightUpdate:
    """One version on its way to an engine.

    ``method`` is ``nccl`` (receive over the group of ``generation``), or ``memory`` /
    ``checkpoint`` (read the safetensors file at ``path``, which may be an fsspec URL with
    ``storage_options``).
    """

    version: int
    method: str
    meta: tuple[TensorMeta, ...] = ()
    generation: int = 0
    path: Optional[str] = None
    bucket_bytes: int = 64 << 20
    storage_options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class WeightReceipt:
    """What one side saw of an update; ``checksum`` must be equal on all sides."""

    version: int
    checksum: int  # weights.checksum over the bytes as received
    n_bytes: int
    seconds: float
    step: Optional[int] = None  # trainer only: the train step whose weights these are
    # false: an engine that computes nothing with them, so its log-probs prove nothing
    has_logprobs: bool = True
    aborted: int = 0  # engine only: requests that are sampled again because of this update


class InferenceEngine(Protocol):
    """The engine inside a rollout worker. All methods run on the worker's event loop.

    One may have ``sampled_tokens(request_id) -> int`` besides: a number that is 0 until the
    request has left the engine's queue and changes while its answer grows. Then a request is
    told apart from one that waits, and a long answer from a stuck one.
    """

    model_version: int

    async def prepare(self) -> dict[str, Any]:
        """Load the model and start serving; returns facts for the log."""
        ...

    async def generate(
        self, prompt_token_ids: list[int], sampling: SamplingParams, request_id: str
    ) -> list[Completion]:
        """Sample ``sampling.n`` answers. Cancelling the awaiting task aborts the request."""
        ...

    async def logprobs(self, token_ids: list[int], temperature: float = 1.0) -> np.ndarray:
        """Log-prob of every token after the first: float32 ``[len(token_ids) - 1]``."""
        ...

    async def init_weight_group(self, spec: WeightGroupSpec) -> None: ...

    async def teardown_weight_group(self) -> None: ...

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        """Pause, load, drop every prefix cache, set the version, resume.

        Requests that run go on with the new weights; each token says which chose it.
        """
        ...

    async def label_weights(self, version: int) -> None:
        """The weights are those of ``version``. Only for an engine that serves nobody yet."""
        ...

    async def stats(self) -> dict[str, float]:
        """Counters: requests, generated_tokens, running, waiting; of an actor also aborted."""
        ...

    async def close(self) -> None: ...


@dataclass
class EngineSpec:
    """Everything an engine actor needs to be built on any worker."""

    slot: str  # "engine-0"
    engine_type: str  # see trinity_dask.models.ENGINES
    model_path: str
    config: dict[str, Any] = field(default_factory=dict)  # RolloutModelConfig as a dict
    model: dict[str, Any] = field(default_factory=dict)  # ModelConfig as a dict
    device: str = "cpu"
    in_flight: str = "keep"  # what an update does to running requests: keep | wait | abort
    in_flight_timeout_s: float = SynchronizerConfig.in_flight_timeout_s  # wait: for how long
    plugin_dirs: tuple[str, ...] = ()  # where a user's own engine may be registered
    run: str = ""  # launch of a run that it samples for; others get nothing from it


def checked(
    prompt: Sequence[int], sampling: SamplingParams, vocab_size: int, max_model_len: int
) -> SamplingParams:
    """``sampling`` with ``max_tokens`` cut to what fits into the model after ``prompt``.

    Raises:
        ValueError: the prompt is empty, too long or has an unknown id, or a sampling
            parameter is out of range.
    """
    check_token_ids(prompt, vocab_size)
    if len(prompt) >= max_model_len:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens, which leaves no room for an answer in "
            f"max_model_len = {max_model_len}; shorten it or raise model.max_model_len"
        )
    check_sampling(sampling)
    room = max_model_len - len(prompt)
    return sampling if sampling.max_tokens <= room else replace(sampling, max_tokens=room)


def check_token_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises ValueError unless there are ids and all are in ``[0, vocab_size)``."""
    if len(token_ids) == 0:
        raise ValueError("the prompt has no tokens; a model needs at least one")
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"token id {low if low < 0 else high} is outside of the model's vocabulary of "
            f"{vocab_size}; was the prompt made with another tokenizer?"
        )


def check_sampling(sampling: SamplingParams) -> None:
    """Raises ValueError naming the first parameter that is out of range."""
    rules = {
        "n": (sampling.n >= 1, "at least 1"),
        "temperature": (sampling.temperature >= 0, "at least 0 (0 is greedy)"),
        "top_p": (0 < sampling.top_p <= 1, "in (0, 1]"),
        "top_k": (sampling.top_k == -1 or sampling.top_k >= 1, "-1 (off) or at least 1"),
        "max_tokens": (sampling.max_tokens >= 1, "at least 1"),
        "min_tokens": (0 <= sampling.min_tokens <= sampling.max_tokens, "in [0, max_tokens]"),
    }
    for name, (good, allowed) in rules.items():
        if not good:
            raise ValueError(f"{name} must be {allowed} (got {getattr(sampling, name)})")
