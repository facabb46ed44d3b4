"""Trinity-RFT's synchronizer: its calls as views of, and events for, the real one's state.

Invariant: no status and no version is kept here. A call that waits restores what it set,
however the wait ends; a module that dies is RUNNING no more and is waited for by nobody.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any, Optional

from distributed import Client

from trinity_dask.cluster.actors import create_actor
from trinity_dask.cluster.context import worker_client
from trinity_dask.cluster.placement import wait_until_alive
from trinity_dask.cluster.rpc import ActorHandle, ActorLost, rpc
from trinity_dask.cluster.slots import CONTROL
from trinity_dask.compat.remote import CREATE_TIMEOUT_S, RemoteActor
from trinity_dask.config.schema import Config
from trinity_dask.models.protocol import WeightUpdate
from trinity_dask.sync.state import REQUIRE_SYNC, RUNNING, STOPPED, RunningStatus
from trinity_dask.sync.synchronizer import Synchronizer as RealSynchronizer

PERIOD_S = 1.0
PING_TIMEOUT_S = 5.0
SIDES = ("trainer", "explorer")


class ReadyCondition:
    """The synchronizer's changes with the calls of an :class:`asyncio.Condition`.

    Everything runs on one event loop, so holding it excludes nobody and costs nothing.
    """

    def __init__(self, real: RealSynchronizer) -> None:
        self._real = real
        self.told = 0  # how often everybody was woken

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, *error: object) -> None:
        pass

    def notify_all(self) -> None:
        self.told += 1
        self._real.notify()

    async def wait(self) -> bool:
        told = self.told
        return await self.wait_for(lambda: self.told > told)

    async def wait_for(self, predicate: Callable[[], bool]) -> bool:
        """Raises TimeoutError after ``synchronizer.sync_timeout_s``."""
        await self._real.wait(predicate, lambda: "a change of the synchronizer")
        return True


class Synchronizer:
    """Made from ``config`` for ``module_ref`` (the trainer or explorer that asks first).

    ``real`` is the synchronizer that it stands for; None makes one, in ``config.job_dir``.
    Explorer calls that name nobody are about any explorer in the right status.
    """

    def __init__(
        self, config: Config, module_ref: Any, real: Optional[RealSynchronizer] = None
    ) -> None:
        self.config = config
        self.real = real or RealSynchronizer(config.synchronizer, config.job_dir, config.name)
        self.checkpoint_shard_counter: Counter[int] = Counter()
        self._ready_condition = ReadyCondition(self.real)
        self._modules: dict[str, Any] = {}
        self._watch: Optional[asyncio.Task[None]] = None
        self._registered: Optional[str] = None
        self._here: set[str] = set()  # sides that wait in ready_to_nccl_sync
        self._met = 0
        if module_ref is not None:
            self._modules[_name_of(module_ref)] = module_ref
            with suppress(RuntimeError):  # an actor is made in a thread; a later call begins it
                self._watch_modules()

    # modules --------------------------------------------------------------------------
    async def add_module(self, module_ref: Any) -> None:
        """Watch a trainer or an explorer: an actor, or an object with ``is_alive()``. Its name
        is its slot or its ``name``. With the last one the shared actor goes too."""
        self._modules[_name_of(module_ref)] = module_ref
        self._watch_modules()

    def _watch_modules(self) -> None:
        if self._watch is None or self._watch.done():
            self._watch = asyncio.get_running_loop().create_task(self._check_modules())

    async def _check_modules(self) -> None:
        while self._modules:
            await asyncio.sleep(PERIOD_S)  # the period of the heartbeat, not a wait for anyone
            asked = dict(self._modules)
            alive = await asyncio.gather(*map(_is_alive, asked.values()))
            for name, lives in zip(asked, alive, strict=True):
                if lives:
                    continue
                del self._modules[name]
                if name in self.real.state.explorers:
                    self.real.state.explorer_stopped(name)
                elif name.startswith("trainer"):
                    self.real.state.trainer_died()
                self.real.notify()
        await self.real.close()
        if self._registered is not None:
            await (await worker_client()).unpublish_dataset(self._registered)

    # statuses -------------------------------------------------------------------------
    trainer_status = property(attrgetter("real.state.trainer"))
    explorer_status_counts = property(attrgetter("real.state.explorer_status_counts"))
    model_version = property(attrgetter("real.state.model_version"))

    @property
    def model_state_dict(self) -> Any:
        return self.get_model_state_dict()[0]

    @property
    def model_path(self) -> Optional[str]:
        published = self.real.published
        return None if published is None else published.path

    def get_trainer_status(self) -> RunningStatus:
        return self.real.state.trainer

    async def set_trainer_status(self, status: RunningStatus | str) -> None:
        state, status = self.real.state, RunningStatus(status)
        if state.trainer is STOPPED and status is not STOPPED:
            state.trainer_joined(state.trainer_version, state.progress)
        state.trainer = status
        if status is STOPPED:
            self._ready_condition.notify_all()
        self.real.notify()

    def trainer_requires_weight_sync(self) -> Optional[bool]:
        """None: the trainer has stopped."""
        status = self.real.state.trainer
        return None if status is STOPPED else status is REQUIRE_SYNC

    def get_explorer_status_counts(self) -> dict[RunningStatus, int]:
        return self.explorer_status_counts

    async def set_explorer_status(
        self, status: RunningStatus | str, old_status: Optional[RunningStatus | str] = None
    ) -> None:
        """An explorer goes from ``old_status`` to ``status``; without the old, one joins.

        Raises:
            ValueError: both are equal, or no explorer has the old one.
        """
        state, status = self.real.state, RunningStatus(status)
        if old_status is None:
            name = f"explorer-{len(state.explorers)}"
            state.explorer_joined(name)
        elif RunningStatus(old_status) is status:
            raise ValueError(f"old_status and status are both {status.value!r}")
        else:
            old, known = (
                RunningStatus(old_status),
                {n: e.status for n, e in state.explorers.items()},
            )
            name = next((n for n, has in known.items() if has is old), "")
            if not name:
                values = {n: has.value for n, has in known.items()}
                raise ValueError(f"no explorer is {old.value!r}; they are {values}")
        if status is STOPPED:
            state.explorer_stopped(name)
        else:
            state.explorers[name].status = status
        self.real.notify()

    def explorer_requires_sync(self) -> bool:
        return self.explorer_status_counts[REQUIRE_SYNC] > 0

    # versions -------------------------------------------------------------------------
    async def get_latest_model_version(self) -> int:
        """The newest version that was published or sent; the start model is 0."""
        return self.model_version

    async def get_latest_model_path(self, use_huggingface: bool = False) -> Optional[str]:
        """The file of the newest published version, or the Hugging Face export of its
        checkpoint; None when there is none."""
        return self._export(self.model_version) if use_huggingface else self.model_path

    def _export(self, step: int) -> Optional[str]:
        path = Path(self.config.job_dir or ".", f"global_step_{step}", "huggingface")
        return str(path) if any(path.glob("*.safetensors")) else None

    async def set_model_state_dict(
        self, model_state_dict: Mapping[str, Any] | str | None, trainer_step: int
    ) -> None:
        """Publish version ``trainer_step``: tensors by name, a safetensors file or directory,
        or None for one whose weights lie elsewhere.

        Raises:
            ValueError: a newer version is published already.
            FileNotFoundError: no weights at the path.
        """
        if model_state_dict is None:
            self.real.state.version_published(trainer_step)
        else:
            await self.real.put(trainer_step, model_state_dict)
        self._ready_condition.notify_all()

    async def set_model_state_dict_with_step_num(
        self, step_num: Optional[int] = None, world_size: Optional[int] = None
    ) -> int:
        """Publish the checkpoint of ``step_num`` (default: the newest), with ``world_size`` once
        all its shards were reported. Returns its step.

        Raises:
            ValueError: ``world_size`` without ``step_num``, or there is no checkpoint.
        """
        if step_num is None:
            steps = Path(self.config.job_dir or ".").glob("global_step_*")
            found = [int(path.name.rpartition("_")[2]) for path in steps]
            step_num = max((step for step in found if self._export(step)), default=None)
            if step_num is None or world_size is not None:
                raise ValueError(
                    f"step_num is needed with world_size={world_size} and {len(found)} "
                    f"checkpoints in {self.config.job_dir}"
                )
        self.checkpoint_shard_counter[step_num] += 1
        if self.checkpoint_shard_counter[step_num] >= (world_size or 1):
            del self.checkpoint_shard_counter[step_num]
            await self.set_model_state_dict(self._export(step_num), step_num)
        return step_num

    def get_model_state_dict(self) -> tuple[Any, int]:
        """``(state, version)`` of the newest published version: copies of the tensors by name
        in method ``memory``, else the path of their file; None when there is none."""
        published = self.real.published
        if published is None:
            return None, max(self.real.state.published, 0)
        if self.config.synchronizer.sync_method != "memory":
            return published.path, published.version
        from trinity_dask.weights.files import looking_at, read_safetensors

        with looking_at(published.path):  # it may hold another version later
            tensors = {name: t.clone() for name, t in read_safetensors(published.path)}
        return tensors, published.version

    def get_model_state_dict_iterator(self) -> Iterator[tuple[str, Any]]:
        """The tensors of the newest published version with their names, one at a time."""
        from trinity_dask.weights.files import fetched, read_safetensors

        published = self.real.published
        if published is None:
            return
        options = dict(self.config.synchronizer.storage_options)
        update = WeightUpdate(
            published.version, "checkpoint", path=published.path, storage_options=options
        )
        with fetched(update) as here:
            yield from read_safetensors(str(here.path))

    async def get_state_dict_meta(self) -> Optional[list[tuple[str, str, tuple[int, ...]]]]:
        """``(name, dtype, shape)`` of each tensor, or None while nobody has any."""
        from trinity_dask.weights.files import file_meta

        if self.real.published is not None:
            meta = await asyncio.to_thread(file_meta, self.real.published.path)
        elif self.real.transfers.rank0 is not None:
            meta = await self.real.transfers.tensor_meta()
        else:
            return None
        return [(m.name, m.dtype, m.shape) for m in meta]

    async def notify_no_new_model_state_dict(self) -> None:
        """Explorers that wait for a version are told that there is none."""
        self._ready_condition.notify_all()

    async def wait_new_model_state_dict(self, current_version: int, no_wait: bool = False) -> int:
        """The newest version, waiting (unless ``no_wait``) for the next event when that is
        ``current_version``; it may be the same when there is none or the trainer has stopped.

        Meanwhile an explorer that is RUNNING counts as REQUIRE_SYNC.

        Raises:
            ValueError: ``current_version`` is above the newest version.
            TimeoutError: nothing within ``sync_timeout_s``.
        """
        state, told = self.real.state, self._ready_condition.told
        if current_version > self.model_version:
            raise ValueError(
                f"current_version={current_version} is above the newest, {self.model_version}"
            )
        if no_wait or self.model_version > current_version or state.trainer is STOPPED:
            return self.model_version
        name = next((n for n, e in state.explorers.items() if e.status is RUNNING), None)
        if name is not None:
            state.explorer_waiting(name, state.explorers[name].required)
        try:
            self.real.notify()
            await self.real.wait(
                lambda: (
                    self.model_version > current_version
                    or state.trainer is STOPPED
                    or self._ready_condition.told > told
                ),
                lambda: f"a version above {current_version}",
            )
        finally:
            if name is not None:
                state.explorer_running(name)
            self.real.notify()
        return self.model_version

    # a broadcast ----------------------------------------------------------------------
    async def ready_to_nccl_sync(
        self, module: str, trainer_step: Optional[int] = None
    ) -> Optional[int]:
        """``module`` (``trainer`` or ``explorer``) is ready for a broadcast; returns the
        trainer's version to both when both are, None when the other has stopped or is late.

        Raises:
            ValueError: another module, or more than one explorer.
        """
        state, met = self.real.state, self._met
        live = [name for name, e in state.explorers.items() if e.live]
        if module not in SIDES or len(live) > 1:
            raise ValueError(
                f"module must be one of {', '.join(SIDES)} (got {module!r}), and method nccl "
                f"serves exactly one explorer (there are {live})"
            )
        if module == "trainer":
            version = state.trainer_version if trainer_step is None else trainer_step
            state.trainer_at_sync(version, state.progress)
        elif live:
            state.explorer_waiting(live[0], state.explorers[live[0]].required)
        self._here.add(module)
        if len(self._here) == len(SIDES):
            self._met += 1
        try:
            self.real.notify()
            await self.real.wait(
                lambda: (
                    self._met > met
                    or (module == "explorer" and state.trainer is STOPPED)
                    or (module == "trainer" and not state.live_explorers)
                ),
                lambda: f"{module} is ready for a broadcast: the other side",
            )
        except TimeoutError:
            self.real.timeouts += 1
        finally:
            for side in SIDES if self._met > met else (module,):
                self._leave(side)
        return state.trainer_version if self._met > met else None

    def _leave(self, side: str) -> None:
        """Met, or given up: ``side`` runs on."""
        if side not in self._here:
            return
        self._here.discard(side)
        if side == "trainer":
            self.real.state.trainer_running()
        for name in self.real.state.explorers if side == "explorer" else ():
            self.real.state.explorer_running(name)

    async def setup_weight_sync_group(
        self, master_address: str, master_port: int, state_dict_meta: Optional[list[Any]] = None
    ) -> None:
        """Form the transfer group now, with trainer rank 0 serving its store there.

        ``state_dict_meta`` is the trainer's to say, and it is asked.

        Raises:
            RuntimeError: no explorer or no trainer rank is attached.
        """
        await self._form_groups(master_address, master_port)

    async def coordinate_weight_sync_setup(self, timeout: Optional[float] = None) -> None:
        """Form the transfer group at an address of the trainer's own choice.

        Raises:
            RuntimeError: no explorer or no trainer rank is attached.
            TimeoutError: not within ``timeout`` seconds (None: ``sync_timeout_s``).
        """
        async with asyncio.timeout(timeout or self.config.synchronizer.sync_timeout_s):
            await self._form_groups()

    async def _form_groups(self, host: Optional[str] = None, port: Optional[int] = None) -> None:
        transfers = self.real.transfers
        if not transfers.names:
            raise RuntimeError("no explorer is attached; an Explorer attaches itself in prepare()")
        for name in transfers.names:
            await transfers.form_group(name, host=host, port=port)

    async def coordinate_weight_sync_teardown(self) -> None:
        """Both sides leave the group. Whoever is dead is passed over."""
        for name in self.real.transfers.names:
            await self.real.transfers.leave_group(name)

    # the shared one -------------------------------------------------------------------
    async def is_alive(self) -> bool:
        return True

    async def register(self, name: str) -> None:
        """This one is shared as ``name``, until its last module is gone."""
        self._registered = name
        if self._modules:
            self._watch_modules()

    @classmethod
    def get_actor(
        cls, config: Optional[Config] = None, namespace: Optional[str] = None
    ) -> RemoteActor:
        """The synchronizer of the run that ``config`` names, made on the control worker by who
        asks first; without a config the one of ``namespace`` (``project/group/name``), which
        must be there. Under Dask nobody knows who calls: pass the caller to ``add_module``.

        Raises, at the first call: LookupError (there is none), TimeoutError (it does not start).
        """

        async def find(client: Optional[Client]) -> tuple[ActorHandle, Any]:
            caller, inside = client or await worker_client(), client is None
            parts = [config.project, config.group, config.name] if config else [namespace]
            name = "/".join(["trinity-dask", *(part for part in parts if part), "synchronizer"])
            limit = CREATE_TIMEOUT_S
            if name not in await caller.list_datasets():
                if config is None:
                    raise LookupError(f"no synchronizer is registered as {name!r}")
                ref = await create_actor(
                    cls, config, None, slot=CONTROL, key=name, timeout=limit, client=caller
                )
                await caller.publish_dataset(ref.future, name=name, override=True)
            future = await caller.get_dataset(name)
            address = await wait_until_alive(caller, future, limit)
            handle = ActorHandle(str(future.key), address, CONTROL)
            outside = None if inside else caller
            await rpc(handle, "register", name, timeout=limit, client=outside)
            return handle, None

        return RemoteActor(find)


def _name_of(module: Any) -> str:
    return str(getattr(module, "slot", None) or getattr(module, "name", None) or module)


async def _is_alive(module: Any) -> bool:
    """One that only does not answer in time counts as alive."""
    try:
        if isinstance(module, ActorHandle):
            return bool(await rpc(module, "is_alive", timeout=PING_TIMEOUT_S))
        async with asyncio.timeout(PING_TIMEOUT_S):
            answer = module.is_alive()
            return bool(await answer if inspect.isawaitable(answer) else answer)
    except ActorLost:
        return False
    except TimeoutError:
        return True
