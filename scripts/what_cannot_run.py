"""Say loudly which tests this machine cannot run, why, and what would change that.

Invariant: the exit status is 0; a machine that lacks something is no failure, silence
about it would be.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

IMPORT_TIMEOUT_S = 180.0


def imports(module: str) -> str | None:
    """None when the module works, else the last line of the error."""
    if importlib.util.find_spec(module) is None:
        return "not installed"
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import {module}"],
            capture_output=True,
            text=True,
            timeout=IMPORT_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return f"its import took longer than {IMPORT_TIMEOUT_S:.0f} s"
    lines = done.stderr.strip().splitlines()
    return None if done.returncode == 0 else (lines[-1] if lines else "its import failed")


def gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def slurm() -> str | None:
    """None when a Slurm of the tests can be had, else which packages are missing."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "slurm"))
    from slurm_stand import SlurmMissing, unpacked

    try:
        unpacked()
    except SlurmMissing as error:
        return str(error)
    return None


def missing() -> list[tuple[str, str, str]]:
    """(tests, why they cannot run, what to do) of everything that cannot run here."""
    found = []
    for module, tests, remedy in (
        ("vllm", "tests/vllm and two of the benchmarks", "make setup, or read its output"),
        ("moto", "the store on s3://", "pip install -e .[test]"),
        ("duckdb", "DuckDB over a run's store", "pip install -e .[test]"),
        ("wandb", "the wandb sink", "pip install -e .[trackers]"),
        ("mlflow", "the mlflow sink", "pip install -e .[trackers]"),
        ("playwright", "tests/browser", "pip install -e .[test]"),
        ("ipykernel", "the notebooks", "pip install -e .[test]"),
    ):
        reason = imports(module)
        if reason:
            found.append((tests, f"{module}: {reason}", remedy))
    if (reason := slurm()) is not None:
        found.append(("tests/slurm: runs as jobs of a real Slurm", reason, "install the packages"))
    if shutil.which("chromium") is None and shutil.which("google-chrome") is None:
        found.append(("tests/browser", "no chromium", "apt-get install chromium"))
    if gpus() == 0:
        found.append(
            ("everything on a GPU (nccl, bfloat16 kernels)", "no GPU", "a machine with one")
        )
    return found


def main() -> int:
    lines = missing()
    if not lines:
        print("=== every test can run on this machine")
        return 0
    print("=" * 78)
    for tests, reason, remedy in lines:
        print(f"CANNOT RUN HERE: {tests}\n  because: {reason}\n  remedy:  {remedy}")
    print("=" * 78)
    return 0


if __name__ == "__main__":
    sys.exit(main())
