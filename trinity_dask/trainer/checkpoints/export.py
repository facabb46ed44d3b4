"""What the ranks write into a checkpoint, read back from it, and give away.

Invariant: a checkpoint continues with any number of ranks. What ranks hold in shards they write
as such (:mod:`~trinity_dask.trainer.checkpoints.shards`); a model that they hold whole, and an
adapter, is written whole by rank 0, and its directory is one that transformers (or peft) loads.
The export is made from the checkpoint's own files alone (an adapter that is merged also reads its
base model), tensor by tensor, and its directory appears whole or not at all.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from trinity_dask.models.hub_names import HubNames
from trinity_dask.models.lora import (
    CONFIG_FILE,
    adapter_parameters,
    has_adapter,
    read_adapter,
    write_adapter,
)
from trinity_dask.models.lora import WEIGHTS_FILE as ADAPTER_FILE
from trinity_dask.trainer.checkpoints.checkpoint import (
    ACTOR,
    ADAPTER_DIR,
    HF_EXPORT,
    OPTIMIZER_FILE,
    RNG,
    WEIGHTS_FILE,
)
from trinity_dask.trainer.checkpoints.shards import (
    SHARDS_DIR,
    read_shards,
    saved_weights,
    write_shards,
)
from trinity_dask.trainer.model.trainable import TrainableModel
from trinity_dask.weights.broadcast import named_weights, persistent_buffers
from trinity_dask.weights.files import TensorFile, write_one_by_one

GENERATION_FILE = "generation_config.json"
TEXT_FILES = (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken")


def write_engine(
    models: Mapping[str, TrainableModel], directory: Path, source: str = "", lead: bool = True
) -> None:
    """Weights, optimizer state and configuration of every model, and the random generator.

    Args:
        source: the model directory that training started from, for the tokenizer's files.
        lead: False on the ranks other than 0, which only write their shards, if any.
    """
    for name, model in models.items():
        if model.lockstep and not has_adapter(model.module):
            write_shards(model, directory / name / SHARDS_DIR)
        else:
            weights = _gathered(model.full_weights(), lead)
            state = _gathered(model.state_tensors(), lead)
            if lead:
                _write_whole(model, weights, state, directory / name, source)
        if lead:
            _write_config(model, directory / name, source)
    if lead:
        save_file({"torch": torch.get_rng_state()}, directory / RNG)


def _gathered(named: Iterable[tuple[str, torch.Tensor]], lead: bool) -> dict[str, torch.Tensor]:
    """Every tensor on the CPU; where nothing is written, none is kept."""
    kept = {}
    for name, tensor in named:
        if lead:
            kept[name] = tensor.detach().cpu().contiguous()
    return kept


def _write_whole(
    model: TrainableModel,
    weights: dict[str, torch.Tensor],
    state: dict[str, torch.Tensor],
    directory: Path,
    source: str,
) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    if has_adapter(model.module):
        write_adapter(model.module.trinity_adapter, weights, directory / ADAPTER_DIR, source)
    else:
        save_file(weights, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    save_file(state, directory / OPTIMIZER_FILE)


def _write_config(model: TrainableModel, directory: Path, source: str) -> None:
    config = copy.deepcopy(model.module.config)
    # sharding gives the class another name
    config.architectures = [type(model.module).__name__.removeprefix("FSDP")]
    config.save_pretrained(directory)
    copy_text_files(Path(source), directory)
    generation = getattr(model.module, "generation_config", None)
    if generation is not None and not (directory / GENERATION_FILE).exists():
        # as text: transformers reads what models on the hub ship, and refuses to save some of it
        # (a temperature without do_sample)
        generation.to_json_file(directory / GENERATION_FILE)


def copy_text_files(source: Path, target: Path) -> None:
    """Tokenizer, chat template, remote code: what is not weights and not there already.

    Saving a tokenizer anew would let transformers choose its class by the model's type,
    which can change the ids.
    """
    for file in sorted(source.iterdir()) if source.is_dir() else ():
        index = file.name.endswith(".index.json")
        if file.suffix in TEXT_FILES and not index and not (target / file.name).exists():
            shutil.copyfile(file, target / file.name)


def read_engine(models: Mapping[str, TrainableModel], checkpoint: str | Path) -> None:
    """Continue where the models of :func:`write_engine` were, bit for bit.

    Raises:
        FileNotFoundError, ValueError: the checkpoint is of other models.
    """
    for name, model in models.items():
        directory = Path(checkpoint) / name
        if has_adapter(model.module):
            model.load_weights(read_adapter(str(directory / ADAPTER_DIR)))
        elif (directory / SHARDS_DIR).is_dir():
            read_shards(model, directory / SHARDS_DIR)
            continue
        elif (directory / WEIGHTS_FILE).is_file():
            model.load_weights(TensorFile(directory / WEIGHTS_FILE))
        else:
            raise FileNotFoundError(
                f"{directory} has no {WEIGHTS_FILE} and no {SHARDS_DIR}/: it was not trained with "
                "this setting of model.lora.rank, or it is damaged; use the configuration that it "
                "was made with"
            )
        model.load_state_tensors(TensorFile(directory / OPTIMIZER_FILE))
    torch.set_rng_state(load_file(Path(checkpoint) / RNG)["torch"])


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
            tensors = {k: value.to(dtype) for k, value in read_adapter(str(adapter)).items()}
            save_file(tensors, partial / ADAPTER_FILE, metadata={"format": "pt"})
            shutil.copyfile(adapter / CONFIG_FILE, partial / CONFIG_FILE)
            copy_text_files(checkpoint / ACTOR, partial)
            # a model's configuration would say that the directory holds a whole model
            (partial / "config.json").unlink(missing_ok=True)
        else:
            _export_model(adapter, checkpoint / ACTOR, partial, dtype)
        if target.exists():  # removing it in place would leave half of it to a kill
            target.rename(replaced)
        partial.rename(target)
    finally:
        for left in (partial, replaced):
            shutil.rmtree(left, ignore_errors=True)
    return target


def _export_model(adapter: Path, actor: Path, target: Path, dtype: torch.dtype) -> None:
    named = _merged(adapter) if adapter.is_dir() else saved_weights(actor)
    skeleton = _skeleton(actor)
    if skeleton is not None:
        kept = persistent_buffers(skeleton)  # in their own dtype
        typed = ((name, value if name in kept else value.to(dtype)) for name, value in named)
        named = HubNames(skeleton).to_hub(typed)
    else:
        named = ((name, value.to(dtype)) for name, value in named)
    write_one_by_one(target / WEIGHTS_FILE, named)
    copy_text_files(actor, target)
    config = target / "config.json"
    values = json.loads(config.read_text(encoding="utf-8"))
    values["dtype"] = str(dtype).removeprefix("torch.")
    config.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _skeleton(actor: Path) -> Any:
    """The model of ``actor`` without memory for its weights; None if its code is its own, whose
    names nobody else knows."""
    if "auto_map" in json.loads((actor / "config.json").read_text(encoding="utf-8")):
        return None
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(actor))


def _merged(adapter: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The base model of ``adapter`` in float32, by its own names, with W + (alpha / r) · B A (arXiv
    2106.09685, section 4.1) for every adapted layer, as the layer's kind has it."""
    config = json.loads((adapter / CONFIG_FILE).read_text(encoding="utf-8"))
    base = config["base_model_name_or_path"]
    if not Path(base).is_dir():
        raise FileNotFoundError(
            f"the adapter in {adapter} belongs to the model {base!r}, which is not there; put it "
            f"back, or write its place into {CONFIG_FILE}"
        )
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    wrapped = PeftModel.from_pretrained(model, str(adapter))
    if lost := read_adapter(str(adapter)).keys() - adapter_parameters(model).keys():
        raise ValueError(
            f"{base} has no weight for {len(lost)} tensors of the adapter in {adapter}, the "
            f"first is {min(lost)!r}"
        )
    yield from named_weights(wrapped.merge_and_unload())
