"""vLLM inside a Dask worker: used by its tasks, healed with it, gone with it."""

import os
import signal
import time

import dask
import psutil
import pytest
from distributed import Client, LocalCluster
from models_support import PROMPT, engine_spec, hf_logprobs, save_model

from trinity_dask.cluster.actors import recreate_actor, start_actor
from trinity_dask.cluster.rpc import call
from trinity_dask.cluster.slots import slot_resource
from trinity_dask.models.actor.actor import EngineActor, ready_engine
from trinity_dask.models.protocol import SamplingParams
from trinity_dask.models.torch.engine import load_model

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

START_S = 600.0
END_S = 60.0


@pytest.fixture
def client():
    settings = {"distributed.worker.daemon": False, "distributed.comm.timeouts.connect": "10s"}
    with (
        dask.config.set(settings),
        LocalCluster(
            n_workers=1,
            threads_per_worker=4,
            memory_limit=None,
            dashboard_address="127.0.0.1:0",
            resources={slot_resource("engine-0"): 1e6, "rollout": 4},
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


def worker_pid(client) -> int:
    (pid,) = client.run(os.getpid).values()
    return pid


def engine_processes(pid: int) -> list[psutil.Process]:
    """vLLM's children: everything below the worker except multiprocessing's helpers."""
    children = psutil.Process(pid).children(recursive=True)
    return [p for p in children if "EngineCore" in " ".join([p.name(), *p.cmdline()])]


def wait_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=END_S)
    assert not alive


def start(client, path):
    ref = start_actor(
        client, EngineActor, engine_spec(path, "vllm"), slot="engine-0", key="e0", timeout=START_S
    )
    serve(client, ref)
    return ref


def serve(client, ref) -> None:
    call(client, ref.handle, "prepare", timeout=START_S)
    call(client, ref.handle, "open", timeout=END_S)


async def rollout(prompt: list[int], name: str):
    engine = await ready_engine(START_S)
    (completion,) = await engine.generate(prompt, SamplingParams(max_tokens=6), name)
    return completion


def rollouts(client, n: int):
    return [
        client.submit(rollout, PROMPT, f"r{i}", resources={"rollout": 1}, pure=False)
        for i in range(n)
    ]


def test_engine_serves_tasks_and_its_death_and_the_worker_s_leave_nothing(client, tmp_path):
    path = save_model(tmp_path / "model")
    model = load_model(path, "float32", "cpu")
    ref = start(client, path)
    for completion in client.gather(rollouts(client, 8)):
        expected = hf_logprobs(model, PROMPT, completion.token_ids, 1.0)
        assert abs(completion.logprobs - expected).max() < 1e-3

    first = worker_pid(client)
    (engine,) = engine_processes(first)
    engine.send_signal(signal.SIGKILL)
    (future,) = rollouts(client, 1)
    wait_gone([psutil.Process(first)] if psutil.pid_exists(first) else [])
    future.cancel()
    client.wait_for_workers(1, timeout=END_S)
    client.sync(recreate_actor, ref, END_S)
    serve(client, ref)
    assert len(client.gather(rollouts(client, 4))) == 4

    second = worker_pid(client)
    assert second != first
    children = engine_processes(second)
    assert len(children) == 1
    os.kill(second, signal.SIGKILL)
    wait_gone(children)


def test_a_worker_that_closes_takes_its_engine_along(client, tmp_path):
    start(client, save_model(tmp_path / "model"))
    children = engine_processes(worker_pid(client))
    assert len(children) == 1
    begin = time.monotonic()
    client.cluster.close(timeout=END_S)
    wait_gone(children)
    assert time.monotonic() - begin < END_S
