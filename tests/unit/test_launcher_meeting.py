"""The meeting of the runs of one job, and the locks on its directory."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trinity_dask.buffer.experience_buffer import ExperienceBuffer
from trinity_dask.config.schema import Config
from trinity_dask.launcher.job_lock import JobInUse, JobLock, claims_of, is_locked, wait_unlocked
from trinity_dask.launcher.meeting import TRAINER, CannotJoin, Meeting, PeerLost
from trinity_dask.launcher.stages import TrainStage
from trinity_dask.launcher.status import End, StatusBoard, end_of
from trinity_dask.sync.synchronizer import Synchronizer


def config(job: Path, mode: str = "explore", name: str = "explorer") -> Config:
    cfg = Config(mode=mode, job_dir=str(job))
    cfg.explorer.name = name
    cfg.buffer.trainer_input.experience_buffer.path = str(job / "store")
    return cfg


def meeting(job: Path) -> Meeting:
    cfg = config(job)
    buffer = ExperienceBuffer(cfg.buffer.trainer_input.experience_buffer)
    return Meeting(cfg, (buffer, Synchronizer(cfg.synchronizer, str(job))), ())


def test_members_have_names_of_their_own_and_settings_in_common(tmp_path: Path) -> None:
    async def main() -> None:
        met = meeting(tmp_path)
        met.add(config(tmp_path, "train"), TRAINER)
        met.add(config(tmp_path), "explorer1")
        with pytest.raises(CannotJoin, match=r"'explorer1' of .* is there already"):
            met.add(config(tmp_path), "explorer1")
        other = config(tmp_path)
        other.synchronizer.sync_interval = 3
        with pytest.raises(CannotJoin, match="sync_interval=3 here, 1 there"):
            met.add(other, "explorer2")

    asyncio.run(main())


def test_a_stop_ends_the_wait_for_an_explorer_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        cfg = config(tmp_path, "train")
        cfg.synchronizer.peer_timeout_s = 600.0
        stage = TrainStage(cfg, StatusBoard(), "run")
        wait = asyncio.ensure_future(stage._wait_explorer(meeting(tmp_path)))
        await asyncio.sleep(0)
        assert not wait.done()
        await stage.stop()
        await asyncio.wait_for(wait, 5.0)

    asyncio.run(main())


def test_writes_end_with_the_last_explorer(tmp_path: Path) -> None:
    async def main() -> None:
        met = meeting(tmp_path)
        await met.buffer.prepare()
        met.add(config(tmp_path, "train"), TRAINER)
        met.add(config(tmp_path), "a")
        met.add(config(tmp_path), "b")
        await met.writes_end("a")
        assert not (await met.buffer.stats())["closed"]
        await met.leave("b", End("failed", "its reason"))
        assert (await met.buffer.stats())["closed"]

    asyncio.run(main())


def test_the_worst_end_of_the_explorers_is_told_and_only_when_all_have_ended(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        met = meeting(tmp_path)
        met.add(config(tmp_path, "train"), TRAINER)
        for name in ("a", "b"):
            met.add(config(tmp_path), name)
            met.started(name)
        told = asyncio.ensure_future(met.wait_explorers_end())
        await met.leave("a", End("failed", "its reason"))
        await asyncio.sleep(0)
        assert not told.done()
        assert not met.ending
        await met.leave("b", End("done"))
        assert await told == ("a", End("failed", "its reason"))
        assert met.ending

    asyncio.run(main())


def test_an_explorer_that_was_refused_does_not_count(tmp_path: Path) -> None:
    async def main() -> None:
        met = meeting(tmp_path)
        met.add(config(tmp_path, "train"), TRAINER)
        met.add(config(tmp_path), "a")
        met.started("a")
        met.add(config(tmp_path), "b")
        await met.leave("b", End("failed", "no engine left"))
        assert list(met.explorers) == ["a"]
        await met.leave("a", End("done"))
        assert await met.wait_explorers_end() == ("a", End("done"))

    asyncio.run(main())


def test_fault_01_every_wait_for_the_other_side_ends_and_says_what_to_do(tmp_path: Path) -> None:
    async def main() -> None:
        met = meeting(tmp_path)
        met.add(config(tmp_path), "a")
        with pytest.raises(PeerLost, match=r"no trainer of .*; start one with mode=train"):
            await met.wait_trainer(0.05)
        met.add(config(tmp_path, "train"), TRAINER)
        waiting = asyncio.ensure_future(met.wait_trainer(60.0))
        await asyncio.sleep(0)
        await met.leave(TRAINER, End("failed", "out of memory"))
        with pytest.raises(PeerLost, match="failed: out of memory"):
            await waiting
        assert (await met.wait_trainer_end()).outcome == "failed"

    asyncio.run(main())


def test_ends() -> None:
    assert end_of(None, stopping=False) == End("done")
    assert end_of(None, stopping=True) == End("interrupted")
    assert end_of(asyncio.CancelledError(), stopping=False) == End("interrupted")
    assert end_of(ValueError("x"), stopping=True) == End("failed", "ValueError: x")


def flock_of(rule: str) -> Callable[[Any, int], None]:
    """``flock`` as NFS has it (flock(2), "NFS details"), or as a file system without it."""
    real = fcntl.flock

    def flock(file: Any, operation: int) -> None:
        if rule == "none":
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        mode = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE
        wanted = os.O_WRONLY if operation & fcntl.LOCK_EX else os.O_RDONLY
        if mode not in (os.O_RDWR, wanted):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        real(file, operation)

    return flock


@pytest.mark.parametrize("mode", ["both", "train", "explore", "bench"])
def test_locks_on_nfs_are_seen_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(fcntl, "flock", flock_of("nfs"))
    claims = claims_of([config(tmp_path, mode)])

    async def main() -> None:
        for _ in range(2):  # the second start finds the files of the first
            async with JobLock(tmp_path, 0.0, claims=claims):
                assert is_locked(tmp_path, claims)
                with pytest.raises(JobInUse):
                    wait_unlocked(tmp_path, 0.0, claims)
            assert not is_locked(tmp_path, claims)
            wait_unlocked(tmp_path, 0.0, claims)

    asyncio.run(main())


def test_a_file_system_without_locks_is_warned_about_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fcntl, "flock", flock_of("none"))

    async def main() -> None:
        async with JobLock(tmp_path, 0.0):
            assert not is_locked(tmp_path)

    asyncio.run(main())
    assert "run.lock cannot be locked" in caplog.text
    assert "checkpoint_root_dir" in caplog.text


def test_a_whole_run_a_trainer_an_explorer_and_a_benchmark(tmp_path: Path) -> None:
    whole, train = [config(tmp_path, "both")], [config(tmp_path, "train")]
    one, two = [config(tmp_path, name="a")], [config(tmp_path, name="b")]
    bench = [config(tmp_path, "bench")]

    async def main() -> None:
        async with (
            JobLock(tmp_path, claims=claims_of(train)),
            JobLock(tmp_path, 0.0, claims=claims_of(one)),
            JobLock(tmp_path, 0.0, claims=claims_of(two)),
            JobLock(tmp_path, 0.0, claims=claims_of(bench)),
        ):
            for taken in (whole, train, one, bench):
                assert is_locked(tmp_path, claims_of(taken))
                with pytest.raises(JobInUse, match="is in use by another run"):
                    async with JobLock(tmp_path, 0.0, claims=claims_of(taken)):
                        pass
        async with JobLock(tmp_path, 0.0, claims=claims_of(whole)):
            assert is_locked(tmp_path, claims_of(train))
            assert not is_locked(tmp_path, claims_of(bench))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.temperature", 0.5),
        ("model.max_response_tokens", 7),
        ("model.dtype", "bfloat16"),
        ("model.lora.rank", 8),
        ("algorithm.repeat_times", 3),
        ("algorithm.advantage_fn_args", {"epsilon": 1.0}),
        ("algorithm.rollout_correction", None),
    ],
)
def test_what_both_sides_compute_with_must_be_alike(tmp_path: Path, key: str, value: Any) -> None:
    async def main() -> None:
        met = meeting(tmp_path)
        trainer, explorer = config(tmp_path, "train"), config(tmp_path)
        trainer.algorithm.optimizer.lr = 0.5  # the trainer's own
        trainer.model.lora.merge_export = True
        met.add(trainer, TRAINER)
        *parents, leaf = key.split(".")
        section: Any = explorer
        for name in parents:
            section = getattr(section, name)
        if value is None:
            section.rollout_correction.cap = 3.0
        else:
            setattr(section, leaf, value)
        with pytest.raises(CannotJoin, match=rf"'a' does not fit 'trainer' .*{key}=.* here, "):
            met.add(explorer, "a")
        met.add(config(tmp_path), "a")

    asyncio.run(main())


def test_an_explorer_that_failed_may_come_back_while_the_others_go_on(tmp_path: Path) -> None:
    async def main() -> None:
        met = meeting(tmp_path)
        await met.buffer.prepare()
        met.add(config(tmp_path, "train"), TRAINER)
        for name in ("a", "b"):
            met.add(config(tmp_path), name)
            met.started(name)
        await met.leave("a", End("failed", "its reason"))
        met.add(config(tmp_path), "a")
        await met.leave("b", End("done"))
        assert not met.ending
        assert not (await met.buffer.stats())["closed"]
        with pytest.raises(CannotJoin, match=r"'a' of .* is there already"):
            met.add(config(tmp_path), "a")
        met.started("a")
        await met.leave("a", End("done"))
        assert await met.wait_explorers_end() == ("a", End("done"))

    asyncio.run(main())
