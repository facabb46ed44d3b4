"""Where the runs of one job meet: a trainer and its explorers, each started by its own driver.

Invariant: on a control worker there is one meeting per job directory. Whoever comes first makes
the parts they share (experience buffer and synchronizer, as Dask actors), the last one to
leave releases them. Everybody's end is told to the others, with its reason, so nobody waits
for one that is gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Optional

from trinity_dask.aio import Changes
from trinity_dask.buffer.experience_buffer import ExperienceBuffer
from trinity_dask.cluster.actors import ActorRef, create_actor, release_actor
from trinity_dask.cluster.rpc import local_actor
from trinity_dask.cluster.slots import CONTROL
from trinity_dask.config.schema import Config
from trinity_dask.launcher.status import End
from trinity_dask.sync.synchronizer import Synchronizer

if TYPE_CHECKING:
    from trinity_dask.trainer.trainer import Trainer

log = logging.getLogger("trinity_dask.stage")

CREATE_TIMEOUT_S = 60.0
VANISH_TIMEOUT_S = 20.0
RECHECK_S = 1.0
TRAINER = "trainer"
OWN_PATIENCE = ("peer_timeout_s", "meet_timeout_s", "max_read_timeout_s")  # by each side's work
# of section model: the weights, and what makes the log-probs that one side samples and the
# other one trains on
SHARED_MODEL = (
    "model_path",
    "dtype",
    "temperature",
    "top_p",
    "top_k",
    "max_model_len",
    "max_prompt_tokens",
    "max_response_tokens",
)


class PeerLost(RuntimeError):
    """The other side of the job ended, or did not come; this side ends with it."""


class CannotJoin(RuntimeError):
    """This run does not fit the ones that are there already."""


_meetings: dict[str, Meeting] = {}
_opening: Optional[asyncio.Lock] = None


async def local_part(cls: type, *args: Any, key: str) -> tuple[Any, ActorRef]:
    """A Dask actor on this very worker: its instance, and what keeps it alive."""
    ref = await create_actor(cls, *args, slot=CONTROL, key=key, timeout=CREATE_TIMEOUT_S)
    instance = local_actor(key)
    if instance is None:
        await release_actor(ref)
        raise RuntimeError(
            f"{cls.__name__} was created at {ref.handle.address}, not on this control "
            "worker; exactly one worker may carry the control slot"
        )
    return instance, ref


async def join(cfg: Config, member: str, run_id: str) -> Meeting:
    """Take part in the job of ``cfg`` as ``member``: ``"trainer"`` or an explorer's name.

    Raises:
        CannotJoin: there is such a member, or its settings differ from those of the others.
        TimeoutError: an earlier meeting of this job does not come to its end.
    """
    global _opening
    _opening = _opening or asyncio.Lock()
    async with _opening:
        job = str(cfg.job_dir)
        known = _meetings.get(job)
        if known is not None and known.ending:
            await known.wait_gone(VANISH_TIMEOUT_S)
            known = None
        if known is None:
            known = await Meeting.open(cfg, run_id)
            _meetings[job] = known
        known.add(cfg, member)
    return known


class Meeting:
    """The members of one job and what they share. Use :func:`join`."""

    def __init__(self, cfg: Config, parts: tuple[Any, Any], refs: tuple[ActorRef, ...]) -> None:
        self.job = str(cfg.job_dir)
        self.buffer: ExperienceBuffer = parts[0]
        self.synchronizer: Synchronizer = parts[1]
        self.trainer: Optional[Trainer] = None  # once it is prepared
        self.members: dict[str, Optional[End]] = {}  # None: live
        self._refs = refs
        self._settings = dict(shared_settings(cfg))
        self._owner = ""
        self._writing: set[str] = set()
        self._present: set[str] = set()
        self._started = {TRAINER}
        self._changes = Changes()

    @classmethod
    async def open(cls, cfg: Config, run_id: str) -> Meeting:
        """Make the shared parts."""
        store = cfg.buffer.trainer_input.experience_buffer
        buffer, first = await local_part(ExperienceBuffer, store, key=f"{run_id}-buffer")
        try:
            synchronizer, second = await local_part(
                Synchronizer,
                cfg.synchronizer,
                str(cfg.job_dir),
                run_id,
                key=f"{run_id}-synchronizer",
            )
        except BaseException:
            await release_actor(first)
            raise
        return cls(cfg, (buffer, synchronizer), (first, second))

    # membership -----------------------------------------------------------------------
    def add(self, cfg: Config, member: str) -> None:
        if member in self._present:  # one that ended and left may come back
            raise CannotJoin(f"{member!r} of {self.job} is there already; give another name")
        differing = sorted(
            f"{key}={value!r} here, {self._settings.get(key)!r} there"
            for key, value in shared_settings(cfg)
            if self._settings.get(key) != value
        )
        if differing:
            raise CannotJoin(
                f"{member!r} does not fit {self._owner!r} of {self.job}, which was there first: "
                f"{'; '.join(differing[:5])}. Start both with the same values"
            )
        self._owner = self._owner or member
        self.members[member] = None
        self._present.add(member)
        if member != TRAINER:
            self._writing.add(member)

    async def leave(self, member: str, end: End) -> None:
        """``member`` is gone; the last one takes the shared parts with it."""
        await self.ended(member, end)
        if member not in self._started and len(self.explorers) > 1:
            self.members.pop(member, None)  # it was refused, or failed before it did anything
        await self.writes_end(member)
        self._present.discard(member)
        if not self._present:
            _meetings.pop(self.job, None)
            await self.synchronizer.close()
            for ref in self._refs:
                await release_actor(ref)
        self._changes.notify()

    def started(self, member: str) -> None:
        """``member`` explores; from now on its end matters to the others."""
        self._started.add(member)

    async def ended(self, member: str, end: End) -> None:
        """``member`` has ended its work (the first word counts); it may still answer calls."""
        self.members[member] = self.members.get(member) or end
        self._changes.notify()

    async def writes_end(self, member: str) -> None:
        """``member`` commits no more. After the last explorer the buffer is closed."""
        self._writing.discard(member)
        if not self._writing:
            await self.buffer.close_writes()

    @property
    def explorers(self) -> dict[str, Optional[End]]:
        return {name: end for name, end in self.members.items() if name != TRAINER}

    @property
    def ending(self) -> bool:
        """Nothing will be done any more: the trainer, or every explorer, has ended."""
        explorers = self.explorers
        all_ended = bool(explorers) and None not in explorers.values()
        return self.members.get(TRAINER) is not None or all_ended

    # waiting --------------------------------------------------------------------------
    async def trainer_is_ready(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._changes.notify()

    async def wait_trainer(self, timeout_s: float) -> Trainer:
        """The prepared trainer.

        Raises:
            PeerLost: none within ``timeout_s`` seconds, or it failed before it was ready.
        """
        await self._until(
            lambda: self.trainer is not None or self.members.get(TRAINER) is not None,
            timeout_s,
            f"no trainer of {self.job} was ready within synchronizer.peer_timeout_s = "
            f"{timeout_s:g} s; start one with mode=train and the same name on this scheduler, or "
            "explore alone with synchronizer.peer_timeout_s=0",
        )
        end = self.members.get(TRAINER)
        if self.trainer is None or (end is not None and end.outcome != "done"):
            verbs = {"failed": "failed", "interrupted": "was interrupted", "done": "has ended"}
            what = "is gone" if end is None else verbs[end.outcome]
            what += f": {end.message}" if end is not None and end.message else ""
            raise PeerLost(f"the trainer of {self.job} {what}")
        return self.trainer

    async def wait_explorer(self, timeout_s: float) -> None:
        """Until an explorer has joined. Raises PeerLost after ``timeout_s`` seconds."""
        await self._until(
            lambda: bool(self.explorers),
            timeout_s,
            f"no explorer of {self.job} joined within synchronizer.peer_timeout_s = "
            f"{timeout_s:g} s; start one with mode=explore and the same name on this scheduler, "
            "or train what is stored with synchronizer.peer_timeout_s=0",
        )

    async def wait_trainer_end(self) -> End:
        await self._until(lambda: self.members.get(TRAINER) is not None)
        end = self.members[TRAINER]
        assert end is not None
        return end

    async def wait_explorers_end(self) -> tuple[str, End]:
        """Until every explorer that joined has ended; the worst end, and whose it is."""
        await self._until(lambda: bool(self.explorers) and None not in self.explorers.values())
        ends = [(name, end) for name, end in self.explorers.items() if end is not None]
        rank = {"failed": 0, "interrupted": 1, "done": 2}
        return min(ends, key=lambda entry: rank[entry[1].outcome])

    async def wait_explorers_gone(self, timeout_s: float) -> None:
        """Until no explorer needs the trainer any more (they evaluate its last weights)."""
        left = self._present - {TRAINER}
        await self._until(
            lambda: not self._present - {TRAINER},
            timeout_s,
            f"explorers {sorted(left)} did not end within {timeout_s:g} s after the trainer",
        )

    async def wait_gone(self, timeout_s: float) -> None:
        await self._until(
            lambda: not self._present,
            timeout_s,
            f"{sorted(self._present)} of {self.job} are still ending; try again when they are gone",
        )

    async def _until(
        self,
        ready: Callable[[], bool],
        timeout_s: Optional[float] = None,
        message: str = "",
    ) -> None:
        if not await self._changes.until(ready, timeout_s, RECHECK_S):
            raise PeerLost(message)


def shared_settings(cfg: Config) -> Iterator[tuple[str, Any]]:
    """What every member of a job must have set alike."""
    for key in SHARED_MODEL:
        yield f"model.{key}", getattr(cfg.model, key)
    for key, value in asdict(cfg.model.lora).items():
        if key != "merge_export":  # how the trainer writes it, not what it is
            yield f"model.lora.{key}", value
    for key, value in asdict(cfg.algorithm).items():
        if key != "optimizer":  # of the trainer alone
            yield f"algorithm.{key}", value
    for key, value in asdict(cfg.synchronizer).items():
        if key not in OWN_PATIENCE:
            yield f"synchronizer.{key}", value
    for key, value in asdict(cfg.buffer.trainer_input.experience_buffer).items():
        if key not in OWN_PATIENCE:
            yield f"buffer.trainer_input.experience_buffer.{key}", value
