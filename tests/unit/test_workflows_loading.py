"""Names of workflows and rewards, and a user's own files."""

from __future__ import annotations

import os
import sys
import textwrap

import pytest

from trinity_dask.workflows import WORKFLOWS, Registry, Workflow
from trinity_dask.workflows.loading import LoadError, load_callable, load_object, load_plugins


def write(path, text):
    path.write_text(textwrap.dedent(text))
    return path


@pytest.mark.parametrize("name", WORKFLOWS.names())
def test_every_built_in_workflow_is_one(name):
    assert issubclass(load_object(name, WORKFLOWS), Workflow)


@pytest.mark.parametrize("name", ["os.path:join", "os.path.join"])
def test_dotted_paths(name):
    assert load_object(name, WORKFLOWS) is os.path.join


def test_a_file_is_used_where_it_lies(tmp_path):
    path = write(tmp_path / "mine.py", "def reward(response, truth):\n    return 1.0\n")
    before = list(sys.path)
    reward = load_object(f"{path}:reward", WORKFLOWS)
    assert reward("a", "b") == 1.0
    assert load_object(f"{path}:reward", WORKFLOWS) is reward
    assert sys.path == before
    assert sorted(p.name for p in tmp_path.iterdir()) in (["mine.py"], ["__pycache__", "mine.py"])


def test_a_changed_file_is_read_again(tmp_path):
    path = write(tmp_path / "mine.py", "X = 1\n")
    assert load_callable(f"{path}:X") == 1
    write(path, "X = 22\n")
    os.utime(path, ns=(1, 1))
    assert load_callable(f"{path}:X") == 22


def test_plugins_register_names_and_may_be_loaded_again(tmp_path):
    code = """
        from trinity_dask.workflows import WORKFLOWS, Workflow

        @WORKFLOWS.register_module("plugged")
        class Mine(Workflow):
            number = {number}
    """
    path = write(tmp_path / "plugin.py", code.format(number=1))
    write(tmp_path / "__init__.py", "raise RuntimeError('not a plugin')")
    assert load_plugins([str(tmp_path)]) == [str(path)]
    assert load_object("plugged", WORKFLOWS).number == 1
    write(path, code.format(number=2))
    os.utime(path, ns=(5, 5))
    load_plugins([str(tmp_path)])
    assert load_object("plugged", WORKFLOWS).number == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("simple_workfow", "Nearest: 'simple_workflow'"),
        ("/nowhere/x.py:f", "there is no file /nowhere/x.py"),
        ("no_such_package.mod:f", "importing no_such_package.mod failed"),
        ("os.path:joinn", "did you mean"),
        ("mine.py", "names no attribute"),
    ],
)
def test_errors_say_what_was_sought_and_where(name, message):
    with pytest.raises(LoadError, match=message):
        load_object(name, WORKFLOWS)


def test_a_broken_file_is_named_with_its_error(tmp_path):
    path = write(tmp_path / "broken.py", "1 / 0\n")
    with pytest.raises(LoadError, match=r"broken\.py failed: ZeroDivisionError"):
        load_callable(f"{path}:f")
    with pytest.raises(LoadError, match="no_dir"):
        load_plugins([str(tmp_path / "no_dir")])


def test_a_name_cannot_be_taken_twice():
    registry = Registry("thing", {"built_in": "os.path:join"})
    registry.register_module("mine", dict)
    with pytest.raises(KeyError, match="registered already"):
        registry.register_module("mine", os.path.join)
    with pytest.raises(KeyError, match="registered already"):
        registry.register_module("built_in", Workflow)
    registry.register_module("mine", os.path.join, force=True)
    assert registry.get("mine") is os.path.join
