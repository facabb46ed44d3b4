"""What the nodes of a run see of this machine, of each other, and of the job's directory.

Invariant: one step of two tasks is started, asked, and over when this is; what it made in the
directory is removed. Where no node is free in time, that is said, and nothing is left in the queue.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trinity_dask.cluster.addresses import address_towards, is_loopback, listening_host
from trinity_dask.cluster.slots import ROLLOUT
from trinity_dask.cluster.slurm.jobs import job_options
from trinity_dask.cluster.slurm.probe import versions
from trinity_dask.cluster.slurm.queue import clean_env, complaint
from trinity_dask.config.schema import Config

OK, WARNING, MISSING = "ok", "warning", "missing"
Line = tuple[str, str]
ASK_S = 60.0
SEEN_S = 70.0  # NFS keeps what it knows of a directory for up to a minute
LATE_S = 5.0
CLOCK_S = 1.0
BROADCAST_BYTES = 64 << 20
BROADCASTS = 5


class Node:
    """The probe on one node, over its connection."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(ASK_S + SEEN_S)
        self._stream = connection.makefile("rwb")
        found = self.ask("facts")
        self.rank: int = found["rank"]
        self.name: str = found["node"] or found["host"]
        self.versions: dict[str, str] = found["versions"]

    def send(self, name: str, *arguments: Any) -> None:
        self._stream.write(json.dumps([name, arguments]).encode() + b"\n")
        self._stream.flush()

    def answer(self) -> Any:
        """Raises OSError when the node is gone, RuntimeError when it could not do it."""
        line = self._stream.readline()
        if not line:
            raise ConnectionError("the node closed the connection")
        told = json.loads(line)
        if "error" in told:
            raise RuntimeError(told["error"])
        return told["answer"]

    def ask(self, name: str, *arguments: Any) -> Any:
        self.send(name, *arguments)
        return self.answer()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.close()


def look(cfg: Config, wait_s: float) -> Iterator[Line]:
    """Level and text of each finding; nodes are waited for up to ``wait_s``."""
    host = listening_host(cfg.cluster.host, cfg.cluster.interface)
    if is_loopback(host):
        host = address_towards("198.51.100.1")
    with socket.create_server((host, 0)) as server, _Step(cfg, server, wait_s) as step:
        nodes = step.nodes()
        if not nodes:
            yield step.excuse
            return
        here = versions()
        for node in nodes:
            yield OK, f"node {node.name} reaches this machine at {host}"
            yield from _same(node, here)
            yield _clock(node)
        root = Path(str(cfg.checkpoint_root_dir)).absolute()
        try:
            yield from _directory(nodes[0], root)
        except (OSError, RuntimeError) as error:
            yield MISSING, f"{root} cannot be used from {nodes[0].name}: {error}"
        yield _broadcast(nodes)


class _Step:
    """One task on each of two nodes, or both on one where there is only one."""

    def __init__(self, cfg: Config, server: socket.socket, wait_s: float) -> None:
        self._server, self._wait_s = server, wait_s
        host, port = server.getsockname()[:2]
        unwanted = ("--gres", "--mem", "--time", "--output", "--ntasks", "--nodes")
        options = [o for o in job_options(cfg.cluster, ROLLOUT) if not o.startswith(unwanted)]
        self._command = [
            *("srun", "--quiet", "--ntasks=2", "--time=5", "--job-name=td-doctor", *options),
            f"--immediate={max(int(wait_s), 1)}",
            *(sys.executable, "-m", "trinity_dask.cluster.slurm.probe", host, str(port)),
        ]
        self._found: list[Node] = []
        self._process: subprocess.Popen[str] | None = None
        self._said = ""

    def nodes(self) -> list[Node]:
        """By rank; those that called within the time."""
        for spread in (["--nodes=2"], ["--nodes=1"]):
            self._start(spread)
            deadline = time.monotonic() + self._wait_s + ASK_S
            while len(self._found) < 2 and time.monotonic() < deadline:
                self._server.settimeout(0.2)
                with contextlib.suppress(TimeoutError):
                    self._found.append(Node(self._server.accept()[0]))
                if self._process is not None and self._process.poll() is not None:
                    break
            if self._found:
                break
            self._stop()
        return sorted(self._found, key=lambda node: node.rank)

    def _start(self, spread: list[str]) -> None:
        command = [self._command[0], *spread, *self._command[1:]]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=clean_env(),
        )

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        for node in self._found:
            node.close()
        try:
            self._said = process.communicate(timeout=0.1 if not self._found else 20)[0]
        except subprocess.TimeoutExpired:
            process.terminate()  # srun takes its job back
            self._said = process.communicate()[0]

    @property
    def excuse(self) -> Line:
        """Why nobody called."""
        told = complaint(self._said) or "no node was free"
        if "cannot connect" in told:
            return MISSING, (
                f"a node ran, but {told}: set cluster.interface or cluster.host to an address that "
                "nodes reach, and look for a firewall"
            )
        return WARNING, (
            f"no node could be looked at within {self._wait_s:g} s ({told}): ask again with "
            "--wait SECONDS"
        )

    def __enter__(self) -> _Step:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()


def _same(node: Node, here: dict[str, str]) -> Iterator[Line]:
    theirs = node.versions
    other = [
        f"{name} {theirs.get(name, 'missing')} instead of {here.get(name, 'none')}"
        for name in sorted(here.keys() | theirs.keys())
        if here.get(name) != theirs.get(name)
    ]
    if not other:
        yield OK, f"node {node.name} has the same packages"
        return
    yield (
        MISSING,
        f"node {node.name} has {', '.join(other)}: use one environment on a file system that "
        "every node sees, or cluster.prologue to enter it",
    )


def _clock(node: Node) -> Line:
    before = time.time()
    theirs = node.ask("clock")
    after = time.time()
    off = max(before - theirs, theirs - after, 0.0)
    text = f"the clock of {node.name} is off by {off:.1f} s or less"
    return (OK, text) if off <= CLOCK_S else (WARNING, f"{text}: logs do not line up; ask for NTP")


def _directory(node: Node, root: Path) -> Iterator[Line]:
    """Whether files of the job mean the same on both machines."""
    root.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=root, prefix=".doctor-"))
    try:
        late = node.ask("exists", str(folder), SEEN_S)
        if late is None:
            yield (
                MISSING,
                f"{root} is not seen on {node.name}: checkpoint_root_dir must be on a file system "
                "that every node sees",
            )
            return
        waits = []
        named, theirs = folder / "renamed", folder / "theirs"
        node.ask("exists", str(named), 0.0)  # so that its absence is remembered
        (folder / "part").write_text("whole", encoding="utf-8")
        (folder / "part").replace(named)
        waits.append(node.ask("exists", str(named), SEEN_S))
        begin = time.monotonic()
        theirs.exists()
        node.ask("write", str(theirs))
        while not theirs.exists() and time.monotonic() - begin < SEEN_S:
            time.sleep(0.01)
        waits.append(time.monotonic() - begin if theirs.exists() else None)
        yield _seen(node, [late, *waits])
        (folder / "mine").touch()
        alone = not node.ask("create", str(folder / "mine"))
        yield (
            (OK, "a file is made by one machine alone (O_EXCL)")
            if alone
            else (MISSING, f"O_EXCL does not hold on {root}: two runs could have one job")
        )
        with open(folder / "lock", "a", encoding="utf-8") as file:
            yield _lock(node, file, root)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _seen(node: Node, waits: list[float | None]) -> Line:
    if None in waits:
        return MISSING, (
            f"a renamed file was not seen on the other machine within {SEEN_S:g} s: the attribute "
            "cache is too long (mount with actimeo=3, or noac)"
        )
    slowest = max(wait for wait in waits if wait is not None)
    text = f"renamed files are seen on {node.name} and from there within {slowest:.2f} s"
    if slowest <= LATE_S:
        return OK, text
    return WARNING, f"{text}: steps wait for it; a mount with actimeo=3 is quicker"


def _lock(node: Node, file: Any, root: Path) -> Line:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return WARNING, (
            f"{root} has no flock ({error}): nothing keeps two runs from one job directory"
        )
    told = node.ask("lock", file.name)
    if told == "held":
        return OK, f"a lock taken here holds on {node.name} (flock)"
    return WARNING, (
        f"a lock taken here does not hold on {node.name} ({told}): two runs of one job on "
        "different machines are not kept apart; start them on one (Lustre: mount with -o flock)"
    )


def _broadcast(nodes: list[Node]) -> Line:
    """The floor of a weight sync: what the network alone takes."""
    if len(nodes) < 2:
        return WARNING, "one node alone was there: the way between two was not measured"
    try:
        host, port = nodes[0].ask("free_port")
        for node in nodes:
            node.send("broadcast", host, port, node.rank, BROADCAST_BYTES, BROADCASTS)
        seconds = max(node.answer() for node in nodes)
    except (OSError, RuntimeError) as error:
        return MISSING, (
            f"{nodes[0].name} and {nodes[1].name} cannot exchange weights: {error}; set "
            "cluster.interface to the network that joins them"
        )
    speed = BROADCAST_BYTES / seconds
    return OK, (
        f"{nodes[0].name} to {nodes[1].name}: {speed / 1e9:.2f} GB/s by gloo; a sync of 1e9 bf16 "
        f"parameters takes {2e9 / speed:.1f} s or more that way"
    )
