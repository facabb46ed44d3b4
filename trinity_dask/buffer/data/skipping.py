"""What becomes of rows that cannot be used.

Invariant: which row takes the place of an unusable one depends on the data alone: the next
usable one in the files' order. So positions, lengths of epochs and what a resumed run reads
are what they were without it; and a data set without one usable row is an error, not a loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from trinity_dask.buffer.errors import DataError, UnusableRow
from trinity_dask.config.schema import FormatConfig

log = logging.getLogger(__name__)
Made = TypeVar("Made")


class Skipping:
    """Makes something of rows of the data set ``name``, and counts those of which nothing is."""

    def __init__(self, name: str, n_rows: int, fmt: FormatConfig) -> None:
        self._name, self._n_rows, self._fmt = name, n_rows, fmt
        self._skipped: set[int] = set()

    @property
    def count(self) -> int:
        """Different rows that were skipped so far by this process."""
        return len(self._skipped)

    def usable(self, index: int, make: Callable[[int], Made]) -> Made:
        """What ``make`` gives for the first usable row from ``index`` on.

        Raises:
            DataError: it was raised for another reason than an unusable row, the policy is
                ``refuse``, or no row of all is usable.
        """
        for offset in range(self._n_rows):
            made = self.attempt((index + offset) % self._n_rows, make)
            if made is not None:
                return made
        raise DataError(f"{self._name}: not one of its {self._n_rows} rows can be used")

    def attempt(self, index: int, make: Callable[[int], Made]) -> Made | None:
        """The same for this row only; None when it is skipped."""
        if index in self._skipped:
            return None
        try:
            return make(index)
        except UnusableRow as error:
            policy = self._fmt.long_rows if error.kind == "long" else self._fmt.empty_rows
            if policy == "refuse":
                raise
            self._skipped.add(index)
            if len(str(self.count).strip("0")) == 1:  # 1 to 9, 10, 20, ... 100, ...
                log.warning("row skipped (%d of %r so far): %s", self.count, self._name, error)
            return None
