"""The card of a run holds nothing that runs, whatever a model wrote."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest

from trinity_dask import Run, load_config
from trinity_dask.monitor.history import encode_line, metrics_path
from trinity_dask.run import card

HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "</td></table><script>alert(1)</script>",
    '"><svg onload=alert(1)>',
    "a\x1b[2J\x1b]0;title\x07b\x00",
    "\u202eevil\u2066\u200b\u2028line",
    "&lt;b&gt; &#60;",
]
ALLOWED = {
    *("div", "b", "a", "progress", "code", "figure", "figcaption", "svg", "polyline", "circle"),
    *("title", "small", "details", "summary", "table", "tr", "th", "td"),
}


class Seen(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("card")
    run = Run(load_config("+experiment=sort_digits", f"checkpoint_root_dir={root}"))
    path = metrics_path(run.job_dirs[-1])
    path.parent.mkdir(parents=True)
    lines = [
        encode_line(
            float(step),
            "trainer",
            step,
            0,
            {"sample/reward/mean": 0.1 * step, "actor/<script>loss": 1.0 - 0.1 * step},
        )
        for step in range(1, 6)
    ]
    path.write_text("".join(lines))
    run._set(state="running", stage="<b>grpo", step=5, total_steps=9, explorer_step=5, reward=0.5)
    return run


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_answer_is_text(run: Run, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    rows = {"batch": ["5"], "prompt_text": [text], "response_text": [text], "reward": [1.0]}
    monkeypatch.setattr(run, "samples", lambda step: pd.DataFrame(rows))
    run._set(message=text)
    bundle = run._repr_mimebundle_()
    seen = Seen()
    seen.feed(bundle["text/html"])
    assert seen.tags <= ALLOWED
    assert {"figure", "progress", "table"} <= seen.tags
    assert not any(name.startswith("on") for name in seen.attributes)
    assert card.plain(text, 300) in seen.text  # nothing is left out either
    shown = bundle["text/html"] + bundle["text/plain"]
    assert not set("\x00\x07\x1b\u202e\u2066\u200b\u2028") & set(shown)
    assert "step 5/9, reward 0.5" in bundle["text/plain"]
    shown.encode()  # what cannot be encoded breaks the saving of a notebook


def test_a_run_without_metrics_and_answers_has_a_card(tmp_path: Path) -> None:
    run = Run(load_config("+experiment=sort_digits", f"checkpoint_root_dir={tmp_path}"))
    assert "starting" in run._repr_mimebundle_()["text/html"]
    assert "starting" in repr(run)
