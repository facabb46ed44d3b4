"""One experience: token ids with what the sampler knew about each of them.

Invariant: every per-token array of the response has the same length, checked when the
experience is made; nothing here imports torch or dask (torch tensors are accepted and
become numpy arrays).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

import numpy as np

from trinity_dask.experience.eid import EID

RESPONSE_TRUNCATED = "response_truncated"
PROMPT_TRUNCATED = "prompt_truncated"

# fields with one value per response token, with their dtypes
RESPONSE_FIELDS: dict[str, type] = {
    "logprobs": np.float32,
    "versions": np.int32,
    "action_mask": np.bool_,
    "token_level_reward": np.float32,
    "advantages": np.float32,
    "returns": np.float32,
    "teacher_logprobs": np.float32,
}


def as_array(value: Any, dtype: type) -> np.ndarray:
    """A 1-d contiguous numpy array of ``value`` (list, numpy array or torch tensor)."""
    if type(value) is np.ndarray and value.dtype == dtype and value.ndim == 1:
        return value if value.flags.c_contiguous else value.copy()
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    array: np.ndarray = np.ascontiguousarray(np.asarray(value, dtype=dtype))
    if array.ndim != 1:
        raise ValueError(f"an experience's arrays have one dimension (got shape {array.shape})")
    return array


@dataclass(slots=True)
class Experience:
    """Prompt and response of one step of one run.

    Shapes: tokens int32 ``[seq]`` (prompt then response), ``prompt_length`` in tokens;
    all of :data:`RESPONSE_FIELDS` ``[seq - prompt_length]``. ``logprobs`` are the
    behaviour policy's at its sampling temperature; ``versions`` the model version that
    sampled each token, -1 for one that no model sampled; ``action_mask`` true where the
    policy chose the token (default: everywhere, or nowhere when the prompt was truncated).

    ``chosen`` / ``rejected`` int32 hold a preference pair; then ``tokens`` is the prompt.

    Raises:
        ValueError: an array's length does not fit, or ``prompt_length`` is out of range.
    """

    tokens: np.ndarray
    prompt_length: int = 1
    eid: EID = field(default_factory=EID)
    reward: Optional[float] = None
    logprobs: Optional[np.ndarray] = None
    versions: Optional[np.ndarray] = None
    action_mask: Optional[np.ndarray] = None
    token_level_reward: Optional[np.ndarray] = None
    advantages: Optional[np.ndarray] = None
    returns: Optional[np.ndarray] = None
    teacher_logprobs: Optional[np.ndarray] = None
    chosen: Optional[np.ndarray] = None
    rejected: Optional[np.ndarray] = None
    truncate_status: Optional[str] = None
    prompt_text: Optional[str] = None
    response_text: Optional[str] = None
    messages: Optional[list[dict[str, Any]]] = None
    tools: Optional[list[dict[str, Any]]] = None
    info: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.eid, dict):
            self.eid = EID(**self.eid)
        self.tokens = as_array(self.tokens, np.int32)
        for name in ("chosen", "rejected"):
            if getattr(self, name) is not None:
                setattr(self, name, as_array(getattr(self, name), np.int32))
        if self.reward is not None:
            self.reward = float(self.reward)
        if self.chosen is not None and self.rejected is not None:
            self.prompt_length = len(self.tokens)
            return
        self._check_response()

    def check(self) -> None:
        """Check an experience that was changed.

        Raises:
            ValueError: an array's length does not fit, or the reward is no number.
        """
        if self.chosen is None or self.rejected is None:
            self._check_response()
        if self.reward is not None and not np.isfinite(self.reward):
            raise ValueError(f"experience {self.eid}: its reward is {self.reward}, not a number")

    def _check_response(self) -> None:
        n_response = len(self.tokens) - self.prompt_length
        if self.prompt_length < 1 or n_response < 1:
            raise ValueError(
                f"experience {self.eid}: {len(self.tokens)} tokens with prompt_length "
                f"{self.prompt_length} leave no prompt or no response; both need one token"
            )
        if self.action_mask is None:
            sampled = self.truncate_status != PROMPT_TRUNCATED
            self.action_mask = np.full(n_response, sampled, dtype=np.bool_)
        for name, dtype in RESPONSE_FIELDS.items():
            value = getattr(self, name)
            if value is None:
                continue
            array = as_array(value, dtype)
            if len(array) != n_response:
                raise ValueError(
                    f"experience {self.eid}: {name} has {len(array)} values for "
                    f"{n_response} response tokens"
                )
            if array is not value:
                setattr(self, name, array)

    @property
    def version_span(self) -> Optional[tuple[int, int]]:
        """Oldest and newest version that sampled a token; None where none is known. Tokens that
        no model sampled (a tool's, the user's) have a negative one."""
        if self.versions is None:
            return None
        sampled = self.versions[self.versions >= 0]
        return (int(sampled.min()), int(sampled.max())) if len(sampled) else None

    @property
    def response_length(self) -> int:
        return len(self.tokens) - self.prompt_length
