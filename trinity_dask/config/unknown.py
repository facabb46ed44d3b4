"""Keys that do not exist, and what was probably meant.

Invariant: every key of a composed configuration is either a field of the dataclasses or
lies in an open (``dict``) section; nothing is accepted and ignored. This holds for keys
that came through ``+`` and for the entries of ``stages``, which Hydra itself accepts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Optional

from trinity_dask.config.keys import (
    STAGE_KEYS,
    Kind,
    all_keys,
    fields_of,
    kind_at,
    split_path,
)
from trinity_dask.config.nearest import hint, nearest
from trinity_dask.config.paths import groups
from trinity_dask.config.schema import Config

# Keys of Trinity-RFT that have another name or place here.
RENAMED = {
    "cluster.node_num": "cluster.rollout.n_workers",
    "cluster.gpu_per_node": "cluster.rollout.gpus_per_worker",
    "cluster.ray_address": "cluster.address",
    "explorer.runner_per_model": "cluster.rollout.nthreads",
    "explorer.rollout_model.engine_num": "cluster.rollout.n_workers",
    "buffer.trainer_input.experience_buffer.capacity": (
        "buffer.trainer_input.experience_buffer.capacity_batches"
    ),
    "buffer.trainer_input.experience_buffer.replay_buffer.reuse_cooldown_time": (
        "buffer.trainer_input.experience_buffer.replay_buffer.reuse_cooldown_time_s"
    ),
    "buffer.explorer_input.taskset.task_selector": "buffer.explorer_input.taskset.data_selector",
    "buffer.explorer_input.taskset.default_workflow_type": "buffer.explorer_input.taskset.workflow",
    "buffer.explorer_input.taskset.default_reward_fn_type": (
        "buffer.explorer_input.taskset.reward_fn"
    ),
    "buffer.explorer_input.default_workflow_type": "buffer.explorer_input.default_workflow",
    "buffer.explorer_input.default_reward_fn_type": "buffer.explorer_input.default_reward_fn",
    "data_processor.experience_pipeline.operators": "buffer.operators",
    "monitor.monitor_type": "monitor.sinks",
    "monitor.monitor_args": "monitor.sink_args",
    "trainer.max_token_len_per_gpu": "trainer.micro_batch_tokens",
}


def find_unknown(tree: Mapping[str, Any]) -> list[str]:
    """One line for each key of ``tree`` (a plain composed config) that does not exist."""
    problems = list(_walk(tree, Config, ""))
    stages = tree.get("stages")
    if isinstance(stages, list):
        for index, stage in enumerate(stages):
            problems.extend(_walk_stage(stage, f"stages.{index}."))
    return problems


def _walk(tree: Mapping[str, Any], section: type, prefix: str) -> Iterator[str]:
    known = fields_of(section)
    for name, value in tree.items():
        kind = known.get(str(name))
        if kind is None:
            yield unknown_key(f"{prefix}{name}")
        else:
            yield from _walk_value(value, kind, f"{prefix}{name}.")


def _walk_value(value: Any, kind: Kind, prefix: str) -> Iterator[str]:
    if kind.section is not None and isinstance(value, Mapping):
        yield from _walk(value, kind.section, prefix)
    elif kind.item is not None and isinstance(value, list):
        for index, entry in enumerate(value):
            if isinstance(entry, Mapping):
                yield from _walk(entry, kind.item, f"{prefix}{index}.")


def _walk_stage(stage: Any, prefix: str) -> Iterator[str]:
    if not isinstance(stage, Mapping):
        yield f"{prefix[:-1]}: {stage!r} is not a mapping; a stage is stage_name and sections"
        return
    known = fields_of(Config)
    for name, value in stage.items():
        if name in STAGE_KEYS:
            yield from _walk_value(value, known[name], f"{prefix}{name}.")
        elif name in known:
            yield (
                f"{prefix}{name}: {name!r} belongs to the whole run and cannot change in a stage; "
                f"set it at the top level (a stage may set: {', '.join(STAGE_KEYS)})"
            )
        else:
            yield f"unknown key '{prefix}{name}'; {hint(str(name), STAGE_KEYS)}"


def unknown_key(path: str) -> str:
    """``unknown key 'a.b'`` with the nearest valid key, wherever it is."""
    prefix, renamed = _split_stage(path)
    if renamed in RENAMED:
        return f"unknown key '{path}'; here it is '{prefix}{RENAMED[renamed]}'"
    local = _nearest_local(renamed)
    if local is not None:
        return f"unknown key '{path}'; did you mean '{prefix}{local}'?"
    elsewhere = _same_leaf(renamed)
    if elsewhere is not None:
        return f"unknown key '{path}'; did you mean '{prefix}{elsewhere}'?"
    section, names = _deepest_section(renamed)
    where = f"in '{prefix}{section}'" if section else "at the top level"
    return f"unknown key '{path}'; keys {where}: {', '.join(names)}"


def _split_stage(path: str) -> tuple[str, str]:
    """``stages.1.`` and the rest, for a key inside a stage."""
    parts = split_path(path)
    if len(parts) > 2 and parts[0] == "stages":
        return ".".join(parts[:2]) + ".", ".".join(parts[2:])
    return "", ".".join(parts)


def _nearest_local(path: str) -> Optional[str]:
    """The path with each wrong part replaced by its nearest sibling; None if one has none."""
    kind, fixed = Kind(section=Config), list[str]()
    for index, part in enumerate(split_path(path)):
        if kind.item is not None and part.isdigit():
            kind = Kind(section=kind.item)
            fixed.append(part)
            continue
        if kind.section is None:
            return ".".join(fixed) if index else None
        known = fields_of(kind.section)
        names = list(known) + (list(groups()) if index == 0 and path.count(".") == 0 else [])
        name = part if part in known else nearest(part, names)
        if name is None:
            return None
        fixed.append(name if name in known else f"+{name}=...")
        kind = known.get(name, Kind())
    return ".".join(fixed)


def _same_leaf(path: str) -> Optional[str]:
    """A key elsewhere in the tree with the same last name, or the nearest one."""
    leaf = split_path(path)[-1]
    by_leaf: dict[str, str] = {}
    for key, _ in all_keys():
        by_leaf.setdefault(split_path(key)[-1], key)
    if leaf in by_leaf:
        return by_leaf[leaf]
    found = nearest(leaf, by_leaf)
    return by_leaf[found] if found else None


def _deepest_section(path: str) -> tuple[str, list[str]]:
    kind, walked = Kind(section=Config), list[str]()
    for part in split_path(path):
        section = kind.section
        if section is None or part not in fields_of(section):
            break
        below = fields_of(section)[part]
        if below.section is None:
            break
        kind = below
        walked.append(part)
    assert kind.section is not None
    return ".".join(walked), list(fields_of(kind.section))


def check_key(path: str) -> Optional[str]:
    """The problem with a dotted key, or None when it exists (stage entries included)."""
    prefix, rest = _split_stage(path)
    first = split_path(rest)[0] if rest else ""
    if prefix and first not in STAGE_KEYS:
        return next(_walk_stage({first: None}, prefix))
    return None if kind_at(rest) is not None else unknown_key(path)
