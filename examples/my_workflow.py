"""A workflow of your own: name it as ``workflow=examples/my_workflow.py:SecondTry``.

The model answers, is told whether it was right, and may answer once more. Both turns become
experiences, so the model is trained on correcting itself.
"""

from typing import Any

from trinity_dask.experience import Experience
from trinity_dask.workflows import Workflow


class SecondTry(Workflow):
    """Reward 1 for a right first answer, 0.5 for a right second one."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        """One run: one experience, or two if the first answer was wrong."""
        messages: list[dict[str, Any]] = [{"role": "user", "content": self.task.task_desc}]
        (first,) = await self.model.chat_async(messages)
        if self._right(first):
            return self._scored([first], reward=1.0)
        messages += [
            {"role": "assistant", "content": first.response_text or ""},
            {"role": "user", "content": "That is not right. Try once more."},
        ]
        (second,) = await self.model.chat_async(messages)
        return self._scored([first, second], reward=0.5 if self._right(second) else 0.0)

    def _right(self, experience: Experience) -> bool:
        return (experience.response_text or "").strip() == self.task.truth

    @staticmethod
    def _scored(turns: list[Experience], reward: float) -> list[Experience]:
        for step, turn in enumerate(turns):
            turn.eid.step = step
            turn.reward = reward
            turn.metrics = {"reward": reward, "turns": float(len(turns))}
        return turns
