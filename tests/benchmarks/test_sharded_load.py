"""A sharded rank's peak of memory, on a model that is smaller than the benchmark's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "sharded_load.py"


@pytest.mark.timeout(300)
def test_no_phase_of_a_rank_holds_more_than_its_share_and_a_layer(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    size = ["--ranks", "2", "--hidden", "768", "--layers", "5", "--vocab", "3000"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *size, "--out", str(out)], capture_output=True, text=True
    )
    assert out.is_file(), done.stderr[-2000:]
    found = json.loads(out.read_text())
    load = found["ranks"]["2"]["load"]
    assert load["held"] == pytest.approx(found["bytes"] / 2, rel=0.01)
    assert load["peak"] > 0.9 * load["held"]  # it was looked at while it had them
    assert found["missed"] == [], done.stdout
