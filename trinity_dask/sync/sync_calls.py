"""The synchronizer's calls that go by Trinity-RFT's names: modules, statuses, versions.

Invariant: each of them is a view of, or an event for, the one
:class:`~trinity_dask.sync.state.SyncState`; none keeps a status of its own, and one
that waits restores what it set, however the wait ends.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Optional

from trinity_dask.config.schema import SynchronizerConfig
from trinity_dask.models.protocol import WeightUpdate
from trinity_dask.sync.hand_shake import HandShake
from trinity_dask.sync.module_watch import ModuleWatch
from trinity_dask.sync.state import REQUIRE_SYNC, RUNNING, STOPPED, RunningStatus
from trinity_dask.sync.sync_core import SyncCore

TRAINER = "trainer"


class SyncCalls(SyncCore):
    """Status and version calls. A status may be given as its string."""

    def __init__(self, cfg: SynchronizerConfig, job_dir: Optional[str], run_id: str) -> None:
        super().__init__(cfg, job_dir, run_id)
        self.checkpoint_shard_counter: Counter[int] = Counter()
        self._hands = HandShake(self.state)
        self._modules = ModuleWatch(self.module_died, self.last_module_gone)
        self._no_news = 0

    # modules --------------------------------------------------------------------------
    async def add_module(self, module_ref: Any, name: Optional[str] = None) -> None:
        """Watch a trainer or an explorer: an actor's handle, or an object with
        ``is_alive()``. ``name`` is ``trainer`` or the explorer's (default: the actor's slot,
        or the object's ``name``)."""
        found = name or getattr(module_ref, "slot", None) or getattr(module_ref, "name", None)
        self._modules.add(str(found or module_ref), module_ref)

    async def module_died(self, name: str) -> None:
        """Not RUNNING, and not waited for, any more."""
        if name in self.state.explorers:
            self.state.explorer_stopped(name)
            self.state.load_ended(name, None)
            self._hands.vanished("explorer")
            self._carrier.sweep(self.state)
        elif name.startswith(TRAINER):
            self.state.trainer_died()
            self._hands.vanished(TRAINER)
        await self._notify()

    async def last_module_gone(self) -> None:
        """Everybody has left: the files go, and so does a synchronizer that is shared."""
        await asyncio.to_thread(self._carrier.shelf.remove_all)
        if self.on_abandoned is not None:
            await self.on_abandoned()

    # statuses -------------------------------------------------------------------------
    @property
    def trainer_status(self) -> RunningStatus:
        return self.state.trainer

    @property
    def explorer_status_counts(self) -> dict[RunningStatus, int]:
        return self.state.explorer_status_counts

    @property
    def model_version(self) -> int:
        return self.state.model_version

    async def get_trainer_status(self) -> RunningStatus:
        return self.state.trainer

    async def set_trainer_status(self, status: RunningStatus | str) -> None:
        status = RunningStatus(status)
        if self.state.trainer is STOPPED and status is not STOPPED:
            self.state.trainer_joined(self.state.trainer_version, self.state.progress)
        self.state.trainer = status
        await self._notify()

    async def trainer_requires_weight_sync(self) -> Optional[bool]:
        """None: the trainer has stopped."""
        return None if self.state.trainer is STOPPED else self.state.trainer is REQUIRE_SYNC

    async def get_explorer_status_counts(self) -> dict[RunningStatus, int]:
        return self.state.explorer_status_counts

    async def set_explorer_status(
        self,
        status: RunningStatus | str,
        old_status: Optional[RunningStatus | str] = None,
        name: Optional[str] = None,
    ) -> None:
        """Explorer ``name`` goes from ``old_status`` to ``status``. Without a name: any that
        has the old status; without both, a new one joins.

        Raises:
            ValueError: both statuses are equal, or no explorer (or not ``name``) has the old.
        """
        status = RunningStatus(status)
        if old_status is not None and RunningStatus(old_status) is status:
            raise ValueError(f"old_status and status are both {status.value!r}")
        if old_status is None:
            name = name or f"explorer-{len(self.state.explorers)}"
            self.state.explorer_joined(name)
        else:
            name = self._with_status(RunningStatus(old_status), name)
        if status is STOPPED:
            self.state.explorer_stopped(name)
        else:
            self.state.explorers[name].status = status
        await self._notify()

    def _with_status(self, status: RunningStatus, name: Optional[str]) -> str:
        found = [n for n, e in self.state.explorers.items() if e.status is status]
        if (name or (found and found[0])) not in found:
            raise ValueError(
                f"no explorer {'' if name is None else repr(name) + ' '}is {status.value!r}; "
                f"they are { {n: e.status.value for n, e in self.state.explorers.items()} }"
            )
        return name or found[0]

    async def explorer_requires_sync(self) -> bool:
        return any(e.status is REQUIRE_SYNC for e in self.state.live_explorers)

    # versions -------------------------------------------------------------------------
    async def get_latest_model_version(self) -> int:
        """The newest version that was published or sent; the start model is 0."""
        return self.state.model_version

    async def set_model_state_dict(
        self, model_state_dict: Mapping[str, Any] | str | None, trainer_step: int
    ) -> None:
        """Publish version ``trainer_step``: tensors by name, or a safetensors file or
        directory, or None for a version whose weights lie elsewhere.

        Raises:
            ValueError: a newer version is published already.
            FileNotFoundError: no weights at the path.
        """
        if trainer_step < self.state.published:
            raise ValueError(
                f"version {trainer_step} is older than {self.state.published}, which is "
                "published; versions only grow"
            )
        if model_state_dict is not None:
            await self._carrier.put(trainer_step, model_state_dict)
        self.state.version_published(trainer_step)
        await self._notify()

    async def set_model_state_dict_with_step_num(
        self, step_num: int, world_size: Optional[int] = None
    ) -> int:
        """A shard of the checkpoint of ``step_num`` is written; with the last of
        ``world_size`` (None: 1) its weights are published. Returns ``step_num``."""
        self.checkpoint_shard_counter[step_num] += 1
        if self.checkpoint_shard_counter[step_num] < (world_size or 1):
            return step_num
        del self.checkpoint_shard_counter[step_num]
        await self.set_model_state_dict(self._checkpoint_path(step_num), step_num)
        return step_num

    def _checkpoint_path(self, step: int) -> Optional[str]:
        """The Hugging Face export of the checkpoint of ``step``, if there is one."""
        path = Path(self.job_dir or ".") / f"global_step_{step}" / "huggingface"
        return str(path) if any(path.glob("*.safetensors")) else None

    async def get_model_state_dict(self) -> tuple[Optional[dict[str, Any] | str], int]:
        """``(state, version)`` of the newest published version: tensors by name in method
        ``memory``, else the path of the file; None when there is none."""
        version = self.state.published
        published = self._carrier.shelf.get(version)
        if published is None:
            return None, max(version, 0)
        if self.cfg.sync_method != "memory":
            return published.path, version
        return await asyncio.to_thread(_tensors, published.path), version

    async def get_model_state_dict_iterator(self) -> AsyncIterator[tuple[str, Any]]:
        """The tensors of :meth:`get_model_state_dict` one after the other, with their names;
        none when there is no version."""
        from trinity_dask.weights.files import read_safetensors
        from trinity_dask.weights.urls import fetched

        shelf = self._carrier.shelf
        published = shelf.get(self.state.published)
        if published is None:
            return
        options = shelf.storage_options
        update = WeightUpdate(
            published.version, "checkpoint", path=published.path, storage_options=options
        )
        with fetched(update) as here:
            tensors = iter(read_safetensors(str(here.path)))
            while (pair := await asyncio.to_thread(next, tensors, None)) is not None:
                yield pair

    async def get_latest_model_path(self, use_huggingface: bool = False) -> Optional[str]:
        """The file of the newest published version, or, with ``use_huggingface``, the Hugging
        Face export of its checkpoint; None when there is none."""
        if use_huggingface:
            return self._checkpoint_path(self.state.model_version)
        published = self._carrier.shelf.get(self.state.published)
        return None if published is None else published.path

    async def get_state_dict_meta(self) -> Optional[list[tuple[str, str, tuple[int, ...]]]]:
        """``(name, dtype, shape)`` of each tensor, or None while nobody has any."""
        published = self._carrier.shelf.get(self.state.published)
        if published is not None:
            from trinity_dask.weights.files import file_meta

            meta = await asyncio.to_thread(file_meta, published.path)
        elif self._carrier.trainer.rank0 is not None:
            meta = await self._carrier.trainer.tensor_meta()
        else:
            return None
        return [(m.name, m.dtype, m.shape) for m in meta]

    async def notify_no_new_model_state_dict(self) -> None:
        """Explorers that wait for a version are told that there is none."""
        self._no_news += 1
        await self._notify()

    async def wait_new_model_state_dict(
        self, current_version: int, name: Optional[str] = None
    ) -> int:
        """Wait for a version above ``current_version``; the newest one is returned, which is
        the same when the trainer has stopped or says that there is none.

        Meanwhile the explorer (``name``, or any that is RUNNING) counts as REQUIRE_SYNC.

        Raises:
            ValueError: ``current_version`` is above the newest version.
            TimeoutError: not within ``sync_timeout_s``; the explorer is RUNNING again.
        """
        state, told = self.state, self._no_news
        if current_version > state.model_version:
            raise ValueError(
                f"current_version={current_version} is above the newest, {state.model_version}"
            )

        def ended() -> bool:
            stopped = state.trainer is STOPPED or self._no_news > told
            return stopped or state.model_version > current_version

        waiting = self._any_running(name)
        if waiting is not None:
            state.explorer_waiting(waiting, state.explorers[waiting].required)
        try:
            await self._notify()
            await self._wait(ended, lambda: f"a version above {current_version}")
        finally:
            if waiting is not None:
                state.explorer_running(waiting)
            await self._notify()
        return state.model_version

    def _any_running(self, name: Optional[str]) -> Optional[str]:
        names = [n for n, e in self.state.explorers.items() if e.status is RUNNING]
        return name if name in names else next(iter(names), None)


def _tensors(path: str) -> dict[str, Any]:
    """Copies: the file may hold another version later."""
    from trinity_dask.weights.files import read_safetensors
    from trinity_dask.weights.shared_memory import looking_at

    with looking_at(path):
        return {name: tensor.clone() for name, tensor in read_safetensors(path)}
