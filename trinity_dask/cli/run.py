"""``trinity-dask run``: Hydra around one run, or around one run per job of a sweep.

Invariant: a configuration that cannot run is refused before anything starts, in a sweep
for every swept value. A failed job of a sweep does not stop the others; an interrupt does.
The exit code is the worst of all jobs; it is 0 only for runs that ended ``done``. The first
Ctrl-C (or SIGTERM, or SIGUSR1) asks the run to save its state and exits 130, a second one does
not wait.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Optional

import hydra
from hydra._internal.utils import get_args_parser  # hydra.main has no other way to see its flags
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from trinity_dask.cli import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED
from trinity_dask.cli.jobs import final_score
from trinity_dask.config.compose import (
    VERSION_BASE,
    check_overrides,
    compose_tree,
    finish,
    register_schema,
)
from trinity_dask.config.errors import ConfigError
from trinity_dask.config.hints import (
    ADDED_GROUPS,
    HYDRA_ERRORS,
    explain,
    parse,
    single_values,
    with_mappings,
)
from trinity_dask.config.job_dir import is_finished, stage_file
from trinity_dask.config.paths import conf_dir, groups
from trinity_dask.config.schema import Config
from trinity_dask.config.secrets import shown, shown_override, shown_text
from trinity_dask.launcher.job_lock import is_locked
from trinity_dask.run.names import check_names

if TYPE_CHECKING:
    from trinity_dask.run import Run

PROGRAM = "trinity-dask run"
FULL_ERROR = "HYDRA_FULL_ERROR"
EXIT_CODES = {"done": EXIT_DONE, "failed": EXIT_FAILED, "interrupted": EXIT_INTERRUPTED}
# SIGUSR1: Slurm's warning that the time of the job is almost over
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
REFRESH_S = 1.0
MAX_LABEL = 60

# made from the names of the preset files alone, so that it is there at once
HELP = """\
usage: trinity-dask run [FLAG ...] [OVERRIDE ...]

Fine-tune a language model by reinforcement on Dask: presets, and keys set over them.

Groups (group=option; with a leading + where shown):
{groups}

Overrides:
  key=value       set a key (stages.0.key=value: in the first stage only)
  ++key=value     the same where no preset mentions the key
  +group=name     add a preset

Flags:
  --cfg job       show the configuration        --info defaults  show where it comes from
  --multirun, -m  a sweep: one run per value    --config-dir DIR more presets of your own
  --hydra-help    every flag of Hydra

Examples:
  trinity-dask run +experiment=sort_digits               the demo: sft, then grpo
  trinity-dask run +experiment=sort_digits engine=torch  with the embedded sampler
  trinity-dask run +experiment=sort_digits cluster.rollout.n_workers=2 seed=7
  trinity-dask run +experiment=sort_digits seed=1,2,3 --multirun
  trinity-dask validate +experiment=sort_digits          check it, run nothing

Every key with its type, default and range: docs/configuration.md
Exit codes: 0 done, 1 failed, 2 bad configuration, 130 interrupted (state saved)."""


class JobFailed(RuntimeError):
    """One job of a sweep ended with a non-zero exit code."""


def main(args: Sequence[str]) -> int:
    """The command; ``args`` are Hydra's flags and overrides in any order."""
    parser = get_args_parser()
    parser.prog = PROGRAM
    flags = parser.parse_intermixed_args(list(args))
    if flags.help:
        print(help_text(flags.config_dir))
        return 0
    only_flags = [item for item in args if item not in flags.overrides and item != "--"]
    flags.overrides = with_mappings(flags.overrides)
    sweeping = flags.multirun or "hydra.mode=MULTIRUN" in flags.overrides
    # refuse what cannot run before Hydra composes it
    fixed, codes = set[str](), list[int]()  # keys that all jobs of a sweep have alike
    refused: Optional[ConfigError] = None
    if not (flags.hydra_help or flags.shell_completion or flags.experimental_rerun):
        if flags.config_path is not None:
            raise ConfigError(
                f"--config-path={flags.config_path} would replace the presets; add a directory of "
                "your own with --config-dir"
            )
        if sweeping or flags.cfg is not None or flags.info is not None:
            fixed = check_all(flags, sweeping)
        else:
            check_overrides(flags.overrides, flags.config_dir)

    def job(tree: DictConfig) -> Optional[float]:
        """Run one composed configuration to its end; returns what a sweeper may optimise."""
        nonlocal refused
        overrides, label = [str(item) for item in HydraConfig.get().overrides.task], None
        if sweeping:
            swept = [o for o in overrides if parse(o).get_key_element() not in fixed]
            label = job_label(HydraConfig.get().job.num, swept)
            print(f"== job {label}", flush=True)
        try:
            config, warnings = finish(tree, overrides, label)
            check_names(config)
        except ConfigError as error:
            if sweeping:
                raise
            refused = error  # Hydra would print a line of its own about it
            return None
        if (number := _task_number(config)) > 0:
            from trinity_dask.cluster.slurm import tasks

            codes.append(tasks.serve(config, number))
            return None
        for message in warnings:
            print(f"warning: {message}", file=sys.stderr)
        record_overrides(config, tree, HydraConfig.get(), overrides)
        from trinity_dask.run import Run  # torch and dask, only for a sound configuration

        try:
            codes.append(follow(Run(config, checked=True)))
        finally:
            if number == 0:
                from trinity_dask.cluster.slurm import tasks

                tasks.release(config)
        if codes[-1] == EXIT_INTERRUPTED:
            raise KeyboardInterrupt
        if codes[-1] != EXIT_DONE and sweeping:
            raise JobFailed(f"job {label} ended with exit code {codes[-1]}")
        return final_score(str(config.job_dir))

    register_schema()
    known = {"version_base": VERSION_BASE, "config_path": str(conf_dir()), "config_name": "config"}
    try:
        with _hydra_arguments([*only_flags, *flags.overrides]):
            hydra.main(**known)(job)()
    except HYDRA_ERRORS as error:
        raise ConfigError(explain(error)) from error
    except JobFailed as error:
        print(f"error: {error}", file=sys.stderr)
    if refused is not None:
        raise refused
    return max(codes, default=0)


def _task_number(config: Config) -> int:
    """Which task of the one ``srun`` this is, 0 the driver; -1: nothing was started that way."""
    if config.cluster.type != "slurm" or config.cluster.where != "tasks":
        return -1
    from trinity_dask.cluster.slurm.tasks import rank

    number = rank()
    return -1 if number is None else number


def help_text(config_dir: Optional[str] = None) -> str:
    """Usage, the groups with their options, and examples."""
    known = groups(config_dir)
    named = {f"+{name}" if name in ADDED_GROUPS else name: known[name] for name in sorted(known)}
    width = max(map(len, named))
    lines = [f"  {name:{width}}  {', '.join(options)}" for name, options in named.items()]
    return HELP.format(groups="\n".join(lines))


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


def check_all(flags: argparse.Namespace, sweeping: bool) -> set[str]:
    """Refuse unknown keys and options; of a sweep every swept value, since its first job must not
    start when the last one cannot. Returns the keys that all jobs have alike."""
    jobs = list(single_values(flags.overrides)) if sweeping else [flags.overrides]
    for overrides in jobs:
        tree = compose_tree(overrides, flags.config_name or "config", flags.config_dir)
        if flags.cfg is None and flags.info is None:
            check_names(finish(tree, overrides)[0])
    given = map(parse, flags.overrides)
    return {item.get_key_element() for item in given if not item.is_sweep_override()}


def job_label(number: int, swept: Sequence[str]) -> str:
    """The directory of one job of a sweep: its number and its values.

    Since the values are part of it, the same sweep called again resumes its jobs and a
    changed sweep does not resume others' jobs.
    """
    text = ",".join(item.lstrip("+~") for item in swept)
    short = re.sub(r"[^\w.,=+-]", "-", ",".join(shown_override(i.lstrip("+~")) for i in swept))
    if len(short) > MAX_LABEL or short != text:
        short = f"{short[:MAX_LABEL]}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
    return f"{number}_{short}" if short else str(number)


def record_overrides(
    config: Config, tree: DictConfig, hydra_config: Any, overrides: Sequence[str]
) -> None:
    """Write ``<job>/.hydra``: the files every Hydra user expects, ``config.yaml`` as composed.

    A job that runs or has run keeps the record of its own command.
    """
    job, stages = str(config.job_dir), len(config.stages) or 1
    joins = config.mode == "bench" or (config.mode == "explore" and Path(job).is_dir())
    if joins or is_locked(job) or is_finished(job, stages, stage_file(config)):
        return
    folder = Path(job) / ".hydra"
    folder.mkdir(parents=True, exist_ok=True)
    of_hydra = _without_secrets(OmegaConf.to_container(OmegaConf.create({"hydra": hydra_config})))
    composed = shown(OmegaConf.to_container(tree))
    OmegaConf.save(OmegaConf.create(composed), folder / "config.yaml")
    OmegaConf.save(OmegaConf.create([*map(shown_override, overrides)]), folder / "overrides.yaml")
    OmegaConf.save(OmegaConf.create(of_hydra), folder / "hydra.yaml")


def _without_secrets(tree: Any) -> Any:
    """What Hydra notes of a command: overrides stand in several of its texts."""
    if isinstance(tree, dict):
        return {key: _without_secrets(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_without_secrets(value) for value in tree]
    if not isinstance(tree, str) or "=" not in tree:
        return tree
    # of several, as in override_dirname, and of one
    return shown_text(tree) if "," in tree.partition("=")[2] else shown_override(tree)


# one run in the terminal ----------------------------------------------------------------
def follow(run: Run) -> int:
    """Take ``run`` to its end in the terminal: progress, signals, results; the exit code."""
    from trinity_dask.monitor.progress import Progress

    interrupts = _Interrupts(run)
    before = {s: signal.signal(s, interrupts) for s in STOPS}
    try:
        run.start()
        with closing(Progress(run.cfg.monitor.progress)) as progress:
            status = run.status
            while status["state"] not in EXIT_CODES and interrupts.count < 2:
                status = run.wait_for_change(int(status["version"]), REFRESH_S)
                progress.update({**status, "dashboard": run.page_link})
        run.close(*([0.0] if interrupts.count > 1 else []))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if status["state"] not in EXIT_CODES:
        status = {**status, "state": "interrupted", "message": "left without waiting"}
    return _finished(run, status)


class _Interrupts:
    """Counts the signals to stop; the first stops the run, the second gives up waiting."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.count = 0

    def __call__(self, number: int, frame: Optional[FrameType]) -> None:
        self.count += 1
        name = signal.Signals(number).name
        if self.count == 1:
            print(f"\n{name}: saving the state; once more to leave without it", file=sys.stderr)
            # a handler must not block: the call goes over the network
            threading.Thread(target=self.run.stop, args=(f"interrupted by {name}",)).start()


def _finished(run: Run, status: dict[str, Any]) -> int:
    code = EXIT_CODES[status["state"]]
    if isinstance(run.error, ConfigError):
        code = ConfigError.exit_code
    if status.get("stage") or code == EXIT_DONE:  # a run that never began has nothing to show
        _print_results(run)
    if status.get("accounts"):
        print("accounts: " + ", ".join(f"{k} {v}" for k, v in status["accounts"].items()))
    if code == EXIT_DONE and status.get("message"):
        print(status["message"])
    if code not in (EXIT_DONE, EXIT_INTERRUPTED):
        print(f"error: {status.get('message')}", file=sys.stderr)
    if code == EXIT_FAILED and status.get("stage"):
        print(f"logs: {run.base_dir}/log; the same command resumes", file=sys.stderr)
    return code


def _print_results(run: Run) -> None:
    """What a benchmark found, or else what the job did and where everything is."""
    from rich.console import Console

    from trinity_dask.monitor.report import bench_table, build_report, print_report

    if run.cfg.mode != "bench":
        print_report(build_report(run.base_dir))
        return
    table = bench_table(run.base_dir)
    if table is not None:
        Console(highlight=False).print(table)
    print(f"results: {run.base_dir}/**/benchmark_meta.json")
