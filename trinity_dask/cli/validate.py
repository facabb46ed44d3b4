"""``trinity-dask validate``: is this configuration sound, and what does it come to.

Invariant: nothing is started and nothing is written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from trinity_dask.config.compose import compose_tree, finish, to_yaml
from trinity_dask.config.schema import Config
from trinity_dask.config.stages import split_stages
from trinity_dask.run.names import check_names


def main(args: Sequence[str]) -> int:
    """Print one line per stage; ``--show`` prints the resolved configurations."""
    flags = _parser().parse_intermixed_args(list(args))
    tree = compose_tree(flags.overrides, config_dir=flags.config_dir)
    config, warnings = finish(tree, flags.overrides)
    check_names(config)
    for message in warnings:
        print(f"warning: {message}", file=sys.stderr)
    for stage in split_stages(config):
        print(f"---\n{to_yaml(stage)}" if flags.show else _line(stage))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trinity-dask validate", description=__doc__)
    parser.add_argument("overrides", nargs="*", help="as for run: +experiment=... key=value")
    parser.add_argument("--config-dir", "-cd", help="a directory with more presets")
    parser.add_argument("--show", action="store_true", help="print the resolved configuration")
    return parser


def _line(stage: Config) -> str:
    name = stage.stage_name or stage.name
    engine = f", engine {stage.explorer.rollout_model.engine_type}" if stage.mode != "train" else ""
    kind = stage.algorithm.algorithm_type
    return f"ok: {name}: mode {stage.mode}, {kind}{engine}, in {stage.job_dir}"
