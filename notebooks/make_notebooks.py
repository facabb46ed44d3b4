"""Make the notebooks of this folder: ``python notebooks/make_notebooks.py [NAME ...]``.

Invariant: a notebook holds the cells of its source, the ``.py`` beside it, and what they said in
one run of them in a kernel of its own, without what only the machine that ran them would say.

A source is cut into cells by lines ``# %%``; a cell that is one string is text. Without names all
notebooks are made. Where there is a Slurm, or one of the tests can be had, the cells see it.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import os
import re
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

HERE = Path(__file__).parent
SOURCES = sorted(HERE.glob("[0-9]*.py"))
CELL_TIMEOUT_S = 240
TEXTS = ("text", "text/plain", "text/html")


def notebook_of(source: Path) -> NotebookNode:
    """The notebook of a source, without outputs."""
    cells = []
    for number, part in enumerate(re.split(r"^# %%\n", source.read_text(), flags=re.MULTILINE)):
        code, cell_id = part.strip("\n"), f"cell-{number}"
        body = ast.parse(code).body
        text = ast.get_docstring(ast.parse(code)) if len(body) == 1 else None
        if text is not None:
            cells.append(new_markdown_cell(inspect.cleandoc(text), id=cell_id))
        else:
            cells.append(new_code_cell(code, id=cell_id))
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return new_notebook(cells=cells, metadata={"kernelspec": kernel})


def execute(notebook: NotebookNode, root: Path, environment: Mapping[str, str]) -> None:
    """Run the cells in a kernel of their own, whose temporary files and settings are in ``root``.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed; the cells up to it have outputs.
        nbclient.exceptions.CellTimeoutError: a cell took longer than ``CELL_TIMEOUT_S``.
    """
    own = {name: str(root) for name in ("TMPDIR", "IPYTHONDIR", "JUPYTER_RUNTIME_DIR")}
    NotebookClient(
        notebook, timeout=CELL_TIMEOUT_S, kernel_name="python3", record_timing=False
    ).execute(cwd=str(root), env={**environment, **own, "OMP_NUM_THREADS": "1"})


def scrub(notebook: NotebookNode, root: Path) -> None:
    """Take out of the outputs what tells of this machine: directories, its name, its software."""
    said = {str(root): "/tmp", socket.gethostname(): "here", sys.prefix: "/venv"}
    said[str(HERE.parent)] = "/trinity-dask"
    for output in outputs(notebook):
        for place, name, text in texts_of(output):
            for mine, anybodys in said.items():
                text = text.replace(mine, anybodys)
            place[name] = text
    notebook.metadata.pop("language_info", None)


def outputs(notebook: NotebookNode) -> Iterator[NotebookNode]:
    return (output for cell in notebook.cells for output in cell.get("outputs", ()))


def texts_of(output: NotebookNode) -> Iterator[tuple[dict[str, Any], str, str]]:
    """(the mapping, its key, the text) of each text of an output."""
    for place in (output, output.get("data", {})):
        for name in TEXTS:
            if name in place:
                yield place, name, place[name]


@contextmanager
def with_slurm() -> Iterator[Mapping[str, str]]:
    """The environment of a user of the tests' Slurm, or the present one where there is none."""
    sys.path.insert(0, str(HERE.parent / "tests" / "slurm"))
    from slurm_stand import SlurmMissing, running

    try:
        with running() as stand:
            yield stand.env
    except SlurmMissing as error:
        print(error, file=sys.stderr)
        yield os.environ


def make(source: Path, environment: Mapping[str, str]) -> None:
    notebook = notebook_of(source)
    with tempfile.TemporaryDirectory() as root:
        execute(notebook, Path(root), environment)
        scrub(notebook, Path(root))
    nbformat.write(notebook, source.with_suffix(".ipynb"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="as 01_first_run")
    names = parser.parse_args().names or [source.stem for source in SOURCES]
    with with_slurm() as environment:
        for name in names:
            print(name)
            make(HERE / f"{name}.py", environment)


if __name__ == "__main__":
    main()
