"""Values that cannot work, found before anything is started.

Invariant: :func:`validate` reports every problem at once, each on one line with the key,
the value, what is allowed and the fix; it changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from trinity_dask.config import checks
from trinity_dask.config.errors import ConfigError, raise_if
from trinity_dask.config.keys import values
from trinity_dask.config.limits import limit_problem
from trinity_dask.config.schema import Config
from trinity_dask.config.stages import split_stages, stage_problems

Check = Callable[[Config], Iterator[str]]


def validate(config: Config) -> list[str]:
    """Check a resolved configuration, all its stages included; returns the warnings.

    Raises:
        ConfigError: one line per problem.
    """
    if not config.stages:
        raise_if(_problems(config, checks.STAGE_CHECKS + checks.RUN_CHECKS))
        return list(checks.warnings(config))
    raise_if(_problems(config, checks.RUN_CHECKS) or list(stage_problems(config)))
    return _validate_stages(split_stages(config))


def _validate_stages(stages: list[Config]) -> list[str]:
    problems, warnings = list[str](), list[str]()
    for stage in stages:
        found = _problems(stage, checks.STAGE_CHECKS)
        problems.extend(f"stage {stage.stage_name!r}: {line}" for line in found)
        warnings.extend(f"stage {stage.stage_name!r}: {line}" for line in checks.warnings(stage))
    raise_if(problems)
    return warnings


def _problems(config: Config, rules: tuple[Check, ...]) -> list[str]:
    """Ranges first; relations between values only when each value is sound."""
    found = [limit_problem(*entry) for entry in values(config)]
    lines = [line for line in found if line is not None]
    return _causes(lines) or [line for rule in rules for line in rule(config)]


def _causes(lines: list[str]) -> list[str]:
    """Without those that only repeat another: rollout_args inherit from model, seeds from seed."""
    lines = [line for line in lines if ".rollout_args." not in line] or lines
    if any(line.startswith("seed=") for line in lines):
        lines = [line for line in lines if ".seed=" not in line]
    return lines


__all__ = ["ConfigError", "validate"]
