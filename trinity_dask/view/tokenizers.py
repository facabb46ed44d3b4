"""The tokenizer of a job, to write its tokens as text: from files alone, and without torch.

Invariant: nothing is downloaded, and no code of a model is run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Optional

from trinity_dask.config.schema import Config
from trinity_dask.records.pieces import load_decoder

FILE = "tokenizer.json"


def decoder_of(config: Config) -> tuple[Any, Optional[str]]:
    """What decodes the tokens of a stage, or None and why not.

    Looked for in the model's directory, the stage's exports, and the hub's cache.
    """
    model = str(config.model.model_path or "")
    exports = sorted(Path(str(config.job_dir)).glob(f"*/huggingface/{FILE}"))
    places = [Path(model), *(path.parent for path in exports)] if model else []
    cached = _cached(model)
    for place in [*places, *([cached] if cached is not None else [])]:
        if (place / FILE).is_file():
            try:
                return load_decoder(str(place)), None
            except ValueError as error:
                return None, str(error)
    return None, f"no {FILE} of {model or 'the model'} is here, so tokens are shown as their ids"


def _cached(model: str) -> Optional[Path]:
    """The snapshot of a model of the hub that was downloaded before."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, FILE)
    except HFValidationError:  # a path
        return None
    return Path(found).parent if isinstance(found, str) else None
