"""What a run tells the outside: metrics, progress, the final report.

Invariant: nothing in here can stop, slow or fail a run.
"""

from trinity_dask.monitor.history import load_metrics
from trinity_dask.monitor.monitor import Monitor
from trinity_dask.monitor.sinks import SINKS

__all__ = ["SINKS", "Monitor", "load_metrics"]
