"""Forked gloo ranks for tests: ``run(work, n, *args)`` is ``work(mesh, *args)`` on each of them."""

from __future__ import annotations

import multiprocessing
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint  # here once, rather than in each fork
import torch.distributed.fsdp
from torch.distributed.device_mesh import init_device_mesh

WAIT_S = 240.0


def run(work: Callable[..., Any], n_ranks: int, directory: Path, *args: Any) -> list[Any]:
    """What each rank returned, in order; the first error of one ends the wait."""
    context = multiprocessing.get_context("fork")
    store = directory / f"store-{n_ranks}-{work.__name__}"
    store.unlink(missing_ok=True)
    results = context.SimpleQueue()
    ranks = [
        context.Process(target=_rank, args=(results, work, store, rank, n_ranks, args))
        for rank in range(n_ranks)
    ]
    for rank in ranks:
        rank.start()
    try:
        found = {}
        for _ in ranks:
            rank, error, value = results.get()
            assert error is None, f"rank {rank}: {error}"
            found[rank] = pickle.loads(value)
        return [found[rank] for rank in range(n_ranks)]
    finally:
        for process in ranks:
            process.join(5)
            process.kill()


def _rank(results, work, store: Path, rank: int, n_ranks: int, args) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=n_ranks
        )
        mesh = init_device_mesh("cpu", (n_ranks,))
        # as bytes: a queue would pass tensors as descriptors, which end with this process
        results.put((rank, None, pickle.dumps(work(mesh, *args))))
        dist.barrier()
    except BaseException:
        results.put((rank, traceback.format_exc(), None))
