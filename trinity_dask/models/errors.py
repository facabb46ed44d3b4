"""Errors of engines that their owner has to act on."""

from __future__ import annotations


class EngineDead(RuntimeError):
    """The engine's own process died; it must be built again, requests cannot be retried on it."""
