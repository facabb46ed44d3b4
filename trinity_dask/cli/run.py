"""``trinity-dask run``: Hydra around one run, or around one run per job of a sweep.

Invariant: a configuration that cannot run is refused before anything starts, in a sweep
for every swept value. A failed job of a sweep does not stop the others; an interrupt does.
The exit code is the worst of all jobs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

import hydra
from hydra._internal.utils import get_args_parser  # hydra.main has no other way to see its flags
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from trinity_dask.cli.help import help_text
from trinity_dask.cli.record import job_label, record_overrides
from trinity_dask.cli.score import final_score
from trinity_dask.config.compose import VERSION_BASE, compose_tree, finish, register_schema
from trinity_dask.config.errors import ConfigError
from trinity_dask.config.explain import HYDRA_ERRORS, explain
from trinity_dask.config.job_dir import is_finished, stage_file
from trinity_dask.config.overrides import single_values
from trinity_dask.config.paths import conf_dir
from trinity_dask.config.schema import Config
from trinity_dask.launcher.job_lock import is_locked
from trinity_dask.run.names import check_names

PROGRAM = "trinity-dask run"
EXIT_INTERRUPTED = 130
FULL_ERROR = "HYDRA_FULL_ERROR"


class JobFailed(RuntimeError):
    """One job of a sweep ended with a non-zero exit code."""


@dataclass
class Session:
    """What one call of the command knows: the fixed overrides and the exit codes so far."""

    fixed: list[str]
    sweeping: bool
    codes: list[int] = field(default_factory=list)

    def run_job(self, tree: DictConfig) -> Optional[float]:
        """Run one composed configuration to its end; returns what a sweeper may optimise."""
        overrides = [str(item) for item in HydraConfig.get().overrides.task]
        label = self._label(overrides)
        config, warnings = finish(tree, overrides, label)
        for message in warnings:
            print(f"warning: {message}", file=sys.stderr)
        if not _has_record(config):
            record_overrides(str(config.job_dir), tree, HydraConfig.get(), overrides)
        self._end_job(_run(config, overrides), label)
        return final_score(str(config.job_dir))

    def _label(self, overrides: Sequence[str]) -> Optional[str]:
        if not self.sweeping:
            return None
        swept = [item for item in overrides if item not in self.fixed]
        label = job_label(HydraConfig.get().job.num, swept)
        print(f"== job {label}", flush=True)
        return label

    def _end_job(self, code: int, label: Optional[str]) -> None:
        self.codes.append(code)
        if code == EXIT_INTERRUPTED:
            raise KeyboardInterrupt
        if code != 0 and label is not None:
            raise JobFailed(f"job {label} ended with exit code {code}")


def _has_record(config: Config) -> bool:
    """A job that runs or has run keeps the record of its own command."""
    job, stages = str(config.job_dir), len(config.stages) or 1
    joins = config.mode == "bench" or (config.mode == "explore" and Path(job).is_dir())
    return joins or is_locked(job) or is_finished(job, stages, stage_file(config))


def _run(config: Config, overrides: Sequence[str]) -> int:
    from trinity_dask.run import run_from_cli  # torch and dask, only for a sound configuration

    return int(run_from_cli(config, overrides))


def main(args: Sequence[str]) -> int:
    """The command; ``args`` are Hydra's flags and overrides in any order."""
    flags = parse_flags(args)
    if flags.help:
        print(help_text(flags.config_dir))
        return 0
    sweeping = flags.multirun or "hydra.mode=MULTIRUN" in flags.overrides
    check_first(flags, sweeping)
    session = Session(fixed=_fixed(flags.overrides), sweeping=sweeping)
    try:
        with _hydra_arguments([*_without(args, flags.overrides), *flags.overrides]):
            _hydra_main(session)
    except HYDRA_ERRORS as error:
        raise ConfigError(explain(error)) from error
    except JobFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return max(session.codes)
    return max(session.codes, default=0)


def parse_flags(args: Sequence[str]) -> argparse.Namespace:
    """Hydra's own flags, with overrides allowed between and after them."""
    parser = get_args_parser()
    parser.prog = PROGRAM
    return parser.parse_intermixed_args(list(args))


def check_first(flags: argparse.Namespace, sweeping: bool) -> None:
    """Refuse what cannot run: keys and options always, values when something is to run."""
    if flags.hydra_help or flags.shell_completion or flags.experimental_rerun:
        return
    if flags.config_path is not None:
        raise ConfigError(
            f"--config-path={flags.config_path} would replace the presets; add a directory of "
            "your own with --config-dir"
        )
    only_shows = flags.cfg is not None or flags.info is not None
    for overrides in single_values(flags.overrides) if sweeping else [list(flags.overrides)]:
        tree = compose_tree(overrides, flags.config_name or "config", flags.config_dir)
        if not only_shows:
            check_names(finish(tree, overrides)[0])


def _fixed(overrides: Sequence[str]) -> list[str]:
    """The overrides that are the same for every job of a sweep."""
    first, *others = single_values(overrides)
    return [item for item in first if all(item in other for other in others)]


def _without(args: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """The flags alone; ``--`` has served its purpose."""
    return [item for item in args if item not in overrides and item != "--"]


def _hydra_main(session: Session) -> None:
    register_schema()

    def job(tree: DictConfig) -> Optional[float]:
        return session.run_job(tree)

    hydra.main(version_base=VERSION_BASE, config_path=str(conf_dir()), config_name="config")(job)()


@contextmanager
def _hydra_arguments(args: Sequence[str]) -> Iterator[None]:
    """Hydra reads ``sys.argv``, and raises what it otherwise prints when asked for full errors."""
    argv, full = sys.argv, os.environ.get(FULL_ERROR)
    sys.argv = [PROGRAM, *args]
    os.environ[FULL_ERROR] = "1"
    try:
        yield
    finally:
        sys.argv = argv
        os.environ.pop(FULL_ERROR)
        if full is not None:
            os.environ[FULL_ERROR] = full
