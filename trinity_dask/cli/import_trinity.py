"""``trinity-dask import-trinity``: a configuration of Trinity-RFT as one of ours.

Invariant: what is printed names every key of the file: mapped, changed in meaning, or without
counterpart, with the reason. Nothing is run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from trinity_dask.cli import EXIT_DONE, EXIT_FAILED
from trinity_dask.config.errors import ConfigError
from trinity_dask.files import write_text

if TYPE_CHECKING:
    from trinity_dask.compat.trinity_config import Conversion

HEADER = "# @package _global_\n# Made from {} by trinity-dask import-trinity.\n"
_TITLES = {
    "mapped": "mapped",
    "changed": "changed in meaning or place",
    "default": "their defaults, written since ours are others",
    "none": "without counterpart, and nothing is lost",
    "unknown": "not known",
    "lost": "LOST: without counterpart",
}


def main(args: Sequence[str]) -> int:
    """Print or write the configuration; the report goes to stderr, or with -o to stdout."""
    flags = _parser().parse_args(list(args))
    source = Path(flags.config)
    from trinity_dask.compat.trinity_config import convert

    done = convert(read(source))
    text = HEADER.format(source.name) + to_yaml(done.tree)
    out = sys.stdout if flags.output else sys.stderr
    print("\n".join(report(done)), file=out)
    if flags.output is None:
        print(text, end="")
    else:
        path = Path(flags.output)
        write_text(path, text)
        print("\n".join(_next(path)))
    return EXIT_FAILED if flags.strict and done.losses else EXIT_DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trinity-dask import-trinity", description=__doc__)
    parser.add_argument("config", help="a YAML file of Trinity-RFT 0.5 or 0.6")
    parser.add_argument(
        "-o", "--output", help="write it here, best as <directory>/experiment/<name>.yaml"
    )
    parser.add_argument(
        "--strict", action="store_true", help="exit 1 if something that matters was lost"
    )
    return parser


def read(path: Path) -> dict[str, Any]:
    """A YAML mapping. Raises ConfigError when the file is none."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"no configuration file {str(path)!r}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} is no configuration: it holds no mapping")
    return tree


def to_yaml(tree: dict[str, Any]) -> str:
    """The keys in their order, lists and texts as a person writes them."""
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=100)


def report(done: Conversion) -> Iterator[str]:
    """What became of every key, kind by kind; the losses last."""
    for kind, title in _TITLES.items():
        notes = [note for note in done.notes if note.kind == kind]
        if notes:
            yield f"{title} ({len(notes)}):"
            yield from (f"  {note}" for note in notes)


def _next(path: Path) -> Iterator[str]:
    """How to go on with the file."""
    yield f"wrote {path}"
    if path.parent.name == "experiment":
        where = path.parent.parent
        yield f"check it: trinity-dask validate --config-dir {where} +experiment={path.stem}"
        yield f"run it:   trinity-dask run --config-dir {where} +experiment={path.stem}"
