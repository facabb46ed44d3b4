"""Sample strategies through the real call path: strategy, buffer, store, rows of the trainer."""

import asyncio
import json
import math
from collections import Counter
from collections.abc import Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from trinity_dask.algorithm.sample_strategies import SAMPLE_STRATEGY
from trinity_dask.buffer.errors import EndOfData
from trinity_dask.buffer.experience_buffer import ExperienceBuffer
from trinity_dask.buffer.sample_strategy import (
    Sample,
    expert_share,
    make_strategy,
)
from trinity_dask.buffer.store.manifest import RowIndex
from trinity_dask.config.schema import (
    AlgorithmConfig,
    BufferConfig,
    Config,
    ExperienceBufferConfig,
    FormatConfig,
    ModelConfig,
    ReplayBufferConfig,
    TrainerInputConfig,
)
from trinity_dask.demo.tokenizer import ascii_tokenizer
from trinity_dask.experience import EID, Experience
from trinity_dask.experience.schema import decode, from_table, to_table
from trinity_dask.trainer.step.batching import collate

DEADLINE_S = 120.0
WAIT_S = 60.0


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, DEADLINE_S))


def group(batch: int, size: int = 3, version: int | None = None, task: int = 0) -> pa.Table:
    """One task's runs, with reward = run; ``version`` as sampled, None for unknown."""
    return to_table(
        [
            Experience(
                tokens=[1, batch, i],
                eid=EID(batch, task, i),
                reward=float(i),
                logprobs=[-1.0, -1.0],
                advantages=[1.0, 1.0],
                returns=[1.0, 1.0],
                versions=None if version is None else [version, version],
                prompt_text=f"{batch}",
                response_text=f"{i}",
            )
            for i in range(size)
        ]
    )


def config(path: Path, rows: int | None, **buffer: Any) -> Config:
    store = ExperienceBufferConfig(path=str(path / "store"), **buffer)
    return Config(
        algorithm=AlgorithmConfig(algorithm_type="grpo"),
        buffer=BufferConfig(train_batch_size=rows, trainer_input=TrainerInputConfig(store)),
    )


async def opened(
    cfg: Config, name: str = "default", state: Any = None, **args: Any
) -> tuple[Any, ExperienceBuffer]:
    buffer = ExperienceBuffer(cfg.buffer.trainer_input.experience_buffer)
    strategy = make_strategy(name, args, cfg, buffer)
    await strategy.prepare(state)
    return strategy, buffer


def rows_of(buffer: ExperienceBuffer, sample: Sample) -> list[Experience]:
    tables = [buffer.store.read(sample.refs)]
    if sample.payload is not None:
        tables.append(decode(sample.payload)[0])
    return from_table(pa.concat_tables(tables))


async def balanced(buffer: ExperienceBuffer, trained: int) -> dict[str, Any]:
    stats = await buffer.stats()
    places = ("consumed_rows", "dropped_rows", "queued_rows", "leased_rows")
    assert stats["committed_rows"] == sum(stats[name] for name in places)
    counted = stats["consumed_rows"] + stats["reused_rows"] + stats["foreign_rows"]
    assert counted == trained
    return stats


def test_default_is_first_in_first_out(tmp_path: Path) -> None:
    assert SAMPLE_STRATEGY.get("warmup") is SAMPLE_STRATEGY.get("default")

    async def scenario() -> None:
        strategy, buffer = await opened(config(tmp_path, 4))
        for version in range(20):
            await buffer.commit(version + 1, group(version + 1, 3, version), {})
        await buffer.close_writes()
        for k in range(15):
            sample = await strategy.sample(k + 1, WAIT_S)
            batches = [e.eid.batch for e in rows_of(buffer, sample)]
            assert batches == [(4 * k + i) // 3 + 1 for i in range(4)]
            versions = [b - 1 for b in batches]
            assert sample.metrics["sample/model_version/min"] == min(versions)
            assert sample.metrics["sample/model_version/max"] == max(versions)
            assert sample.metrics["sample/model_version/mean"] == np.mean(versions)
            assert sample.metrics["sample/model_version_drift/max"] == 0
            assert sample.metrics["time/read_experience"] >= 0
            await strategy.done(sample)
            await balanced(buffer, 4 * (k + 1))
        assert strategy.progress == 20
        with pytest.raises(EndOfData):
            await strategy.sample(16, WAIT_S)

    run(scenario())


def test_staleness_control_drops_what_is_too_old(tmp_path: Path) -> None:
    async def scenario() -> None:
        cfg = config(tmp_path, 1)
        strategy, buffer = await opened(cfg, "staleness_control", max_staleness=3)
        for version in range(20):
            await buffer.commit(version + 1, group(version + 1, 3, version), {})
        trained = 0
        for k in range(20):
            sample = await strategy.sample(k + 1, WAIT_S)
            (row,) = rows_of(buffer, sample)
            assert row.versions is not None
            # one row a step is slower than the limit: from step 5 on the limit decides
            assert row.versions[0] == max(k - 3, k // 3 if k < 5 else 0)
            assert sample.metrics["sample/model_version/min"] == row.versions[0]
            await strategy.done(sample)
            trained += 1
            stats = await balanced(buffer, trained)
        assert stats["dropped_rows"] == 3 * 16 - 19  # versions below 16, but the trained ones
        # everything is too old: the strategy makes progress without a row
        assert await strategy.sample(100, 0.01) is None
        assert strategy.progress == 20
        state = json.loads(json.dumps(await strategy.state_dict()))
        again, reopened = await opened(cfg, "staleness_control", state, max_staleness=3)
        assert again.progress == 20
        assert (await balanced(reopened, trained))["queued_rows"] == 0

    run(scenario())


def test_an_old_token_makes_its_whole_group_old(tmp_path: Path) -> None:
    async def scenario() -> None:
        strategy, buffer = await opened(config(tmp_path, 3), "staleness_control", max_staleness=0)
        mixed = from_table(group(1, 3, 5))
        mixed[1].versions = np.array([5, 4], np.int32)
        await buffer.commit(1, to_table(mixed), {})
        await buffer.commit(2, group(2, 3, 5), {})
        sample = await strategy.sample(6, WAIT_S)  # needs version 5
        assert sample.lease.batches == (2,)
        await strategy.done(sample)
        assert (await balanced(buffer, 3))["dropped_rows"] == 3

    run(scenario())


def test_what_is_too_old_can_be_masked_instead_and_the_limit_survives_a_resume(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        cfg, args = config(tmp_path, 3), {"max_staleness": 2, "over_limit": "mask"}
        strategy, buffer = await opened(cfg, "staleness_control", **args)
        await buffer.commit(1, group(1, 3, 0), {})
        await buffer.commit(2, group(2, 3, 1), {})
        sample = await strategy.sample(9, WAIT_S)
        assert (sample.rows, sample.min_version) == (3, 6)  # 9 - 1 - 2
        await strategy.done(sample)
        state = json.loads(json.dumps(await strategy.state_dict()))
        again, reopened = await opened(cfg, "staleness_control", state, **args)
        sample = await again.sample(10, WAIT_S)
        assert (sample.lease.batches, sample.min_version) == ((2,), 7)
        await again.done(sample)
        assert (await balanced(reopened, 6))["dropped_rows"] == 0
        with pytest.raises(ValueError, match=r"over_limit must be one of drop, mask \(got 'x'\)"):
            await opened(cfg, "staleness_control", over_limit="x")

    run(scenario())


def test_staleness_needs_a_sensible_limit(tmp_path: Path) -> None:
    async def scenario() -> None:
        with pytest.raises(ValueError, match="max_staleness must be >= 0"):
            await opened(config(tmp_path, 1), "staleness_control", max_staleness=-1)
        strategy, buffer = await opened(config(tmp_path, 1), "staleness_control")
        await buffer.commit(1, group(1, 1, 0), {})
        assert (await strategy.sample(10**9, WAIT_S)).rows == 1

    run(scenario())


def replay(**kw: Any) -> dict[str, Any]:
    return {"replay_buffer": ReplayBufferConfig(enable=True, **kw)}


def test_priority_is_newest_first(tmp_path: Path) -> None:
    async def scenario() -> None:
        strategy, buffer = await opened(config(tmp_path, 3, **replay()))
        for version in range(20):
            await buffer.commit(version + 1, group(version + 1, 3, version), {})
        for k in range(20):
            sample = await strategy.sample(k + 1, WAIT_S)
            assert sample.metrics["sample/model_version/mean"] == 19 - k
            assert sample.metrics["sample/use_count/max"] == 1
            await strategy.done(sample)
            await balanced(buffer, 3 * (k + 1))
        assert strategy.progress == 20

    run(scenario())


def test_writers_of_a_replay_buffer_never_wait(tmp_path: Path) -> None:
    async def scenario() -> None:
        cfg = config(tmp_path, 3, capacity_batches=1, max_read_timeout_s=0.01, **replay())
        _, buffer = await opened(cfg)
        for version in range(5):
            await buffer.commit(version + 1, group(version + 1, 3, version), {})
        assert (await buffer.stats())["queued_rows"] == 15

    run(scenario())


def test_fault_33_replayed_groups_stay_whole_and_distinct(tmp_path: Path) -> None:
    """Through every layer: four tasks are committed, four come back, and again."""

    async def scenario() -> None:
        cfg = config(tmp_path, 12, **replay(reuse_cooldown_time_s=0.05))
        strategy, buffer = await opened(cfg)
        table = pa.concat_tables([group(1, 3, 0, task) for task in range(4)])
        await buffer.commit(1, table, {})
        for use in (1, 2, 3):
            sample = await strategy.sample(use, WAIT_S)  # waits for the pause, not for rows
            rows = rows_of(buffer, sample)
            assert Counter(e.eid.tid for e in rows) == {f"1/{task}": 3 for task in range(4)}
            assert len({e.eid.uid for e in rows}) == 12
            assert sample.metrics["sample/use_count/min"] == use
            await strategy.done(sample)
            await balanced(buffer, 12 * use)

    run(scenario())


def test_replay_goes_on_after_a_crash(tmp_path: Path) -> None:
    async def scenario() -> None:
        cfg = config(tmp_path, 3, **replay(reuse_cooldown_time_s=0.0))
        strategy, buffer = await opened(cfg)
        for version in range(3):
            await buffer.commit(version + 1, group(version + 1, 3, version), {})
        first = await strategy.sample(1, WAIT_S)
        await strategy.done(first)
        state = json.loads(json.dumps(await strategy.state_dict()))
        lost = await strategy.sample(2, WAIT_S)  # trained, but not in the checkpoint
        await strategy.done(lost)
        await buffer.commit(4, group(4, 3, 3), {})
        again, reopened = await opened(cfg, state=state)
        order = []
        for step in range(2, 5):
            sample = await again.sample(step, WAIT_S)
            order.append(sample.lease.batches[0])
            await again.done(sample)
        assert first.lease.batches == (3,)
        assert order == [4, 2, 4]  # a second use costs two versions
        await balanced(reopened, 12)

    run(scenario())


def test_released_rows_come_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        for kw in ({}, replay()):
            cfg = config(tmp_path / str(len(kw)), 3, **kw)
            strategy, buffer = await opened(cfg)
            await buffer.commit(1, group(1, 3, 0), {})
            sample = await strategy.sample(1, WAIT_S)
            await strategy.release(sample)
            again = await strategy.sample(1, WAIT_S)
            assert again.refs == sample.refs
            await strategy.done(again)
            await balanced(buffer, 3)

    run(scenario())


def test_groups_stay_whole_where_the_trainer_compares_them(tmp_path: Path) -> None:
    async def scenario() -> None:
        cfg = config(tmp_path, 4)
        cfg.algorithm.algorithm_type = "rloo"  # advantages in the trainer
        strategy, buffer = await opened(cfg)
        await buffer.commit(1, pa.concat_tables([group(1, 3, 0, t) for t in range(3)]), {})
        sample = await strategy.sample(1, WAIT_S)
        assert [e.eid.task for e in rows_of(buffer, sample)] == [0] * 3 + [1] * 3

    run(scenario())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer")
    ascii_tokenizer().save_pretrained(path)
    (path / "config.json").write_text('{"model_type": "qwen2"}')
    return str(path)


def mix_config(tmp_path: Path, model: str, rows: int) -> Config:
    cfg = config(tmp_path, rows)
    cfg.model = ModelConfig(model_path=model, max_model_len=64)
    experts = [{"prompt": f"p{i}", "response": f"r{i}"} for i in range(5)]
    path = tmp_path / "experts.jsonl"
    path.write_text("\n".join(map(json.dumps, experts)))
    cfg.buffer.trainer_input.auxiliary_buffers = [
        ExperienceBufferConfig(
            name="sft_dataset",
            storage_type="file",
            path=str(path),
            format=FormatConfig(apply_chat_template=False),
        )
    ]
    return cfg


def test_mix_adds_expert_rows(tmp_path: Path, model: str) -> None:
    async def scenario() -> None:
        cfg = mix_config(tmp_path, model, 4)
        strategy, buffer = await opened(cfg, "mix", expert_data_ratio=0.4)
        await buffer.commit(1, group(1, 6, 0), {})
        seen = []
        for step in (1, 2, 3):
            sample = await strategy.sample(step, WAIT_S)
            assert (sample.rows, sample.expert_rows) == (4, 2)
            rows = rows_of(buffer, sample)
            assert [bool(e.info.get("is_expert")) for e in rows] == [False, False, True, True]
            for row in rows[2:]:
                assert (row.reward, row.info["step"]) == (0.0, step)
                assert row.logprobs is not None
                assert row.advantages is not None
                assert not row.logprobs.any()
                assert not row.advantages.any()
                seen.append(row.response_text)
            batch = collate(to_table(rows), pad_token_id=0)
            expected = batch["action_mask"].clone()
            expected[:2] = False
            assert batch["expert_mask"].equal(expected)
            assert {"advantages", "rollout_logprobs"} <= batch.keys()
            await strategy.done(sample)
            await balanced(buffer, 4 * step)
        assert seen == ["r0", "r1", "r2", "r3", "r4", "r0"]  # round and round
        assert await strategy.sample(4, 0.01) is None  # no partner: no expert row is lost
        state = json.loads(json.dumps(await strategy.state_dict()))
        again, reopened = await opened(cfg, "mix", state, expert_data_ratio=0.4)
        await reopened.commit(2, group(2, 6, 0), {})
        sample = await again.sample(4, WAIT_S)
        assert [e.response_text for e in rows_of(reopened, sample)[2:]] == ["r1", "r2"]
        await again.release(sample)
        sample = await again.sample(4, WAIT_S)
        assert [e.response_text for e in rows_of(reopened, sample)[2:]] == ["r1", "r2"]
        await again.done(sample)
        assert (await balanced(reopened, 16))["foreign_rows"] == 8

    run(scenario())


def test_mix_explains_what_it_needs(tmp_path: Path, model: str) -> None:
    async def scenario() -> None:
        cfg = mix_config(tmp_path, model, 4)
        with pytest.raises(ValueError, match=r"no entry named 'other'.*sft_dataset"):
            await opened(cfg, "mix", sft_dataset_name="other")
        cfg.buffer.train_batch_size = None
        with pytest.raises(ValueError, match=r"needs buffer\.train_batch_size"):
            await opened(cfg, "mix")
        with pytest.raises(ValueError, match="unknown sample_strategy 'mixx'"):
            await opened(cfg, "mixx")
        with pytest.raises(ValueError, match="did you mean 'expert_data_ratio'"):
            await opened(cfg, "mix", expert_ratio=0.1)

    run(scenario())
    assert [expert_share(r, 32) for r in (0.5, 0.1, 0.01)] == [16, 4, 1]
    for ratio in (0.0, 1.0, math.nan):
        with pytest.raises(ValueError, match="between 0 and 1"):
            expert_share(ratio, 4)
    with pytest.raises(ValueError, match="leaves no row of the policy"):
        expert_share(0.9, 4)


def test_a_store_without_an_index_is_read_for_it(tmp_path: Path) -> None:
    """Stores of an earlier version have no row index in their manifests."""

    async def scenario() -> None:
        cfg = config(tmp_path, 3, **replay())
        _, buffer = await opened(cfg)
        for version in (1, 2):
            buffer.store.commit(version, group(version, 3, version), {"accounts": {}})
        strategy, _ = await opened(cfg)
        assert (await strategy.sample(1, WAIT_S)).lease.batches == (2,)

    run(scenario())


def test_the_row_index_knows_groups_and_versions() -> None:
    table = pa.concat_tables([group(1, 2, 4), group(1, 3, None, 1), group(1, 1, 6, 2)])
    found = RowIndex.of(table)
    assert (found.sizes, found.oldest, found.newest) == ((2, 3, 1), (4, -1, 6), (4, -1, 6))
    assert RowIndex.from_meta({"row_index": asdict(found)}, 6) == found
    assert RowIndex.from_meta({"row_index": asdict(found)}, 7) is None
    assert RowIndex.of(table.slice(1, 3)).sizes == (1, 2)
    tool = from_table(group(1, 1, 3))
    tool[0].versions = np.array([-1, 3], np.int32)  # the first token is no model's
    assert RowIndex.of(to_table(tool)).oldest == (3,)


def test_a_strategy_may_change_between_two_runs(tmp_path: Path, model: str) -> None:
    async def scenario() -> None:
        cfg = mix_config(tmp_path, model, 4)
        strategy, buffer = await opened(cfg, "mix")
        await buffer.commit(1, group(1, 6, 0), {})
        await strategy.done(await strategy.sample(1, WAIT_S))
        plain, reopened = await opened(cfg, "default", await strategy.state_dict())
        await plain.done(await plain.sample(2, WAIT_S))
        assert (await balanced(reopened, 8))["foreign_rows"] == 2
        back, again = await opened(cfg, "mix", await plain.state_dict())
        assert (await balanced(again, 8))["queued_rows"] == 0
        assert back.progress == 1

    run(scenario())
