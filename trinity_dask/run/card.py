"""A run as a notebook shows it: where it stands, its curves, its last answers.

Invariant: the card is one piece of static HTML: no script, nothing that is fetched, every text
escaped and without control characters, since a model's answer may be anything. So a saved notebook
shows the last state without a kernel.
"""

from __future__ import annotations

import html
import math
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Optional

from trinity_dask.launcher.status import FINAL_STATES
from trinity_dask.monitor.curves import CURVES

if TYPE_CHECKING:
    import pandas as pd

    from trinity_dask.run.session import Run

SHOWN_CURVES = ("reward", "eval", "loss", "kl")
N_ANSWERS = 3
UNCHANGED_S = 5.0  # a status that does not change is looked at this often
MAX_TEXT = 300  # characters of an answer
MAX_POINTS = 200  # of a curve
WIDTH, HEIGHT, PAD = 220, 90, 6  # of a curve, in pixels
COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728")
FACTS = ("explorer_step", "model_version", "in_flight", "tokens_per_s", "queue_rows")


def line(run: Run) -> str:
    """One line: state, stage, step, reward, place."""
    status = run.status
    parts = [str(status["state"])]
    if status.get("stage"):
        parts.append(f"stage {status['stage']}")
    if status.get("step") is not None:
        of = f"/{status['total_steps']}" if status.get("total_steps") else ""
        parts.append(f"step {status['step']}{of}")
    if status.get("reward") is not None:
        parts.append(f"reward {status['reward']:.3g}")
    if status["state"] == "failed" and status.get("message"):
        parts.append(plain(str(status["message"]), MAX_TEXT))
    return f"<Run {run.run_id}: {', '.join(parts)}; in {run.base_dir}>"


def plain(text: str, most: int) -> str:
    """``text`` in one line of at most ``most`` characters, with control and formatting
    characters (terminal escapes, right-to-left overrides, nulls) shown as their codes."""
    cut = text if len(text) <= most else text[:most] + " …"
    kinds = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
    return "".join(f"\\u{ord(c):04x}" if unicodedata.category(c) in kinds else c for c in cut)


def card(run: Run) -> str:
    """The run as HTML."""
    status = run.status
    head = "".join(_head(run, status))
    frame = run.metrics
    curves = "".join(
        _figure(curve.title, series)
        for curve in CURVES
        if curve.name in SHOWN_CURVES and (series := _series(frame, curve.metrics.search))
    )
    answers = "".join(_answers(run, status))
    return f'<div style="font-family:sans-serif;font-size:13px">{head}{curves}{answers}</div>'


def keep_showing(run: Run, handle: Any, every_s: float) -> None:
    """Update a display handle with the run's card whenever its status changes, until it ends."""
    seen = -1
    while True:
        status = run.wait_for_change(seen, UNCHANGED_S)
        ended = status["state"] in FINAL_STATES
        if ended or int(status["version"]) != seen:
            handle.update(run)
        if ended:
            return
        seen = int(status["version"])
        # the frontend is spared the steps between; a saved notebook needs the end at once
        with suppress(TimeoutError, RuntimeError):
            run.wait(every_s)


def _head(run: Run, status: Mapping[str, Any]) -> Iterator[str]:
    yield f"<div><b>{_text(run.run_id)}</b> {_text(status['state'])}"
    if status.get("stage"):
        of = f"{int(status.get('stage_index') or 0) + 1} of {status.get('n_stages') or 1}"
        yield f", stage {_text(status['stage'])} ({_text(of)})"
    for name, link in (("dashboard", run.dashboard_link), ("page of this run", run.page_link)):
        if link and link.startswith(("http://", "https://")):
            yield f' · <a href="{html.escape(link)}">{name}</a>'
    yield "</div>"
    step, total = status.get("step"), status.get("total_steps")
    if step is not None:
        at = f' max="{int(total)}"' if total else ""
        yield f'<div><progress value="{int(step)}"{at} style="width:60%"></progress> '
        yield f"step {int(step)}{f' of {int(total)}' if total else ''}</div>"
    facts: dict[str, Any] = {"reward": status.get("reward"), **dict(status.get("eval") or {})}
    facts |= {name: status.get(name) for name in FACTS}
    shown = [f"{_text(k)} {_text(_number(v))}" for k, v in facts.items() if v is not None]
    yield f"<div>{' · '.join(shown)}</div>"
    if status.get("message"):
        yield f"<div>{_text(plain(str(status['message']), MAX_TEXT))}</div>"
    yield f"<div><code>{_text(run.base_dir)}</code></div>"


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _text(value: Any) -> str:
    return html.escape(plain(str(value), 4 * MAX_TEXT))


def _series(frame: pd.DataFrame, shows: Any) -> dict[str, list[tuple[float, float]]]:
    """(step, value) per metric, of the stage that was logged last; non-finite values left out."""
    if frame.empty:
        return {}
    newest = frame[frame["stage"] == frame["stage"].iloc[-1]]
    series = {}
    for name in map(str, newest.columns):
        if name in ("stage", "role", "step", "incarnation", "time") or not shows(name):
            continue
        rows = newest[["step", name]].dropna().sort_values("step")
        points = [(float(s), float(v)) for s, v in rows.itertuples(index=False)]
        points = [point for point in points if all(map(math.isfinite, point))]
        if points:
            series[name] = points[:: math.ceil(len(points) / MAX_POINTS)]
    return dict(list(series.items())[: len(COLOURS)])


def _figure(title: str, series: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """The lines as one inline SVG, with the range of both axes written out."""
    steps = [step for points in series.values() for step, _ in points]
    values = [value for points in series.values() for _, value in points]
    left, low = min(steps), min(values)
    width, height = max(steps) - left or 1.0, max(values) - low or 1.0
    drawn = []
    for colour, (name, points) in zip(COLOURS, series.items(), strict=False):
        at = [
            (
                PAD + (WIDTH - 2 * PAD) * (step - left) / width,
                HEIGHT - PAD - (HEIGHT - 2 * PAD) * (value - low) / height,
            )
            for step, value in points
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        label = f"<title>{_text(name)}</title>"
        drawn.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5">{label}'
            f'</polyline><circle cx="{at[-1][0]:.1f}" cy="{at[-1][1]:.1f}" r="2.5" '
            f'fill="{colour}">{label}</circle>'
        )
    ends = f"{_number(low)} … {_number(max(values))}, steps {left:g}–{max(steps):g}"
    return (
        '<figure style="display:inline-block;margin:4px 8px 4px 0">'
        f"<figcaption>{_text(title)}</figcaption>"
        f'<svg width="{WIDTH}" height="{HEIGHT}" role="img" style="border:1px solid #ccc">'
        f"{''.join(drawn)}</svg><div><small>{_text(ends)}</small></div></figure>"
    )


def _answers(run: Run, status: Mapping[str, Any]) -> Iterator[str]:
    frame = _last_batch(run, status)
    if frame is None or "response_text" not in frame:
        return
    yield f"<details open><summary>last answers (batch {_text(frame['batch'].iloc[0])})</summary>"
    yield '<table style="text-align:left"><tr><th>prompt</th><th>answer</th><th>reward</th></tr>'
    for row in frame.head(N_ANSWERS).to_dict("records"):
        cells = [plain(str(row.get(k) or ""), MAX_TEXT) for k in ("prompt_text", "response_text")]
        cells.append(_number(row.get("reward")))
        yield f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>"
    yield "</table></details>"


def _last_batch(run: Run, status: Mapping[str, Any]) -> Optional[pd.DataFrame]:
    """Of the last step that has a committed batch: the newest may still be under way."""
    step = int(status.get("explorer_step") or 0)
    for each in range(step, max(step - 2, 0), -1):
        try:
            return run.samples(each)
        except (LookupError, OSError):
            continue
    return None
