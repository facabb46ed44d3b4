"""Ranks as actors see them: shares, gloo sums, checkpoints, weights on their way."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from trainer_support import grpo_config, rows, save_tiny_model

from trinity_dask.config.schema import OptimizerConfig
from trinity_dask.experience.schema import encode
from trinity_dask.models.protocol import WeightGroupSpec, WeightUpdate
from trinity_dask.trainer.checkpoints.checkpoint import latest_complete, read_state
from trinity_dask.trainer.ranks.rank import TrainerRank
from trinity_dask.trainer.sources import TrainInput
from trinity_dask.weights.broadcast import make_group, recv
from trinity_dask.weights.checksum import Digest

SGD = OptimizerConfig(optimizer_type="sgd", lr=0.5)


def by_value(experiences) -> TrainInput:
    return TrainInput(payload=encode(experiences, {}))


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


async def start(cfg, world=1, checkpoint=None, generation=1):
    ranks = [TrainerRank(cfg, r, world) for r in range(world)]
    master = f"127.0.0.1:{await ranks[0].free_port()}"
    prepare = (master, generation, cfg.model.model_path, checkpoint)
    await asyncio.gather(*(rank.prepare(*prepare) for rank in ranks))
    return ranks


async def step(ranks, train_input, number=1):
    return await asyncio.gather(*(rank.train_step(train_input, number) for rank in ranks))


async def close(ranks):
    await asyncio.gather(*(rank.close() for rank in ranks))


async def weights(rank):
    """The weights as the rank writes them for the engines."""
    path = f"{rank.cfg.job_dir}/weights-of-{rank.rank}.safetensors"
    await rank.write_weights(path, 1)
    return load_file(path)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_fault_31_one_and_two_ranks_and_any_micro_batches_give_the_same_gradient(
    tmp_path, model_path, mode
):
    """Unequal lengths, an odd number of rows, gloo between the two ranks.

    One SGD step without clipping: the weights move by the gradient, so they tell it.
    """
    train_input = by_value(rows(13, seed=4))
    start_weights = load_file(f"{model_path}/model.safetensors")

    async def run(world, budget):
        cfg = grpo_config(tmp_path, model_path, micro_batch_tokens=budget, grad_clip=0.0)
        cfg.algorithm.optimizer = SGD
        cfg.algorithm.loss_agg_mode = mode
        ranks = await start(cfg, world)
        metrics = await step(ranks, train_input)
        first = await weights(ranks[0])
        for rank in ranks[1:]:
            for name, value in (await weights(rank)).items():
                torch.testing.assert_close(value, first[name], atol=0, rtol=0)
        await close(ranks)
        return {n: (start_weights[n] - value) / SGD.lr for n, value in first.items()}, metrics[0]

    expected, metrics = asyncio.run(run(1, 1 << 30))
    assert max(float(g.abs().max()) for g in expected.values()) > 1e-3
    for world, budget in ((1, 80), (1, 40), (2, 1 << 30), (2, 40)):
        got, same = asyncio.run(run(world, budget))
        for name, gradient in expected.items():
            torch.testing.assert_close(got[name], gradient, atol=1e-5, rtol=1e-4)
        for name in ("actor/final_loss", "actor/grad_norm", "actor/pg_clipfrac"):
            assert same[name] == pytest.approx(metrics[name], abs=1e-5)


def test_mini_batches_are_the_same_for_any_number_of_ranks(tmp_path, model_path):
    cfg = grpo_config(tmp_path, model_path, mini_batches=3, ppo_epochs=2)
    cfg.algorithm.optimizer = SGD
    train_input = by_value(rows(15, seed=1))

    async def run(world):
        ranks = await start(cfg, world)
        metrics = await step(ranks, train_input)
        trained = await weights(ranks[0])
        await close(ranks)
        return trained, metrics[0]

    alone, metrics = asyncio.run(run(1))
    together, same = asyncio.run(run(2))
    assert metrics["actor/updates"] == same["actor/updates"] == 6
    for name, value in alone.items():
        torch.testing.assert_close(together[name], value, atol=1e-4, rtol=1e-3)


def test_fault_9_a_rank_without_rows_keeps_step_with_its_peer(tmp_path, model_path):
    cfg = grpo_config(tmp_path, model_path)

    async def run():
        ranks = await start(cfg, 2)
        metrics = await step(ranks, by_value(rows(1)))
        trained = [await weights(rank) for rank in ranks]
        await close(ranks)
        return metrics, trained

    metrics, trained = asyncio.run(asyncio.wait_for(run(), 120))
    assert sorted(m["tokens"] for m in metrics)[0] == 0
    assert metrics[0]["actor/final_loss"] == metrics[1]["actor/final_loss"]
    for name, value in trained[0].items():
        torch.testing.assert_close(trained[1][name], value, atol=0, rtol=0)


def test_rows_that_cannot_be_trained_are_refused_by_all_ranks_at_once(tmp_path, model_path):
    experiences = rows(4)
    experiences[0].advantages = None

    async def run():
        ranks = await start(grpo_config(tmp_path, model_path), 2)
        results = await asyncio.gather(
            *(rank.train_step(by_value(experiences), 1) for rank in ranks), return_exceptions=True
        )
        await close(ranks)
        return results

    results = asyncio.run(asyncio.wait_for(run(), 120))
    assert [type(result) for result in results] == [ValueError, ValueError]
    assert "advantages" in str(results[1])


def test_a_resumed_rank_is_bit_equal(tmp_path, model_path):
    cfg = grpo_config(tmp_path / "job", model_path, mini_batches=2)

    async def run():
        (first,) = await start(cfg)
        await first.train_step(by_value(rows(8, seed=1)), 1)
        path = await first.save_checkpoint(cfg.job_dir, 1, {"step": 1, "more": [1, 2]}, True)
        (second,) = await start(cfg, checkpoint=path)
        for rank in (first, second):
            await rank.train_step(by_value(rows(8, seed=2)), 2)
        files = [
            await r.write_weights(str(tmp_path / f"{k}.st"), 2)
            for k, r in enumerate((first, second))
        ]
        await close((first, second))
        return path, files

    path, (first, second) = asyncio.run(run())
    assert first.checksum == second.checksum
    assert str(latest_complete(cfg.job_dir)) == path
    assert read_state(path) == {"step": 1, "more": [1, 2]}
    assert (latest_complete(cfg.job_dir) / "huggingface" / "config.json").exists()


def test_a_rebuilt_group_meets_again_under_a_new_generation(tmp_path, model_path):
    cfg = grpo_config(tmp_path, model_path)

    async def run():
        ranks = await start(cfg, 2)
        await step(ranks, by_value(rows(6)))
        master = f"127.0.0.1:{await ranks[0].free_port()}"
        again = (master, 2, model_path, None)
        await asyncio.gather(*(rank.prepare(*again) for rank in ranks))
        metrics = await step(ranks, by_value(rows(6)))
        await close(ranks)
        return metrics

    metrics = asyncio.run(asyncio.wait_for(run(), 120))
    assert metrics[0]["actor/grad_norm"] == metrics[1]["actor/grad_norm"] > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sent_weights_have_the_written_weights_checksum(tmp_path, model_path, dtype):
    cfg = grpo_config(tmp_path, model_path)
    cfg.model.dtype = dtype

    async def run():
        (rank,) = await start(cfg)
        meta = await rank.weight_meta()
        port = await rank.free_port()
        spec = WeightGroupSpec("127.0.0.1", port, 2, 1, 7, "gloo", 60.0)
        received = Digest()

        def engine():
            group = make_group(spec, 1, is_master=False)
            for _ in recv(group, meta, 1 << 12, received):
                pass

        thread = threading.Thread(target=engine)
        thread.start()
        await rank.open_weight_group(spec)
        update = WeightUpdate(3, "nccl", meta, generation=7, bucket_bytes=1 << 12)
        sent = await rank.send_weights(update)
        await asyncio.to_thread(thread.join)
        written = await rank.write_weights(str(tmp_path / "w.safetensors"), 3)
        with pytest.raises(RuntimeError, match="generation 8 is not open"):
            await rank.send_weights(WeightUpdate(4, "nccl", meta, generation=8))
        await rank.close_weight_group()
        await close((rank,))
        return meta, sent, written, received

    meta, sent, written, received = asyncio.run(asyncio.wait_for(run(), 120))
    assert {m.dtype for m in meta} == {dtype}
    assert "lm_head.weight" not in {m.name for m in meta}
    assert sent.checksum == written.checksum == received.value
    assert sent.n_bytes == written.n_bytes == received.n_bytes
    assert (sent.version, written.version) == (3, 3)


def test_a_peer_that_does_not_come_holds_up_neither_training_nor_the_next_group(
    tmp_path, model_path
):
    async def run():
        (rank,) = await start(grpo_config(tmp_path, model_path))
        ports = [await rank.free_port() for _ in range(2)]
        three = WeightGroupSpec("127.0.0.1", ports[0], 3, 1, 1, "gloo", 60.0)
        two = WeightGroupSpec("127.0.0.1", ports[1], 2, 1, 2, "gloo", 60.0)

        def peer(spec, number):
            return asyncio.create_task(asyncio.to_thread(make_group, spec, number, False))

        first = asyncio.create_task(rank.open_weight_group(three))
        peers = [peer(three, 1)]  # the other engine has died on its way
        await rank.train_step(by_value(rows(4)), 1)
        await rank.close_weight_group()
        peers.append(peer(two, 1))
        second = asyncio.create_task(rank.open_weight_group(two))
        done, _ = await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
        assert done == {second}
        assert second.exception() is None
        peers.append(peer(three, 2))  # it comes after all: its group is not wanted any more
        with pytest.raises(RuntimeError, match="generation 1 came too late"):
            await first
        meta = await rank.weight_meta()
        with pytest.raises(RuntimeError, match=r"generation 1 is not open .*open: 2"):
            await rank.send_weights(WeightUpdate(1, "nccl", meta, generation=1))
        for group in await asyncio.gather(*peers):
            group.close()
        await rank.close_weight_group()
        await close((rank,))

    asyncio.run(asyncio.wait_for(run(), 120))


def test_probes_and_facts(tmp_path, model_path):
    async def run():
        (rank,) = await start(grpo_config(tmp_path, model_path))
        probes = await rank.probe_logprobs([[1, 2, 3], [4, 5]])
        metrics = await rank.train_step(by_value(rows(8)), 1)
        await close((rank,))
        return probes, metrics

    probes, metrics = asyncio.run(run())
    assert [p.shape for p in probes] == [(2,), (1,)]
    assert all(p.dtype == np.float32 for p in probes)
    assert metrics["sample/rows"] == 8
    assert metrics["sample/task_count"] == 2
    assert 0 <= metrics["sample/reward/mean"] <= 1
    assert metrics["sample/truncated_share"] == 0
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/lr", "actor/ppo_kl", "correction/gap"):
        assert np.isfinite(metrics[name])


def test_a_rank_that_is_not_prepared_says_so(tmp_path, model_path):
    rank = TrainerRank(grpo_config(tmp_path, model_path), 0, 1)
    with pytest.raises(RuntimeError, match="rank 0: prepare"):
        asyncio.run(rank.weight_meta())
