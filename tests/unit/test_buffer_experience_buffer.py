"""The experience buffer: commits, leases, waiting, closing, and resuming."""

import asyncio
import gc
import pickle
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from trinity_dask.buffer.errors import StoreError
from trinity_dask.buffer.experience_buffer import EndOfData, ExperienceBuffer
from trinity_dask.buffer.store.experience_store import ExperienceStore
from trinity_dask.buffer.store.manifest import Manifest, RowIndex
from trinity_dask.config.schema import ExperienceBufferConfig
from trinity_dask.experience import EID, Experience
from trinity_dask.experience.schema import from_table, to_table

DEADLINE_S = 60.0


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, DEADLINE_S))


def rows(batch: int, n: int) -> pa.Table:
    return to_table([Experience(tokens=[batch, i], eid=EID(batch, i)) for i in range(n)])


async def opened(path: Path, state: dict[str, Any] | None = None, **kw: Any) -> ExperienceBuffer:
    buffer = ExperienceBuffer(ExperienceBufferConfig(path=str(path), **kw))
    await buffer.prepare(state)
    return buffer


def test_commit_lease_read_ack(tmp_path: Path) -> None:
    async def scenario() -> None:
        buffer = await opened(tmp_path)
        manifest = await buffer.commit(1, rows(1, 3), {"a": 1})
        assert await buffer.commit(1, rows(1, 9), {"a": 2}) == manifest
        lease = await buffer.lease(None, DEADLINE_S)
        assert lease is not None
        assert (lease.rows, lease.batches) == (3, (1,))
        table = ExperienceStore(str(tmp_path)).read(lease.refs)
        assert [e.tokens.tolist() for e in from_table(table)] == [[1, 0], [1, 1], [1, 2]]
        assert await buffer.ack(lease.lease_id) == 1
        stats = await buffer.stats()
        assert (stats["committed_rows"], stats["consumed_rows"], stats["queued_rows"]) == (3, 3, 0)
        assert await buffer.manifests() == [manifest]

    run(scenario())


def test_lease_times_out_and_wakes_on_commit(tmp_path: Path) -> None:
    async def scenario() -> None:
        buffer = await opened(tmp_path)
        assert await buffer.lease(None, 0.01) is None
        assert not buffer.has_lease(None)
        waiting = asyncio.create_task(buffer.lease(4, DEADLINE_S))
        await buffer.commit(1, rows(1, 3), {})
        await buffer.commit(2, rows(2, 3), {})
        lease = await waiting
        assert lease is not None
        assert buffer.has_lease(2)
        assert not buffer.has_lease(3)
        assert [(r.batch_id, r.start, r.stop) for r in lease.refs] == [(1, 0, 3), (2, 0, 1)]

    run(scenario())


def test_capacity_makes_the_writer_wait_for_the_trainer(tmp_path: Path) -> None:
    async def scenario() -> None:
        buffer = await opened(tmp_path, capacity_batches=1)
        await buffer.commit(1, rows(1, 2), {})
        waiting = asyncio.create_task(buffer.commit(2, rows(2, 2), {}))
        lease = await buffer.lease(None, DEADLINE_S)
        assert lease is not None
        await asyncio.wait([waiting], timeout=0.05)
        assert not waiting.done()  # a leased batch is not trained yet
        await buffer.ack(lease.lease_id)
        assert (await waiting).batch_id == 2

    run(scenario())


@pytest.mark.parametrize("resumed", [False, True])
def test_of_what_is_trained_the_counts_stay_and_nothing_else(tmp_path: Path, resumed: bool) -> None:
    """What is asked twice a second costs the same at any step, and memory stays flat."""

    def kept() -> int:
        gc.collect()
        return sum(isinstance(found, Manifest | RowIndex) for found in gc.get_objects())

    async def scenario() -> None:
        before, buffer = kept(), await opened(tmp_path)
        for batch in range(1, 21):
            accounts = {"scheduled": batch, "succeeded": batch, "produced": 2, "committed": 2}
            await buffer.commit(batch, rows(batch, 2), {"accounts": accounts})
            lease = await buffer.lease(2, DEADLINE_S)
            assert lease is not None
            await buffer.ack(lease.lease_id)
        if resumed:
            buffer = await opened(tmp_path, await buffer.state_dict())
        again = await buffer.commit(7, rows(7, 9), {})
        assert (again.batch_id, again.rows) == (7, 2)
        del again, lease
        stats = await buffer.stats()
        assert (stats["committed_batches"], stats["committed_rows"]) == (20, 40)
        total = {"scheduled": 210, "succeeded": 210, "produced": 40, "committed": 40}
        assert stats["accounts"] == total
        assert kept() - before <= 1  # a thread's last result, until it has another

    run(scenario())


def test_a_full_buffer_gives_up_at_its_deadline(tmp_path: Path) -> None:
    async def scenario() -> None:
        buffer = await opened(tmp_path, capacity_batches=1, max_read_timeout_s=0.05)
        await buffer.commit(1, rows(1, 2), {})
        with pytest.raises(TimeoutError, match=r"batch 2 waited 0\.05 s .*capacity_batches=1"):
            await buffer.commit(2, rows(2, 2), {})
        assert [m.batch_id for m in await buffer.manifests()] == [1]

    run(scenario())


def test_a_trainer_that_moves_on_gives_a_writer_more_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        buffer = await opened(tmp_path, capacity_batches=1, max_read_timeout_s=0.2)
        await buffer.commit(1, rows(1, 2), {})
        waiting = asyncio.create_task(buffer.commit(2, rows(2, 2), {}))
        for _ in range(6):
            await asyncio.sleep(0.1)
            lease = await buffer.lease(None, DEADLINE_S)
            assert lease is not None
            await buffer.release(lease.lease_id)
        assert not waiting.done()
        lease = await buffer.lease(None, DEADLINE_S)
        assert lease is not None
        await buffer.ack(lease.lease_id)
        assert (await waiting).batch_id == 2

    run(scenario())


def test_end_of_data_reports_what_is_left(tmp_path: Path) -> None:
    async def scenario() -> None:
        buffer = await opened(tmp_path)
        await buffer.commit(1, rows(1, 5), {})
        lease = await buffer.lease(3, DEADLINE_S)
        assert lease is not None
        await buffer.close_writes()
        assert await buffer.lease(4, 0.01) is None  # the lease may still be released
        await buffer.ack(lease.lease_id)
        with pytest.raises(EndOfData) as caught:
            await buffer.lease(4, DEADLINE_S)
        assert caught.value.left_rows == 2
        rest = await buffer.lease(None, DEADLINE_S)  # left rows are not lost
        assert rest is not None
        await buffer.ack(rest.lease_id)
        with pytest.raises(EndOfData):
            await buffer.lease(None, DEADLINE_S)
        with pytest.raises(RuntimeError, match="after the experience buffer was closed"):
            await buffer.commit(2, rows(2, 1), {})

    run(scenario())


def test_close_wakes_a_waiting_trainer(tmp_path: Path) -> None:
    async def scenario() -> None:
        buffer = await opened(tmp_path)
        waiting = asyncio.create_task(buffer.lease(1, DEADLINE_S))
        await asyncio.wait([waiting], timeout=0.05)
        await buffer.close_writes()
        with pytest.raises(EndOfData):
            await waiting

    run(scenario())


def test_a_cancelled_lease_takes_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        buffer = await opened(tmp_path)
        waiting = asyncio.create_task(buffer.lease(1, DEADLINE_S))
        await asyncio.wait([waiting], timeout=0.05)
        waiting.cancel()
        await buffer.commit(1, rows(1, 1), {})
        await asyncio.wait([waiting])
        assert (await buffer.stats())["leased_rows"] == 0
        assert await buffer.lease(1, DEADLINE_S) is not None

    run(scenario())


def test_resume_hands_out_what_was_not_trained(tmp_path: Path) -> None:
    async def first() -> dict[str, Any]:
        buffer = await opened(tmp_path)
        for batch in (1, 2, 3):
            await buffer.commit(batch, rows(batch, 4), {})
        trained, lost = await buffer.lease(6, 1), await buffer.lease(4, 1)
        assert trained is not None
        assert lost is not None
        await buffer.ack(trained.lease_id)
        return await buffer.state_dict()

    async def second(state: dict[str, Any]) -> list[tuple[Any, int, int]]:
        buffer = ExperienceBuffer(ExperienceBufferConfig(path=str(tmp_path)))
        found = await buffer.prepare(state)
        assert found == {"batches": 3, "rows": 12, "queued_rows": 6, "last_batch": 3}
        lease = await buffer.lease(6, DEADLINE_S)
        assert lease is not None
        await buffer.ack(lease.lease_id)
        stats = await buffer.stats()
        assert (stats["consumed_rows"], stats["consumed_batch"]) == (12, 3)
        return [(r.batch_id, r.start, r.stop) for r in lease.refs]

    assert run(second(run(first()))) == [(2, 2, 4), (3, 0, 4)]


def test_a_state_whose_batches_are_gone_is_refused(tmp_path: Path) -> None:
    async def trained_state() -> dict[str, Any]:
        buffer = await opened(tmp_path / "a")
        await buffer.commit(1, rows(1, 1), {})
        lease = await buffer.lease(None, 1)
        assert lease is not None
        await buffer.ack(lease.lease_id)
        return await buffer.state_dict()

    state = run(trained_state())
    with pytest.raises(StoreError, match="trained batches 1 that are not in"):
        run(opened(tmp_path / "b", state))


def test_a_failed_commit_frees_its_place(tmp_path: Path) -> None:
    async def scenario() -> None:
        buffer = await opened(tmp_path / "s", capacity_batches=1, max_read_timeout_s=1)
        (tmp_path / "s").write_text("in the way")
        with pytest.raises(StoreError):
            await buffer.commit(1, rows(1, 1), {})
        (tmp_path / "s").unlink()
        assert (await buffer.commit(1, rows(1, 1), {})).rows == 1

    run(scenario())


def test_fault_33_groups_come_back_whole_and_distinct(tmp_path: Path) -> None:
    async def scenario() -> None:
        buffer = await opened(tmp_path)
        groups = [
            [Experience(tokens=[1, 2], eid=EID(1, task, run)) for run in range(3)]
            for task in range(4)
        ]
        await buffer.commit(1, to_table([exp for group in groups for exp in group]), {})
        store, seen = ExperienceStore(str(tmp_path)), []
        for group in groups:
            lease = await buffer.lease(3, DEADLINE_S)
            assert lease is not None
            found = from_table(store.read(lease.refs))
            assert [e.eid for e in found] == [e.eid for e in group]
            seen += [e.eid.uid for e in found]
        assert len(set(seen)) == 12

    run(scenario())


def test_what_crosses_processes_can_be_pickled(tmp_path: Path) -> None:
    async def scenario() -> None:
        buffer = await opened(tmp_path)
        manifest = await buffer.commit(1, rows(1, 2), {})
        lease = await buffer.lease(None, DEADLINE_S)
        for value in (manifest, lease):
            assert pickle.loads(pickle.dumps(value)) == value
        assert pickle.loads(pickle.dumps(EndOfData(3))).left_rows == 3

    run(scenario())


def test_a_buffer_without_a_path_says_which_key(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"experience_buffer\.path"):
        ExperienceBuffer(ExperienceBufferConfig())
