"""Seconds from the start of ``trinity-dask run`` to the first trained sft step.

Each start is a process of its own with an empty job directory, over a demo that has been prepared
before. With another checkout the two take turns, so that both meet the same load:
``python benchmarks/startup.py [--other PATH] [--starts N] [--smoke] [KEY=VALUE ...]`` prints every
start, the medians and their ratio. ``--smoke``: one start of the demo's miniature,
which makes its data first.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
TRAINED = re.compile(r"\bstep [1-9]\d*/")
LIMIT_S = 300.0


def start_up(tree: Path, demo: str, root: str, name: str, overrides: Sequence[str]) -> float:
    """Seconds until ``tree``'s command prints its first trained step; it is interrupted then.

    Raises:
        RuntimeError: it ended without one (has its output).
    """
    command = [
        *(sys.executable, "-c", "import sys; from trinity_dask.cli import main; sys.exit(main())"),
        *("run", f"+experiment={demo}", "engine=torch", "monitor.progress=plain"),
        *(f"checkpoint_root_dir={root}", f"name={name}", *overrides),
    ]
    began, lines = time.perf_counter(), list[str]()
    process = subprocess.Popen(
        command,
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        for line in process.stdout or ():
            lines.append(line)
            if TRAINED.search(line):
                return time.perf_counter() - began
            if time.perf_counter() - began > LIMIT_S:
                break
        raise RuntimeError(f"{tree} trained no step:\n{''.join(lines[-20:])}")
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LIMIT_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--other", type=Path, help="another checkout to compare with")
    parser.add_argument("--starts", type=int, default=3, help="of each checkout (default 3)")
    parser.add_argument("--smoke", action="store_true", help="one start of the demo's miniature")
    parser.add_argument("overrides", nargs="*", help="further key=value of the run")
    flags = parser.parse_intermixed_args()
    trees = [HERE] + ([flags.other.resolve()] if flags.other else [])
    demo = "sort_digits_tiny" if flags.smoke else "sort_digits"
    starts = 1 if flags.smoke else flags.starts
    found: dict[Path, list[float]] = {tree: [] for tree in trees}
    with tempfile.TemporaryDirectory() as root:
        if not flags.smoke:  # it makes the data and the model
            start_up(HERE, demo, root, "prepare", flags.overrides)
        for number in range(starts):
            for index, tree in enumerate(trees):
                name = f"{index}-{number}"
                found[tree].append(start_up(tree, demo, root, name, flags.overrides))
                print(f"{found[tree][-1]:6.1f} s  {tree}", flush=True)
    medians = [statistics.median(found[tree]) for tree in trees]
    print(f"median {medians[0]:.1f} s")
    if flags.other:
        print(f"other  {medians[1]:.1f} s; ratio {medians[0] / medians[1]:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
