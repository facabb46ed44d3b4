"""The one error of building or joining a cluster."""

from __future__ import annotations


class ClusterError(RuntimeError):
    """The cluster cannot be built or joined; the message says what to change."""
