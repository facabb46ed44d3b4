"""The notebooks are saved as they ran: their sources' cells, with outputs, and nobody's machine.

Invariant: nothing is executed here; ``tests/e2e/test_notebooks.py`` does that.
"""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import nbformat
import pytest
from make_notebooks import HERE, SOURCES, execute, notebook_of, outputs, scrub, texts_of
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_notebook, new_output

MAX_BYTES = 300_000
WANTED = ["01_first_run", "02_attach_and_look", "03_your_own_agent"]
WANTED += ["04_on_a_cluster", "05_algorithms"]
# a loopback address and what lies in a temporary directory are everybody's
OF_A_MACHINE = {
    "directory": r"(?<![\w.:/])/(?:home|root|work|opt|mnt|usr|var|srv|Users|private)\b",
    "package": r"site-packages|dist-packages",
    "address": r"\b(?!127\.0\.0\.1\b)\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}\b",
    "date": r"\b20[2-9]\d-[01]\d-[0-3]\d|\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]* \d|\d\d:\d\d:\d\d",
    "process": r"\bpid\W{0,3}\d+",
    "package host": r"\b(?:pypi|files\.pythonhosted|conda)\.\w+|/simple/|index-url",
    "link": r"(?:https?|tcp|tls)://(?!127\.0\.0\.1[:/])",
}
FRAMES = re.compile(r"<svg.*?</svg>", re.DOTALL)  # whose numbers are coordinates


def of_a_machine(text: str) -> list[str]:
    """What in ``text`` tells of the machine or the day that made it."""
    text = FRAMES.sub("", text)
    found = [f"{kind}: {m[0]}" for kind, p in OF_A_MACHINE.items() for m in re.finditer(p, text)]
    return found + [f"host: {n}" for n in {socket.gethostname()} if len(n) > 4 and n in text]


def saved(source: Path) -> nbformat.NotebookNode:
    return nbformat.read(source.with_suffix(".ipynb"), as_version=4)


def test_there_are_the_notebooks_and_no_others() -> None:
    assert [source.stem for source in SOURCES] == WANTED
    assert sorted(path.stem for path in HERE.glob("*.ipynb")) == WANTED


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_a_notebook_is_its_source_and_what_that_said(source: Path) -> None:
    notebook, made = saved(source), notebook_of(source)
    cells = [(cell.cell_type, cell.id, cell.source) for cell in made.cells]
    again = f"python notebooks/make_notebooks.py {source.stem}"
    assert [(c.cell_type, c.id, c.source) for c in notebook.cells] == cells, again
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1)), f"not executed from top to bottom: {again}"
    kinds = [output.output_type for output in outputs(notebook)]
    assert "error" not in kinds
    assert [o.text for o in outputs(notebook) if o.get("name") == "stderr"] == []
    assert {"execute_result", "display_data"} & set(kinds)
    texts = [text for output in outputs(notebook) for _, _, text in texts_of(output)]
    assert [found for text in texts for found in of_a_machine(text)] == []
    assert source.with_suffix(".ipynb").stat().st_size < MAX_BYTES
    nbformat.validate(notebook)


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_what_a_notebook_points_to_is_there(source: Path) -> None:
    text = "\n".join(c.source for c in notebook_of(source).cells if c.cell_type == "markdown")
    links = re.findall(r"\]\(([^)#]+)\)", text)
    assert [link for link in links if not (HERE / link).is_file()] == []


def test_cards_are_saved_as_they_were_last() -> None:
    """The card that ``show`` updates from a thread; a run that was ended in a later cell."""
    for name, state in (("01_first_run", "done"), ("02_attach_and_look", "interrupted")):
        shown = [o for o in outputs(saved(HERE / f"{name}.py")) if o.output_type == "display_data"]
        cards = [o["data"]["text/html"] for o in shown if "text/html" in o["data"]]
        assert [f"</b> {state}" in card for card in cards] == [True]
        assert cards[0].count("<svg") >= 2


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("in /root/x", "directory"),
        ("'/work/main/runs'", "directory"),
        ("/venv/lib/python3.11/site-packages/x.py", "package"),
        ("tcp://10.0.0.7:8786", "address"),
        ("2026-12-01 17:00", "date"),
        ("17:00:31,123 warning", "date"),
        ("pid=4711", "process"),
        ("http://node-17:8787/status", "link"),
        ("https://pypi.org", "package host"),
    ],
)
def test_what_tells_of_a_machine_is_found(text: str, kind: str) -> None:
    assert any(found.startswith(f"{kind}:") for found in of_a_machine(text)), of_a_machine(text)


@pytest.mark.parametrize(
    "text", ["<Run a: done; in /tmp/trinity-x/job>", "http://127.0.0.1:8787/trinity", "1.2.3 0.5"]
)
def test_what_tells_of_none_is_left(text: str) -> None:
    assert of_a_machine(text) == []


def test_outputs_are_scrubbed(tmp_path: Path) -> None:
    data = {"text/html": f"<b>{tmp_path}/a</b>", "text/plain": f"in {tmp_path}/a"}
    cell = nbformat.v4.new_code_cell(
        "x",
        outputs=[
            new_output("display_data", data=data),
            new_output("stream", name="stdout", text=f"{HERE.parent} on {socket.gethostname()}"),
        ],
    )
    notebook = new_notebook(cells=[cell])
    scrub(notebook, tmp_path)
    texts = [text for output in outputs(notebook) for _, _, text in texts_of(output)]
    assert sorted(texts) == ["/trinity-dask on here", "<b>/tmp/a</b>", "in /tmp/a"]


def test_cells_and_texts_are_told_apart(tmp_path: Path) -> None:
    source = tmp_path / "x.py"
    source.write_text('"""\n# Title\n"""\n\n# %%\nx = 1\n\n\n# %%\n"""not text"""; x\n')
    cells = notebook_of(source).cells
    assert [(c.cell_type, c.source) for c in cells] == [
        ("markdown", "# Title"),
        ("code", "x = 1"),
        ("code", '"""not text"""; x'),
    ]


def test_a_cell_that_fails_is_an_error(tmp_path: Path) -> None:
    source = tmp_path / "x.py"
    source.write_text("1 / 0\n")
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        execute(notebook_of(source), tmp_path, os.environ)
