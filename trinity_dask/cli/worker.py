"""``trinity-dask worker``: one more worker for a scheduler that runs elsewhere.

Invariant: the worker gets the slots and limits that the configuration gives its group, and
ends with its scheduler.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from trinity_dask.cli import CommandError
from trinity_dask.config.compose import compose_tree, from_yaml, resolve_config, to_config
from trinity_dask.config.errors import ConfigError

GROUPS = ("control", "rollout", "trainer", "runner")


def main(args: Sequence[str]) -> int:
    flags = _parser().parse_intermixed_args(list(args))
    if flags.index < 0:
        raise ConfigError(f"--index={flags.index} must be 0 or more: it numbers the group's slots")
    if flags.config is not None:
        config = from_yaml(flags.config)
    else:
        config = to_config(compose_tree(flags.overrides, config_dir=flags.config_dir))
    config.stages = []  # a worker's slots do not depend on the stage
    from trinity_dask.cluster.specs import ClusterError
    from trinity_dask.cluster.tls import load_certificate
    from trinity_dask.cluster.worker_cli import run_worker

    # a run's certificate lies beside the configuration that it saves for its workers
    security = load_certificate(Path(flags.config).parent) if flags.config is not None else None
    config = resolve_config(config)
    try:
        return int(run_worker(flags.address, flags.group, flags.index, config, security))
    except ClusterError as error:
        raise CommandError(str(error)) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trinity-dask worker", description=__doc__)
    parser.add_argument("address", help="the scheduler's address, as tcp://host:8786")
    parser.add_argument("overrides", nargs="*", help="as for run: +experiment=... key=value")
    parser.add_argument("--group", choices=GROUPS, required=True)
    parser.add_argument("--index", type=int, default=0, help="number within the group")
    parser.add_argument("--config", metavar="FILE", help="instead of overrides: a run's own")
    parser.add_argument("--config-dir", "-cd", help="a directory with more presets")
    return parser
