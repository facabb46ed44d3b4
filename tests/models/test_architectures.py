"""Every architecture of tests/architectures.py stands every check that needs no vLLM.

Invariant: what a model of the table cannot do is refused with a reason; nothing is skipped here.
"""

from pathlib import Path

import pytest
from architectures import ARCHITECTURES, COLUMNS, Stand

PAGE = Path(__file__).parents[2] / "docs" / "models.md"

# "–": it does not apply to the architecture, for the reason given in docs/models.md
DOES_NOT_APPLY = {
    ("shared prompts", name)
    for name in (
        "mistral", "qwen3-next", "gemma2", "gemma3", "phi3", "olmo3", "gpt-oss", "mamba", "bloom",
    )
}  # fmt: skip


def expected(name):
    return {c: "–" if (c, name) in DOES_NOT_APPLY else "✓" for c in COLUMNS}


def test_the_page_shows_every_architecture_as_it_is():
    made = PAGE.read_text(encoding="utf-8").partition("do not edit. -->")[2]
    lines = [line for line in made.splitlines() if line[:2] == "| "]
    head, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert head[1:] == [*COLUMNS, "vLLM (CPU)"]
    assert [row[0].split()[0] for row in rows] == list(ARCHITECTURES), "run docs/make_models.py"
    for row in rows:
        assert row[1:-1] == list(expected(row[0].split()[0]).values())
        assert row[-1] in ("✓", "refused")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_architecture_stands_every_check(name, tmp_path):
    stand = Stand(name, tmp_path)
    found = {column: check(stand) for column, check in COLUMNS.items()}
    assert found == expected(name)
