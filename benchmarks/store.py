"""How fast the experience store commits and scans rows of 512 tokens.

Commit counts everything between a table in memory and a durable, visible batch: schema
check, serialisation, SHA-256, write, fsync, manifest. Scan counts everything between a
list of manifests and every byte of every column having been read from the mapped files.

    python benchmarks/store.py [--dir DIR] [--rows 2048] [--batches 12]

Prints a table and writes ``benchmarks/results/store.json``. Floors: commit >= 200 MB/s,
scan >= 1 GB/s (bytes of Arrow data per second) without compression.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trinity_dask.buffer.store.experience_store import ExperienceStore
from trinity_dask.experience import EID, Experience
from trinity_dask.experience.schema import to_table

TOKENS = 512
COMMIT_FLOOR_MB_S = 200.0
SCAN_FLOOR_GB_S = 1.0


def make_table(rows: int, seed: int = 0) -> pa.Table:
    """Rows as GRPO commits them: 128 prompt and 384 response tokens, five response fields."""
    rng = np.random.default_rng(seed)
    response = TOKENS - 128

    def row(index: int) -> Experience:
        return Experience(
            tokens=rng.integers(0, 150_000, TOKENS),
            prompt_length=128,
            eid=EID(1, index // 8, index % 8),
            reward=float(rng.random()),
            logprobs=-rng.exponential(size=response),
            versions=np.full(response, 3),
            advantages=rng.normal(size=response),
            returns=rng.normal(size=response),
            response_text="x" * 1500,
            info={"model_version": 3},
            metrics={"accuracy": 1.0},
        )

    return to_table([row(index) for index in range(rows)])


def checksum(table: pa.Table) -> float:
    """Read every byte of the table: each buffer is summed as machine words."""
    total = 0.0
    for column in table.columns:
        for chunk in column.chunks:
            for buffer in chunk.buffers():
                if buffer is not None and buffer.size >= 8:
                    words = np.frombuffer(buffer, np.uint64, buffer.size // 8)
                    total += float(pc.sum(pa.array(words)).as_py())
    return total


def measure(directory: Path, table: pa.Table, batches: int, compression: str | None) -> dict:
    store = ExperienceStore(str(directory), compression=compression)
    commit_s, scan_s = [], []
    cpu_s = time.process_time()
    for batch in range(1, batches + 1):
        started = time.perf_counter()
        store.commit(batch, table, {})
        commit_s.append(time.perf_counter() - started)
    cpu_s = time.process_time() - cpu_s
    manifests = store.manifests()
    for manifest in manifests:
        started = time.perf_counter()
        checksum(store.read([manifest.ref()]))
        scan_s.append(time.perf_counter() - started)
    commit, scan = statistics.median(commit_s), statistics.median(scan_s)
    return {
        "compression": compression or "none",
        "commit_mb_s": table.nbytes / commit / 1e6,
        "commit_rows_s": table.num_rows / commit,
        "commit_mb_per_cpu_s": batches * table.nbytes / cpu_s / 1e6,
        "scan_gb_s": table.nbytes / scan / 1e9,
        "commit_worst_s": max(commit_s),
        "file_ratio": manifests[0].n_bytes / table.nbytes,
    }


def bare_disk_mb_s(directory: Path, n_bytes: int) -> float:
    """Write and fsync the same number of bytes: what the disk alone allows."""
    data = np.random.default_rng(1).bytes(n_bytes)
    times = []
    for index in range(5):
        started = time.perf_counter()
        with open(directory / f"bare{index}", "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        times.append(time.perf_counter() - started)
    return n_bytes / statistics.median(times) / 1e6


def report(result: dict) -> None:
    size = result["batch_mb"]
    print(f"{result['rows']} rows of {TOKENS} tokens, {size:.1f} MB a batch, on {result['dir']}")
    print(f"bare write + fsync: {result['bare_write_mb_s']:.0f} MB/s")
    print(
        f"{'compression':12}{'commit MB/s':>12}{'MB/CPU s':>10}{'rows/s':>10}"
        f"{'scan GB/s':>11}{'file/data':>11}"
    )
    for line in result["stores"]:
        print(
            f"{line['compression']:12}{line['commit_mb_s']:12.0f}"
            f"{line['commit_mb_per_cpu_s']:10.0f}{line['commit_rows_s']:10.0f}{line['scan_gb_s']:11.2f}{line['file_ratio']:11.2f}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", default=None, help="directory on the disk to measure")
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--smoke", action="store_true", help="smallest form; judges nothing")
    args = parser.parse_args()
    if args.smoke:
        args.rows, args.batches = 64, 2
    root = Path(tempfile.mkdtemp(prefix="store-benchmark-", dir=args.dir))
    try:
        table = make_table(args.rows)
        stores = [
            measure(root / str(name), table, args.batches, name) for name in (None, "lz4", "zstd")
        ]
        result = {
            "rows": args.rows,
            "batch_mb": table.nbytes / 1e6,
            "dir": str(args.dir or tempfile.gettempdir()),
            "machine": platform.machine(),
            "bare_write_mb_s": bare_disk_mb_s(root, table.nbytes),
            "stores": stores,
        }
    finally:
        shutil.rmtree(root)
    report(result)
    if args.smoke:
        return 0
    path = Path(__file__).parent / "results" / "store.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    plain = stores[0]
    good = plain["commit_mb_s"] >= COMMIT_FLOOR_MB_S and plain["scan_gb_s"] >= SCAN_FLOOR_GB_S
    print(
        f"commit >= {COMMIT_FLOOR_MB_S:g} MB/s and scan >= {SCAN_FLOOR_GB_S:g} GB/s: "
        f"{'reached' if good else 'NOT reached'}"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
