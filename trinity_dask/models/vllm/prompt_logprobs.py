"""Prompt log-probs at the temperature of their request.

Invariant: each request's prompt is scored with the softmax of ``logits / temperature``, as
its sampled tokens are. vLLM scores prompts at temperature 1 whatever the request says.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

METHOD = "_get_prompt_logprobs_dict"


def heat_prompt_logprobs(runner: Any) -> bool:
    """Make ``runner`` apply the temperature; False if this vLLM has no such hook."""
    if not all(hasattr(runner, name) for name in (METHOD, "num_prompt_logprobs", "sampler")):
        return False
    original = getattr(runner, METHOD)

    def by_temperature(hidden_states: Any, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
        everyone = runner.num_prompt_logprobs
        results: dict[str, Any] = {}
        for heat, requests in _by_heat(runner).items():
            # the original works through this table and removes what it finished
            runner.num_prompt_logprobs = {r: everyone.pop(r) for r in requests}
            try:
                with _ScaledLogits(runner.sampler, heat):
                    results.update(original(hidden_states, num_scheduled_tokens))
            finally:
                everyone.update(runner.num_prompt_logprobs)
                runner.num_prompt_logprobs = everyone
        return results

    setattr(runner, METHOD, by_temperature)
    return True


def _by_heat(runner: Any) -> dict[float, list[str]]:
    groups: dict[float, list[str]] = defaultdict(list)
    for request_id in runner.num_prompt_logprobs:
        params = runner.requests[request_id].sampling_params
        groups[params.temperature or 1.0].append(request_id)
    return groups


class _ScaledLogits:
    """While it is entered, the sampler's log-probs are those of ``logits / heat``."""

    def __init__(self, sampler: Any, heat: float) -> None:
        self.sampler, self.heat = sampler, heat

    def __enter__(self) -> None:
        if self.heat != 1.0:
            original = type(self.sampler).compute_logprobs
            self.sampler.compute_logprobs = lambda logits: original(logits.float() / self.heat)

    def __exit__(self, *_: object) -> None:
        self.sampler.__dict__.pop("compute_logprobs", None)
