"""Names of the parts of a run, which name files, locks and metrics in the job directory.

Invariant: a part's name is one path component that no other part's files can have.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from trinity_dask.config.schema import Config

_STORE = "buffer.trainer_input.experience_buffer"
_COMPONENT = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")
# <name>_meta.json, <name>_config.yaml and <name>.lock of these are something else's
_RESERVED = ("bench", "benchmark", "run", "stage", "synchronizer")
_ALLOWED = "letters, digits, '_', '-' and '.' (not first)"


def part_names(config: Config) -> Iterator[str]:
    """Of the explorer, the trainer and the experience buffer."""
    explorer, trainer = config.explorer.name, config.trainer.name
    buffer = config.buffer.trainer_input.experience_buffer.name
    yield from _problems("explorer.name", explorer, (*_RESERVED, "trainer"), "explorer1")
    yield from _problems("trainer.name", trainer, _RESERVED, "trainer")
    yield from _problems(f"{_STORE}.name", buffer, (), "experience")
    if explorer == trainer and explorer != "trainer":  # that one is told already
        yield (
            f"explorer.name={explorer!r} is trainer.name too, and both write files of that name; "
            "give one of them another name"
        )


def _problems(key: str, value: str, reserved: tuple[str, ...], example: str) -> Iterator[str]:
    if not _COMPONENT.fullmatch(value):
        yield (
            f"{key}={value!r} is not a name: it becomes part of file names, so it is made of "
            f"{_ALLOWED}, as {key}={example}"
        )
    elif value in reserved:
        yield (
            f"{key}={value!r} is reserved, as are {', '.join(reserved)}: files of that name are "
            f"written by another part; choose another one of {_ALLOWED}, as {key}={example}"
        )
