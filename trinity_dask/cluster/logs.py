"""Where the log lines of Dask go while a run owns the terminal.

Invariant: within :func:`driver_log` nothing of Dask is printed by this process; the
handlers that were there come back afterwards.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from trinity_dask.cluster.guard import LogFormatter

DRIVER_LOG = "driver.log"


@contextlib.contextmanager
def driver_log(directory: Path | None) -> Iterator[None]:
    """Send the lines of this process's scheduler and nannies to ``<directory>/driver.log``.

    Without a directory only errors are shown, where they were shown before.
    """
    # Dask's top logger and those below it that have handlers of their own
    known = logging.Logger.manager.loggerDict
    found = [x for name, x in known.items() if name.startswith("distributed.")]
    own = [x for x in found if isinstance(x, logging.Logger) and x.handlers]
    loggers = [logging.getLogger("distributed"), *own]
    before = [(logger, logger.handlers[:], logger.level) for logger in loggers]
    handler: logging.Handler | None = None
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(directory / DRIVER_LOG)
        handler.setFormatter(LogFormatter())
    try:
        for logger in loggers:
            if handler is None:
                logger.setLevel(logging.ERROR)
            else:
                logger.handlers[:] = [handler]
        yield
    finally:
        for logger, handlers, level in before:
            logger.handlers[:] = handlers
            logger.setLevel(level)
        if handler is not None:
            handler.close()
