"""``trinity-dask try``: one task through its workflow, printed turn by turn, without a trainer.

Invariant: nothing is trained or written; exit code 1 when a run of the workflow failed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from trinity_dask.cli import EXIT_DONE, EXIT_FAILED, CommandError
from trinity_dask.config import split_stages
from trinity_dask.config.compose import compose_tree, finish
from trinity_dask.config.errors import ConfigError
from trinity_dask.config.hints import with_mappings
from trinity_dask.run.names import check_names
from trinity_dask.run.trace import stage_to_try, trace

OWN = ("task", "checkpoint", "runs", "taskset", "stage")  # words beside those of run


def main(args: Sequence[str]) -> int:
    flags = _parser().parse_intermixed_args(list(args))
    own, overrides = _own(flags.words)
    overrides = with_mappings(overrides)
    config, _ = finish(compose_tree(overrides, config_dir=flags.config_dir), overrides)
    check_names(config)
    stage = stage_to_try(split_stages(config), own.pop("stage", None))
    try:
        found = trace(stage, **own)
    except ConfigError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        raise CommandError(f"the task could not be tried: {error}") from error
    print(found)
    return EXIT_DONE if found.ok else EXIT_FAILED


def _own(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The words of this command, and the rest, which are overrides.

    Raises:
        ConfigError: ``task`` or ``runs`` is none.
    """
    own: dict[str, Any] = {}
    rest = []
    for word in words:
        name, equals, value = word.partition("=")
        if equals and name in OWN:
            own[name] = value
        else:
            rest.append(word)
    if "task" in own:
        try:
            own["task"] = json.loads(own["task"])
        except json.JSONDecodeError as error:
            raise ConfigError(f"task={own['task']}: a number or a row as JSON ({error})") from error
        if isinstance(own["task"], bool) or not isinstance(own["task"], int | dict):
            raise ConfigError(f"task={own['task']}: a number or a row as JSON")
    if "runs" in own:
        if not own["runs"].isdigit() or int(own["runs"]) < 1:
            raise ConfigError(f"runs={own['runs']}: how often the task is run, from 1 on")
        own["runs"] = int(own["runs"])
    return own, rest


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trinity-dask try",
        description=__doc__,
        epilog="task=N or task='{...}', checkpoint=N|DIRECTORY|newest|start, runs=N, "
        "taskset=NAME of an evaluation, stage=NAME",
    )
    parser.add_argument("words", nargs="*", help="as for run, and those below")
    parser.add_argument("--config-dir", "-cd", help="a directory with more presets")
    return parser
