"""Who may import whom, read from the source of every module.

Invariant: a part imports its own layer or lower ones; ``algorithm`` knows of
ours only the registry; configuration and experiences can be used where neither torch nor
dask is loaded.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "trinity_dask"
ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / PACKAGE).rglob("*.py"))

# top to bottom
LAYERS = (
    {"cli", "run", "__main__"},
    {"launcher", "manager", "compat", "studio", "dashboard", "view"},
    {"explorer", "trainer", "sync"},
    {"engines", "workflows", "rewards", "demo", "serve"},
    {"models", "buffer", "weights", "monitor", "records"},
    {"cluster", "experience", "algorithm"},
    {"config", "files", "aio", "lazy", "registry"},
)
RANK = {part: len(LAYERS) - index for index, layer in enumerate(LAYERS) for part in layer}

HEAVY = {"torch", "dask", "distributed"}
# parts that must load without these, at module level
LIGHT = {"config": HEAVY, "experience": HEAVY}
# modules in which these must not appear at all, not even inside a function
PURE = {
    "explorer/schedule/state.py": HEAVY,
    "buffer/queue/lease_queue.py": HEAVY,
    "buffer/queue/replay_queue.py": HEAVY,
}
ALGORITHM_MAY_IMPORT = {"torch", "numpy", *sys.stdlib_module_names}


def imported(tree: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    """Dotted names of all imports below ``tree``; ``from a import b`` is ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                parents = parents[: len(parents) - node.level + is_package]
                base = ".".join([*parents, base] if base else parents)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def module_level(tree: ast.Module) -> ast.Module:
    """The statements that run when the module is imported."""
    kept = [
        statement
        for statement in tree.body
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not (isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test))
    ]
    return ast.Module(body=kept, type_ignores=[])


def part_of(name: str) -> str | None:
    """``trinity_dask.buffer.data`` is of part ``buffer``; None for others' and the root's."""
    pieces = name.split(".")
    if pieces[0] != PACKAGE or len(pieces) < 2:
        return None
    return pieces[1] if pieces[1] in RANK or (ROOT / PACKAGE / pieces[1]).is_dir() else None


def broken_rules(relative: str, source: str) -> list[str]:
    """What the module at ``trinity_dask/<relative>`` imports and must not."""
    tree = ast.parse(source)
    pieces = relative.removesuffix(".py").split("/")
    is_package = pieces[-1] == "__init__"
    own = pieces[0]
    module = ".".join([PACKAGE, *pieces[: -1 if is_package else None]])
    names = list(imported(tree, module, is_package))
    early = {name.split(".")[0] for name in imported(module_level(tree), module, is_package)}
    anywhere = {name.split(".")[0] for name in names}
    wrong = [
        f"imports {name}, of a layer above {own}"
        for name in names
        if (part := part_of(name)) and RANK[part] > RANK[own]
    ]
    wrong += [f"imports {name} at module level" for name in sorted(LIGHT.get(own, set()) & early)]
    wrong += [f"imports {name}" for name in sorted(PURE.get(relative, set()) & anywhere)]
    if own == "algorithm":
        wrong += [f"imports {name}; algorithm knows torch only" for name in foreign(names)]
    return wrong


def foreign(names: list[str]) -> list[str]:
    return [
        name
        for name in names
        if name.split(".")[0] not in ALGORITHM_MAY_IMPORT
        and not name.startswith(
            (f"{PACKAGE}.algorithm", f"{PACKAGE}.registry.", f"{PACKAGE}.lazy.")
        )
    ]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_module_imports_only_what_it_may(path):
    relative = str(path.relative_to(ROOT / PACKAGE))
    if relative == "__init__.py":
        pytest.skip("the root only names what it loads later")
    part = relative.split("/")[0].removesuffix(".py")
    assert part in RANK, f"{part} is in no layer; add it to LAYERS where it belongs"
    assert broken_rules(relative, path.read_text()) == []


@pytest.mark.parametrize(
    ("relative", "source"),
    [
        ("config/x.py", "from trinity_dask.buffer import store"),
        ("config/x.py", "import torch"),
        ("config/x.py", "try:\n    import dask\nexcept ImportError:\n    dask = None"),
        ("experience/x.py", "from distributed import get_worker"),
        ("cluster/x.py", "def f():\n    from trinity_dask.models import wrapper"),
        ("buffer/x.py", "from ..trainer import rank"),
        ("buffer/x.py", "import trinity_dask.explorer.schedule.scheduler as s"),
        ("buffer/__init__.py", "from ..sync import synchronizer"),
        ("models/x.py", "from trinity_dask import run"),
        ("algorithm/x.py", "from trinity_dask.config import Config"),
        ("algorithm/x.py", "import pandas"),
        ("algorithm/x.py", "from trinity_dask.files import sync"),
        ("trainer/x.py", "from trinity_dask.launcher import Launcher"),
        ("explorer/schedule/state.py", "def f():\n    import torch"),
    ],
)
def test_a_wrong_import_is_found(relative, source):
    assert len(broken_rules(relative, source)) == 1


@pytest.mark.parametrize(
    ("relative", "source"),
    [
        ("experience/rows.py", "def collate():\n    import torch"),
        ("experience/x.py", "if TYPE_CHECKING:\n    import torch"),
        ("buffer/x.py", "from trinity_dask.experience.task import Task"),
        ("buffer/x.py", "from .store import ExperienceStore"),
        ("buffer/x.py", "from trinity_dask import __version__"),
        ("run.py", "from trinity_dask.manager import synchronizer"),
        ("algorithm/x.py", "import math\nimport torch\nfrom trinity_dask.algorithm import kl"),
        ("algorithm/x.py", "from trinity_dask.registry import Registry"),
    ],
)
def test_a_right_import_passes(relative, source):
    assert broken_rules(relative, source) == []


@pytest.mark.parametrize("module", ["trinity_dask", "trinity_dask.config"])
def test_importing_it_loads_neither_torch_nor_dask(module):
    """The real import, through everything it pulls in."""
    code = f"import sys, {module}; print(sorted(set({sorted(HEAVY)!r}) & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
