"""Whether Slurm would take the jobs of a run, asked before any is submitted.

Invariant: no job is left behind, and every finding that is not ok says what to do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from trinity_dask.cluster.slurm.jobs import job_options, resources
from trinity_dask.cluster.slurm.nodes import MISSING, OK, WARNING, Line, look
from trinity_dask.cluster.slurm.queue import SlurmError, ask
from trinity_dask.cluster.specs import needed_workers
from trinity_dask.config.schema import Config

POLITE_S = 10  # for a worker to hand back its work and close its engine


def check(cfg: Config, wait_s: float) -> Iterator[Line]:
    """Level and text of each finding; a node is waited for up to ``wait_s``."""
    try:
        yield OK, ask("sinfo", "--version").strip()
        yield from _partitions(cfg)
        yield from _settings()
    except SlurmError as error:
        yield MISSING, f"{error}; run this where sbatch works, or set SLURM_CONF"
        return
    groups = {group: 1 for group in needed_workers(cfg)}
    taken = [_would_take(cfg, group) for group in (*groups, "driver")]
    yield from taken
    if all(level == OK for level, _ in taken):
        yield from look(cfg, wait_s)


def _partitions(cfg: Config) -> Iterator[Line]:
    """Each partition's limits; of those that the run names also whether they take jobs."""
    cluster = cfg.cluster
    sections = (getattr(cluster, g) for g in (*needed_workers(cfg), "driver"))
    wanted = {section.partition or cluster.partition for section in sections}
    shown = ask("sinfo", "-h", "-o", "%R|%a|%l|%D|%c|%m|%G|%T").splitlines()
    for line in shown:
        name, state, limit, nodes, cores, memory, gres, at = line.split("|")
        told = (
            f"partition {name}: {state}, time limit {limit}, {nodes} nodes {at} of {cores} cores, "
            f"{memory} MB, {gres}"
        )
        closed = name in wanted and state != "up"
        yield (WARNING, f"{told}; its jobs would wait: take another") if closed else (OK, told)


def _settings() -> Iterator[Line]:
    found = dict(re.findall(r"^(\w+)\s*= (.*)$", ask("scontrol", "show", "config"), re.MULTILINE))
    wait = int(re.sub(r"\D.*", "", found.get("KillWait", "30")) or 0)
    text = f"KillWait {wait} s: from SIGTERM to SIGKILL"
    short = f"{text}; an engine may be killed while it closes, which costs nothing but its log"
    yield (OK, text) if wait >= POLITE_S else (WARNING, short)
    if found.get("JobRequeue", "1").startswith("1"):
        yield OK, "jobs may be queued again (JobRequeue)"
    else:
        yield WARNING, "jobs are not queued again (JobRequeue=0): submit makes a successor instead"


def _would_take(cfg: Config, group: str) -> Line:
    """Of one job of the group; the time limit of a partition is not looked at by Slurm here."""
    cores, _ = resources(cfg.cluster, group)
    options = [*job_options(cfg.cluster, group), f"--cpus-per-task={cores}", "--ntasks=1"]
    try:
        ask("sbatch", "--test-only", *options, "--wrap=true")
    except SlurmError as error:
        return MISSING, f"a job of {group} is refused: {error} (asked for: {' '.join(options)})"
    return OK, f"a job of {group} would be taken: {' '.join(options)}"
