"""What Slurm costs a run, and what it takes to heal there, on a Slurm of this machine.

The same job with ``cluster=local`` and with a job of Slurm for each worker, in turn: from the
command to the first train step, and seconds of a step once it runs, of the quickest round (what
other work on the machine adds is not Slurm's). From ``scancel`` of a worker of each group until the
driver has noticed, until its next job runs, and until the next train step. From the warning of a
submitted driver until it is queued again, and from then (its start is put four seconds later) to
the next step. The Slurm is that of ``tests/slurm``: two nodes, as processes of this machine.

``python benchmarks/slurm.py [--steps N] [--rounds N] [--losses N] [--smoke]`` prints a table,
writes ``benchmarks/results/slurm.json`` and exits with 1 when a step in Slurm takes over 1.03 of a
local one or a loss is noticed after more than a second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from trinity_dask.monitor.history import load_metrics

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "slurm"))
from slurm_driver import Driver
from slurm_stand import Slurm, SlurmMissing, running, until

RESULTS = Path(__file__).parent / "results" / "slurm.json"
OVERHEAD, NOTICED_S = 1.03, 1.0
GROUPS = ("rollout-0", "trainer-0", "control-0")
WAIT_S = 240.0


def after(begin: float, true: Callable[[], object], what: str) -> float:
    """Seconds since ``begin`` at which it became true."""
    until(true, what, WAIT_S)
    return time.monotonic() - begin


def reached(driver: Driver, step: int) -> Callable[[], bool]:
    return lambda: driver.step() >= step


def steady(slurm: Slurm, root: Path, cluster: str, steps: int, number: int) -> dict[str, float]:
    """Seconds to the first train step, and the median of a step after it."""
    begin = time.monotonic()
    driver = Driver(
        slurm,
        root,
        *(f"buffer.total_steps={steps}", "buffer.batch_size=32"),
        name=f"{cluster}-{number}",
        cluster=cluster,
    )
    first_step_s = after(begin, reached(driver, 1), "first step")
    assert driver.end() == 0, driver.output[-3000:]
    rows = load_metrics(str(driver.job)).dropna(subset=["trainer/trained_rows"])
    return {"first_step_s": first_step_s, "step_s": float(rows["time"].diff().median())}


def losses(slurm: Slurm, root: Path, times: int) -> dict[str, dict[str, float]]:
    """Medians for a worker of each group."""
    driver = Driver(
        slurm, root, "buffer.total_steps=100000", "trainer.save_interval=1", "name=lost",
        f"cluster.max_resubmits={times + 1}", name="lost",
    )  # fmt: skip
    found: dict[str, list[tuple[float, float, float]]] = {group: [] for group in GROUPS}
    for group in GROUPS * times:
        driver.until_step(driver.step() + 1)
        job, told = driver.running(group), driver.output.count(f"{group} is over")
        begin = time.monotonic()
        slurm.run("scancel", job)
        noticed = after(
            begin, lambda g=group, n=told: driver.output.count(f"{g} is over") > n, "notice"
        )
        again = after(begin, lambda g=group, j=job: slurm.job_of(g) not in (None, j), "next job")
        step = driver.step()
        found[group].append((noticed, again, after(begin, reached(driver, step + 1), "next step")))
    driver.process.terminate()
    driver.end()
    names = ("noticed_s", "runs_again_s", "next_step_s")
    return {
        group: {
            n: statistics.median(v) for n, v in zip(names, zip(*rows, strict=True), strict=True)
        }
        for group, rows in found.items()
    }


def requeue(slurm: Slurm, root: Path) -> dict[str, float]:
    """A driver in a job of its own, warned, queued again, started again."""
    submitted = Driver(slurm, root, "buffer.total_steps=100000", command="submit", name="again")
    assert submitted.end() == 0, submitted.output
    job = submitted.output.split()[1]
    until(reached(submitted, 2), "step 2", WAIT_S)
    begin = time.monotonic()
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    queued = after(begin, lambda: slurm.only_waits(job), "requeued driver")
    step, begin = submitted.step(), time.monotonic()
    slurm.start_again(job)
    going = after(begin, reached(submitted, step + 1), "step after it")
    slurm.run("scancel", "--batch", "--signal=TERM", job)
    until(lambda: slurm.queue() == {}, "end", WAIT_S)
    return {"saved_and_queued_s": queued, "next_step_s": going}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--losses", type=int, default=3, help="of each group")
    parser.add_argument("--smoke", action="store_true", help="few steps, one loss of each group")
    flags = parser.parse_args()
    if flags.smoke:
        flags.steps, flags.rounds, flags.losses = 4, 1, 1
    try:
        with running() as slurm, tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            rounds = {"local": [], "slurm": []}
            for number in range(flags.rounds):
                for cluster, done in rounds.items():
                    done.append(steady(slurm, root, cluster, flags.steps, number))
            found = {c: min(done, key=lambda row: row["step_s"]) for c, done in rounds.items()}
            lost = losses(slurm, root, flags.losses)
            again = requeue(slurm, root)
    except SlurmMissing as error:
        print(error, file=sys.stderr)
        return 2
    print("| cluster | first step | a step |\n|---|---|---|")
    for name, row in found.items():
        print(f"| {name} | {row['first_step_s']:.1f} s | {row['step_s']:.3f} s |")
    print("\n| lost | noticed | runs again | next train step |\n|---|---|---|---|")
    for group, row in lost.items():
        told = " | ".join(f"{value:.2f} s" for value in row.values())
        print(f"| {group} | {told} |")
    ratio = found["slurm"]["step_s"] / found["local"]["step_s"]
    print(f"\na step in Slurm takes {ratio:.3f} of a local one")
    print(f"warned: saved and queued again after {again['saved_and_queued_s']:.1f} s")
    print(f"started again: the next train step after {again['next_step_s']:.1f} s")
    if flags.smoke:
        return 0
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"steady": found, "lost": lost, "requeue": again}, indent=2))
    slow = max(row["noticed_s"] for row in lost.values())
    return int(ratio > OVERHEAD or slow > NOTICED_S)


if __name__ == "__main__":
    sys.exit(main())
