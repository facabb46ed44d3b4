"""Names of things that a configuration can choose, and the loading of a user's own code.

Invariant: one name means one object in a process. A user's file is executed once per process and
content version whatever names it (a loss, a reward, a workflow, a plugin directory, a file beside
it); it is executed where it lies: nothing is copied or installed, and ``sys.path`` is as it was.

A user's file may import what lies beside it, and a dotted path may start in the working directory.
What is installed goes first: a neighbour with the name of an installed module is not found.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, Optional, TypeVar, overload

T = TypeVar("T")


class LoadError(ValueError):
    """A name leads to nothing, or what it leads to cannot be imported; says where it was sought."""


class Registry(Generic[T]):
    """Objects of one kind (``workflow``, ``policy_loss_fn``) by name.

    ``defaults`` maps built-in names to ``"module:attribute"``, imported when first asked for.
    """

    def __init__(self, kind: str, defaults: Optional[Mapping[str, str]] = None) -> None:
        self.kind = kind
        self._defaults = dict(defaults or {})
        self._items: dict[str, T] = {}
        self._modules: dict[str, Optional[ModuleType]] = {}  # that registered the item

    def names(self) -> list[str]:
        """All registered names, sorted."""
        given = [name for kind, name in _given if kind == self.kind]
        return sorted({*self._defaults, *self._items, *given})

    def get(self, name: str) -> T:
        """What ``name`` means: a registered name, or a path as :func:`load_object` takes.

        Raises:
            LoadError: neither; names the nearest registered one.
        """
        if (self.kind, name) in _given:
            return _given[self.kind, name]
        if name in self._items:
            return self._items[name]
        if name in self._defaults:
            return load_object(self._defaults[name])
        if ":" in name or "." in name:
            try:
                return load_object(name)
            except LoadError as error:
                raise LoadError(f"{self.kind} {error}") from error
        plugins = ", ".join(_plugin_files) or "none loaded"
        raise LoadError(
            f"unknown {self.kind} {name!r}{nearest(name, self.names())}; plugin files: {plugins}; "
            "or give 'package.module:name' or 'path/to/file.py:name'"
        )

    @overload
    def register_module(
        self, name: str, cls: None = None, force: bool = False
    ) -> Callable[[T], T]: ...

    @overload
    def register_module(self, name: str, cls: T, force: bool = False) -> T: ...

    def register_module(self, name: str, cls: Optional[T] = None, force: bool = False) -> Any:
        """Give ``cls`` the name ``name``; without ``cls`` a decorator.

        A file that is executed again gives its names to its new objects.

        Raises:
            ValueError: the name belongs to another object and not ``force``.
        """
        if cls is None:
            return functools.partial(self.register_module, name, force=force)
        module = sys.modules.get(getattr(cls, "__module__", None) or "")
        known = self._items.get(name, self._defaults.get(name))
        # what a registered definition has become in a new execution of its file
        old, origin = self._items.get(name), getattr(cls, "__module__", None)
        named = getattr(old, "__qualname__", None) == getattr(cls, "__qualname__", "")
        again = origin is not None and getattr(old, "__module__", None) == origin
        again &= named or (module is not None and self._modules.get(name) is not module)
        if not (known is None or force or known is cls or again):
            raise ValueError(
                f"{self.kind} {name!r} is already registered ({known}); choose another name or "
                "pass force=True"
            )
        self._items[name], self._modules[name] = cls, module
        if origin == "__main__":
            _of_main[self.kind, name] = cls
        else:
            _of_main.pop((self.kind, name), None)
        return cls


#: (kind, name) -> what a cell or script of this process defined: no other process can import it
_of_main: dict[tuple[str, str], Any] = {}
#: (kind, name) -> what another process defined so and handed over
_given: dict[tuple[str, str], Any] = {}


def defined_in_main() -> dict[tuple[str, str], Any]:
    """What was registered by code that has no file others could import: (kind, name) -> object."""
    return dict(_of_main)


def take_over(defined: Mapping[tuple[str, str], Any]) -> None:
    """Have these names mean these objects from now on, whatever they meant before."""
    _given.update(defined)


def load_object(name: str) -> Any:
    """What ``pkg.mod:attr``, ``pkg.mod.attr`` or ``path/to/file.py:attr`` means.

    Raises:
        LoadError: no such file, module or attribute, or the import failed.
    """
    location, _, attribute = name.rpartition(":" if ":" in name else ".")
    if not location or attribute == "py":
        raise LoadError(
            f"{name!r} names no attribute; write 'package.module:name' or 'file.py:name'"
        )
    if location.endswith(".py") or os.sep in location:
        path = Path(location).expanduser().resolve()
        if not path.is_file():
            raise LoadError(f"{name!r}: there is no file {path}")
        module = _load_file(str(path), repr(name))
    else:
        module = _import(location, name)
    value = getattr(module, attribute, None)
    if value is None:
        public = [n for n in vars(module) if not n.startswith("_")]
        near = difflib.get_close_matches(attribute, public, n=3)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        origin = getattr(module, "__file__", module.__name__)
        raise LoadError(f"{name!r}: {origin} has no attribute {attribute!r}{hint}")
    return value


def load_plugins(plugin_dirs: Iterable[str]) -> list[str]:
    """Execute every ``*.py`` of the directories (not recursive, no dunder files).

    The files register their names. Files already executed and unchanged are skipped. Returns
    the paths of the files.

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


# users' files ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Loaded:
    """An executed file: its content then, and the files beside it that it took names from."""

    module: ModuleType
    stamp: tuple[int, int]
    neighbours: dict[str, ModuleType]


_lock = threading.Lock()  # of _loaded; never held while code of a user's is executed
_loaded: dict[str, _Loaded] = {}  # by path
_paths: dict[str, str] = {}  # of the modules' names
_neighbours: dict[str, str] = {}  # top-level name that a user's code imported -> its directory
_directories: dict[str, None] = {}  # where users' code lies, the latest last
_plugin_files: list[str] = []
_executing = threading.local()  # .directory: where the code lies that this thread executes


def _load_file(path: str, what: str) -> ModuleType:
    """The module of a user's file. Python's own import lock has it executed by one thread."""
    name = _module_name(path)
    with _lock:
        _forget_if_edited(path, set())
    try:
        return importlib.import_module(name)
    except Exception as error:  # any error of user code at import is the same fault: not loadable
        raise LoadError(
            f"{what}: importing {path} failed: {type(error).__name__}: {error}"
        ) from error


def _import(module_name: str, name: str) -> ModuleType:
    """A module by its dotted name, that may start in the working directory."""
    try:
        with _searching(os.getcwd(), module_name.partition(".")[0]):
            module = importlib.import_module(module_name)
    except Exception as error:
        raise LoadError(
            f"{name!r}: importing {module_name} failed: {type(error).__name__}: {error}"
        ) from error
    path = getattr(module, "__file__", None)
    return _load_file(path, repr(name)) if path in _loaded else module


def _module_name(path: str) -> str:
    digest = hashlib.sha256(path.encode()).hexdigest()[:8]
    name = f"trinity_dask_user_{Path(path).stem}_{digest}"
    _paths[name] = path
    return name


def _stamp(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_mtime_ns, status.st_size


def _forget_if_edited(path: str, seen: set[str]) -> None:
    """Have a file executed again that was edited, or took names from one that was."""
    loaded = _loaded.get(path)
    if loaded is None or path in seen:
        return
    seen.add(path)
    for neighbour in loaded.neighbours:
        _forget_if_edited(neighbour, seen)
    near = loaded.neighbours.items()
    same = all(p in _loaded and _loaded[p].module is m for p, m in near)
    if not same or loaded.stamp != _stamp(path):
        del _loaded[path]
        for name in [n for n, module in list(sys.modules.items()) if module is loaded.module]:
            del sys.modules[name]


@contextmanager
def _searching(directory: str, namespace: Optional[str] = None) -> Iterator[None]:
    """Have this thread's imports find what lies in ``directory``, if it is nowhere else.

    ``namespace``: a name that may there be a directory without ``__init__.py``.
    """
    before = vars(_executing).copy()
    _executing.directory, _executing.namespace = directory, namespace
    for name, other in list(_neighbours.items()):
        if other != directory and _found_in(directory, name) is not None:
            # two directories have a module of one name, and this one's code means its own
            del _neighbours[name]
            for each in [n for n in list(sys.modules) if n.partition(".")[0] == name]:
                del sys.modules[each]
    try:
        yield
    finally:
        vars(_executing).clear()
        vars(_executing).update(before)


def _found_in(directory: str, name: str) -> Optional[importlib.machinery.ModuleSpec]:
    spec = importlib.machinery.PathFinder.find_spec(name, [directory])
    named = name == getattr(_executing, "namespace", None)
    return None if spec is None or (spec.loader is None and not named) else spec


#: a package that users' code may import without having it -> the module that stands for it
_STAND_INS = {"trinity": f"{__package__}.compat.trinity"}


class _UserCode(importlib.abc.MetaPathFinder):
    """Finds what the finders before it do not: users' files, and what lies beside them."""

    def find_spec(
        self, name: str, path: Optional[Sequence[str]] = None, target: Optional[ModuleType] = None
    ) -> Optional[importlib.machinery.ModuleSpec]:
        if name in _paths:
            file = _paths[name]
            return importlib.util.spec_from_file_location(name, file, loader=_File(name, file))
        if path is not None:  # below a package, whose own directory has been searched
            return None
        here = getattr(_executing, "directory", None)
        for directory in [*([here] if here else []), *reversed(_directories)]:
            spec = _found_in(directory, name)
            if spec is not None:
                _neighbours[name] = directory
                _directories.setdefault(directory)
                if spec.submodule_search_locations is None and str(spec.origin).endswith(".py"):
                    spec = importlib.machinery.ModuleSpec(name, _Neighbour(), origin=spec.origin)
                return spec
        if here is None or name not in _STAND_INS:
            return None
        importlib.import_module(_STAND_INS[name])  # which puts the package into sys.modules
        return sys.modules[name].__spec__


class _File(importlib.machinery.SourceFileLoader):
    """Executes a user's file and notes its content and its neighbours."""

    def exec_module(self, module: ModuleType) -> None:
        path, directory = self.path, os.path.dirname(self.path)
        stamp = _stamp(path)
        importlib.invalidate_caches()  # a neighbour may have been written a moment ago
        _directories.pop(directory, None)
        _directories[directory] = None
        with _searching(directory):
            # no bytecode file: it is told from an edited source by whole seconds only
            code = self.source_to_code(self.get_data(path), path)
            exec(code, vars(module))
            used = [sys.modules[n] for n in code.co_names if _neighbours.get(n) == directory]
        with _lock:
            files = {str(m.__file__): m for m in used if m.__file__ in _loaded}
            _loaded[path] = _Loaded(module, stamp, files)


class _Neighbour(importlib.abc.Loader):
    """A file that a neighbour imports by its plain name is the module that its path names."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(_module_name(str(spec.origin)))
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the plain name's has replaced it


sys.meta_path.append(_UserCode())


# arguments ---------------------------------------------------------------------------------


def nearest(name: str, allowed: Iterable[str]) -> str:
    """``"; did you mean 'x'? allowed: ..."`` for an error message."""
    options = sorted(allowed)
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.4)
    hint = f"; did you mean {close[0]!r}?" if close else ";"
    return f"{hint} allowed: {', '.join(options) or 'nothing'}"


def check_args(
    kind: str, factory: Callable[..., Any], args: Mapping[str, Any], hidden: Iterable[str] = ()
) -> None:
    """Raise ValueError for an argument that ``factory`` does not have, naming the nearest.

    So it does for a value that is no number where the annotation says ``float`` or ``int``.
    ``hidden``: parameters that are not the user's to give.
    """
    parameters = {
        n: p for n, p in inspect.signature(factory).parameters.items() if n not in set(hidden)
    }
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name, value in args.items():
        if name in parameters:
            _check_number(kind, parameters[name], value)
        elif not open_ended:
            raise ValueError(f"unknown argument {name!r} of {kind}{nearest(name, parameters)}")


_NUMBERS = {"float": "a number", "int": "a whole number"}


def _check_number(kind: str, parameter: inspect.Parameter, value: Any) -> None:
    annotation = parameter.annotation
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    plain = text.removeprefix("Optional[").removesuffix("]").removesuffix(" | None")
    if plain not in _NUMBERS or (value is None and plain != text):
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and not math.isnan(value) and (plain == "float" or isinstance(value, int)):
        return
    default = parameter.default
    usual = "" if default in (parameter.empty, None) else f", as its default {default}"
    null = "" if plain == text else " or null"
    raise ValueError(
        f"argument {parameter.name}={'null' if value is None else repr(value)} of {kind} must be "
        f"{_NUMBERS[plain]}{null}{usual}"
    )


def build(kind: str, factory: Callable[..., T], args: Mapping[str, Any]) -> T:
    """Call ``factory(**args)`` after checking that it takes each of ``args``.

    Raises:
        ValueError: an argument that the factory does not have, with the nearest one.
    """
    check_args(kind, factory, args)
    return factory(**args)


def build_callable(kind: str, item: Any, args: Mapping[str, Any], subject: Iterable[str]) -> Any:
    """Like :func:`build`, but ``item`` may also be the finished function itself.

    A plain function with a parameter out of ``subject`` (what such functions work on) is
    not a factory: ``args`` are bound to it, and it is called later.
    """
    is_function = (
        inspect.isfunction(item) and set(subject) & inspect.signature(item).parameters.keys()
    )
    if not is_function:
        return build(kind, item, args)
    check_args(kind, item, args)
    return functools.partial(item, **args) if args else item
