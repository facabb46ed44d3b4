"""Starting, watching and finding runs: for notebooks (:class:`Run`) and for the command line."""

from trinity_dask.run.console import run_from_cli
from trinity_dask.run.session import Run, RunFailed

__all__ = ["Run", "RunFailed", "run_from_cli"]
