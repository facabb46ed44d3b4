"""A reward of your own: name it as ``reward_fn=examples/my_reward.py:short_and_right``.

It is called with the arguments it names, out of response, truth, prompt, finish_reason,
tokens and raw_task. Return a number, or a dict of named numbers; the reward is their sum.
"""


def short_and_right(response: str, truth: str, max_chars: int = 20) -> dict[str, float]:
    """One point for the right answer, a tenth off for a long one."""
    right = float(response.strip() == truth)
    too_long = -0.1 if len(response) > max_chars else 0.0
    return {"accuracy": right, "length_penalty": too_long}
