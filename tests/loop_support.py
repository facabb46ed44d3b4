"""A trainer's loop with real ranks in this process; only their placement is left out."""

from __future__ import annotations

from trainer_support import rows

from trinity_dask.buffer.experience_buffer import ExperienceBuffer
from trinity_dask.cluster.rpc import ActorHandle, ActorLost
from trinity_dask.experience.schema import to_table
from trinity_dask.trainer.checkpoints.checkpoint import complete_checkpoints
from trinity_dask.trainer.ranks.rank import RankPool, TrainerRank
from trinity_dask.trainer.trainer import Trainer


class LocalPool(RankPool):
    """Ranks in this process. ``losses`` names the calls at which rank 0's worker "dies"."""

    def __init__(self, cfg, losses=()):
        super().__init__(cfg, "test")
        self.losses = list(losses)
        self.calls: list[str] = []

    @property
    def handles(self):
        return [ActorHandle(f"rank-{r}", "tcp://127.0.0.1:1", f"trainer-{r}") for r in range(1)]

    async def _create(self, rank):
        return TrainerRank(self.cfg, rank, self.world_size)

    def _watch(self, rank):
        pass

    async def call(self, rank, method, *args, timeout_s):
        self.calls.append(method)
        if self.losses and self.losses[0] == (method, self.calls.count(method)):
            self.losses.pop(0)
            raise ActorLost(self.handles[rank], method)
        return await getattr(self._refs[rank], method)(*args)

    async def call_all(self, method, *args, timeout_s):
        return [await self.call(0, method, *args, timeout_s=timeout_s)]

    async def _recreate_lost(self, cause):
        self._refs = [await self._create(0)]

    async def close(self):
        for rank in self._refs:
            await rank.close()


class Monitor:
    def __init__(self):
        self.steps = {}

    def log(self, step, metrics):
        self.steps.setdefault(step, {}).update(metrics)


async def filled_buffer(cfg, sizes, close=True):
    buffer = ExperienceBuffer(cfg.buffer.trainer_input.experience_buffer)
    await buffer.prepare(None)
    for batch_id, size in enumerate(sizes, 1):
        await buffer.commit(batch_id, to_table(rows(size, seed=batch_id)), {})
    if close:
        await buffer.close_writes()
    return buffer


async def run(cfg, buffer, synchronizer=None, monitor=None, losses=()):
    trainer = Trainer(cfg, "t", buffer, synchronizer, monitor, LocalPool(cfg, losses))
    try:
        await trainer.prepare()
        # what the stage does: writes end only after the trainer opened the buffer
        if buffer is not None:
            await buffer.close_writes()
        return await trainer.train(), trainer
    finally:
        await trainer.close()


def weights_of(job_dir, step):
    from safetensors.torch import load_file

    path = {int(p.name.rsplit("_", 1)[1]): p for p in complete_checkpoints(job_dir)}[step]
    return load_file(path / "actor" / "model.safetensors")


def assert_equal(a, b):
    assert a.keys() == b.keys()
    assert all((a[name] == b[name]).all() for name in a)
