"""The policy's adapter inside vLLM's worker process.

Invariant: there is one adapter, always under the same id, and it is replaced in memory as a
whole: requests that run across an update go on with the new one, as with full weights. Its
file is never read, so no stale file can be taken for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trinity_dask.models.lora_config import peft_config

if TYPE_CHECKING:
    import torch

ADAPTER_ID = 1
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM has room for


def adapter_args(lora: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's engine arguments for one adapter of this rank.

    Raises:
        ValueError: vLLM cannot hold it.
    """
    room = [size for size in RANKS if size >= int(lora["rank"])]
    if not room:
        raise ValueError(
            f"model.lora.rank={lora['rank']} is more than vLLM serves ({RANKS[-1]}); lower it, or "
            "use explorer.rollout_model.engine_type=torch"
        )
    return {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": room[0]}


class AdapterHolder:
    """vLLM's manager of adapters in one worker process; ``lora``: the section ``model.lora``."""

    def __init__(self, manager: Any, lora: Mapping[str, Any]) -> None:
        from vllm.lora.peft_helper import PEFTHelper

        self._manager = manager
        values = peft_config(lora).to_dict()  # as its file has it
        if not isinstance(values["target_modules"], str):
            values["target_modules"] = sorted(values["target_modules"])
        self._helper = PEFTHelper.from_dict(values)
        self._helper.validate_legal(manager.lora_config)
        self._staged: dict[str, torch.Tensor] = {}

    def stage(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Keep these tensors (names of peft's file) for :meth:`take`."""
        # they may be views of a received bucket
        self._staged = {name: value.clone() for name, value in tensors.items()}

    def take(self) -> None:
        """Serve the staged tensors from now on.

        Raises:
            ValueError: vLLM's model has no module for one of them.
        """
        adapters = self._manager._adapter_manager
        mapper = getattr(adapters.model, "hf_to_vllm_mapper", None)
        tensors, self._staged = self._staged, {}
        model = self._manager._lora_model_cls.from_lora_tensors(
            ADAPTER_ID,
            tensors,
            peft_helper=self._helper,
            device="cpu",
            dtype=self._manager.lora_config.lora_dtype,
            model_vocab_size=self._manager.vocab_size,
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
        )
        adapters.remove_adapter(ADAPTER_ID)
        adapters.add_adapter(model)
        adapters.activate_adapter(ADAPTER_ID)
