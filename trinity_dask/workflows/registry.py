"""Names for things that a configuration can choose.

Invariant: one name means one object in one process; the built-in objects are imported when
they are first asked for, so that listing names costs nothing.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any, Optional


class Registry:
    """Registered objects of one kind (``workflow``, ``reward function``).

    ``defaults`` maps the built-in names to ``"module:attribute"``.
    """

    def __init__(self, kind: str, defaults: Optional[dict[str, str]] = None) -> None:
        self.kind = kind
        self._defaults = dict(defaults or {})
        self._objects: dict[str, Any] = {}

    def names(self) -> list[str]:
        """All names that :meth:`get` knows, sorted."""
        return sorted({*self._defaults, *self._objects})

    def get(self, name: str) -> Any | None:
        """The object of that name, or None."""
        if name not in self._objects and name in self._defaults:
            module, attribute = self._defaults[name].split(":")
            return getattr(importlib.import_module(module), attribute)
        return self._objects.get(name)

    def register_module(self, name: str, cls: Any = None, force: bool = False) -> Any:
        """Register ``cls`` under ``name``; without ``cls`` a decorator.

        Loading the same file again replaces what it registered before.

        Raises:
            KeyError: the name belongs to something from another file and not ``force``.
        """
        if cls is None:
            return self._decorator(name, force)
        known = self._defaults.get(name) or self._objects.get(name)
        if known is not None and not force and not _same_file(known, cls):
            raise KeyError(
                f"{self.kind} {name!r} is registered already ({known}); "
                "choose another name or pass force=True"
            )
        self._objects[name] = cls
        return cls

    def _decorator(self, name: str, force: bool) -> Callable[[Any], Any]:
        def register(cls: Any) -> Any:
            return self.register_module(name, cls, force=force)

        return register


def _same_file(known: Any, new: Any) -> bool:
    source = _file_of(known)
    return source is not None and source == _file_of(new)


def _file_of(thing: Any) -> str | None:
    module = sys.modules.get(getattr(thing, "__module__", None) or "")
    return getattr(module, "__file__", None)
