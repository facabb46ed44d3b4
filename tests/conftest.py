"""Settings every test needs, made before anything imports numpy or torch, and the order of files.

Invariant: no test talks to a model hub, no test process starts more than one OpenMP thread,
and a Ctrl-C that a test sends is not ignored because the tests run in the background of a
shell (which has its background jobs ignore it, and their children after them).
"""

import os
import signal

import pytest

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Whole files go to one of two workers in this order; a long one at the end would run alone.
LONG_FIRST = (
    "chaos/test_kill_driver.py",
    "slurm/test_slurm_runs.py",
    "slurm/test_slurm_time.py",
    "e2e/test_learning.py",
    "e2e/test_notebooks.py",
    "models/test_architectures.py",
    "vllm/test_vllm_in_dask.py",
    "cluster/test_trainer_fsdp.py",
    "e2e/test_two_runs.py",
    "vllm/test_vllm_engine.py",
    "e2e/test_algorithms.py",
    "chaos/test_interrupt.py",
    "benchmarks/test_benchmarks_smoke.py",
    "chaos/test_kill_workers.py",
    "e2e/test_modes.py",
    "e2e/test_refusals.py",
    "e2e/test_sync_styles.py",
    "chaos/test_kill_for_good.py",
    "cluster/test_manager_synchronizer.py",
    "cluster/test_trainer_cluster.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Bring the long files to the front; all else keeps its order."""
    rank = {f"tests/{name}": place for place, name in enumerate(LONG_FIRST)}
    items.sort(key=lambda item: rank.get(item.nodeid.partition("::")[0], len(rank)))
