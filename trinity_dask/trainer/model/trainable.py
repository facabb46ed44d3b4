"""A model that is trained: module, optimizer, schedule and the sums over its ranks.

Invariant: weights change only in :meth:`TrainableModel.finish_update`, by the sum of all
ranks' gradients, and only if that sum is finite; afterwards every rank holds the same
weights (or its shard of them).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any, Optional

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trinity_dask.config.schema import OptimizerConfig
from trinity_dask.models.hub_names import HubNames
from trinity_dask.models.lora import adapter_parameters, has_adapter
from trinity_dask.models.protocol import TensorMeta
from trinity_dask.trainer.model.logprobs import LOGITS_BYTES, Scorer
from trinity_dask.trainer.model.optimizer import build_optimizer, build_schedule
from trinity_dask.trainer.ranks.gradients import GradientGroup
from trinity_dask.trainer.ranks.parallel import is_sharded, like, to_device, whole
from trinity_dask.weights.broadcast import persistent_buffers, tensor_meta, torch_dtype


class TrainableModel:
    """One model of one rank, the policy or the critic.

    Args:
        module: float32, on its device; it may hold an adapter (then only that is trained)
            and may be sharded.
        optimizer_cfg: optimizer, learning rate and schedule.
        total_steps: train steps of the run, for a schedule that decays.
        group: the ranks that share gradients (None: just this one).
        grad_clip: largest global gradient norm; 0 does not clip.
        autocast: dtype of forward passes, None for float32.
        offload: keep weights and optimizer state on the CPU outside :meth:`on_device`.
        logits_bytes: see :class:`Scorer`.
    """

    def __init__(
        self,
        module: Any,
        optimizer_cfg: OptimizerConfig,
        total_steps: Optional[int] = None,
        group: Optional[GradientGroup] = None,
        grad_clip: float = 1.0,
        autocast: Optional[torch.dtype] = None,
        offload: bool = False,
        logits_bytes: int = LOGITS_BYTES,
    ) -> None:
        self.module = module
        self.group = group or GradientGroup()
        self.grad_clip = grad_clip
        self.autocast = autocast
        self.logits_bytes = logits_bytes
        # its forward passes need all ranks, since weights are shards: ranks must then run the
        # same number of passes, with blank ones where rows are few
        self.lockstep = is_sharded(module)
        # what is trained, as this rank has it (perhaps a shard of each tensor), under the names
        # of a saved model; with an adapter, those of peft's file
        self.named: dict[str, Any] = (
            adapter_parameters(module) if has_adapter(module) else dict(module.named_parameters())
        )
        self._buffers = () if has_adapter(module) else tuple(persistent_buffers(module))
        # of a critic and of an adapter no hub says how they are named
        is_whole = not has_adapter(module) and hasattr(module, "get_output_embeddings")
        self._hub = HubNames(module) if is_whole else None
        self.base_lr = optimizer_cfg.lr
        self.schedule = build_schedule(optimizer_cfg, total_steps)
        self.optimizer = build_optimizer(optimizer_cfg, module.parameters())
        self.device = next(module.parameters()).device
        self._offload = offload
        self._resident = 1  # depth of on_device
        if offload:
            self._leave()

    @property
    def buffers(self) -> dict[str, Tensor]:
        """A mixture's routing bias, say: no optimizer moves it, no model is whole without."""
        return {name: self.module.get_buffer(name) for name in self._buffers}

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Within it the model can score and be trained; it may be nested."""
        if self._offload and self._resident == 0:
            self._move(self.device)
        self._resident += 1
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        self._resident -= 1
        if self._offload and self._resident == 0:
            self._move(torch.device("cpu"))

    def _move(self, device: torch.device) -> None:
        """Weights and the optimizer's moments; step counters stay where the optimizer keeps
        them."""
        to_device(self.module, device)
        for state in self.optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    state[key] = value.to(device)

    def scorer(self, temperature: float = 1.0) -> Scorer:
        """Log-probs of responses under the current weights, at the sampler's temperature."""
        return Scorer(self.module, temperature, self.autocast, logits_bytes=self.logits_bytes)

    # one update -------------------------------------------------------------------------
    def set_step(self, step: int) -> float:
        """Take the learning rate of train step ``step`` (1 is the first), and return it."""
        lr = self.base_lr * self.schedule.factor(step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def begin_update(self) -> None:
        """Forget the gradient; any number of ``backward`` calls may follow."""
        self.optimizer.zero_grad(set_to_none=True)

    def finish_update(self, step: int) -> float:
        """Sum the gradients over the ranks, clip, and step; every rank must call it.

        Returns:
            The global gradient norm before clipping.

        Raises:
            FloatingPointError: it is not finite; no weight was changed.
        """
        if not self.lockstep:  # shards are summed in the backward pass
            self.group.sum_gradients(self.named.values())
        parameters = [p for p in self.named.values() if p.grad is not None]
        limit = self.grad_clip if self.grad_clip > 0 else math.inf
        norm = float(whole(torch.nn.utils.clip_grad_norm_(parameters, limit)))
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"the gradient norm of train step {step} is {norm}; the weights are still those "
                "before this update. Lower algorithm.optimizer.lr, or look for broken rewards "
                "and log-probs in the batch"
            )
        self.optimizer.step()
        return norm

    # state ------------------------------------------------------------------------------
    def full_weights(self, hub: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Every trained weight by name, and what else belongs to the model, whole, each stored
        tensor once; under its own name, or as the ``hub`` has it.

        With shards every rank must iterate to the end: each tensor is gathered when it is due.
        """
        if hub and self._hub is not None and not self._hub.same:
            yield from self._hub.to_hub(self.full_weights())
            return
        for name, parameter in (self.named | self.buffers).items():
            tensor = parameter.detach()
            yield name, whole(tensor) if self.lockstep else tensor

    def wire_meta(self, dtype: str) -> tuple[TensorMeta, ...]:
        """Of ``full_weights(hub=True)``: weights as ``dtype``, buffers as they are."""
        wire = {name: torch_dtype(dtype) for name in self.named}
        named: Iterable[tuple[str, Tensor]] = (
            (name, torch.empty(t.shape, dtype=wire.get(name, t.dtype), device="meta"))
            for name, t in (self.named | self.buffers).items()
        )
        return tensor_meta(named if self._hub is None else self._hub.to_hub(named))

    def state_tensors(self, gather: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Optimizer state by name, to be saved with the weights: whole, as full_weights, or with
        ``gather`` False as this rank has it."""
        for name, parameter in self.named.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield f"{key}|{name}", whole(value) if gather else value
                elif isinstance(value, int):
                    yield f"{key}|{name}|int", torch.tensor(value)

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over :meth:`state_tensors` of an equal model, of any number of ranks: whole
        tensors, or this rank's shards, which it keeps."""
        self.optimizer.state.clear()
        for label, value in tensors.items():
            key, name, *kind = label.split("|")
            parameter = self.named[name]
            state = self.optimizer.state[parameter]
            mine = isinstance(value, DTensor)
            state[key] = int(value) if kind else value if mine else like(value, parameter).clone()

    @torch.no_grad()
    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy whole weights by name into the module, one after the other.

        Buffers may be missing: checkpoints of before had none, and they are the start model's.

        Raises:
            ValueError: names or shapes are not the module's.
        """
        self.check_names(tensors.keys())
        for name, tensor in (self.named | self.buffers).items():
            if name in tensors:
                tensor.copy_(like(tensors[name], tensor))

    def check_names(self, names: Set[str]) -> None:
        """Raises ValueError unless a checkpoint's weights have the model's names."""
        if wrong := self.named.keys() ^ (names - self.buffers.keys()):
            raise ValueError(
                f"the checkpoint's {len(names)} tensors are not the model's "
                f"{len(self.named)}; first difference: {min(wrong)!r}"
            )
