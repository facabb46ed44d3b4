"""An agent that plays the sorting game over OpenAI's protocol: it knows nothing of training.

Name it as ``workflow: agent`` with ``workflow_args: {agent: examples/sort_agent.py:play}``. The
client is a plain ``openai.AsyncOpenAI``; any framework that takes a base URL and a key can be
used in its place. The dialogue is recorded as it is sampled.
"""

from typing import Any


async def play(task: Any, client: Any, moves: int = 3) -> dict[str, float]:
    """Ask for the smallest digit that is left, ``moves`` times; the share of right ones."""
    left = str(task.task_desc).removeprefix("sort ").removesuffix("=")
    messages: list[dict[str, Any]] = []
    right = 0
    for _ in range(moves):
        messages.append({"role": "user", "content": f"pick {left}="})
        reply = await client.chat.completions.create(model="policy", messages=messages)
        answer = reply.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": answer})
        right += answer == min(left)
        left = left.replace(min(left), "", 1)
    return {"right": right / moves}
