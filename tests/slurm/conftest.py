"""One Slurm for all of these tests; where it cannot be had they are skipped, and say why."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from slurm_stand import Slurm, SlurmMissing, running


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    try:
        with running() as stand:
            yield stand
    except SlurmMissing as error:
        pytest.skip(str(error))
