"""From a name in a configuration to the object it means.

Invariant: user code is executed where it lies; nothing is copied, installed or added to
``sys.path``. A file is executed once per process and content version.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from trinity_dask.workflows.registry import Registry

_lock = threading.RLock()
_modules: dict[str, tuple[int, ModuleType]] = {}  # path -> (mtime_ns, module)
_plugin_files: list[str] = []


class LoadError(LookupError):
    """A workflow or reward cannot be found or imported. The message says where it was sought."""


def load_object(name: str, registry: Registry) -> Any:
    """The object that ``name`` means.

    ``name`` is a registered name (built in, or registered by a plugin file),
    ``pkg.mod:attr``, ``pkg.mod.attr`` or ``path/to/file.py:attr``.

    Raises:
        LoadError: no such name, file, module or attribute, or the import failed.
    """
    found = registry.get(name)
    if found is not None:
        return found
    if ":" not in name and "." not in name:
        raise LoadError(_unknown(name, registry))
    return load_callable(name)


def load_callable(name: str) -> Any:
    """What ``pkg.mod:attr``, ``pkg.mod.attr`` or ``path/to/file.py:attr`` means.

    Raises:
        LoadError: no such file, module or attribute, or the import failed.
    """
    if ":" in name:
        location, _, attribute = name.rpartition(":")
        return _attribute(_module_at(location, name), attribute, name)
    location, _, attribute = name.rpartition(".")
    if not location or attribute == "py":
        raise LoadError(
            f"{name!r} names no attribute; write 'package.module:name' or 'file.py:name'"
        )
    return _attribute(_import(location, name), attribute, name)


def load_plugins(plugin_dirs: Iterable[str]) -> list[str]:
    """Execute every ``*.py`` of the directories (not recursive, no dunder files).

    The files register their workflows and rewards. Files already executed and unchanged
    are skipped. Returns the paths of the files.

    Raises:
        LoadError: a directory does not exist, or a file fails to import.
    """
    files: list[str] = []
    for directory in plugin_dirs:
        root = Path(directory).expanduser()
        if not root.is_dir():
            raise LoadError(
                f"plugin_dirs: {str(directory)!r} is not a directory (in {os.getcwd()})"
            )
        files += [str(p.resolve()) for p in sorted(root.glob("*.py")) if p.name[:2] != "__"]
    load_plugin_files(files)
    return files


def load_plugin_files(files: Iterable[str]) -> None:
    """Execute plugin files, named by their paths. Raises LoadError as :func:`load_plugins`."""
    for file in files:
        _load_file(file, f"plugin file {file}")
    _plugin_files[:] = sorted({*_plugin_files, *files})


def plugin_files() -> list[str]:
    """Paths of the plugin files that this process has loaded."""
    return list(_plugin_files)


def _module_at(location: str, name: str) -> ModuleType:
    if location.endswith(".py") or os.sep in location:
        path = Path(location).expanduser().resolve()
        if not path.is_file():
            raise LoadError(f"{name!r}: there is no file {path}")
        return _load_file(str(path), repr(name))
    return _import(location, name)


def _load_file(path: str, what: str) -> ModuleType:
    with _lock:
        mtime = os.stat(path).st_mtime_ns
        known = _modules.get(path)
        if known is not None and known[0] == mtime:
            return known[1]
        module = _execute(path, what)
        _modules[path] = (mtime, module)
        return module


def _execute(path: str, what: str) -> ModuleType:
    digest = hashlib.sha256(path.encode()).hexdigest()[:8]
    module_name = f"trinity_dask_user_{Path(path).stem}_{digest}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise LoadError(f"{what}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # before execution: dataclasses and pickle look their module up by name
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise LoadError(f"{what}: importing {path} failed: {_short(error)}") from error
    return module


def _import(module_name: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except Exception as error:  # any error of user code at import is the same fault: not loadable
        raise LoadError(f"{name!r}: importing {module_name} failed: {_short(error)}") from error


def _attribute(module: ModuleType, attribute: str, name: str) -> Any:
    value = getattr(module, attribute, None)
    if value is None:
        public = [n for n in vars(module) if not n.startswith("_")]
        near = difflib.get_close_matches(attribute, public, n=3)
        hint = f"; did you mean {near}?" if near else ""
        origin = getattr(module, "__file__", module.__name__)
        raise LoadError(f"{name!r}: {origin} has no {attribute!r}{hint}")
    return value


def _unknown(name: str, registry: Registry) -> str:
    near = difflib.get_close_matches(name, registry.names(), n=1)
    hint = f" Nearest: {near[0]!r}." if near else ""
    plugins = f"{_plugin_files}" if _plugin_files else "none loaded"
    return (
        f"{registry.kind} {name!r} not found.{hint} Registered: {registry.names()}; plugin "
        f"files: {plugins}. Or give 'package.module:name' or 'path/to/file.py:name'."
    )


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
