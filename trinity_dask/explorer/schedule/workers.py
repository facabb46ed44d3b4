"""The workers on which sub-tasks can run, and which of them takes the next one.

Invariant: a worker holds at most as many sub-tasks as it has lanes, and none while it is
down. Pure data: times come in as arguments.

A worker is an engine's (group ``rollout``) or one for blocking workflows (group ``runner``);
it is known by its slot. The next sub-task goes where it is expected to end first: to the worker
with the least measured seconds per sub-task, which are taken to double between an idle and a
full worker. Workers that differ by less than ``SAME_SPEED`` count as equally fast; among them the
emptiest one is chosen. Near the end of the work a slow worker is left idle if the faster ones,
busy now, will have done all that waits before the slow one could have ended a single
sub-task.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Optional

from trinity_dask.explorer.schedule.tasks import RunError

NO_WORKER = "NoWorker"
ROLLOUT = "rollout"
RUNNER = "runner"
GROUPS = (ROLLOUT, RUNNER)
SAME_SPEED = 1.25
# sub-tasks over which the measured seconds are averaged, about: at least so many, and half of
# what a worker holds, or one stall that hits all of them at once makes it a slow worker
MEMORY = 16
ROUNDING = 1e-6


@dataclass
class Worker:
    """One worker. ``lanes`` are the numbers of the places that it can give to sub-tasks."""

    name: str
    group: str = ROLLOUT
    lanes: tuple[int, ...] = ()
    up: bool = True
    running: dict[int, float] = field(default_factory=dict)  # lane -> start, seconds
    seconds: float = 0.0  # of one sub-task, as measured lately
    measured: int = 0
    response_tokens: int = 0  # sampled here so far, by what has ended
    _free: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._free = list(self.lanes)

    @property
    def capacity(self) -> int:
        return len(self.lanes)

    @property
    def free(self) -> int:
        return len(self._free) if self.up else 0

    def take(self, now: float) -> int:
        """Occupy the lowest free lane."""
        lane = heapq.heappop(self._free)
        self.running[lane] = now
        return lane

    def give_back(self, lane: int) -> None:
        if self.running.pop(lane, None) is not None:
            heapq.heappush(self._free, lane)

    def observe(self, seconds: float) -> None:
        """A sub-task took ``seconds`` here."""
        self.measured += 1
        weight = max(1 / self.measured, 1 / max(MEMORY, self.capacity // 2))
        self.seconds += weight * (seconds - self.seconds)

    def usual_s(self, now: float) -> float:
        """Seconds of a sub-task here; before any has ended, at least as long as one runs."""
        if self.measured or not self.running:
            return self.seconds
        return now - min(self.running.values())

    def done_within(self, horizon_s: float, now: float) -> int:
        """How many further sub-tasks this worker ends within ``horizon_s``.

        What is overdue is taken to need as long again.
        """
        elapsed = [now - start for start in self.running.values()]
        waits = [self.seconds - e if e < self.seconds else e for e in elapsed]
        waits += [0.0] * self.free
        left = (horizon_s - wait for wait in waits if wait < horizon_s)
        return sum(int(seconds / self.seconds + ROUNDING) for seconds in left)


def no_worker(workers: Workers, waited_s: float) -> RunError:
    """Why nothing was run in all that time."""
    names = ", ".join(worker.name for worker in workers) or "none is known"
    return RunError(
        NO_WORKER,
        f"no worker could take a sub-task within {waited_s:g} s (workers: {names}); see the "
        "logs of the rollout workers",
    )


class Workers:
    """All workers; lane numbers are unique among them and stay with their worker."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}
        self._n_lanes = 0

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def __getitem__(self, name: str) -> Worker:
        return self._workers[name]

    def up(self, name: str, capacity: int, group: str) -> Worker:
        """A worker serves (again). What it ran before must have been given back."""
        if capacity < 1:
            raise ValueError(f"worker {name!r} has {capacity} lanes; a worker has at least one")
        known = self._workers.get(name)
        if known is not None and known.capacity == capacity:
            known.up = True
            return known
        lanes = tuple(range(self._n_lanes, self._n_lanes + capacity))
        self._n_lanes += capacity
        worker = self._workers[name] = Worker(name, group, lanes)
        return worker

    def down(self, name: str) -> None:
        """A worker is gone; its speed is measured anew when it comes back."""
        worker = self._workers.get(name)
        if worker is not None:
            worker.up = False
            worker.seconds, worker.measured = 0.0, 0

    def choose(self, group: str, waiting: int, now: float) -> Optional[Worker]:
        """Where the next of ``waiting`` sub-tasks goes; None when it had better wait."""
        group_up = [p for p in self if p.group == group and p.up]
        free = [p for p in group_up if p.free]
        if not free:
            return None
        fastest = min((p.seconds for p in group_up if p.measured), default=0.0)

        def cost(worker: Worker) -> tuple[float, float]:
            ratio = worker.usual_s(now) / fastest if fastest else 1.0
            ratio = 1.0 if ratio < SAME_SPEED else ratio
            n = len(worker.running)
            return ratio * (1 + (n + 1) / worker.capacity), n / worker.capacity

        best = min(free, key=cost)
        return None if self._better_wait(best, group_up, waiting, now) else best

    @staticmethod
    def _better_wait(worker: Worker, others: list[Worker], waiting: int, now: float) -> bool:
        """Whether faster workers end all that waits before ``worker`` could end one of it."""
        horizon = worker.usual_s(now)
        faster = [p for p in others if p.measured and 0 < p.seconds * SAME_SPEED <= horizon]
        most = sum(p.capacity * (horizon / p.seconds + 1) for p in faster)
        if waiting > most:  # not near the end: no need to look closely
            return False
        return waiting <= sum(p.done_within(horizon, now) for p in faster)

    def look_again(self, group: str, now: float) -> Optional[float]:
        """When to choose again: a lane kept free on purpose must not stay so if a fast worker
        stops. None when no lane is free."""
        up = [p for p in self if p.group == group and p.up]
        if not any(p.free for p in up):
            return None
        return now + min((p.seconds for p in up if p.measured), default=1.0)
