"""What every worker process does first: its own process group, its warden, its log.

Invariant: after :func:`guard_process` a Ctrl-C in the driver's terminal does not reach the
worker, nor does a SIGTERM to all processes end it before its driver does; its output goes to its
own log file, and no process that it starts outlives it. Calling it again in the same process
changes nothing.
"""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.util
import os
import signal
import subprocess
import sys
import threading
import uuid
from contextlib import suppress
from pathlib import Path

import psutil
from distributed import Scheduler, Worker

from trinity_dask.cluster import warden
from trinity_dask.cluster.context import remember_worker
from trinity_dask.config.secrets import shown_text

LOG_DIR_ENV = "TRINITY_DASK_LOG_DIR"
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
TERMINATE_S = 2.0


class LogFormatter(logging.Formatter):
    """The form of our log lines; secrets of the configuration are masked in them."""

    def __init__(self) -> None:
        super().__init__(LOG_FORMAT)

    def format(self, record: logging.LogRecord) -> str:
        return shown_text(super().format(record))


_SPARED = warden.SPARED.decode()

_guarded_pid: int | None = None
_known_before: set[int] = set()  # child processes that are not ours to end


def guard_worker(worker: Worker) -> bool:
    """Guard the process of a running ``worker``; false where that process is not its own.

    Must run on the worker's event loop. Workers inside the driver's process
    (``processes=False``) are left alone.
    """
    shares_process = bool(Scheduler._instances) and not worker.nanny  # with a driver
    if threading.current_thread() is not threading.main_thread() or shares_process:
        return False
    remember_worker(worker)
    guard_process(str(worker.name), has_nanny=bool(worker.nanny))
    return True


def guard_process(name: str, has_nanny: bool) -> None:
    """Guard this process, whose main thread runs the worker called ``name``."""
    global _guarded_pid
    if _guarded_pid == os.getpid():
        return
    _guarded_pid = os.getpid()
    if os.environ.get(LOG_DIR_ENV):
        redirect_output(Path(os.environ[LOG_DIR_ENV]) / f"{name}.log")
    _known_before.update(child.pid for child in psutil.Process().children(recursive=True))
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    # a handler, not SIG_IGN: programs that the worker starts get the default back
    signal.signal(signal.SIGINT, lambda *_: None)
    if has_nanny:
        # Slurm sends SIGTERM to every process of a job at once: the driver saves the state and
        # then ends this one through its nanny, as it would end it without the signal
        signal.signal(signal.SIGTERM, lambda *_: None)
        if "SLURM_STEP_ID" in os.environ:
            # Slurm's warnings reach every process of a step; the nanny's process answers them
            signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    # Dask makes its workers daemonic by default, which forbids multiprocessing below them;
    # a worker that we did not start can only be changed from within
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    # where the driver's main module imports torch, it was loaded before the worker's own
    # OMP_NUM_THREADS was set
    threads, torch = os.environ.get("OMP_NUM_THREADS", ""), sys.modules.get("torch")
    if torch is not None and threads.isdigit():
        torch.set_num_threads(int(threads))
    _start_warden(parent=os.getppid() if has_nanny else 0)
    # runs before multiprocessing joins its children at exit, which could take for ever
    multiprocessing.util.Finalize(None, end_children, exitpriority=100)
    if has_nanny:
        multiprocessing.util.Finalize(None, _leave_at_once, exitpriority=-100)


def _leave_at_once() -> None:
    """End without unloading the interpreter: with torch in it that takes seconds, and the
    nanny kills what takes four. Everything that must be closed is closed by now."""
    if sys.exc_info()[0] is not None:
        return  # the traceback is still to be printed
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


def _start_warden(parent: int) -> None:
    token = uuid.uuid4().hex
    os.environ[warden.MARK] = token
    command = [sys.executable, "-I", "-S", warden.__file__, str(os.getpid()), str(parent), token]
    process = subprocess.Popen(
        command,
        env={},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    _known_before.add(process.pid)


def redirect_output(path: Path) -> None:
    """Append everything this process and its children print or log to ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter())
    logger = logging.getLogger("trinity_dask")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.info("worker process %d starts", os.getpid())


def end_children(timeout_s: float = TERMINATE_S) -> None:
    """End the processes below this one that were started since it was guarded.

    First SIGTERM, after ``timeout_s`` SIGKILL.
    """
    ours = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            if child.pid not in _known_before and _SPARED not in " ".join(child.cmdline()):
                ours.append(child)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for child in ours:
            with suppress(psutil.NoSuchProcess):
                child.send_signal(number)
        _, ours = psutil.wait_procs(ours, timeout=timeout_s)
