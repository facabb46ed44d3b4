"""Checkpoints on disk: complete or not there.

Invariant: ``global_step_<n>`` counts only while its ``COMPLETE`` marker, written last,
agrees with the files beside it; at every moment of a save (a kill included) the checkpoint
that was the latest before it, or the new one, is complete.

Layout of ``<job>/global_step_<n>/``::

    actor/model.safetensors      float32 weights by parameter name
    actor/lora_adapter/          instead of it when only an adapter is trained (as peft)
    actor/optimizer.safetensors  optimizer state
    actor/*.json, ...            configuration and tokenizer: transformers loads actor/
    critic/...                   the same of the critic, where there is one
    rng.safetensors              random generator
    state.json                   trainer step, counters, lease or reader state
    COMPLETE                     names, sizes and (small files) hashes of all of these
    huggingface/                 only when asked: loadable by transformers and vLLM

``huggingface/`` is made from the rest and may be made again or deleted at any time, so the
marker says nothing about it; it appears whole or not at all by itself.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional

from trinity_dask.files import fsync

log = logging.getLogger(__name__)

MARKER = "COMPLETE"
STATE = "state.json"
ACTOR = "actor"  # the policy's directory
WEIGHTS_FILE = "model.safetensors"  # in the directory of each model
OPTIMIZER_FILE = "optimizer.safetensors"
ADAPTER_DIR = "lora_adapter"  # in place of the weights when only an adapter is trained
WEIGHTS = f"{ACTOR}/{WEIGHTS_FILE}"
ADAPTER = f"{ACTOR}/{ADAPTER_DIR}/adapter_model.safetensors"
RNG = "rng.safetensors"
HF_EXPORT = "huggingface"
# a hash of every file would read a large model twice; its size and the fsync must do
HASHED_BYTES = 1 << 16

# an older checkpoint of the same step waits under this name while the new one moves in
_RETIRED = ".retired"
_NAME = re.compile(rf"^global_step_(\d+)(?:{re.escape(_RETIRED)})?$")
_PARTIAL = re.compile(r"^\.global_step_\d+\.[0-9a-f]{8}\.partial$")

Hook = Callable[[str], None]


def step_dir(job_dir: str | Path, step: int) -> Path:
    return Path(job_dir) / f"global_step_{step}"


# reading ------------------------------------------------------------------------------
def is_complete(path: str | Path) -> bool:
    """Whether the marker is there and every file is as it says."""
    path = Path(path)
    try:
        files = json.loads((path / MARKER).read_text(encoding="utf-8"))["files"]
        return all(
            (path / name).stat().st_size == entry["size"]
            and ("sha256" not in entry or _sha256(path / name) == entry["sha256"])
            for name, entry in files.items()
            if _marked(name)
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _marked(name: str) -> bool:
    """Whether the marker vouches for the file; older markers also named the export's."""
    return Path(name).parts[0] != HF_EXPORT


def complete_checkpoints(job_dir: str | Path) -> list[Path]:
    """Complete checkpoints by step, oldest first; one per step."""
    found: dict[int, Path] = {}
    for path in sorted(_candidates(job_dir)):  # the plain name sorts before a retired one
        match = _NAME.match(path.name)
        if match and int(match[1]) not in found and is_complete(path):
            found[int(match[1])] = path
    return [found[step] for step in sorted(found)]


def _candidates(job_dir: str | Path) -> list[Path]:
    job_dir = Path(job_dir)
    if not job_dir.is_dir():
        return []
    return [path for path in job_dir.iterdir() if _NAME.match(path.name) and path.is_dir()]


def latest_complete(job_dir: str | Path) -> Optional[Path]:
    """The complete checkpoint with the highest step; says which incomplete ones it skips."""
    complete = complete_checkpoints(job_dir)
    latest = complete[-1] if complete else None
    newest = -1 if latest is None else step_of(latest) or 0
    for path in _candidates(job_dir):
        if (step_of(path) or 0) > newest:
            log.warning("checkpoint %s is incomplete (a save was cut off) and is skipped", path)
    return latest


def latest_hf_export(job_dir: str | Path) -> Optional[Path]:
    """The newest Hugging Face export in a complete checkpoint."""
    for path in reversed(complete_checkpoints(job_dir)):
        if (path / HF_EXPORT / "config.json").is_file():
            return path / HF_EXPORT
    return None


def read_state(path: str | Path) -> dict[str, Any]:
    """The state that was saved with a checkpoint."""
    return json.loads((Path(path) / STATE).read_text(encoding="utf-8"))


def step_of(path: Path) -> Optional[int]:
    """The step that a checkpoint's name tells; None for another name."""
    match = _NAME.match(path.name)
    return None if match is None else int(match[1])


class CheckpointGone(FileNotFoundError):
    """Retention removed a checkpoint that was listed before."""


@contextmanager
def held(path: Path) -> Iterator[None]:
    """While it is read here, no retention of any process on any node removes the checkpoint.

    A lease is a shared ``flock`` of the marker, so it ends with its owner, however that ends.
    Where the file system has no ``flock``, nothing is held.

    Raises:
        CheckpointGone: it is not there, or is just being removed.
    """
    gone = CheckpointGone(f"{path} was removed by the trainer's retention before it was read")
    try:
        marker = (path / MARKER).open("rb")
    except FileNotFoundError as error:
        raise gone from error
    with marker:
        try:
            fcntl.flock(marker, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise gone from error
        except OSError as error:
            log.warning("%s cannot be held while it is read (%s)", path, error)
        if not (path / MARKER).exists():
            raise gone
        yield


# writing ------------------------------------------------------------------------------
def write_checkpoint(
    job_dir: str | Path,
    step: int,
    state: dict[str, Any],
    fill: Callable[[Path], None],
    keep: int = 0,
    hook: Optional[Hook] = None,
) -> Path:
    """Write checkpoint ``step``, durably; then remove all but the ``keep`` newest.

    Args:
        state: JSON-able, becomes ``state.json``.
        fill: writes everything else into the directory that it is given.
        keep: complete checkpoints to leave on disk, earlier runs' included; 0 keeps all.
        hook: called with the name of each point that the save passes.

    Raises:
        OSError: the disk is full or not writable; earlier checkpoints are untouched.
    """
    reached = hook or (lambda point: None)
    target = step_dir(job_dir, step)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.partial"
    try:
        partial.mkdir()
        reached("created")
        fill(partial)
        reached("filled")
        (partial / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
        entries = {}
        fsync(partial, tree=True)
        for path in sorted(partial.rglob("*")):
            if path.is_file() and _marked(name := str(path.relative_to(partial))):
                size = path.stat().st_size
                hashed = {"sha256": _sha256(path)} if size <= HASHED_BYTES else {}
                entries[name] = {"size": size} | hashed
        reached("synced")
        marker = json.dumps({"step": step, "files": entries}, indent=1)
        (partial / MARKER).write_text(marker, encoding="utf-8")
        fsync(partial / MARKER)
        fsync(partial)
        reached("marked")
        _move_in(partial, target, reached)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    prune(target.parent, keep, target)
    reached("pruned")
    return target


def _move_in(partial: Path, target: Path, reached: Hook) -> None:
    """Give ``partial`` its name; a checkpoint of that name keeps existing until then."""
    retired = target.with_name(target.name + _RETIRED)
    if target.exists():
        if retired.exists():
            shutil.rmtree(retired)
        os.rename(target, retired)
        reached("retired")
    os.rename(partial, target)
    fsync(target.parent)
    reached("renamed")
    if retired.exists():
        shutil.rmtree(retired)


def prune(job_dir: str | Path, keep: int, newest: Optional[Path] = None) -> None:
    """Remove left-overs of killed saves, and complete checkpoints beyond the last ``keep``.

    ``newest`` was just written and stays, also when a job that started over in an old
    directory finds higher steps there. What somebody reads (:func:`held`) stays until a later
    save.
    """
    for path in Path(job_dir).iterdir():
        replaced = path.name.endswith(_RETIRED) and is_complete(path.with_suffix(""))
        if _PARTIAL.match(path.name) or replaced:
            shutil.rmtree(path, ignore_errors=True)
    for path in complete_checkpoints(job_dir)[:-keep] if keep > 0 else []:
        if path == newest:
            continue
        with (path / MARKER).open("r+b") as marker:
            try:
                fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.info("%s is being read and is kept until the next save", path)
                continue
            except OSError:
                pass  # a file system without flock: nobody can hold it
            # without its marker a half-removed directory cannot be taken for a checkpoint
            (path / MARKER).unlink()
            shutil.rmtree(path)


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
