"""A real Slurm of two nodes as child processes: without root, and several at once.

Invariant: leaving the context ends every daemon and every job that was started in it, and
removes its directory. Where Slurm is neither installed nor to be had from the package archive,
:class:`SlurmMissing` names the packages.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

PACKAGES = (
    *("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "munge", "libmunge2"),
    *("libhwloc15", "libnuma1", "libjson-c5", "liblua5.1-0"),
)
DAEMONS = ("slurmctld", "slurmd", "slurmstepd")
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "trinity-dask-slurm"
GPUS_PER_NODE = 2
# gres wants files; each is a device that does nothing
FAKE_GPUS = ("/dev/null", "/dev/zero")
START_S = 20.0
END_S = 8.0

CONFIGURATION = """\
ClusterName=stand
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={home}/munge.sock
CredType=cred/munge
PluginDir={plugins}
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
ReturnToService=2
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd.%n.pid
SlurmctldPort={port}
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool/%n
SlurmctldLogFile={home}/log/slurmctld.log
SlurmdLogFile={home}/log/slurmd.%n.log
SlurmdParameters=config_overrides
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
PropagateResourceLimits=NONE
KillWait=5
GresTypes=gpu
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=2 GraceTime=0
PartitionName=low Nodes=ALL MaxTime=INFINITE PriorityTier=1 GraceTime=10
PartitionName=one Nodes=n1 MaxTime=60
PartitionName=closed Nodes=ALL State=DOWN
"""


class SlurmMissing(RuntimeError):
    """Slurm cannot be had here; the message names its packages and says why."""


def unpacked() -> Path:
    """The directory below which Slurm's ``usr/`` is: ``/`` where it is installed.

    Raises:
        SlurmMissing: it is not installed, and the packages cannot be downloaded.
    """
    if shutil.which("slurmctld") and shutil.which("munged"):
        return Path("/")
    root = CACHE / "root"
    if (root / "complete").exists():
        return root
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as part:
        try:
            download(Path(part))
        except (OSError, subprocess.SubprocessError) as error:
            told = getattr(error, "stderr", None) or str(error)
            raise SlurmMissing(
                f"tests/slurm needs Debian's packages {' '.join(PACKAGES)}: install them, or make "
                f"them available to apt-get download ({told.strip().splitlines()[-1]})"
            ) from error
        if not root.exists():  # else another test process was faster
            os.replace(Path(part, "root"), root)
    return root


def download(part: Path) -> None:
    fetch = ["apt-get", "download", "-qq", *PACKAGES]
    if (
        subprocess.run(fetch, cwd=part, capture_output=True, text=True).returncode
        and not os.getuid()
    ):
        subprocess.run(["apt-get", "update", "-qq"], capture_output=True, text=True, check=True)
    subprocess.run(fetch, cwd=part, capture_output=True, text=True, check=True)
    for deb in part.glob("*.deb"):
        subprocess.run(["dpkg", "-x", deb, part / "root"], check=True)
    for name in DAEMONS:  # it looks at the name it is called by: with -wlm it has no gres
        link = part / "root" / "usr" / "sbin" / name
        if not link.exists():
            link.symlink_to(f"{name}-wlm")
    (part / "root" / "complete").touch()


def free_ports(n: int) -> list[int]:
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.socket()) for _ in range(n)]
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in listeners]


class Slurm:
    """A running Slurm. ``env`` is the environment of a user of it."""

    def __init__(self, root: Path, home: Path, n_nodes: int, cpus: int) -> None:
        self.home, self.n_nodes = home, n_nodes
        self._sbin = root / "usr" / "sbin"
        self._daemons: list[subprocess.Popen[bytes]] = []
        libraries = root / "usr" / "lib" / f"{os.uname().machine}-linux-gnu"
        plugins = libraries / "slurm-wlm"
        self.env = {k: v for k, v in os.environ.items() if not re.match("SLURM|SBATCH|SRUN", k)}
        self.env["SLURM_CONF"] = str(home / "slurm.conf")
        self.env["PATH"] = f"{root}/usr/bin:{self._sbin}:{os.environ['PATH']}"
        if root != Path("/"):
            self.env["LD_LIBRARY_PATH"] = f"{libraries}:{plugins}"
        host, user = socket.gethostname().split(".")[0], getpass.getuser()
        port, *node_ports = free_ports(n_nodes + 1)
        nodes = "\n".join(
            f"NodeName=n{i} NodeHostname={host} NodeAddr=127.0.0.1 Port={node_ports[i]} "
            f"CPUs={cpus} RealMemory=8000 Gres=gpu:{GPUS_PER_NODE} State=UNKNOWN"
            for i in range(n_nodes)
        )
        for folder in ("state", "log", *(f"spool/n{i}" for i in range(n_nodes))):
            (home / folder).mkdir(parents=True)
        (home / "munge.key").write_bytes(os.urandom(128))
        (home / "munge.key").chmod(0o400)
        (home / "slurm.conf").write_text(
            CONFIGURATION.format(
                host=host, user=user, home=home, plugins=plugins, port=port, nodes=nodes
            )
        )
        gpus = [
            f"NodeName=n{i} Name=gpu File={FAKE_GPUS[gpu]}\n"
            for i in range(n_nodes)
            for gpu in range(GPUS_PER_NODE)
        ]
        (home / "gres.conf").write_text("".join(gpus))
        version = re.search(r"(\d+)\.(\d+)", self.run(self._sbin / "slurmd", "-V"))
        assert version is not None
        # newer ones do not start without the key, older ones do not know it
        modern = (int(version[1]), int(version[2])) >= (23, 2)
        text = "CgroupPlugin=disabled\n" if modern else "CgroupAutomount=no\n"
        (home / "cgroup.conf").write_text(text)

    # daemons ------------------------------------------------------------------------------
    def start(self) -> None:
        home, key = self.home, self.home / "munge.key"
        files = ("socket", "pid-file", "log-file", "seed-file")
        names = ("munge.sock", "munge.pid", "log/munge.log", "munge.seed")
        flags = [f"--{flag}={home / name}" for flag, name in zip(files, names, strict=True)]
        self._spawn("munged", "-F", "--force", f"--key-file={key}", "--num-threads=2", *flags)
        until((home / "munge.sock").exists, "munge's socket")
        self._spawn("slurmctld", "-D", "-c")
        for index in range(self.n_nodes):
            self._spawn("slurmd", "-D", "-N", f"n{index}", "-d", str(self._sbin / "slurmstepd"))
        try:
            until(lambda: self.node_states() == ["idle"] * self.n_nodes, "idle nodes")
        except AssertionError as error:
            raise AssertionError(f"{error}; daemons said: {self.said()}") from error

    def said(self) -> str:
        logs = sorted((self.home / "log").glob("*.log"))
        return "\n".join(f"{log.name}: {log.read_text()[-1500:]}" for log in logs)

    def _spawn(self, name: str, *words: str) -> None:
        with open(self.home / "log" / "daemons.log", "ab") as log:
            process = subprocess.Popen(
                [str(self._sbin / name), *words],
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.home,
                start_new_session=True,
            )
        self._daemons.append(process)

    def node_states(self) -> list[str]:
        return self.run("sinfo", "-hN", "-p", "main", "-o", "%T", check=False).split()

    def end(self) -> None:
        below = [c for d in self._daemons for c in _children(d.pid)]
        self.run("scancel", "--full", "-u", getpass.getuser(), check=False)
        deadline = time.monotonic() + END_S
        while time.monotonic() < deadline and self.queue():
            time.sleep(0.05)
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for process in [*below, *self._askers()]:
            if process.is_running():
                process.kill()

    def _askers(self) -> list[psutil.Process]:
        """Who still wants to ask this Slurm something: a run's reaper tries for minutes."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or [""]
            if words[0].endswith(("squeue", "scancel")) or "reaper.py" in " ".join(words):
                with contextlib.suppress(psutil.Error):
                    if process.environ().get("SLURM_CONF") == self.env["SLURM_CONF"]:
                        found.append(process)
        return found

    # what tests ask and do ----------------------------------------------------------------
    def run(self, *words: object, check: bool = True, **options: Any) -> str:
        """A command of Slurm; its output. Raises CalledProcessError unless told otherwise."""
        command = [str(word) for word in words]
        done = subprocess.run(
            command, env=self.env, capture_output=True, text=True, check=check, **options
        )
        return done.stdout

    def queue(self) -> dict[str, tuple[str, str]]:
        """Jobs that are not over: id -> (name, state)."""
        lines = self.run("squeue", "-h", "-o", "%i %j %T", check=False).splitlines()
        return {job: (name, state) for job, name, state in (line.split() for line in lines)}

    def only_waits(self, job: str) -> bool:
        """Whether one job is left, which waits, and nothing of its earlier start is: what that
        still has to say of its end would be taken for the end of the new one."""
        states = [(number, state) for number, (_, state) in self.queue().items()]
        steps = [
            process
            for daemon in self._daemons
            for process in _children(daemon.pid)
            if "slurmstepd" in process.name()
        ]
        return states == [(job, "PENDING")] and not steps

    def start_again(self, job: str) -> None:
        """Have a requeued job start soon, not after Slurm's two minutes; a moment is left to the
        controller to learn of the end that :meth:`only_waits` has waited for."""
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now+4")

    def job_of(self, worker: str) -> str | None:
        """The running job whose name ends with ``worker``, as ``rollout-0``."""
        for job, (name, state) in self.queue().items():
            if name.endswith(worker) and state == "RUNNING":
                return job
        return None


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def until(true: Callable[[], object], what: str, timeout_s: float = START_S) -> None:
    """Wait for something of Slurm, which announces nothing."""
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, f"no {what} within {timeout_s:g} s"
        time.sleep(0.05)


@contextmanager
def running(n_nodes: int = 2, cpus: int = 8) -> Iterator[Slurm]:
    """A Slurm whose nodes are idle.

    Raises:
        SlurmMissing: it cannot be had here.
    """
    root = unpacked()
    home = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # a socket's path is short
    slurm = None
    try:
        slurm = Slurm(root, home, n_nodes, cpus)
        slurm.start()
        yield slurm
    finally:
        if slurm is not None:
            slurm.end()
        shutil.rmtree(home, ignore_errors=True)
