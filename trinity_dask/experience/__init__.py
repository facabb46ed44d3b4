"""Experiences: identity, content, Arrow form, payloads."""

from trinity_dask.experience.eid import EID
from trinity_dask.experience.experience import (
    PROMPT_TRUNCATED,
    RESPONSE_TRUNCATED,
    Experience,
)

__all__ = ["EID", "PROMPT_TRUNCATED", "RESPONSE_TRUNCATED", "Experience"]
