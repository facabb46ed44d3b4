"""Which tensors a loss or an advantage function asks for, read from its signature.

Invariant: what a function declares is what it gets; nothing is listed a second time. A
``**kwargs`` asks for nothing by itself: an overriding method that only passes its inputs
on needs what the method below it declares.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

# every loss gets these; how it is normalised and weighted is not an input of its formula
ALWAYS_GIVEN = frozenset(("logprob", "action_mask", "denominator", "loss_agg_mode", "weights"))


def declared(function: Any) -> dict[str, bool]:
    """Parameter names of a callable, and whether a value must be given for each."""
    if isinstance(function, functools.partial):
        inner = declared(function.func)
        return {name: required for name, required in inner.items() if name not in function.keywords}
    if inspect.isfunction(function):
        return dict(_parameters(function))
    if inspect.ismethod(function):
        return declared(function.__self__)
    cls: Any = type(function)
    return dict(_declared_by_type(cls))


@functools.lru_cache(maxsize=256)
def _declared_by_type(cls: type) -> dict[str, bool]:
    found: dict[str, bool] = {}
    for base in cls.__mro__:
        method = base.__dict__.get("__call__")
        if method is None:
            continue
        for name, required in _parameters(method):
            found.setdefault(name, required)
        parameters = inspect.signature(method).parameters.values()
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    else:  # every ``__call__`` passes its inputs on: what the formula reads
        for name, required in getattr(cls, "declares", dict)().items():
            found.setdefault(name, required)
    found.pop("self", None)
    return found


def _parameters(function: Callable[..., Any]) -> Iterator[tuple[str, bool]]:
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            yield name, parameter.default is parameter.empty


def needs_of(loss: Callable[..., Any]) -> frozenset[str]:
    """Inputs that a loss cannot do without, apart from :data:`ALWAYS_GIVEN`."""
    required = {name for name, required in declared(loss).items() if required}
    return frozenset(required - ALWAYS_GIVEN)


def pick(function: Callable[..., Any], available: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments out of ``available`` that the function declares.

    Raises:
        ValueError: one that it cannot do without is missing.
    """
    wanted = declared(function)
    missing = [n for n, required in wanted.items() if required and available.get(n) is None]
    if missing:
        raise ValueError(
            f"{type(function).__name__} needs {', '.join(missing)}, which the batch does not have "
            f"(it has {', '.join(sorted(available))})"
        )
    return {name: available[name] for name in wanted if name in available}
