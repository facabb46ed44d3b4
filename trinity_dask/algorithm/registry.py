"""Names for functions and classes, and dotted paths for a user's own.

Invariant: a name resolves to exactly one object; a name that does not resolve raises and
says what was looked for and which registered name is nearest.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """A table of objects of one kind, by name."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._items: dict[str, T] = {}

    def register_module(self, name: str) -> Callable[[T], T]:
        """Decorator that gives an object a name.

        Raises:
            ValueError: the name belongs to another object.
        """

        def register(item: T) -> T:
            if self._items.get(name, item) is not item:
                raise ValueError(f"{self.kind} {name!r} is already registered; choose another name")
            self._items[name] = item
            return item

        return register

    def names(self) -> list[str]:
        return sorted(self._items)

    def get(self, name: str) -> T:
        """The object called ``name``, or at ``pkg.mod:attr`` or ``pkg.mod.attr``.

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
            return getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ValueError(
                f"{self.kind} {path!r} cannot be loaded: {error}; give a registered name "
                f"({', '.join(self.names())}) or an importable 'package.module:name'"
            ) from error


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


def check_args(kind: str, factory: Callable[..., Any], args: Iterable[str]) -> None:
    """Raise ValueError for an argument that ``factory`` does not have, naming the nearest."""
    parameters = inspect.signature(factory).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in args:
        if name not in parameters and not open_ended:
            raise ValueError(f"unknown argument {name!r} of {kind}{nearest(name, parameters)}")


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
