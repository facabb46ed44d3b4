"""When weights move: the decisions of all four styles, without I/O.

Invariant: versions never fall (what the engines of one explorer serve, what is published,
what one trainer incarnation trains); a side that is stopped or lost is waited for by nobody
and counted as running by nobody; a wait that ends, however it ends, leaves no
``REQUIRE_SYNC`` behind.

``version`` is the trainer's step. ``progress`` counts explorer batches: the largest batch id
b such that every batch up to b has been trained on. ``published`` is the newest version that
lies in a file (methods ``checkpoint`` and ``memory``).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import Optional


class RunningStatus(Enum):
    RUNNING = "running"
    REQUIRE_SYNC = "require_sync"  # stands at a sync point
    STARVED = "starved"  # trainer only: waits for rows that only an explorer can make
    STOPPED = "stopped"  # for good, or never there; a trainer's last weights can still be sent


RUNNING, REQUIRE_SYNC = RunningStatus.RUNNING, RunningStatus.REQUIRE_SYNC
STARVED, STOPPED = RunningStatus.STARVED, RunningStatus.STOPPED


@dataclass
class ExplorerPosition:
    """One explorer as the trainer sees it."""

    status: RunningStatus = RUNNING
    version: int = -1  # its engines serve this one or a newer one; -1 = the start model
    required: int = 0  # batches that must be trained before its (next) boundary is passed
    final: bool = False  # waits for the last weights that its rows can give
    loading: Optional[int] = None  # the version that is on its way to its engines
    submitted: int = 0  # batches it has begun, over all incarnations of the job
    paced: bool = False  # waits, with nothing under way, until it may begin another one
    watching: bool = False  # takes newer weights under its running requests

    @property
    def live(self) -> bool:
        return self.status is not STOPPED


@dataclass
class SyncState:
    """Both sides' positions. Mutate through the event methods, then read the decisions."""

    style: str = "fixed"  # fixed | trainer_driven | explorer_driven | fully_async
    method: str = "nccl"  # nccl | checkpoint | memory
    interval: int = 1
    offset: int = 0
    max_staleness: Optional[int] = None  # train steps between sampling and training a row
    trainer: RunningStatus = STOPPED
    trainer_lost: bool = False  # its weights are gone with it
    trainer_version: int = 0
    progress: int = 0
    published: int = -1
    sending: int = 0  # transfers and writes for which the trainer must stand still
    rows_available: bool = False  # the buffer could serve the trainer's next step right now
    rows_taken: bool = False  # a starved trainer has its rows and waits for readers to end
    writes_blocked: bool = False  # an explorer waits for room in the buffer
    overdue: bool = False  # the trainer went on from its last sync point unseen
    explorers: dict[str, ExplorerPosition] = field(default_factory=dict)
    # batches that each explorer of the job had begun before this incarnation, back or not
    begun_before: dict[str, int] = field(default_factory=dict)

    # events: trainer ----------------------------------------------------------------
    def trainer_joined(self, version: int, progress: int = 0) -> None:
        """A trainer begins at ``version``. A new one may begin below where another died."""
        self.trainer, self.trainer_lost = RUNNING, False
        self.trainer_version, self.progress = version, progress

    def trainer_at_sync(self, version: int, progress: int) -> None:
        self._trainer_moves(version, progress)
        self.trainer, self.overdue = REQUIRE_SYNC, False

    def trainer_running(self) -> None:
        if self.trainer is REQUIRE_SYNC:
            self.overdue = any(self._behind(e) for e in self.live_explorers)
        self.rows_taken = False
        if self.trainer is not STOPPED:
            self.trainer = RUNNING

    def trainer_resuming(self) -> None:
        """Rows came: from now on nobody begins to read these weights."""
        self.rows_taken = True

    def trainer_starved(self, version: int, progress: int) -> None:
        self._trainer_moves(version, progress)
        self.trainer, self.rows_taken = STARVED, False

    def trainer_stopped(self, version: int, progress: int) -> None:
        self._trainer_moves(version, progress)
        self.trainer = STOPPED

    def trainer_died(self) -> None:
        self.trainer, self.trainer_lost = STOPPED, True

    def version_published(self, version: int) -> None:
        self.published = max(self.published, version)

    def _trainer_moves(self, version: int, progress: int) -> None:
        if version < self.trainer_version:
            raise AssertionError(
                f"the trainer's version fell from {self.trainer_version} to {version}"
            )
        self.trainer_version, self.progress = version, max(progress, self.progress)

    # events: explorers --------------------------------------------------------------
    def explorer_joined(self, name: str) -> None:
        """Known from now on. One that was stopped or lost begins anew, with the start model.

        Raises:
            ValueError: method nccl has its one explorer already.
        """
        known = self.explorers.get(name)
        if known is not None and known.live:
            return
        others = [n for n, e in self.explorers.items() if e.live and n != name]
        if self.method == "nccl" and others:
            raise ValueError(
                f"explorer {name!r} cannot join: synchronizer.sync_method=nccl serves one "
                f"explorer, and {others[0]!r} is there; use checkpoint or memory"
            )
        self.explorers[name] = ExplorerPosition(required=self.interval)

    def explorer_waiting(self, name: str, required: int, final: bool = False) -> None:
        explorer = self.explorers[name]
        if explorer.live:
            explorer.status, explorer.required, explorer.final = REQUIRE_SYNC, required, final

    def explorer_running(self, name: str, next_required: Optional[int] = None) -> None:
        """Its wait is over; ``next_required`` None leaves the boundary where it was."""
        explorer = self.explorers[name]
        explorer.final = False
        if explorer.live:
            explorer.status = RUNNING
        if next_required is not None:
            explorer.required = next_required

    def explorer_stopped(self, name: str) -> None:
        explorer = self.explorers.setdefault(name, ExplorerPosition())
        explorer.status, explorer.final, explorer.watching = STOPPED, False, False

    def load_ended(self, name: str, version: Optional[int]) -> None:
        """``version`` reached every engine of ``name``; None when it did not."""
        explorer = self.explorers[name]
        explorer.loading = None
        if version is None:
            return
        if version < explorer.version:
            raise AssertionError(
                f"the engines of {name!r} went from version {explorer.version} to {version}"
            )
        explorer.version = version

    # decisions: explorer ------------------------------------------------------------
    def should_sync(self, name: str, step: int) -> bool:
        """Whether the explorer drains and asks for weights after ``step``."""
        past = step - self.offset
        if self.style == "fully_async" or past <= 0 or past % self.interval:
            return False
        return self.style != "trainer_driven" or self.offer(name) is not None

    def answered(self, name: str) -> bool:
        """The waiting explorer may go on, with :meth:`offer` if there is one."""
        explorer = self.explorers[name]
        if explorer.loading is not None:
            return False
        if not explorer.live or self.trainer is STOPPED:
            return True
        if explorer.final:
            return self._exhausted(name)
        if self.style == "explorer_driven":
            return self.standing or self.published > explorer.version
        if self.style != "fixed":
            return True
        if len(self.explorers) > 1 and self.method != "nccl":
            return self.published > explorer.version or self._exhausted(name)
        if self.trainer is REQUIRE_SYNC:
            return self.progress >= explorer.required
        return self._exhausted(name)

    def _exhausted(self, name: str) -> bool:
        """Without new rows the trainer trains no more, and nobody else makes any.

        A starved trainer whose rows have just arrived is about to train on them.
        """
        if self.trainer is STOPPED:
            return True
        others = (e for n, e in self.explorers.items() if n != name)
        return self._hungry and all(e.status in (REQUIRE_SYNC, STOPPED) for e in others)

    @property
    def _hungry(self) -> bool:
        return self.trainer is STARVED and not (self.rows_available or self.rows_taken)

    @property
    def standing(self) -> bool:
        """The trainer's weights are there and do not change until it is let go."""
        if self.trainer is STARVED:
            return self._hungry
        return self.trainer is REQUIRE_SYNC or (self.trainer is STOPPED and not self.trainer_lost)

    def offer(self, name: str) -> Optional[int]:
        """The version that ``name`` can load now; None when there is nothing newer.

        The start model is version 0, so a trainer at step 0 has nothing to send.
        """
        explorer, version = self.explorers[name], self.published
        at_sync_points_only = self.style in ("trainer_driven", "fully_async") and not explorer.final
        ready = self.standing and not (at_sync_points_only and self.trainer is STARVED)
        if ready and not self.trainer_lost:
            version = max(version, self.trainer_version)
        return version if version > max(explorer.version, 0) else None

    def may_submit(self, name: str, step: int) -> Optional[bool]:
        """Whether ``name`` may begin its batch ``step`` without its rows getting too old.

        False: newer weights have to be taken first. None: not yet. With one train step per
        batch, the p-th batch of the run is trained at step p on weights of version p - 1, so
        rows of version v are p - 1 - v steps old then: p <= v + max_staleness + 1.
        """
        explorer = self.explorers[name]
        if self.max_staleness is None or self.style == "fixed" or not explorer.live:
            return True
        others = sum(n for other, n in self._begun.items() if other != name)
        fits = step + others <= max(explorer.version, 0) + self.max_staleness + 1
        if fits or self.trainer is STOPPED:
            return True
        news = self.offer(name) is not None
        if explorer.paced and self._hungry and not news:
            # nobody moves when a step needs more rows than the bound allows to be under way
            others_stand = (
                e.paced or e.status in (REQUIRE_SYNC, STOPPED) for e in self.explorers.values()
            )
            return True if all(others_stand) else None
        stands_here = self.style == "trainer_driven" and news
        return False if self.style == "explorer_driven" or stands_here else None

    # decisions: trainer -------------------------------------------------------------
    def sync_due(self, step: int) -> bool:
        """Whether the trainer stands still after ``step`` until it is let go."""
        if self.style == "explorer_driven":
            return any(e.status is REQUIRE_SYNC and not e.final for e in self.live_explorers)
        late = self.overdue and self.method == "nccl" and self.style != "fixed"
        return late or step % self.interval == 0

    @property
    def should_publish(self) -> bool:
        """At its sync point the trainer writes a file at once and goes on."""
        alone = self.style == "fixed" and len(self.explorers) == 1
        return self.method != "nccl" and not alone

    @property
    def trainer_brings(self) -> bool:
        """At its sync point the trainer brings its weights to the explorers that stand ready.
        A published version, and the weights of a trainer at rest, are fetched by an explorer."""
        return self.trainer is REQUIRE_SYNC and not self.should_publish

    @property
    def receiver(self) -> Optional[str]:
        """The explorer to which the trainer brings its weights next; None: nobody is ready."""
        if not self.trainer_brings:
            return None
        for name, explorer in self.explorers.items():
            ready = explorer.watching or (explorer.status is REQUIRE_SYNC and self.answered(name))
            free = explorer.live and explorer.loading is None
            if free and ready and self.offer(name) is not None:
                return name
        return None

    def may_fetch(self, name: str) -> Optional[int]:
        """The version that ``name`` can load by itself now."""
        return None if self.trainer_brings else self.offer(name)

    def may_pass(self, name: str) -> bool:
        """``name`` is answered, and the trainer is not about to bring it anything."""
        return self.answered(name) and not (self.trainer_brings and self.offer(name) is not None)

    @property
    def trainer_may_continue(self) -> bool:
        """At a sync point, and nobody needs exactly these weights any more."""
        if self.sending:
            return False
        # who waits for the very last weights wants the trainer to go on
        live = [e for e in self.live_explorers if not e.final or e.loading is not None]
        if not live or self.should_publish:
            return True
        if self.style == "fixed":
            return live[0].required > self.progress and live[0].loading is None
        if self.style == "explorer_driven":
            waiting = [e for e in live if e.status is REQUIRE_SYNC or e.loading is not None]
            return not any(self._behind(e) for e in waiting)
        return not self._behind(live[0]) or self.writes_blocked

    def _behind(self, explorer: ExplorerPosition) -> bool:
        return explorer.version < self.trainer_version

    # views --------------------------------------------------------------------------
    @property
    def _begun(self) -> dict[str, int]:
        """Batches that each explorer of the job has begun, over all incarnations."""
        here = {name: explorer.submitted for name, explorer in self.explorers.items()}
        names = here.keys() | self.begun_before.keys()
        return {n: max(here.get(n, 0), self.begun_before.get(n, 0)) for n in names}

    @property
    def positions(self) -> tuple[object, ...]:
        """How far either side has come: equal when nobody has moved on."""
        explorers = ((n, e.version, e.submitted) for n, e in self.explorers.items())
        return (self.trainer_version, self.progress, self.published, *explorers)

    def __str__(self) -> str:
        explorers = "; ".join(
            f"explorer {name!r} {e.status.value} at version {e.version}, requires {e.required}"
            for name, e in self.explorers.items()
        )
        return (
            f"trainer {self.trainer.value} at version {self.trainer_version}, batches trained "
            f"{self.progress}; {explorers or 'no explorer'}"
        )

    @property
    def live_explorers(self) -> list[ExplorerPosition]:
        return [e for e in self.explorers.values() if e.live]

    @property
    def engine_version(self) -> int:
        """The newest version that some explorer's engines serve; -1 = nothing sent yet."""
        return max((e.version for e in self.explorers.values()), default=-1)

    @property
    def model_version(self) -> int:
        """The newest version that was published or sent; the start model is 0."""
        return max(self.engine_version, self.published, 0)

    @property
    def explorer_status_counts(self) -> dict[RunningStatus, int]:
        counts = Counter(e.status for e in self.explorers.values())
        return {status: counts[status] for status in (RUNNING, REQUIRE_SYNC, STOPPED)}

    def next_required(self, step: int) -> int:
        """Batches the boundary after ``step`` requires."""
        base = max(step - self.offset, 0)
        return (base // self.interval + 1) * self.interval
