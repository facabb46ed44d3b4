"""Write the table of ``docs/from-trinity.md`` from the converter's own table.

Invariant: what stands above the marker is written by hand and kept; what stands below is made
from ``trinity_dask/compat/trinity_config`` alone. ``--check`` writes nothing and exits 1 when the
page is not current.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from generated_page import marker, renewed, write_page  # noqa: E402  (beside this script)

from trinity_dask.compat.trinity_config import KEYS  # noqa: E402  (one level up)
from trinity_dask.compat.trinity_config.keys import Key  # noqa: E402

PAGE = Path(__file__).with_name("from-trinity.md")
MARKER = marker(Path(__file__).name)
# sections whose rows also stand for another place
_COPIES = {
    "buffer.explorer_input.tasksets.*.": "buffer.explorer_input.taskset.",
    "buffer.explorer_input.eval_tasksets.*.": "buffer.explorer_input.taskset.",
    "buffer.trainer_input.auxiliary_buffers.*.": "buffer.trainer_input.experience_buffer.",
    "trainer.trainer_config.actor.": "trainer.trainer_config.actor_rollout_ref.actor.",
    "trainer.trainer_config.ref.": "trainer.trainer_config.actor_rollout_ref.ref.",
}


def page(old: str) -> str:
    """The page with its hand-written part kept and its table made anew."""
    return renewed(old, MARKER, "\n".join(table()))


def table() -> Iterator[str]:
    yield "## Every key"
    yield ""
    yield from (f"`{place}` has the keys of `{like}`.  " for place, like in _COPIES.items())
    section = None
    for key in KEYS:
        if key.theirs.startswith(tuple(_COPIES)):
            continue
        if (here := key.theirs.partition(".")[0]) != section:
            section = here
            yield from ("", f"### {section}", "", "| theirs | ours | note |", "|---|---|---|")
        yield _row(key)


def _row(key: Key) -> str:
    ours = "none" if key.ours is None else "same" if key.ours == key.theirs else f"`{key.ours}`"
    note = key.note + ("; their default is written out" if key.carry and key.note else "")
    note = note or ("their default is written out" if key.carry else "")
    return f"| `{key.theirs}` | {ours} | {note} |".replace(" | |", " | |")


if __name__ == "__main__":
    sys.exit(write_page(PAGE, page, __doc__))
