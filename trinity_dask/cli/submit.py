"""``trinity-dask submit``: the driver of a run in a job of Slurm that goes on in its next one.

Invariant: nothing is submitted that ``run`` would refuse. Before the job's time is over the driver
saves, ends with 130 and the job is queued again, or where that is not allowed a successor is.
A user's own ``scancel`` ends the run, saved, for good.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from trinity_dask.cli import CommandError
from trinity_dask.config.compose import compose_tree, finish
from trinity_dask.config.errors import ConfigError
from trinity_dask.config.hints import with_mappings
from trinity_dask.config.schema import Config
from trinity_dask.files import write_text
from trinity_dask.run.names import check_names

SCRIPT = """\
#!/bin/bash
{directives}

{prologue}
# made by the driver when it stops because its time is over, or here when Slurm says so
export {time_over}={script}.over.$SLURM_JOB_ID
rm -f ${time_over}
{command} &
driver=$!
trap '[ -e ${time_over} ] || {{ touch ${time_over}; kill -TERM $driver; }}' USR1
trap 'rm -f ${time_over}; kill -TERM $driver' TERM
wait $driver; code=$?
while kill -0 $driver 2>/dev/null; do wait $driver; code=$?; done
# 130: stopped, its state saved; 143: stopped before it had begun
if [ -e ${time_over} ] && [[ $code = 130 || $code = 143 ]]; then
  rm -f ${time_over}
  scontrol requeue $SLURM_JOB_ID ||
    sbatch --dependency=afterany:$SLURM_JOB_ID {script}
fi
exit $code
"""


def main(args: Sequence[str]) -> int:
    flags = _parser().parse_intermixed_args(list(args))
    overrides = with_mappings(flags.overrides)
    config, warnings = finish(compose_tree(overrides, config_dir=flags.config_dir), overrides)
    check_names(config)
    if config.cluster.type != "slurm":
        raise ConfigError(
            f"cluster.type={config.cluster.type!r}: submit is for Slurm; add cluster=slurm"
        )
    for message in warnings:
        print(f"warning: {message}", file=sys.stderr)
    path = Path(str(config.job_dir)) / "slurm" / "submit.sh"
    words = list(flags.overrides)
    if flags.config_dir is not None:
        words += ["--config-dir", str(Path(flags.config_dir).absolute())]
    script = job_script(config, words, path)
    if flags.dry_run:
        print(script, end="")
        return 0
    from trinity_dask.cluster.slurm.queue import SlurmError, ask

    write_text(_made(path), script)
    _made(Path(log_path(config)))
    try:
        job = ask("sbatch", "--parsable", str(path)).strip().partition(";")[0]
    except SlurmError as error:
        raise ConfigError(f"Slurm refuses the job of the driver: {error}") from error
    except OSError as error:
        raise CommandError(f"sbatch cannot be run: {error}") from error
    print(f"job {job}")
    print(f"log {log_path(config).replace('%j', job)}")
    print(f"status: trinity-dask status {config.job_dir}")
    print(f"end it, its state saved: scancel --batch --signal=TERM {job}")
    return 0


def job_script(config: Config, words: Sequence[str], path: Path) -> str:
    """The script of the driver's job; ``words`` are those of ``trinity-dask run``."""
    from trinity_dask.cluster.slurm.allocation import TIME_OVER
    from trinity_dask.cluster.slurm.jobs import job_options, lead_s, resources

    cluster = config.cluster
    options = [
        f"--job-name={config.name.replace('/', '-')}",
        "--ntasks=1",
        f"--cpus-per-task={resources(cluster, 'driver')[0]}",
        *job_options(cluster, "driver"),
        f"--output={shlex.quote(log_path(config))}",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{lead_s(cluster, 'driver')}",
    ]
    # the run's own job is no room for its workers
    where = ["cluster.where=login"] if cluster.where == "auto" else []
    command = [sys.executable, "-m", "trinity_dask", "run", *words, *where]
    return SCRIPT.format(
        directives="\n".join(f"#SBATCH {option}" for option in options),
        prologue="\n".join(cluster.prologue),
        command=shlex.join(command),
        script=shlex.quote(str(path)),
        time_over=TIME_OVER,
    )


def log_path(config: Config) -> str:
    return f"{config.job_dir}/log/submit-%j.log"


def _made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trinity-dask submit", description=__doc__)
    parser.add_argument("overrides", nargs="*", help="as for run: +experiment=... key=value")
    parser.add_argument("--dry-run", action="store_true", help="print the script, submit nothing")
    parser.add_argument("--config-dir", "-cd", help="a directory with more presets")
    return parser
