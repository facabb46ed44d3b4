"""Trinity-RFT's classes by their own names: thin adapters that have the real objects.

Invariant: an adapter translates names, parameters and the ways of waiting; it decides nothing
and keeps no state that the real object has. Each is also found at Trinity-RFT's module path
(``trinity.explorer.scheduler`` is :mod:`trinity_dask.explorer.scheduler`).
"""
