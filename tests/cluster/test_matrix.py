"""Every pair of sync style, method, bound, number of explorers and event ends as it should.

Invariant of each: it ends by itself within its deadline, its accounts balance, every batch of every
explorer that was there is committed, and no callback held the loop for a second.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest
from mini_run import LoopHeld, Mini, MiniRun

from trinity_dask.aio import all_or_first_error

DEADLINE_S = 120.0
FACTORS: dict[str, tuple[Any, ...]] = {
    "style": ("fixed", "trainer_driven", "explorer_driven", "fully_async"),
    "method": ("nccl", "memory", "checkpoint"),
    "bound": ("none", "small", "unreachable"),
    "explorers": (1, 2),
    "event": ("resume", "absent", "starved", "slow_eval", "slow_step", "stop", "filtered"),
}


def allowed(case: dict[str, Any]) -> bool:
    """Only one explorer can be in a group of method nccl, and one of one cannot be absent."""
    if case.get("explorers") == 2 and case.get("method") == "nccl":
        return False
    if case.get("explorers") == 1 and case.get("event") == "absent":
        return False
    return not (case.get("event") == "absent" and case.get("method") == "nccl")


def covering() -> list[dict[str, Any]]:
    """Greedily few cases in which every allowed pair of values occurs."""
    whole = [
        dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values())
    ]
    cases = [case for case in whole if allowed(case)]

    def pairs(case: dict[str, Any]) -> set[Any]:
        return set(itertools.combinations(case.items(), 2))

    left = set().union(*map(pairs, cases))
    chosen = []
    while left:
        best = max(cases, key=lambda case: len(pairs(case) & left))
        left -= pairs(best)
        chosen.append(best)
    return chosen


CASES = covering()


def test_every_pair_is_covered() -> None:
    for a, b in itertools.combinations(FACTORS, 2):
        for x, y in itertools.product(FACTORS[a], FACTORS[b]):
            if allowed({a: x, b: y}):
                assert any(case[a] == x and case[b] == y for case in CASES), (a, x, b, y)


def mini_of(case: dict[str, Any], job: Path) -> Mini:
    names = ("explorer",) if case["explorers"] == 1 else ("one", "two")
    mini = Mini(job, case["style"], case["method"], explorers=names)
    if case["bound"] != "none":
        mini.staleness = 1
    if case["bound"] == "unreachable":  # a step needs more rows than may be under way
        mini.train_rows = 3 * mini.batch * mini.repeat
    slow = {"starved": "task_s", "slow_eval": "eval_s", "slow_step": "step_s"}
    if case["event"] in slow:
        setattr(mini, slow[case["event"]], 0.2)
    if case["event"] == "filtered":
        mini.filtered, mini.repeat = True, 3
    return mini


async def until_committed(run: MiniRun, batches: int) -> None:
    while run.buffer.n_committed < batches:
        await asyncio.sleep(0.005)


async def played(case: dict[str, Any], mini: Mini) -> None:
    if case["event"] in ("resume", "absent", "stop"):
        async with MiniRun(mini) as run:
            work = asyncio.ensure_future(run.work())
            await until_committed(run, 2)
            if case["event"] == "stop":
                await run.stop()
                await work
                assert not (await run.accounts()).errors()
            else:  # as a kill: nothing is said to anybody
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
    present = mini.explorers[:1] if case["event"] == "absent" else mini.explorers
    async with MiniRun(mini, present) as run:
        await run.work()
        accounts = await run.accounts()
        assert not accounts.errors(), accounts.errors()
        assert [side.explorer.committed_step for side in run.sides] == [mini.steps] * len(present)
        wanted = mini.train_rows or 1
        assert accounts.queued + accounts.leased < wanted
        assert accounts.trained > 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES, ids=["-".join(map(str, c.values())) for c in CASES])
def test_it_ends_as_it_should(case: dict[str, Any], tmp_path: Path) -> None:
    mini = mini_of(case, tmp_path / "job")
    asyncio.run(asyncio.wait_for(played(case, mini), DEADLINE_S))


def test_a_loop_that_spins_is_seen_at_once(tmp_path: Path) -> None:
    """As a bound that could not be reached once made it."""

    async def answered() -> bool:  # at once, so awaiting it never lets go of the loop
        return False

    async def spin() -> None:
        while not await answered():
            pass

    async def main() -> None:
        async with MiniRun(Mini(tmp_path / "job")) as run:
            await all_or_first_error(run.work(), spin())

    with pytest.raises(LoopHeld, match="held the loop"):
        asyncio.run(main())
