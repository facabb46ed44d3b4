"""One Slurm for all tests of a process; where it cannot be had they are skipped, and say why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from slurm_driver import Driver
from slurm_stand import Slurm, SlurmMissing, running, until


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    try:
        with running() as stand:
            yield stand
    except SlurmMissing as error:
        pytest.skip(str(error))


@pytest.fixture
def drive(slurm: Slurm, tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    started: list[Driver] = []

    def start(*overrides: str, **options: Any) -> Driver:
        started.append(Driver(slurm, tmp_path, *overrides, **options))
        return started[-1]

    yield start
    for driver in started:
        driver.kill()
    until(lambda: slurm.queue() == {}, "empty queue", 60)
