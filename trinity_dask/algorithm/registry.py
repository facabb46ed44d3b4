"""Names for functions and classes, and dotted paths for a user's own.

Invariant: a name resolves to exactly one object; a name that does not resolve raises and
says what was looked for and which registered name is nearest.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """A table of objects of one kind, by name."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._items: dict[str, T] = {}

    def register_module(self, name: str) -> Callable[[T], T]:
        """Decorator that gives an object a name; a module executed anew gives it to its new one.

        Raises:
            ValueError: the name belongs to another object.
        """

        def register(item: T) -> T:
            known = self._items.get(name, item)
            if known is not item and _origin(known) != _origin(item):
                raise ValueError(f"{self.kind} {name!r} is already registered; choose another name")
            self._items[name] = item
            return item

        return register

    def names(self) -> list[str]:
        return sorted(self._items)

    def get(self, name: str) -> T:
        """The object called ``name``, or at ``pkg.mod:attr``, ``pkg.mod.attr`` or ``file.py:attr``.

        Raises:
            ValueError: neither a registered name nor an importable path.
        """
        if name in self._items:
            return self._items[name]
        if ":" in name or "." in name:
            return self._load(name)
        raise ValueError(f"unknown {self.kind} {name!r}{nearest(name, self._items)}")

    def _load(self, path: str) -> T:
        separator = ":" if ":" in path else "."
        module, _, attribute = path.rpartition(separator)
        try:
            return getattr(_module(module), attribute)
        except (ImportError, AttributeError, OSError, SyntaxError) as error:
            raise ValueError(
                f"{self.kind} {path!r} cannot be loaded: {error}; give a registered name "
                f"({', '.join(self.names())}), an importable 'package.module:name', or "
                "'path/to/file.py:name'"
            ) from error


def _origin(item: Any) -> tuple[str | None, str | None]:
    """Module and name of a definition: the same when its file is executed again."""
    name = getattr(item, "__qualname__", None)
    return (item.__module__, name) if name is not None else (None, str(id(item)))


def _module(location: str) -> ModuleType:
    """The module called ``location``, or the file at that path, executed once per process."""
    if not location.endswith(".py") and os.sep not in location:
        return importlib.import_module(location)
    path = Path(location).expanduser().resolve()
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    # the name that workflows and rewards give the same file, which is then one module
    name = f"trinity_dask_user_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # before execution: dataclasses and pickle look their module up by name
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


class LazyRegistry(Registry[Any]):
    """Names of objects in modules that are imported when the object is asked for.

    Its items may be dotted paths ``pkg.mod:attr``; :meth:`get` gives the object itself.
    """

    def get(self, name: str) -> Any:
        item = super().get(name)
        return self._load(item) if isinstance(item, str) else item


def nearest(name: str, allowed: Iterable[str]) -> str:
    """``"; did you mean 'x'? Allowed: ..."`` for an error message."""
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
