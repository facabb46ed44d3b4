"""Every architecture of tests/architectures.py stands every check that needs no vLLM.

Invariant: what a model of the table cannot do is refused with a reason; nothing is skipped here.
"""

import pytest
from architectures import ARCHITECTURES, COLUMNS, Stand

# "–": it does not apply to the architecture, for the reason given in docs/models.md
DOES_NOT_APPLY = {
    ("shared prompts", name)
    for name in (
        "mistral", "qwen3-next", "gemma2", "gemma3", "phi3", "olmo3", "gpt-oss", "mamba", "bloom",
    )
}  # fmt: skip


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_architecture_stands_every_check(name, tmp_path):
    stand = Stand(name, tmp_path)
    found = {column: check(stand) for column, check in COLUMNS.items()}
    expected = {c: "–" if (c, name) in DOES_NOT_APPLY else "✓" for c in COLUMNS}
    assert found == expected
