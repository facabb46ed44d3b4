"""The text of ``trinity-dask run --help``.

Invariant: made from the names of the preset files alone, so that it is there at once;
``--cfg job`` shows the configuration itself and ``--hydra-help`` Hydra's flags.
"""

from __future__ import annotations

from typing import Optional

from trinity_dask.config.overrides import ADDED_GROUPS, all_groups

_TEXT = """\
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


def help_text(config_dir: Optional[str] = None) -> str:
    """Usage, the groups with their options, and examples."""
    return _TEXT.format(groups="\n".join(_group_lines(config_dir)))


def _group_lines(config_dir: Optional[str]) -> list[str]:
    known = all_groups(config_dir)
    named = {f"+{name}" if name in ADDED_GROUPS else name: known[name] for name in sorted(known)}
    width = max(map(len, named))
    return [f"  {name:{width}}  {', '.join(options)}" for name, options in named.items()]
