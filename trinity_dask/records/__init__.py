"""What a run leaves to be looked at: every row of it, kept or not, and how it was trained.

Invariant: nothing here is read by training or by the accounts; a job without a single record is
the same job. See docs/records.md for what lies where.
"""

from __future__ import annotations

from trinity_dask import lazy

_SOURCES = dict.fromkeys(("Rollouts", "rollouts"), "trinity_dask.records.reader")
__all__ = list(_SOURCES)
__getattr__ = lazy.names(__name__, _SOURCES)
