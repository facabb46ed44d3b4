"""What a job directory keeps of the command that made it.

Invariant: ``<job>/.hydra`` has the files every Hydra user expects: ``config.yaml`` (as
composed), ``overrides.yaml`` and ``hydra.yaml``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

MAX_LABEL = 60


def record_overrides(
    job_dir: str, tree: DictConfig, hydra_config: Any, overrides: Sequence[str]
) -> None:
    """Write the three files; an earlier command's are replaced."""
    folder = Path(job_dir) / ".hydra"
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(tree, folder / "config.yaml")
    OmegaConf.save(OmegaConf.create(list(overrides)), folder / "overrides.yaml")
    OmegaConf.save(OmegaConf.create({"hydra": hydra_config}), folder / "hydra.yaml")


def job_label(number: int, swept: Sequence[str]) -> str:
    """The directory of one job of a sweep: its number and its values.

    Since the values are part of it, the same sweep called again resumes its jobs and a
    changed sweep does not resume others' jobs.
    """
    text = ",".join(item.lstrip("+~") for item in swept)
    short = re.sub(r"[^\w.,=+-]", "-", text)
    if len(short) > MAX_LABEL or short != text:
        short = f"{short[:MAX_LABEL]}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
    return f"{number}_{short}" if short else str(number)
