"""An engine that samples with the Hugging Face model itself: for CPUs and for reference.

Invariant: the model belongs to one thread. That thread takes all requests that wait when
it becomes free as one batch, and does everything else (weight updates, log-probs) between
two batches. An update cuts the running batch short: what it has sampled stays, and the
rest of each answer is sampled with the new weights, from its prompt and its tokens so far,
so no cached key or value of the old weights is used. All of a version is received and compared
with the model's names before the first parameter changes, so a transfer that breaks leaves the
old weights whole.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Optional

import numpy as np
import torch

from trinity_dask.lazy import MODEL_LIBRARY, import_modules
from trinity_dask.models.checks import attention_implementation, check_model_dir
from trinity_dask.models.hub_names import HubNames
from trinity_dask.models.lora import add_adapter, has_adapter, load_adapter
from trinity_dask.models.lora_config import wants_adapter
from trinity_dask.models.protocol import (
    FINISH_STOP,
    Completion,
    EngineSpec,
    SamplingParams,
    WeightGroupSpec,
    WeightReceipt,
    WeightUpdate,
    check_token_ids,
    checked,
)
from trinity_dask.models.tokenizer import end_token_ids, load_tokenizer
from trinity_dask.models.torch.sampler import BatchSampler, SampleRequest
from trinity_dask.models.torch.work_thread import WorkThread
from trinity_dask.weights.broadcast import (
    WeightGroup,
    check_update,
    incoming,
    make_group,
    torch_dtype,
)
from trinity_dask.weights.checksum import Digest
from trinity_dask.weights.files import fetched

LOGPROB_POSITIONS = 1024  # positions per slice of the softmax; bounds its memory
UNLIMITED = 1 << 20  # tokens, for a model that says no length


class TorchEngine:
    """Implements :class:`~trinity_dask.models.protocol.InferenceEngine`."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.model_version = 0
        deterministic = bool(spec.config.get("deterministic", False))
        self._thread: WorkThread[SampleRequest, list[Completion]] = WorkThread(
            f"torch-{spec.slot}",
            self._sample,
            # the numbers of a row depend on its batch by rounding, so on who else was waiting
            max_weight=1 if deterministic else int(spec.config.get("max_num_seqs", 256)),
            weight=lambda request: request.sampling.n,
        )
        self._group: WeightGroup | None = None
        self._model: Any = None
        self._sampler: BatchSampler | None = None
        self._max_model_len = 0
        self._vocab_size = 0
        self._n_requests = 0
        self._asked: dict[int, SampleRequest] = {}  # by id; waiting or being sampled
        self._begun: set[str] = set()  # ids of requests that have been in a batch

    async def prepare(self) -> dict[str, Any]:
        start = time.perf_counter()
        self._thread.start()
        await self._thread.call(self._load)
        return {
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "parameters": sum(p.numel() for p in self._model.parameters()),
            "max_model_len": self._max_model_len,
            "torch_threads": torch.get_num_threads(),
            "load_s": time.perf_counter() - start,
        }

    def _load(self) -> None:
        model_cfg, engine_cfg = self.spec.model, self.spec.config
        dtype = engine_cfg.get("dtype") or model_cfg.get("dtype") or "float32"
        trust = bool(model_cfg.get("trust_remote_code", False))
        self._model = load_model(
            self.spec.model_path,
            dtype,
            self.spec.device,
            trust,
            model_cfg.get("attn_implementation"),
        )
        if wants_adapter(model_cfg):
            add_adapter(self._model, model_cfg["lora"], self.spec.model_path)
            self._model.to(self._model.device).requires_grad_(False)
        config = self._model.config.get_text_config()
        self._vocab_size = config.vocab_size
        longest = getattr(config, "max_position_embeddings", None)  # a recurrent model has none
        self._max_model_len = model_cfg.get("max_model_len") or longest or UNLIMITED
        tokenizer = load_tokenizer(self.spec.model_path, trust)
        ends = end_token_ids((self._model.generation_config, config), tokenizer)
        ends = tuple(token for token in ends if token < self._vocab_size)
        self._sampler = BatchSampler(self._model, ends, int(engine_cfg.get("seed", 0)))
        self._sampler.settle()

    async def generate(
        self, prompt_token_ids: list[int], sampling: SamplingParams, request_id: str
    ) -> list[Completion]:
        sampling = checked(prompt_token_ids, sampling, self._vocab_size, self._max_model_len)
        self._n_requests += 1
        try:
            return await self._answers(prompt_token_ids, sampling, request_id)
        finally:
            self._begun.discard(request_id)

    def sampled_tokens(self, request_id: str) -> int:
        """All requests of a batch go on together, and are answered together."""
        return self._sampler.steps if self._sampler and request_id in self._begun else 0

    async def _answers(
        self, prompt: list[int], sampling: SamplingParams, request_id: str
    ) -> list[Completion]:
        request = SampleRequest(prompt, sampling, request_id)
        self._asked[id(request)] = request
        try:
            answers = await self._thread.submit(request)
        except asyncio.CancelledError:
            request.cancelled = True
            raise
        finally:
            del self._asked[id(request)]
        if not request.cancelled:
            return answers
        if not answers:  # an update came before its batch began
            return await self._answers(prompt, sampling, request_id)
        rest = (
            self._continued(prompt, sampling, request_id, row, cut)
            for row, cut in enumerate(answers)
        )
        return list(await asyncio.gather(*rest))

    async def _continued(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        request_id: str,
        row: int,
        cut: Completion,
    ) -> Completion:
        """An answer that an update may have cut, whole."""
        length = len(cut.token_ids)
        if cut.finish_reason == FINISH_STOP or length >= sampling.max_tokens:
            return cut
        # of one seed every row would go on with the same numbers, from their beginning
        seed = None if sampling.seed is None else sampling.seed + (row + 1) * 1_000_003 + length
        left = replace(
            sampling,
            n=1,
            max_tokens=sampling.max_tokens - length,
            min_tokens=max(sampling.min_tokens - length, 0),
            seed=seed,
        )
        (end,) = await self._answers([*prompt, *cut.token_ids.tolist()], left, request_id)
        return Completion(
            np.concatenate([cut.token_ids, end.token_ids]),
            np.concatenate([cut.logprobs, end.logprobs]),
            np.concatenate([cut.versions, end.versions]),
            end.finish_reason,
        )

    def _sample(self, requests: list[SampleRequest]) -> list[list[Completion]]:
        assert self._sampler is not None
        live = [request for request in requests if not request.cancelled]
        self._begun.update(request.request_id for request in live)
        sampled = self._sampler.sample(live, self.model_version) if live else []
        answers = {id(request): answer for request, answer in zip(live, sampled, strict=True)}
        return [answers.get(id(request), []) for request in requests]

    async def logprobs(self, token_ids: list[int], temperature: float = 1.0) -> np.ndarray:
        check_token_ids(token_ids, self._vocab_size)
        return await self._thread.call(
            lambda: sequence_logprobs(self._model, token_ids, temperature)
        )

    async def init_weight_group(self, spec: WeightGroupSpec) -> None:
        await self.teardown_weight_group()
        device = self.spec.device
        self._group = await asyncio.to_thread(make_group, spec, spec.rank_offset, False, device)

    async def teardown_weight_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            await asyncio.to_thread(group.close)

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        for request in self._asked.values():
            request.cancelled = True  # its batch ends with its next token

        def load() -> WeightReceipt:
            receipt = load_update(self._model, update, self._group)
            self.model_version = update.version
            return receipt

        return await self._thread.call(load)

    async def label_weights(self, version: int) -> None:
        self.model_version = version

    async def stats(self) -> dict[str, float]:
        return {
            "requests": float(self._n_requests),
            "generated_tokens": float(self._sampler.generated_tokens if self._sampler else 0),
            "running": float(self._thread.running),
            "waiting": float(self._thread.waiting),
        }

    async def close(self) -> None:
        await self.teardown_weight_group()
        await self._thread.close()
        self._model = self._sampler = None


def load_model(
    path: str,
    dtype: str,
    device: str,
    trust_remote_code: bool = False,
    attention: Optional[str] = None,
) -> Any:
    """The causal language model at ``path`` in evaluation mode.

    Raises:
        ValueError: the directory lacks something, or cannot have this ``attention``.
    """
    import_modules(MODEL_LIBRARY)
    from transformers import AutoConfig, AutoModelForCausalLM

    check_model_dir(path)
    with quiet_loading():
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        model = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch_dtype(dtype),
            attn_implementation=attention_implementation(config, attention),
            trust_remote_code=trust_remote_code,
        )
    model.to(torch.device(device))  # type: ignore[arg-type]
    return model.eval().requires_grad_(False)


@torch.inference_mode()
def sequence_logprobs(model: Any, token_ids: list[int], temperature: float) -> np.ndarray:
    """Log-prob of each token after the first, float32 ``[len(token_ids) - 1]``."""
    if len(token_ids) == 1:
        return np.empty(0, dtype=np.float32)
    heat = temperature or 1.0
    ids = torch.tensor(token_ids, device=model.device)
    logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0]
    pieces = [torch.empty(0, device=model.device)]
    for part, targets in zip(
        logits.split(LOGPROB_POSITIONS), ids[1:, None].split(LOGPROB_POSITIONS), strict=True
    ):
        scaled = part.float() / heat
        pieces.append(scaled.gather(1, targets)[:, 0] - scaled.logsumexp(dim=-1))
    return torch.cat(pieces).cpu().numpy()


def load_update(model: Any, update: WeightUpdate, group: WeightGroup | None) -> WeightReceipt:
    """Receive ``update`` and copy it into ``model`` in place.

    Raises:
        ValueError: names or shapes do not fit the model; it is unchanged then.
    """
    start = time.perf_counter()
    digest = Digest()
    with fetched(update) as here:
        check_update(here, group)
        staged = dict(incoming(here, group, digest))
        if has_adapter(model):
            load_adapter(model, staged)
        else:
            assign(model, staged)
    return WeightReceipt(update.version, digest.value, digest.n_bytes, time.perf_counter() - start)


@torch.no_grad()
def assign(model: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Copy ``tensors`` into parameters and persistent buffers by the model's own names or the
    hub's; a tied alias may be present, and an older file may lack the buffers."""
    known = model.state_dict()  # shares storage with the parameters; lists aliases too
    needed = {name for name, _ in model.named_parameters()}
    if not needed <= tensors.keys():
        tensors = HubNames(model).to_model(tensors)
    missing, unknown = sorted(needed - set(tensors)), sorted(set(tensors) - set(known))
    if missing or unknown:
        raise ValueError(
            f"the weights do not fit the model: missing {missing[:3]}, unknown {unknown[:3]} "
            f"({len(missing)} and {len(unknown)} names)"
        )
    for name, tensor in tensors.items():
        if known[name].shape != tensor.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; the model's is {tuple(known[name].shape)}"
            )
    for name, tensor in tensors.items():
        known[name].copy_(tensor)


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Progress bars of transformers are off inside, and as before afterwards."""
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if before:
            logging.enable_progress_bar()
