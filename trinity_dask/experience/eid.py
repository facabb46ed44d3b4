"""The identity of an experience: which run of which task of which batch it came from."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from functools import partial


@dataclass(slots=True)
class EID:
    """Batch, task, run and step of an experience, and a random suffix.

    ``tid`` names the group (all runs of one task), ``rid`` one run, ``sid`` one step of
    all runs, ``uid`` exactly one experience.
    """

    batch: int | str = ""
    task: int | str = ""
    run: int = 0
    step: int = 0
    suffix: str = field(default_factory=partial(secrets.token_hex, 3))

    @property
    def uid(self) -> str:
        return f"{self.batch}/{self.task}/{self.run}/{self.step}/{self.suffix}"

    @property
    def sid(self) -> str:
        return f"{self.batch}/{self.task}/{self.step}"

    @property
    def rid(self) -> str:
        return f"{self.batch}/{self.task}/{self.run}"

    @property
    def tid(self) -> str:
        return f"{self.batch}/{self.task}"

    def __str__(self) -> str:
        return self.uid
