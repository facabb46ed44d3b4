"""A game of several steps: pick the smallest digit that is left, until none is left.

Name it as ``workflow=examples/sort_game.py:SortGame``. Each move is a step of its own: the
position is the prompt (``pick 4071=``), the answer is one digit. A wrong digit ends the game.
Every step is an experience with its number in ``eid.step``; ``info`` carries the reward of
the move and a hash of the position, by which ``gigpo`` finds the moves that several runs of
a task made from the same position.
"""

import hashlib

from trinity_dask.experience import Experience
from trinity_dask.workflows import Workflow


class SortGame(Workflow):
    """Reward 1 for a game that is played to its end; ``workflow_args``: ``step_reward`` (0.1)
    for each right move on the way."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        """One run: one experience per move."""
        step_reward = float(self.task.workflow_args.get("step_reward", 0.1))
        left = str(self.task.task_desc).removeprefix("sort ").removesuffix("=")
        moves: list[Experience] = []
        while left:
            (move,) = await self.model.generate_async(f"pick {left}=", max_tokens=2)
            move.eid.step = len(moves)
            move.info["env_state_hash"] = hashlib.sha256(left.encode()).hexdigest()[:16]
            moves.append(move)
            answer = move.response_text or ""
            if answer != min(left):
                move.info["step_reward"] = 0.0
                break
            move.info["step_reward"] = step_reward
            left = left.replace(answer, "", 1)
        return self._finished(moves, won=not left)

    @staticmethod
    def _finished(moves: list[Experience], won: bool) -> list[Experience]:
        moves[-1].info["step_reward"] += float(won)
        for move in moves:
            move.reward = float(won)
        moves[-1].metrics = {"reward": float(won), "moves": float(len(moves))}
        return moves
