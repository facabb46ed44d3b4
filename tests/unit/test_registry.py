"""Names of workflows and rewards, and a user's own files."""

from __future__ import annotations

import importlib.util
import os
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest

from trinity_dask.algorithm import ADVANTAGE_FN, POLICY_LOSS_FN
from trinity_dask.buffer.operators.operators import OPERATORS
from trinity_dask.registry import LoadError, Registry, load_object, load_plugins
from trinity_dask.rewards import REWARD_FUNCTIONS
from trinity_dask.workflows import WORKFLOWS, Workflow


def write(path, text):
    path.write_text(textwrap.dedent(text))
    return path


@pytest.mark.parametrize("name", WORKFLOWS.names())
def test_every_built_in_workflow_is_one(name):
    assert issubclass(WORKFLOWS.get(name), Workflow)


@pytest.mark.parametrize("name", ["os.path:join", "os.path.join"])
def test_dotted_paths(name):
    assert WORKFLOWS.get(name) is os.path.join


def test_a_file_is_used_where_it_lies(tmp_path):
    path = write(tmp_path / "mine.py", "def reward(response, truth):\n    return 1.0\n")
    before = list(sys.path)
    reward = WORKFLOWS.get(f"{path}:reward")
    assert reward("a", "b") == 1.0
    assert WORKFLOWS.get(f"{path}:reward") is reward
    assert sys.path == before
    assert sorted(p.name for p in tmp_path.iterdir()) in (["mine.py"], ["__pycache__", "mine.py"])


def test_a_changed_file_is_read_again(tmp_path):
    path = write(tmp_path / "mine.py", "X = 1\n")
    assert load_object(f"{path}:X") == 1
    write(path, "X = 22\n")
    os.utime(path, ns=(1, 1))
    assert load_object(f"{path}:X") == 22


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
    assert WORKFLOWS.get("plugged").number == 1
    write(path, code.format(number=2))
    os.utime(path, ns=(5, 5))
    load_plugins([str(tmp_path)])
    assert WORKFLOWS.get("plugged").number == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("simple_workfow", "did you mean 'simple_workflow'"),
        ("/nowhere/x.py:f", "there is no file /nowhere/x.py"),
        ("no_such_package.mod:f", "importing no_such_package.mod failed"),
        ("os.path:joinn", "did you mean"),
        ("mine.py", "names no attribute"),
    ],
)
def test_errors_say_what_was_sought_and_where(name, message):
    with pytest.raises(LoadError, match=message):
        WORKFLOWS.get(name)


def test_a_broken_file_is_named_with_its_error(tmp_path):
    path = write(tmp_path / "broken.py", "1 / 0\n")
    with pytest.raises(LoadError, match=r"broken\.py failed: ZeroDivisionError"):
        load_object(f"{path}:f")
    with pytest.raises(LoadError, match="no_dir"):
        load_plugins([str(tmp_path / "no_dir")])


def test_a_name_cannot_be_taken_twice():
    registry = Registry("thing", {"built_in": "os.path:join"})
    registry.register_module("mine", dict)
    with pytest.raises(ValueError, match="already registered"):
        registry.register_module("mine", os.path.join)
    with pytest.raises(ValueError, match="already registered"):
        registry.register_module("built_in", Workflow)
    registry.register_module("mine", os.path.join, force=True)
    assert registry.get("mine") is os.path.join


def test_a_file_that_is_read_again_may_rename_its_class(tmp_path):
    code = """
        from trinity_dask.workflows import WORKFLOWS, Workflow

        @WORKFLOWS.register_module("renamed")
        class {name}(Workflow):
            pass
    """
    path = write(tmp_path / "plugin.py", code.format(name="First"))
    load_plugins([str(tmp_path)])
    write(path, code.format(name="Other"))
    load_plugins([str(tmp_path)])
    assert WORKFLOWS.get("renamed").__name__ == "Other"


COUNTED = """
import sys
sys.executions = getattr(sys, "executions", 0) + 1

def loss(logprob, action_mask): return logprob.sum(), {}
def advantage(experiences): return experiences, {}
def reward(response, truth): return 1.0
class MyOperator: pass
class MyWorkflow: pass
VERSION = 1
"""
NAMES = {
    POLICY_LOSS_FN: "loss",
    ADVANTAGE_FN: "advantage",
    REWARD_FUNCTIONS: "reward",
    OPERATORS: "MyOperator",
    WORKFLOWS: "MyWorkflow",
}


@pytest.mark.parametrize("backwards", [False, True], ids=["loss first", "workflow first"])
def test_a_file_is_executed_once_whatever_names_it(tmp_path, monkeypatch, backwards):
    monkeypatch.setattr(sys, "executions", 0, raising=False)
    path = write(tmp_path / "mine.py", COUNTED)
    order = list(reversed(NAMES)) if backwards else list(NAMES)
    for version in (1, 2):
        write(path, COUNTED.replace("VERSION = 1", f"VERSION = {version}"))
        os.utime(path, ns=(version, version))
        found = [registry.get(f"{path}:{NAMES[registry]}") for registry in order]
        load_plugins([str(tmp_path)])
        modules = {sys.modules[item.__module__] for item in found}
        assert len(modules) == 1
        assert version == next(iter(modules)).VERSION
        assert next(iter(modules)).reward is REWARD_FUNCTIONS.get(f"{path}:reward")
        assert sys.executions == version


def test_an_edit_of_equal_length_is_seen_within_a_second(tmp_path):
    path = write(tmp_path / "mine.py", "X = 1\n")
    assert load_object(f"{path}:X") == 1
    seconds = path.stat().st_mtime_ns // 10**9 * 10**9
    for number in range(2, 5):
        write(path, f"X = {number}\n")
        os.utime(path, ns=(seconds + number, seconds + number))
        assert load_object(f"{path}:X") == number


def test_threads_execute_a_file_once(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executions", 0, raising=False)
    path = write(tmp_path / "mine.py", "import time\ntime.sleep(0.05)\n" + COUNTED)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(load_object, [f"{path}:reward"] * 8))
    assert len(set(found)) == 1
    assert sys.executions == 1


def test_a_file_imports_its_neighbour_and_follows_its_edits(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executions", 0, raising=False)
    helper = write(tmp_path / "near_by.py", COUNTED)
    path = write(
        tmp_path / "mine.py", "from near_by import VERSION, reward\ndef late():\n import later_by\n"
    )
    before = list(sys.path)
    load_plugins([str(tmp_path)])
    assert load_object(f"{path}:reward") is load_object(f"{helper}:reward")
    assert sys.executions == 1
    write(tmp_path / "later_by.py", "")
    load_object(f"{path}:late")()
    write(helper, COUNTED.replace("VERSION = 1", "VERSION = 20"))
    assert load_object(f"{path}:VERSION") == 20
    assert sys.executions == 2
    assert sys.path == before


def test_files_of_two_directories_have_their_own_neighbours(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name / "a_package").mkdir(parents=True)
        write(tmp_path / name / "same_name.py", f"WHO = {name!r}")
        write(tmp_path / name / "a_package" / "__init__.py", "from .inner import WHO")
        write(tmp_path / name / "a_package" / "inner.py", f"WHO = {name!r}")
        write(tmp_path / name / "mine.py", "import same_name, a_package\nX = 1")
    for name in ("one", "two", "one"):
        path = tmp_path / name / "mine.py"
        os.utime(path)  # executed again
        load_object(f"{path}:X")
        assert name == load_object(f"{path}:same_name").WHO
        assert name == load_object(f"{path}:a_package").WHO


def test_a_dotted_path_may_start_in_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for package in ("with_init", "without_init"):
        (tmp_path / package).mkdir()
        write(tmp_path / package / "rewards.py", "from . import tools\nscore = tools.score")
        write(tmp_path / package / "tools.py", "score = 3.0")
    write(tmp_path / "with_init" / "__init__.py", "")
    write(tmp_path / "alone_here.py", "X = 1")
    assert load_object("with_init.rewards:score") == 3.0
    assert load_object("without_init.rewards.score") == 3.0
    assert load_object("alone_here:X") == 1
    write(tmp_path / "alone_here.py", "X = 22")
    assert load_object("alone_here:X") == 22
    assert importlib.util.find_spec("not_here") is None
    # a directory by chance of the name of what is not installed is no package
    (tmp_path / "some_library").mkdir()
    assert importlib.util.find_spec("some_library") is None
