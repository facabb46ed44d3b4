"""A run as somebody has it who works in cells: found again, looked at, interrupted, on their
client. A cell is a thread with a running event loop, as in an ipykernel."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster
from small_jobs import WAIT_S, SmallJobs, overrides

from trinity_dask import Run, load_config
from trinity_dask.launcher.job_lock import JobInUse
from trinity_dask.run.card import keep_showing
from trinity_dask.run.joining import leave_word

ATTACH = """
import sys, time
from trinity_dask import Run
run = Run.attach(sys.argv[1])
print(run.run_id, time.process_time(), "torch" in sys.modules, flush=True)
run.close()
"""


class Shown:
    """Stands where IPython's display handle does; keeps the newest card."""

    card = ""

    def update(self, run: Run) -> None:
        self.card = run._repr_mimebundle_()["text/html"]


def wait_for_stage(run: Run) -> None:
    while run.status.get("stage") is None:
        run.wait_for_change(int(run.status["version"]), 60.0)
        assert run.state in ("starting", "running"), run.status


@pytest.mark.timeout(600)
def test_the_same_cell_twice_and_another_notebook(
    jobs: SmallJobs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "theirs").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    Path("pal.py").write_text("def f(response_text=None, **_):\n    return 0.25\n")
    more = ["buffer.explorer_input.taskset.reward_fn=pal.py:f", "buffer.total_steps=6"]
    run = jobs.start(*more)
    assert Run.current() is run
    assert Run.current("job") is run
    begun = time.monotonic()
    with pytest.raises(JobInUse, match=r"by this process already.*Run\.current\(\)"):
        jobs.start(*more)
    assert time.monotonic() - begun < 15.0, "it waited for itself"

    # the other notebook is somewhere else, where there is no pal.py
    monkeypatch.chdir(tmp_path / "theirs")
    attached = Run.attach(run.base_dir, wait_s=120.0)  # it has only just been started
    wait_for_stage(run)
    shown = Shown()
    shows = threading.Thread(target=keep_showing, args=(run, shown, WAIT_S), daemon=True)
    shows.start()
    words = [sys.executable, "-c", ATTACH, run.base_dir]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    run_id, cpu_s, torch = done.stdout.split()
    assert (run_id, torch) == (run.run_id, "False"), done.stderr[-2000:]
    assert float(cpu_s) < 3.0, "of a whole process, imports and all"
    assert attached.run_id == run.run_id
    assert attached.dashboard_link == run.dashboard_link is not None
    assert attached.page_link == run.page_link is not None
    assert attached.wait(timeout=WAIT_S)["state"] == "done"
    assert run.run_id in repr(attached)
    assert "step 6/6" in repr(attached)
    assert "reward 0.25" in repr(attached)
    assert run.base_dir in repr(attached)
    attached.close()
    assert run.wait(timeout=60)["state"] == "done"
    shows.join(60.0)  # the last card is drawn at the end, not when its time has come
    assert "</b> done" in shown.card
    with pytest.raises(LookupError, match=r"no live run.*Run\.attach"):
        Run.current()

    bundle = run._repr_mimebundle_()
    assert bundle["text/plain"] == repr(run)
    card = bundle["text/html"]
    assert card.count("<svg") >= 2  # reward and loss
    assert "last answers" in card
    assert "0.25" in card


def test_who_attaches_too_early_or_elsewhere_is_told(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match=r"there is no directory .*/nosuch"):
        Run.attach(f"{tmp_path}/nosuch")
    begun = time.monotonic()
    with pytest.raises(LookupError, match="does not say where its run is: it has not begun yet"):
        Run.attach(str(tmp_path), wait_s=1.2)
    assert time.monotonic() - begun >= 1.0


def test_who_attaches_to_a_run_that_is_over_is_told_at_once(tmp_path: Path) -> None:
    with socket.socket() as taken:  # a port at which nobody listens
        taken.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        leave_word(str(tmp_path), "a-123456", address, None)
        begun = time.monotonic()
        with pytest.raises(ConnectionError, match=r"nobody listens at tcp.* it has ended"):
            Run.attach(str(tmp_path))
        with pytest.raises(ConnectionError, match=r"nobody listens at tcp[^,]*$"):
            Run.attach(address)
        assert time.monotonic() - begun < 25.0, "Dask would have tried for 30 s each"

        async def cell() -> None:
            Run.attach(str(tmp_path))

        with pytest.raises(ConnectionError, match="it has ended"):
            asyncio.run(cell())


@pytest.mark.timeout(600)
def test_a_client_that_is_asynchronous(cluster: LocalCluster, tmp_path: Path, data: Path) -> None:
    async def cell() -> dict[str, Any]:
        address = cluster.scheduler_address
        async with Client(address, asynchronous=True, set_as_default=False) as client:
            run = Run(load_config(*overrides(tmp_path, data)), client).start()
            with pytest.raises(RuntimeError, match="await run"):
                run.wait()
            status = await asyncio.wait_for(_ended(run), WAIT_S)
            await asyncio.to_thread(run.close)
            assert client.status == "running"
        return status

    async def _ended(run: Run) -> dict[str, Any]:
        return await run

    assert asyncio.run(cell())["state"] == "done"


KERNEL = """
import sys
from trinity_dask import Run, load_config
run = Run(load_config(*sys.argv[1:])).start()
seen = 0
while run.status.get("stage") is None:
    seen = run.wait_for_change(seen, 60.0)["version"]
assert run.state == "running", run.status
try:
    print("in a cell", flush=True)  # who reads it presses the button at once
    run.wait()
except KeyboardInterrupt:
    print("interrupted", run.state, flush=True)
print(run.wait(timeout=240)["state"], flush=True)
run.close()
"""


@pytest.mark.timeout(600)
def test_the_stop_button_ends_the_waiting_and_not_the_run(tmp_path: Path, data: Path) -> None:
    """Jupyter interrupts the whole process group of the kernel."""
    words = overrides(tmp_path, data)
    kernel = subprocess.Popen(
        [sys.executable, "-c", KERNEL, *words, "buffer.total_steps=8"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert kernel.stdout is not None
    try:
        for line in kernel.stdout:
            if line.startswith("in a cell"):
                os.killpg(kernel.pid, signal.SIGINT)
                break
        rest, errors = kernel.communicate(timeout=WAIT_S)
    finally:
        if kernel.poll() is None:
            kernel.kill()
            kernel.wait()
    assert rest.split() == ["interrupted", "running", "done"], errors[-2000:]
    assert kernel.returncode == 0, errors[-2000:]


CELLS = """
import sys
from distributed import Client
from trinity_dask import REWARD_FUNCTIONS, Run, load_config
from trinity_dask.algorithm import POLICY_LOSS_FN
from trinity_dask.buffer.operators.operators import OPERATORS
from trinity_dask.workflows import WORKFLOWS
from trinity_dask.workflows.simple import SimpleWorkflow

client = Client(sys.argv[1], set_as_default=False)
words = [*sys.argv[2:], "buffer.explorer_input.taskset.reward_fn=mine",
         "buffer.explorer_input.default_workflow=my_flow"]
words.append("buffer.explorer_input.taskset.workflow=my_flow")
words += ["algorithm.policy_loss_fn=my_loss", "algorithm.kl_loss_fn=none"]
words += ["buffer.operators=[{name: my_operator, args: {most: 3}}]"]

@WORKFLOWS.register_module("my_flow")
class Flow(SimpleWorkflow):
    pass

@OPERATORS.register_module("my_operator")
class Operator:
    def __init__(self, most):
        self.most = most

    def process(self, exps):
        kept = [exp for exp in exps if exp.eid.run < self.most]
        return kept, {"left_out": float(len(exps) - len(kept))}

@POLICY_LOSS_FN.register_module("my_loss")
def loss(logprob, advantages, action_mask):
    value = -(advantages * logprob)[action_mask].mean()
    return value, {"scale": logprob.new_tensor(scale)}

scale = 0.25
@REWARD_FUNCTIONS.register_module("mine")
def reward(response_text=None, **_):
    return scale

def rewards(name):
    with Run(load_config(*words, f"name={name}"), client) as run:
        run.wait(timeout=240)
        rows, metrics = run.samples(2), run.metrics
        print(rows["run"].max(), metrics["experience_pipeline/my_operator/left_out"].max(),
              sorted(set(metrics["actor/scale"].dropna())))
        return sorted(set(rows["reward"]))

print(rewards("first"))
scale = 0.5
exec('''
@REWARD_FUNCTIONS.register_module("mine")
def reward(response_text=None, **_):
    return 0.75
''', globals())
print(rewards("second"))
"""


@pytest.mark.timeout(600)
def test_what_a_cell_defines_runs_on_a_cluster_as_it_was_edited_last(
    cluster: LocalCluster, tmp_path: Path, data: Path
) -> None:
    words = overrides(tmp_path, data)
    address = cluster.scheduler_address
    done = subprocess.run(
        [sys.executable, "-c", CELLS, address, *words], capture_output=True, text=True, timeout=480
    )
    first = ["2 4.0 [0.25]", "[0.25]"]  # highest run that is left, rows left out, scale; rewards
    assert done.stdout.splitlines() == [*first, "2 4.0 [0.5]", "[0.75]"], done.stderr[-3000:]
