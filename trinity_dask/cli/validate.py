"""``trinity-dask validate``: is this configuration sound, and what does it come to.

Invariant: nothing is started and nothing is written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from trinity_dask.config.compose import compose_tree, finish, split_stages, to_yaml
from trinity_dask.run.names import check_names, check_start_model


def main(args: Sequence[str]) -> int:
    """Print one line per stage; ``--show`` prints the resolved configurations."""
    flags = _parser().parse_intermixed_args(list(args))
    tree = compose_tree(flags.overrides, config_dir=flags.config_dir)
    config, warnings = finish(tree, flags.overrides)
    check_names(config)
    for message in warnings:
        print(f"warning: {message}", file=sys.stderr)
    stages = split_stages(config)
    if Path(stages[0].model.model_path).is_dir():  # else it may be on the workers' machines only
        check_start_model(stages)
    for stage in stages:
        if flags.show:
            print(f"---\n{to_yaml(stage)}")
            continue
        engine = stage.explorer.rollout_model.engine_type
        what = f"{stage.algorithm.algorithm_type}" + f", engine {engine}" * (stage.mode != "train")
        name = stage.stage_name or stage.name
        print(f"ok: {name}: mode {stage.mode}, {what}, in {stage.job_dir}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trinity-dask validate", description=__doc__)
    parser.add_argument("overrides", nargs="*", help="as for run: +experiment=... key=value")
    parser.add_argument("--config-dir", "-cd", help="a directory with more presets")
    parser.add_argument("--show", action="store_true", help="print the resolved configuration")
    return parser
