"""Which sub-task runs when and on which worker.

Invariant: what is decided (``state``, ``policy``, ``workers``, ``pending``, ``tasks``) knows no
Dask and no clock; ``executor``, ``membership`` and ``worker_watch`` talk to Dask and decide
nothing; ``scheduler`` is what others use.
"""
