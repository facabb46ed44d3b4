"""Turns tasks into committed experiences.

Invariant: nothing is imported here, so that the scheduler's decisions can be used without
Dask, torch or a cluster.
"""
