"""What is imported only when it is used: public names of a module, and large libraries.

Invariant: importing a module that uses this imports nothing that stands behind its names. Of the
threads of a process one at a time imports a library through here: two that import packages with
cyclic imports may each see half of a module.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

#: what loading any model or tokenizer imports first
MODEL_LIBRARY = (
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
)
_one_thread = threading.RLock()


def import_modules(names: Iterable[str]) -> None:
    """Import these modules, after whoever imports at the moment has done so."""
    with _one_thread:
        for name in names:
            importlib.import_module(name)


class _Library:
    """Stands for a library; the first look at one of its names imports it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what looks for such a name wants no library
            raise AttributeError(name)
        import_modules([self._name])
        value = getattr(sys.modules[self._name], name)
        vars(self)[name] = value  # looked up once
        return value


def names(module: str, sources: Mapping[str, str]) -> Callable[[str], Any]:
    """A ``__getattr__`` for ``module``: ``sources`` says which module defines each name."""

    def load(name: str) -> Any:
        if name not in sources:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(importlib.import_module(sources[name]), name)

    return load


if TYPE_CHECKING:
    import torch as torch
else:
    #: torch for modules that a driver imports to check names, and which compute elsewhere
    torch = _Library("torch")
