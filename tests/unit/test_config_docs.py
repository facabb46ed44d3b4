"""docs/configuration.md is what the dataclasses say."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from trinity_dask.config.fields import all_keys, fields_of
from trinity_dask.config.schema import Config, OptimizerConfig

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def maker():
    spec = importlib.util.spec_from_file_location(
        "make_configuration", DOCS / "make_configuration.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def text():
    return (DOCS / "configuration.md").read_text(encoding="utf-8")


def test_the_page_is_current(maker, text):
    assert maker.page(text) == text, "run: python docs/make_configuration.py"


def test_every_key_has_a_row(maker, text):
    for section, paths in maker.sections().items():
        title = ", ".join(f"`{path}`" for path in paths) if section is not Config else "Top level"
        rows = text.split(f"## {title}\n")[1].split("\n## ")[0]
        assert re.findall(r"^\| `(\w+)` \|", rows, re.MULTILINE) == list(fields_of(section))
    assert (
        len(maker.sections())
        == len({k.section or k.item for _, k in all_keys(Config)} - {None}) + 1
    )


def test_the_comments_of_a_field_are_its_meaning(maker):
    notes = maker.comments(OptimizerConfig)
    assert notes["min_lr_ratio"] == "floor of a decaying schedule, as a share of lr"
    assert maker.comments(Config)["job_dir"] == "directory of the run"


def test_every_key_says_what_it_is(maker):
    for section in maker.sections():
        notes = maker.comments(section)
        for name, kind in fields_of(section).items():
            assert kind.section is not None or notes.get(name), f"{section.__name__}.{name}"


def test_the_examples_of_the_page_are_sound(text):
    from trinity_dask.config import load_config

    commands = re.findall(r"^trinity-dask validate ([^#\n]*)", text, re.MULTILINE)
    assert commands
    for command in commands:
        load_config(*(word for word in command.split() if not word.startswith("--")))
