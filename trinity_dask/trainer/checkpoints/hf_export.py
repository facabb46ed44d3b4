"""A checkpoint's policy as a Hugging Face directory that transformers and vLLM load.

Invariant: made from the checkpoint's own files alone (an adapter that is merged also reads
its base model), tensor by tensor; the directory appears whole or not at all.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from trinity_dask.models.lora import CONFIG_FILE, FILE_PREFIX, WEIGHTS_FILE, read_adapter
from trinity_dask.trainer.checkpoints.checkpoint import ACTOR, ADAPTER_DIR, HF_EXPORT
from trinity_dask.trainer.checkpoints.checkpoint import WEIGHTS_FILE as MODEL_FILE
from trinity_dask.trainer.checkpoints.export import copy_text_files
from trinity_dask.weights.files import read_safetensors


def export_policy(checkpoint: Path, dtype: torch.dtype, merge: bool = False) -> Path:
    """Write ``huggingface/`` of a checkpoint in ``dtype`` and return its path.

    Args:
        merge: with an adapter: the whole model with the adapter added to its base; False
            writes the adapter alone, as peft loads it.

    Raises:
        FileNotFoundError: there are no weights, or an adapter's base model is gone.
    """
    target, partial = checkpoint / HF_EXPORT, checkpoint / f".{HF_EXPORT}.partial"
    replaced = checkpoint / f".{HF_EXPORT}.replaced"
    for left in (partial, replaced):  # of an export that was killed
        shutil.rmtree(left, ignore_errors=True)
    partial.mkdir()
    adapter = checkpoint / ACTOR / ADAPTER_DIR
    try:
        if adapter.is_dir() and not merge:
            _copy_adapter(adapter, checkpoint / ACTOR, partial, dtype)
        else:
            _write_model(adapter, checkpoint / ACTOR, partial, dtype)
        if target.exists():  # removing it in place would leave half of it to a kill
            target.rename(replaced)
        partial.rename(target)
    finally:
        for left in (partial, replaced):
            shutil.rmtree(left, ignore_errors=True)
    return target


def _copy_adapter(adapter: Path, actor: Path, target: Path, dtype: torch.dtype) -> None:
    tensors = {name: value.to(dtype) for name, value in read_adapter(str(adapter)).items()}
    save_file(tensors, target / WEIGHTS_FILE, metadata={"format": "pt"})
    shutil.copyfile(adapter / CONFIG_FILE, target / CONFIG_FILE)
    copy_text_files(actor, target)
    # a model's configuration would say that the directory holds a whole model
    (target / "config.json").unlink(missing_ok=True)


def _write_model(adapter: Path, actor: Path, target: Path, dtype: torch.dtype) -> None:
    merged = _merged(adapter) if adapter.is_dir() else read_safetensors(str(actor / MODEL_FILE))
    tensors = {name: value.to(dtype).contiguous() for name, value in merged}
    save_file(tensors, target / MODEL_FILE, metadata={"format": "pt"})
    copy_text_files(actor, target)
    config = target / "config.json"
    values = json.loads(config.read_text(encoding="utf-8"))
    values["dtype"] = str(dtype).removeprefix("torch.")
    config.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _merged(adapter: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """W + (alpha / r) · B A (arXiv 2106.09685, section 4.1) for every adapted layer."""
    config = json.loads((adapter / CONFIG_FILE).read_text(encoding="utf-8"))
    base = config["base_model_name_or_path"]
    if not Path(base).is_dir():
        raise FileNotFoundError(
            f"the adapter in {adapter} belongs to the model {base!r}, which is not there; put it "
            f"back, or write its place into {CONFIG_FILE}"
        )
    tensors = read_adapter(str(adapter))
    scale = config["lora_alpha"] / config["r"]
    for name, weight in read_safetensors(base):
        module = FILE_PREFIX + name.removesuffix(".weight")
        down = tensors.pop(f"{module}.lora_A.weight", None)
        if down is None:
            yield name, weight
            continue
        up = tensors.pop(f"{module}.lora_B.weight")
        delta = scale * (up.float() @ down.float())
        yield name, weight.float() + (delta if delta.shape == weight.shape else delta.t())
    if tensors:
        raise ValueError(
            f"{base} has no weight for {len(tensors)} tensors of the adapter in {adapter}, the "
            f"first is {min(tensors)!r}"
        )
