"""The three walks of docs/walks.md, as a real run takes them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from walk_support import ROOT, WALKS, broken_links, read_trace, read_walks

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Who called whom in the miniature of the main job, in all its processes."""
    folder, root = tmp_path_factory.mktemp("trace"), tmp_path_factory.mktemp("run")
    paths = [str(ROOT / "tests" / "walk_trace"), os.environ.get("PYTHONPATH", "")]
    command = [
        str(Path(sys.executable).with_name("trinity-dask")),
        *("run", "+experiment=sort_digits_tiny", "engine=vllm"),
        *(f"checkpoint_root_dir={root}", "monitor.progress=plain"),
    ]
    done = subprocess.run(
        command,
        env={
            **os.environ,
            "TRINITY_WALK_TRACE": str(folder),
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        },
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return read_trace(folder)


@pytest.mark.parametrize("walk", read_walks(WALKS.read_text()), ids=lambda walk: walk.title)
def test_the_run_takes_the_walk(walk, trace):
    entered = {callee for _, callee in trace}
    assert [hop.key for hop in walk.hops if hop.key not in entered] == []
    assert broken_links(walk, trace) == []
    assert sum(hop.woken for hop in walk.hops) <= 4, "a mark for a hop that a call explains"
