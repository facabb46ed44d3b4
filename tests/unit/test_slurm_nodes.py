"""The probe on a node and what is made of its answers, with a probe that runs here."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trinity_dask.cluster.slurm import nodes
from trinity_dask.cluster.slurm.nodes import MISSING, OK, WARNING, Node
from trinity_dask.cluster.slurm.probe import versions

PROBE = [sys.executable, "-m", "trinity_dask.cluster.slurm.probe", "127.0.0.1"]


@pytest.fixture
def node() -> Iterator[Node]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        probe = subprocess.Popen([*PROBE, str(server.getsockname()[1])])
        server.settimeout(60)
        connection, _ = server.accept()
        with connection:
            found = Node(connection)
            yield found
            found.close()
        assert probe.wait(30) == 0  # nobody asks any more


def test_a_directory_that_both_see_is_sound_and_left_as_it_was(node: Node, tmp_path: Path) -> None:
    lines = list(nodes._directory(node, tmp_path))
    assert [level for level, _ in lines] == [OK] * 3, lines
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_the_node_does_not_see(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "SEEN_S", 0.2)
    asked, node.ask = node.ask, lambda name, path, *rest: asked(name, f"/elsewhere{path}", *rest)  # type: ignore[method-assign]
    [(level, text)] = nodes._directory(node, tmp_path)
    assert level == MISSING
    assert "must be on a file system that every node sees" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("told", ["free", "Function not implemented"])
def test_locks_that_end_at_the_machine_are_told(
    node: Node, tmp_path: Path, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "ask", lambda *_: told)
    with open(tmp_path / "lock", "a", encoding="utf-8") as file:
        level, text = nodes._lock(node, file, tmp_path)
    assert level == WARNING
    assert told in text


def test_another_environment_is_named(node: Node) -> None:
    here = versions()
    assert [level for level, _ in nodes._same(node, here)] == [OK]
    [(level, text)] = nodes._same(node, {**here, "torch": "1.0", "vllm": "9"})
    assert level == MISSING
    assert "vllm missing instead of 9" in text
    assert "instead of 1.0" in text


def test_a_clock_that_is_off_is_told(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    assert nodes._clock(node)[0] == OK
    monkeypatch.setattr(node, "ask", lambda *_: 1e9)
    level, text = nodes._clock(node)
    assert level == WARNING
    assert "NTP" in text


def test_what_the_node_cannot_do_says_why(node: Node) -> None:
    with pytest.raises(RuntimeError, match="FileNotFoundError"):
        node.ask("write", "/nowhere/at/all/file")
    assert node.ask("clock") > 0  # and it is asked further


def test_a_probe_that_reaches_nobody_says_so() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = str(unused.getsockname()[1])
        done = subprocess.run([*PROBE, port], capture_output=True, text=True, timeout=60)
    assert done.returncode == 3
    assert f"cannot connect to 127.0.0.1 port {port}" in done.stdout
