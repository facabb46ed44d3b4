"""Where sub-tasks go, on engines that only exist in time.

Invariant: the clock is simulated, so the numbers are exact and the machine does not matter.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np
import pytest
from placement_support import shortest_s

from trinity_dask.explorer.schedule.policy import Cancel, SchedulePolicy, Submit
from trinity_dask.explorer.schedule.state import SchedulerState
from trinity_dask.explorer.schedule.tasks import AttemptOutcome, Status
from trinity_dask.explorer.schedule.workers import ROLLOUT, Workers
from trinity_dask.workflows import Task

Latency = Callable[[int, float], float]  # worker, load when it starts -> seconds


class Simulation:
    """Engines with a latency of their own, driven by the scheduler's instructions."""

    def __init__(self, slots: int, latency: Latency, n_engines: int) -> None:
        self.state = SchedulerState(SchedulePolicy(batch_timeout_s=1e9, attempt_timeout_s=1e8))
        self.latency = latency
        self.now = 0.0
        self.ends: list[tuple[float, int, float]] = []
        for index in range(n_engines):
            self.follow(self.state.worker_up(f"engine-{index}", slots, 0.0))

    def follow(self, instructions) -> None:
        for submit in instructions:
            assert not isinstance(submit, Cancel)
            if isinstance(submit, Submit):
                worker = self.state.workers[submit.worker]
                seconds = self.latency(int(submit.worker[7:]), len(worker.running))
                heapq.heappush(self.ends, (self.now + seconds, submit.attempt_id, seconds))

    def schedule(self, batch: int, n: int) -> None:
        self.follow(self.state.schedule(batch, [Task("w")] * n, self.now))

    def turn(self) -> None:
        """Until the next thing happens."""
        due = self.state.next_deadline()
        assert due is not None
        if self.ends and self.ends[0][0] <= due:
            self.now, attempt, seconds = heapq.heappop(self.ends)
            outcome = AttemptOutcome(Status(1, 1, [{}]), (), seconds)
            self.follow(self.state.finished(attempt, outcome, b"", self.now))
        else:
            self.now = due
            self.follow(self.state.tick(due))

    def run(self, batch: int, n: int) -> float:
        """Seconds that a batch of ``n`` sub-tasks takes."""
        started = self.now
        self.schedule(batch, n)
        while not self.state.batches[batch].complete:
            self.turn()
        self.state.drain(batch)
        return self.now - started


@pytest.mark.parametrize("slots", [1, 4, 16])
@pytest.mark.parametrize("n", [8, 20, 40, 64, 100])
@pytest.mark.parametrize("speeds", [[1.0, 3.0], [1.0, 1.0, 3.0], [1.0, 3.0, 3.0], [1.0, 2.0]])
def test_engines_of_unequal_speed_finish_a_batch_together(slots, n, speeds):
    simulation = Simulation(slots, lambda worker, load: speeds[worker], len(speeds))
    simulation.run(0, 4 * slots * len(speeds))  # the speeds are learned
    for batch in (1, 2, 3):
        assert simulation.run(batch, n) <= 1.15 * shortest_s(n, slots, speeds)


@pytest.mark.parametrize(("slots", "n"), [(1, 32), (4, 64), (4, 128)])
def test_the_first_batch_already_is_close_to_the_ideal(slots, n):
    simulation = Simulation(slots, lambda worker, load: (1.0, 3.0)[worker], 2)
    assert simulation.run(0, n) <= 1.15 * shortest_s(n, slots, [1.0, 3.0])


def test_engines_that_slow_down_under_load_share_equally():
    simulation = Simulation(64, lambda worker, load: 1 + load / 8, 4)
    simulation.run(0, 256)
    simulation.schedule(1, 64)
    running = [len(worker.running) for worker in simulation.state.workers]
    assert max(running) - min(running) <= 1


def test_the_noise_of_long_tailed_latencies_leaves_no_engine_idle():
    draws = np.random.default_rng(0)
    sigma = np.log(10) / 2.326  # median 1 s, 99th percentile 10 s
    simulation = Simulation(16, lambda worker, load: float(draws.lognormal(0, sigma)), 4)
    simulation.schedule(0, 400)
    busy = 0.0
    while len(simulation.state.pending) > 64:
        before = simulation.now
        in_use = simulation.state.busy
        simulation.turn()
        busy += in_use * (simulation.now - before)
    assert busy / (64 * simulation.now) > 0.99


def test_a_place_has_lanes():
    with pytest.raises(ValueError, match="has 0 lanes"):
        Workers().up("engine-0", 0, "rollout")


def test_one_stall_of_all_it_runs_does_not_make_a_place_slow():
    """Half a batch ran while the worker stood still; the next batch still goes to both."""
    workers = Workers()
    for name in ("engine-0", "engine-1"):
        worker = workers.up(name, 256, ROLLOUT)
        for _ in range(256):
            worker.observe(0.30)
    for _ in range(32):
        workers["engine-1"].observe(0.55)
    taken = {"engine-0": 0, "engine-1": 0}
    for waiting in range(64, 0, -1):
        worker = workers.choose(ROLLOUT, waiting, now=0.0)
        worker.take(0.0)
        taken[worker.name] += 1
    assert taken == {"engine-0": 32, "engine-1": 32}
