"""The page ``/trinity`` in the Dask dashboard: what a run tells, kept and drawn in the scheduler.

Invariant: the page looks at feeds only; no actor and no worker is ever asked for it.
"""
