"""``trinity-dask submit``: the driver of a run in a job of Slurm that goes on in its next one.

Invariant: nothing is submitted that ``run`` would refuse, of a sweep no value. Before the job's
time is over the driver saves, ends with 130 and the job is queued again, or where that is not
allowed a successor is. A user's own ``scancel`` ends the run, saved, for good.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

# what --multirun uses where no other sweeper is chosen; Hydra gives no other way to its jobs
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

from trinity_dask.cli import CommandError
from trinity_dask.cli.run import job_label
from trinity_dask.config.compose import compose_tree, finish
from trinity_dask.config.errors import ConfigError
from trinity_dask.config.hints import parse, with_mappings
from trinity_dask.config.schema import Config
from trinity_dask.files import write_text
from trinity_dask.run.names import check_names

SCRIPT = """\
#!/bin/bash
{directives}

{prologue}
{words}
# made by the driver when it stops because its time is over, or here when Slurm says so
export {time_over}={script}.over.$SLURM_JOB_ID
rm -f ${time_over}
{command} &
driver=$!
trap 'told=1; [ -e ${time_over} ] || {{ touch ${time_over}; kill -TERM $driver; }}' USR1
trap 'told=1; rm -f ${time_over}; kill -TERM $driver' TERM
# a signal ends the wait with a code of its own; 127: the driver's code was read already
told=1
while [ $told ]; do
  told=; wait $driver; ended=$?
  [ $ended = 127 ] || code=$ended
done
# 130: stopped, its state saved; 143: stopped before it had begun
if [ -e ${time_over} ] && [[ $code = 130 || $code = 143 ]]; then
  rm -f ${time_over}
  scontrol requeue $SLURM_JOB_ID ||
    sbatch --dependency=afterany:$SLURM_JOB_ID \\
      ${{SLURM_ARRAY_TASK_ID:+--array=$SLURM_ARRAY_TASK_ID}} {script}
fi
exit $code
"""


def main(args: Sequence[str]) -> int:
    flags = _parser().parse_intermixed_args(list(args))
    overrides = with_mappings(flags.overrides)
    whole, configs = _configs(overrides, flags)
    config = configs[0]
    if config.cluster.type != "slurm" or config.cluster.where == "tasks":
        told = "srun" if config.cluster.where == "tasks" else config.cluster.type
        raise ConfigError(f"cluster={told}: submit is for cluster=slurm")
    more = [] if flags.config_dir is None else ["--config-dir", str(_absolute(flags.config_dir))]
    root = Path(str(whole.job_dir))
    path, log = root / "slurm" / "submit.sh", root / "log" / f"submit-{_number(flags)}.log"
    if flags.multirun:
        words = [
            [*each, f"name='{c.name}'", *more]
            for each, c in zip(_jobs(overrides), configs, strict=True)
        ]
        script = job_script(config, words, path, log, f"0-{len(words) - 1}{_at_once(flags)}")
    else:
        script = job_script(config, [[*flags.overrides, *more]], path, log)
    if flags.dry_run:
        print(script, end="")
        return 0
    from trinity_dask.cluster.slurm.queue import SlurmError, ask

    write_text(_made(path), script)
    _made(log)
    try:
        job = ask("sbatch", "--parsable", str(path)).strip().partition(";")[0]
    except SlurmError as error:
        raise ConfigError(f"Slurm refuses the job of the driver: {error}") from error
    except OSError as error:
        raise CommandError(f"sbatch cannot be run: {error}") from error
    print(f"job {job}" + (f", an array of {len(configs)}" if flags.multirun else ""))
    print(f"log {str(log).replace('%j', job).replace('%A', job).replace('%a', '*')}")
    for each in configs:
        print(f"status: trinity-dask status {each.job_dir}")
    print(f"end it, its state saved: scancel --batch --signal=TERM {job}")
    return 0


def _configs(overrides: Sequence[str], flags: argparse.Namespace) -> tuple[Config, list[Config]]:
    """The configuration of all jobs together (of the first, of a sweep), and that of each.

    Raises:
        ConfigError: one of them cannot run.
    """
    found: list[Config] = []
    jobs = _jobs(overrides) if flags.multirun else [list(overrides)]
    fixed = {item for item in overrides if not parse(item).is_sweep_override()}
    told: set[str] = set()
    for number, words in enumerate(jobs):
        label = None
        if flags.multirun:
            label = job_label(number, [word for word in words if word not in fixed])
        config, warnings = finish(compose_tree(words, config_dir=flags.config_dir), words, label)
        check_names(config)
        found.append(config)
        told.update(warnings)
    for message in sorted(told):
        print(f"warning: {message}", file=sys.stderr)
    if not flags.multirun:
        return found[0], found
    return finish(compose_tree(jobs[0], config_dir=flags.config_dir), jobs[0])[0], found


def _jobs(overrides: Sequence[str]) -> list[list[str]]:
    """Every combination of swept values, in the order of ``run --multirun``."""
    [batch] = BasicSweeper.split_arguments([parse(item) for item in overrides], None)
    return [list(words) for words in batch]


def _number(flags: argparse.Namespace) -> str:
    return "%A_%a" if flags.multirun else "%j"


def _at_once(flags: argparse.Namespace) -> str:
    return f"%{flags.at_once}" if flags.at_once else ""


def _absolute(directory: str) -> Path:
    return Path(directory).absolute()


def job_script(
    config: Config,
    words: Sequence[Sequence[str]],
    path: Path,
    log: Path,
    array: Optional[str] = None,
) -> str:
    """The script of the driver's job; ``words`` are those of ``trinity-dask run``, for each job
    of an ``array``."""
    from trinity_dask.cluster.slurm.allocation import TIME_OVER
    from trinity_dask.cluster.slurm.jobs import job_options, lead_s, resources

    cluster = config.cluster
    options = [
        f"--job-name={(path.parent.parent.name if array else config.name).replace('/', '-')}",
        "--ntasks=1",
        f"--cpus-per-task={resources(cluster, 'driver')[0]}",
        *job_options(cluster, "driver"),
        f"--output={shlex.quote(str(log))}",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{lead_s(cluster, 'driver')}",
        *([f"--array={array}"] if array else []),
    ]
    # the run's own job is no room for its workers
    where = ["cluster.where=login"] if cluster.where == "auto" else []
    lines = [shlex.join([*each, *where]) for each in words]
    cases = "\n".join(f"  {number}) set -- {line} ;;" for number, line in enumerate(lines))
    command = shlex.join([sys.executable, "-m", "trinity_dask", "run"])
    return SCRIPT.format(
        directives="\n".join(f"#SBATCH {option}" for option in options),
        prologue="\n".join(cluster.prologue),
        words=f"case $SLURM_ARRAY_TASK_ID in\n{cases}\nesac" if array else f"set -- {lines[0]}",
        command=f'{command} "$@"',
        script=shlex.quote(str(path)),
        time_over=TIME_OVER,
    )


def _made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trinity-dask submit", description=__doc__)
    parser.add_argument("overrides", nargs="*", help="as for run: +experiment=... key=value")
    parser.add_argument("--dry-run", action="store_true", help="print the script, submit nothing")
    parser.add_argument(
        "--multirun", "-m", action="store_true", help="a sweep: a job array, one job per value"
    )
    parser.add_argument(
        "--at-once", type=int, metavar="N", help="how many jobs of a sweep may run at a time"
    )
    parser.add_argument("--config-dir", "-cd", help="a directory with more presets")
    return parser
