"""An engine without a model: deterministic tokens after a drawn latency.

Invariant: the answer depends on the prompt, the request's seed and the model version at its
start only, so a test can tell which weights, and which request, an answer came from. Its
tokens come evenly over its latency, each with the version of its moment.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trinity_dask.models.protocol import (
    FINISH_LENGTH,
    FINISH_STOP,
    Completion,
    EngineSpec,
    SamplingParams,
    WeightGroupSpec,
    WeightReceipt,
    WeightUpdate,
    check_sampling,
)
from trinity_dask.weights.broadcast import WeightGroup, check_update, incoming, make_group
from trinity_dask.weights.checksum import Digest
from trinity_dask.weights.files import fetched

VOCAB_SIZE = 256
EOS_ID = VOCAB_SIZE - 1
LOGPROB = float(np.log(1 / VOCAB_SIZE))


@dataclass(eq=False)
class _Running:
    """A request: its start, its latency, and the versions so far with their first moments."""

    started: float
    latency_s: float
    versions: list[tuple[float, int]] = field(default_factory=list)

    def stamped(self, length: int) -> np.ndarray:
        """The version of each of ``length`` tokens, int32."""
        found = np.full(length, self.versions[0][1], dtype=np.int32)
        for moment, version in self.versions[1:]:
            share = (moment - self.started) / max(self.latency_s, 1e-9)
            found[int(min(share, 1.0) * length) :] = version
        return found


class FakeEngine:
    """Implements :class:`~trinity_dask.models.protocol.InferenceEngine` without weights.

    A request takes ``fake_latency_s`` seconds, times a log-normal factor of mean 1 when
    ``fake_latency_sigma`` is above 0; the first one ``fake_first_latency_s`` more. Weight
    updates take part in the transfer, so their checksum is real, and change nothing but the
    version.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.model_version = 0
        self.latency_s = float(spec.config.get("fake_latency_s", 0.0))
        self.sigma = float(spec.config.get("fake_latency_sigma", 0.0))
        self.first_latency_s = float(spec.config.get("fake_first_latency_s", 0.0))
        self._rng = np.random.default_rng(int(spec.config.get("seed", 0)))
        self._eos_id = _vocab_size(spec.model_path) - 1
        self._group: WeightGroup | None = None
        self._running: set[_Running] = set()
        self._n_requests = 0
        self._n_tokens = 0

    async def prepare(self) -> dict[str, Any]:
        return {"latency_s": self.latency_s, "latency_sigma": self.sigma}

    async def generate(
        self, prompt_token_ids: list[int], sampling: SamplingParams, request_id: str
    ) -> list[Completion]:
        check_sampling(sampling)
        first_s = 0.0 if self._n_requests else self.first_latency_s
        self._n_requests += 1
        now, latency_s = time.monotonic(), self.draw_latency_s() + first_s
        running = _Running(now, latency_s, [(now, self.model_version)])
        self._running.add(running)
        try:
            await asyncio.sleep(latency_s)
        finally:
            self._running.discard(running)
        return [self._answer(prompt_token_ids, sampling, running, i) for i in range(sampling.n)]

    def draw_latency_s(self) -> float:
        """Seconds of the next request."""
        if self.latency_s <= 0 or self.sigma <= 0:
            return self.latency_s
        # the mean of a log-normal is exp(mu + sigma^2 / 2)
        return self.latency_s * float(self._rng.lognormal(-(self.sigma**2) / 2, self.sigma))

    def _answer(
        self, prompt: list[int], sampling: SamplingParams, running: _Running, index: int
    ) -> Completion:
        key = np.asarray(
            [*prompt, running.versions[0][1], sampling.seed or 0, index], dtype=np.int64
        )
        draw = int.from_bytes(hashlib.blake2b(key.tobytes(), digest_size=4).digest(), "little")
        length = sampling.min_tokens + draw % (sampling.max_tokens - sampling.min_tokens + 1)
        length = max(length, 1)
        tokens = (draw + np.arange(length) * 7919) % self._eos_id
        stopped = length < sampling.max_tokens or draw % 2 == 0
        if stopped:
            tokens[-1] = self._eos_id
        self._n_tokens += length
        return Completion(
            tokens.astype(np.int32),
            np.full(length, LOGPROB, dtype=np.float32),
            running.stamped(length),
            FINISH_STOP if stopped else FINISH_LENGTH,
        )

    async def logprobs(self, token_ids: list[int], temperature: float = 1.0) -> np.ndarray:
        return np.full(len(token_ids) - 1, LOGPROB, dtype=np.float32)

    async def init_weight_group(self, spec: WeightGroupSpec) -> None:
        await self.teardown_weight_group()
        self._group = await asyncio.to_thread(make_group, spec, spec.rank_offset, False)

    async def teardown_weight_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            await asyncio.to_thread(group.close)

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        receipt = await asyncio.to_thread(self._receive, update)
        self.model_version = update.version
        for running in self._running:
            running.versions.append((time.monotonic(), update.version))
        return receipt

    def _receive(self, update: WeightUpdate) -> WeightReceipt:
        start = time.perf_counter()
        digest = Digest()
        with fetched(update) as here:
            check_update(here, self._group)
            for _ in incoming(here, self._group, digest):
                pass  # received for its checksum only
        seconds = time.perf_counter() - start
        return WeightReceipt(
            update.version, digest.value, digest.n_bytes, seconds, has_logprobs=False
        )

    async def label_weights(self, version: int) -> None:
        self.model_version = version

    async def stats(self) -> dict[str, float]:
        return {
            "requests": float(self._n_requests),
            "generated_tokens": float(self._n_tokens),
            "running": float(len(self._running)),
            "waiting": 0.0,
        }

    async def close(self) -> None:
        await self.teardown_weight_group()


def _vocab_size(model_path: str) -> int:
    """Of what is sampled: a model that is trained on it must know every token."""
    config = Path(model_path) / "config.json"
    if not model_path or not config.is_file():
        return VOCAB_SIZE
    known = json.loads(config.read_text(encoding="utf-8")).get("vocab_size", VOCAB_SIZE)
    return max(2, min(VOCAB_SIZE, int(known)))
