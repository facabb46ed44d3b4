"""The process in which functions run that need a main thread, or may never return.

Invariant: it answers each request once, in order, in its main thread, and ends when its
parent is gone. What the functions print goes to standard error.

Run as ``python -m trinity_dask.rewards.child REQUESTS ANSWERS PARENT`` (two file descriptors
and a pid). A request is ``(target, args)``, with ``args`` None to load the target only. An
answer is ``("ok", value)`` or ``("error", type, message)``.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

LOOK_S = 1.0


@cache
def load(target: str) -> Callable[..., Any]:
    """The function that ``module:name`` means."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def answer(target: str, args: tuple[Any, ...] | None) -> tuple[Any, ...]:
    try:
        function = load(target)
        return ("ok", None if args is None else function(*args))
    except (Exception, SystemExit) as error:  # the caller's to handle, there
        return ("error", type(error).__name__, str(error))


def serve(requests: Connection, answers: Connection) -> None:
    """Answer until the other side closes the pipe."""
    while True:
        try:
            target, args = requests.recv()
        except EOFError:
            return
        answers.send(answer(target, args))


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os._exit(1)


def main(argv: list[str]) -> None:
    requests = Connection(int(argv[0]), writable=False)
    answers = Connection(int(argv[1]), readable=False)
    os.dup2(2, 1)
    threading.Thread(target=_end_with, args=(int(argv[2]),), daemon=True).start()
    try:
        serve(requests, answers)
    except (BrokenPipeError, KeyboardInterrupt):
        return


if __name__ == "__main__":
    main(sys.argv[1:])
