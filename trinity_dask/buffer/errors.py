"""What can go wrong with data, as exceptions whose messages name the file and the fix."""

from __future__ import annotations


class DataError(ValueError):
    """A task or training file lacks something; the message names file, row and column."""


class UnusableRow(DataError):
    """A row that has nothing to ask or to learn: ``kind`` is ``empty``, or ``long``, longer than
    the limit. What becomes of it, ``format.empty_rows`` and ``format.long_rows`` say."""

    def __init__(self, message: str, kind: str = "empty") -> None:
        super().__init__(message)
        self.kind = kind

    def __reduce__(self) -> tuple[type[UnusableRow], tuple[str, str]]:
        return type(self), (str(self), self.kind)


class StoreError(RuntimeError):
    """The experience store could not be read or written; nothing half-done is visible."""


class CorruptFileError(StoreError):
    """A file of the store is missing, cut short, or was not written by the store."""


class EndOfTasks(Exception):
    """A taskset has given every batch it has."""


class EndOfData(Exception):
    """No more rows will come, and fewer are left than were asked for.

    ``left_rows`` is the number of rows that remain un-leased, so that they are reported.
    """

    def __init__(self, left_rows: int) -> None:
        super().__init__(f"end of data; {left_rows} rows are left, too few for another batch")
        self.left_rows = left_rows

    def __reduce__(self) -> tuple[type[EndOfData], tuple[int]]:
        return type(self), (self.left_rows,)
