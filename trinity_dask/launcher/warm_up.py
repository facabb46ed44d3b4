"""Workers import what their role needs while the control worker still prepares the job.

Invariant: nothing depends on it. What cannot be imported is reported by whoever needs it; and
no actor is created while its worker still imports; one that an earlier launcher left there may load
at the same time, which is why imports take turns (:mod:`trinity_dask.lazy`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from types import TracebackType
from typing import Optional

from distributed import Client, Future

from trinity_dask.cluster.context import worker_client
from trinity_dask.cluster.placement import slot_labels
from trinity_dask.cluster.slots import engine_slot, slot_resource, trainer_slot
from trinity_dask.config import modes
from trinity_dask.config.schema import Config
from trinity_dask.lazy import MODEL_LIBRARY, import_modules

log = logging.getLogger("trinity_dask.launcher")

WAIT_S = 60.0
TRAINER_MODULES = ("trinity_dask.trainer.ranks.rank", *MODEL_LIBRARY)
# vLLM's environment is set before anything of it, or of torch's compiler, is imported
ENGINE_MODULES = {
    "torch": ("trinity_dask.models.torch.engine", *MODEL_LIBRARY),
    "vllm": ("torch",),
}


class WarmUp:
    """Imports on the workers of ``stages``, as an asynchronous context manager.

    The first stage's workers begin at once. The others begin when those are ready, beside the
    first steps: an engine's imports take a core for seconds that the first stage, if it only
    trains, would have to wait for.

    To be used on the event loop of a worker.
    """

    def __init__(self, stages: Iterable[Config]) -> None:
        self._stages = list(stages)
        self._client: Optional[Client] = None
        self._begun = set[str]()  # slots
        self._imports: dict[str, Future] = {}  # by slot; while somebody waits for it

    async def __aenter__(self) -> WarmUp:
        try:
            self._client = await worker_client()
            await self._begin(self._stages[:1])
        except (OSError, RuntimeError) as error:
            log.info("the workers are not warmed up: %s", error)
        return self

    async def _begin(self, stages: Iterable[Config]) -> None:
        if self._client is None:
            return
        modules = modules_by_slot(stages)
        for slot in sorted(await slot_labels(self._client) & modules.keys() - self._begun):
            self._begun.add(slot)
            self._imports[slot] = self._client.submit(
                import_modules, modules[slot], resources={slot_resource(slot): 1}, pure=False
            )

    async def wait(self, stage: Config, timeout_s: float = WAIT_S) -> None:
        """Until the workers of ``stage`` have imported; they have plenty of time for it."""
        try:
            async with asyncio.timeout(timeout_s):
                needed = modules_by_slot([stage]).keys() & self._imports.keys()
                await asyncio.gather(*(self._imports[slot].exception() for slot in needed))
                for slot in needed:  # or Dask would import again beside an actor's birth
                    self._imports.pop(slot).release()
                await self._begin(self._stages)
        except TimeoutError:
            log.warning("workers still import after %g s; going on", timeout_s)
        except (OSError, RuntimeError) as error:
            log.info("no more workers are warmed up: %s", error)

    async def __aexit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        for future in self._imports.values():
            future.release()


def modules_by_slot(stages: Iterable[Config]) -> dict[str, tuple[str, ...]]:
    """What the workers with these slots will import when their actors are made."""
    found: dict[str, tuple[str, ...]] = {}
    for stage in stages:
        cluster, engine = stage.cluster, stage.explorer.rollout_model.engine_type
        if modes.trains(stage.mode):
            slots = [trainer_slot(rank) for rank in range(cluster.trainer.n_workers)]
            found.update(dict.fromkeys(slots, TRAINER_MODULES))
        if modes.samples(stage.mode) and engine in ENGINE_MODULES:
            first = cluster.rollout.first_index or 0
            slots = [engine_slot(first + i) for i in range(cluster.rollout.n_workers)]
            found.update(dict.fromkeys(slots, ENGINE_MODULES[engine]))
    return found
