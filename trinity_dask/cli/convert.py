"""``trinity-dask convert``: a Hugging Face directory for every checkpoint that lacks one.

Invariant: reads complete checkpoints only and changes nothing but ``huggingface/``, which
appears whole or not at all; converting again does nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from trinity_dask.cli import CommandError


def main(args: Sequence[str]) -> int:
    flags = _parser().parse_args(list(args))
    import torch

    from trinity_dask.trainer.checkpoints.checkpoint import HF_EXPORT
    from trinity_dask.trainer.checkpoints.export import export_policy

    for path in _wanted(Path(flags.directory), flags.step):
        if (path / HF_EXPORT).is_dir() and not flags.force:
            print(f"{path / HF_EXPORT}: there already")
            continue
        try:
            print(export_policy(path, getattr(torch, flags.dtype), merge=not flags.adapter))
        except (OSError, ValueError) as error:
            raise CommandError(f"{path}: {error}") from error
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trinity-dask convert", description=__doc__)
    parser.add_argument("directory", help="directory of a job, of a stage, or of one checkpoint")
    parser.add_argument("--step", type=int, nargs="+", help="these steps; default all")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument(
        "--adapter", action="store_true", help="of an adapter: itself, not merged into its base"
    )
    parser.add_argument("--force", action="store_true", help="also where there is one already")
    return parser


def _wanted(directory: Path, steps: Sequence[int] | None) -> Iterator[Path]:
    """The complete checkpoints that were asked for.

    Raises:
        CommandError: there is none, or one of ``steps`` is missing.
    """
    from trinity_dask.trainer.checkpoints.checkpoint import (
        complete_checkpoints,
        is_complete,
        step_of,
    )

    if not directory.is_dir():
        raise CommandError(f"{directory} is not a directory")
    named = [directory]
    if step_of(directory) is None:  # those of a stage, or of every stage of a job
        stages = [directory, *sorted(path for path in directory.iterdir() if path.is_dir())]
        named = [path for stage in stages for path in complete_checkpoints(stage)]
    found = [path for path in named if is_complete(path)]
    missing = sorted(set(steps or ()) - {step_of(path) for path in found})
    if not found or missing:
        what = f"of step {', '.join(map(str, missing))} " if missing else ""
        raise CommandError(f"{directory} holds no complete checkpoint {what}(global_step_<n>)")
    for path in found:
        if not steps or step_of(path) in steps:
            yield path
