"""On-policy means on-policy: a run at lag 0 is a plain loop in one process, bit by bit."""

from __future__ import annotations

import asyncio
from typing import Any

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file
from small_jobs import STEPS, SmallJobs

from trinity_dask import Config
from trinity_dask.buffer.store.experience_store import ExperienceStore
from trinity_dask.explorer.coordinator import ExperiencePipeline
from trinity_dask.explorer.rollout.subtask import RunnerSettings
from trinity_dask.explorer.rollout.workflow_runner import WorkflowRunner
from trinity_dask.explorer.task_stream import TasksetReader
from trinity_dask.launcher.specs import engine_specs
from trinity_dask.models.protocol import WeightUpdate
from trinity_dask.models.torch.engine import TorchEngine
from trinity_dask.models.wrapper import ModelWrapper, load_tokenizer
from trinity_dask.monitor.history import load_metrics
from trinity_dask.run import RunFailed
from trinity_dask.trainer.checkpoints.checkpoint import WEIGHTS, latest_complete
from trinity_dask.trainer.ranks.rank import TrainerRank
from trinity_dask.trainer.sources import TrainInput

WORDS = [
    "explorer.rollout_model.deterministic=true",
    "algorithm.optimizer.lr=0.02",  # weights that move, so that a wrong version would show
    "algorithm.optimizer.lr_warmup_steps=0",
    "trainer.save_interval=1",
]


class Loop:
    """Sample, reward, write rows, train on them, copy the weights: no cluster, no waiting."""

    def __init__(self, cfg: Config, directory: str) -> None:
        self.cfg, self.file = cfg, f"{directory}/weights.safetensors"
        self.engine = TorchEngine(engine_specs(cfg)[0])
        self.settings = RunnerSettings.from_config(cfg)
        self.tokenizer = load_tokenizer(cfg.model.model_path)
        self.runner = WorkflowRunner(self.model)
        self.pipeline = ExperiencePipeline.from_config(cfg)
        self.rank = TrainerRank(cfg, 0, 1)
        self.store = ExperienceStore(f"{directory}/rows-{cfg.name}")
        self.losses: list[float] = []

    def model(self, rollout_args: Any) -> ModelWrapper:
        seed = self.settings.request_seed
        return ModelWrapper(
            self.engine, self.tokenizer, self.settings.model, rollout_args or {}, request_seed=seed
        )

    async def run(self) -> dict[str, torch.Tensor]:
        await self.engine.prepare()
        await self.rank.prepare("127.0.0.1:0", 1, self.cfg.model.model_path, None)
        tasks = TasksetReader(self.cfg)
        for step in range(1, STEPS + 1):
            await self.train(step, await self.sample(step, tasks.read()))
        await self.engine.close()
        await self.rank.close()
        return load_file(self.file)

    async def sample(self, step: int, tasks: Any) -> pa.Table:
        payloads = []
        for number, task in enumerate(tasks):
            task.batch_id, task.task_id = step, number
            payloads.append((await self.runner.run_task(task, step, task.repeat_times))[1])
        return self.pipeline.process(payloads)[0]

    async def train(self, step: int, table: pa.Table) -> None:
        refs = (self.store.commit(step, table, {}).ref(),)
        metrics = await self.rank.train_step(TrainInput(self.store.url, refs=refs), step)
        self.losses.append(metrics["actor/final_loss"])
        await self.rank.write_weights(self.file, step)
        await self.engine.update_weights(WeightUpdate(step, "memory", path=self.file))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("fixed", ["synchronizer=nccl", "synchronizer.sync_style=fixed"]),
        (
            "async",
            [
                "synchronizer=memory",
                "synchronizer.sync_style=fully_async",
                "synchronizer.max_staleness=0",
            ],
        ),
    ],
)
def test_fault_19_at_lag_0_a_run_is_the_plain_loop_bit_by_bit(
    jobs: SmallJobs, name: str, keys: list[str]
) -> None:
    run = jobs.finish(*WORDS, *keys, name=name)
    (cfg,) = run.stages
    torch.set_num_threads(1)
    loop = Loop(cfg, str(jobs.root))
    expected = asyncio.run(asyncio.wait_for(loop.run(), 240))

    found = load_file(str(latest_complete(jobs.dir(name)) / WEIGHTS))
    assert found.keys() == expected.keys()
    for tensor in expected:
        assert torch.equal(found[tensor], expected[tensor]), tensor
    frame = load_metrics(jobs.dir(name)).dropna(subset=["actor/final_loss"])
    assert list(frame["actor/final_loss"]) == loop.losses
    assert len(set(loop.losses)) == STEPS  # it did train


@pytest.mark.timeout(600)
def test_a_finished_run_that_is_given_more_steps_is_the_longer_run(jobs: SmallJobs) -> None:
    """Optimizer, task position and accounts go on, to the bit."""
    words = [*WORDS, "algorithm.optimizer.lr_scheduler_type=constant"]  # others know the total
    whole = jobs.finish(*words, name="whole")
    jobs.finish(*words, f"buffer.total_steps={STEPS - 2}", name="grown")
    grown = jobs.finish(*words, name="grown")
    assert grown.status["accounts"] == whole.status["accounts"]
    ends = [latest_complete(jobs.dir(name)) for name in ("whole", "grown")]
    one, other = (load_file(end / WEIGHTS) for end in ends if end is not None)
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    again = jobs.finish(*words, name="grown")
    assert "is finished already" in again.status["message"]
    with pytest.raises(RunFailed, match="Only with more steps or epochs"):
        jobs.finish(*words, "algorithm.optimizer.lr=0.01", "buffer.total_steps=6", name="grown")
    with pytest.raises(RunFailed, match=r"different: buffer\.total_steps"):
        jobs.finish(*words, "buffer.total_steps=3", name="grown")
