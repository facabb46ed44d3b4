"""Write the tables of ``docs/algorithms.md`` from the registries.

Invariant: what stands above the marker is written by hand and kept; what stands below is
made from ``trinity_dask.algorithm`` alone: the functions' own docstrings, arguments and
defaults. ``--check`` writes nothing and exits 1 when the page is not current.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from generated_page import marker, renewed, write_page  # noqa: E402  (beside this script)

from trinity_dask.algorithm import (  # noqa: E402  (a script finds the package beside it)
    ADVANTAGE_FN,
    ALGORITHM,
    ENTROPY_LOSS_FN,
    KL_FN,
    POLICY_LOSS_FN,
    AlgorithmSpec,
    resolve_algorithm,
)
from trinity_dask.algorithm.advantages import runs_in_trainer  # noqa: E402

PAGE = Path(__file__).with_name("algorithms.md")
MARKER = marker(Path(__file__).name)


def page(old: str) -> str:
    """The page with its hand-written part kept and its tables made anew."""
    parts = [_types(), *_function_tables(), _estimators()]
    return renewed(old, MARKER, "\n\n".join(parts))


def _types() -> str:
    lines = [
        "## Algorithm types",
        "",
        "The preset of a type is `algorithm=<type>` (`conf/algorithm/<type>.yaml`).",
        "",
        "| type | what it does | group | advantage | policy loss | kl loss | entropy | rows | "
        "aggregation | needs | paper |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join(lines + [_type_row(name) for name in ALGORITHM.names()])


def _type_row(name: str) -> str:
    kind, spec = ALGORITHM.get(name), resolve_algorithm({"algorithm_type": name})
    cells = [
        f"`{name}`",
        kind.about,
        str(spec.repeat_times),
        _with_args(spec, "advantage_fn"),
        _with_args(spec, "policy_loss_fn"),
        _with_args(spec, "kl_loss_fn"),
        spec.resolved["entropy_loss_fn"],
        spec.schema if spec.sample_strategy == "default" else f"{spec.schema}, mixed",
        spec.loss_agg_mode,
        ", ".join(_needs(spec)) or "–",
        ", ".join(f"[{paper}](https://arxiv.org/abs/{paper})" for paper in kind.paper.split())
        or "–",
    ]
    return f"| {' | '.join(cells)} |"


def _with_args(spec: AlgorithmSpec, key: str) -> str:
    name, args = spec.resolved[key], spec.resolved[f"{key}_args"]
    if name == "none":
        return "–"
    given = ", ".join(f"{k} {v}" for k, v in args.items())
    return f"`{name}` ({given})" if given else f"`{name}`"


def _needs(spec: AlgorithmSpec) -> Iterator[str]:
    if spec.uses_critic:
        yield "critic"
    if spec.uses_reference:
        yield "reference"
    if spec.uses_teacher:
        yield "teacher"
    if spec.needs_greedy_baseline:
        yield "greedy rollout"
    if {"entropys", "necs"} & spec.advantage_needs:
        yield "entropies"
    if "expert_mask" in spec.needs:
        yield "demonstrations"


def _function_tables() -> Iterator[str]:
    grouped, in_trainer = {}, {}
    for name in ADVANTAGE_FN.names():
        factory = ADVANTAGE_FN.get(name)
        (in_trainer if runs_in_trainer(factory()) else grouped)[name] = factory
    yield _functions(
        "Advantages of the experience pipeline",
        "`algorithm.advantage_fn`; r is a row's reward, mean and std are over the "
        "scored runs of its task.",
        grouped,
    )
    yield _functions(
        "Advantages of the trainer",
        "`algorithm.advantage_fn`; over the tokens of the global batch of a step.",
        in_trainer,
    )
    losses = {name: POLICY_LOSS_FN.get(name) for name in POLICY_LOSS_FN.names()}
    yield _functions(
        "Policy losses",
        "`algorithm.policy_loss_fn`; ρ = π/π_old on the sampled token, sg stops the gradient. "
        "Every loss also takes `loss_agg_mode`, but for `dpo`.",
        losses,
    )
    bonuses = {name: ENTROPY_LOSS_FN.get(name) for name in ENTROPY_LOSS_FN.names()}
    yield _functions("Entropy losses", "`algorithm.entropy_loss_fn`.", bonuses)


def _functions(title: str, about: str, factories: dict[str, Callable[..., Any]]) -> str:
    lines = [f"## {title}", "", about, "", "| name | formula | arguments |", "|---|---|---|"]
    for name, factory in factories.items():
        lines.append(f"| `{name}` | {_first_paragraph(factory)} | {_arguments(factory)} |")
    return "\n".join(lines)


def _first_paragraph(item: Any) -> str:
    """The docstring's first paragraph in one line, safe inside a table."""
    text = (inspect.getdoc(item) or "").partition("\n\n")[0]
    return " ".join(text.split()).replace("|", "\\|").replace("``", "`")


def _arguments(factory: Callable[..., Any]) -> str:
    parameters = inspect.signature(factory).parameters.values()
    shown = [
        f"`{p.name}` {_shown(p.default)}" for p in parameters if p.name not in ("loss_agg_mode",)
    ]
    return ", ".join(shown) or "–"


def _shown(value: Any) -> str:
    """A default as it is written in YAML."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


_ESTIMATORS = {
    "k1": ("δ", "none as a loss; right in the reward"),
    "k2": ("δ²/2", "right as a loss"),
    "k3": ("e^−δ − 1 + δ", "that of KL(ref‖π), the other direction"),
    "low_var_kl": ("k3, clamped to ±10", "as k3, and none beyond the clamp"),
    "abs": ("\\|δ\\|", "sign of δ"),
    "corrected_k3": ("min(ρ, 2)·k3", "right as a loss"),
}


def _estimators() -> str:
    missing = set(KL_FN.names()) ^ _ESTIMATORS.keys()
    if missing:
        raise ValueError(f"the page describes other KL estimators than there are: {missing}")
    lines = [
        "## KL estimators",
        "",
        "`algorithm.kl_loss_fn` (a term of the loss) and `algorithm.kl_penalty_fn` (in the reward, "
        "for advantages of the trainer); δ = log π − log π_ref on the sampled token. Arguments of "
        "both: `kl_coef` 0.001, `adaptive` false, `target_kl` null, `horizon` null.",
        "",
        "| name | value | expected gradient |",
        "|---|---|---|",
    ]
    return "\n".join(lines + [f"| `{n}` | {v} | {g} |" for n, (v, g) in _ESTIMATORS.items()])


if __name__ == "__main__":
    sys.exit(write_page(PAGE, page, __doc__))
