"""How long a large taskset takes to open, and what it costs in memory.

Invariant: each file is opened in a process of its own, so the memory is what opening it, its
first batch and a thousand rows at random added to a process that has imported everything.

    python benchmarks/taskset.py                 # a million rows of each kind
    python benchmarks/taskset.py --smoke

Columns: seconds until the taskset is open, until the first batch is there (both from the
start of opening), for 1000 rows at random; MB above the process (peak).
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = ("jsonl", "jsonl.gz", "json", "csv", "parquet", "arrow")

CHILD = """
import json, random, resource, sys, time
from pathlib import Path
from trinity_dask.buffer.data.taskset import Taskset, TasksetScheduler
from trinity_dask.config.schema import SelectorConfig, TasksetConfig

def peak_mb():
    # of this process alone: what ru_maxrss says is at first that of the one that started it
    status = Path("/proc/self/status").read_text()
    return int(next(l for l in status.splitlines() if l.startswith("VmHWM")).split()[1]) / 1024

def config(path, selector):
    return TasksetConfig(path=path, workflow="simple_workflow", reward_fn="math_reward",
                         data_selector=SelectorConfig(selector, 42))

path, small, selector = sys.argv[1:]
TasksetScheduler([config(small, selector)], batch_size=1).read()  # imports
before, start = peak_mb(), time.perf_counter()
tasks = TasksetScheduler([config(path, selector)], batch_size=64)
opened = time.perf_counter() - start
tasks.read()
first = time.perf_counter() - start
start = time.perf_counter()
reader, draw = tasks.tasksets[0]._reader, random.Random(0)
for _ in range(1000):
    reader[draw.randrange(len(reader))]
print(json.dumps([opened, first, time.perf_counter() - start, peak_mb() - before, len(tasks)]))
"""


def write(folder: Path, rows: int) -> None:
    """The same rows in every format: a question of 160 characters and a truth."""
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    table = pa.table(
        {
            "prompt": [f"question {i:09d} " + "x" * 141 for i in range(rows)],
            "response": [str(i) for i in range(rows)],
        }
    )
    with (folder / "t.jsonl").open("w") as lines, gzip.open(folder / "t.jsonl.gz", "wt", 1) as gz:
        for batch in table.to_batches(10_000):
            text = "".join(json.dumps(row) + "\n" for row in batch.to_pylist())
            lines.write(text)
            gz.write(text)
    with (folder / "t.jsonl").open() as lines, (folder / "t.json").open("w") as array:
        for number, line in enumerate(lines):  # one array of all rows
            array.write(("," if number else "[") + line)
        array.write("]")
    pa.csv.write_csv(table, folder / "t.csv")
    pa.parquet.write_table(table, folder / "t.parquet")
    with pa.ipc.new_file(folder / "t.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=10_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--smoke", action="store_true", help="2000 rows")
    parser.add_argument("--dir", help="where the files are made")
    args = parser.parse_args()
    rows = 2000 if args.smoke else args.rows
    print(f"{rows:,} rows\n{'file':10} {'order':11} {'open s':>7} {'first s':>8} "
          f"{'1000 rows s':>12} {'MB':>7}")  # fmt: skip
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        write(Path(folder), rows)
        Path(folder, "small").mkdir()
        write(Path(folder, "small"), 10)
        for suffix in SUFFIXES:
            for order in ("sequential", "shuffle"):
                done = subprocess.run(
                    [sys.executable, "-c", CHILD, f"{folder}/t.{suffix}",
                     f"{folder}/small/t.{suffix}", order],
                    capture_output=True, text=True, check=True, cwd=ROOT,
                )  # fmt: skip
                opened, first, read, memory, found = json.loads(done.stdout)
                assert found == rows
                print(f"{suffix:10} {order:11} {opened:7.2f} {first:8.2f} {read:12.2f} "
                      f"{memory:7.0f}")  # fmt: skip


if __name__ == "__main__":
    main()
