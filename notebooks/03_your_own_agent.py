"""
# An agent of your own

A workflow turns a task into experiences. This one has turns: the model answers, is told when it
was wrong, and may try again. Both turns are trained on.
"""

# %%
import tempfile

from trinity_dask import WORKFLOWS, Experience, Run, Workflow, load_config

folder = tempfile.TemporaryDirectory(prefix="trinity-")


@WORKFLOWS.register_module("second_try")
class SecondTry(Workflow):
    """Reward 1 for a right first answer, 0.5 for a right second one."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        task, turns = self.task.task_desc, []
        prompt, right = task, False
        while not right and len(turns) < 2:
            (turn,) = await self.model.generate_async(prompt)
            turn.eid.step = len(turns)
            turns.append(turn)
            right = turn.response_text == self.task.truth
            prompt = f"no {turn.response_text}, {task}"  # of the second turn
        reward = right / len(turns)
        for turn in turns:
            turn.reward = reward
            turn.metrics = {"reward": reward, "turns": float(len(turns))}
        return turns


# %%
"""
The cell is all there is to deploy: a registered name is sent by value to where it is needed. A
file (`workflow=my_agent.py:SecondTry`) does as well, and an agent that is a program with an
OpenAI client is trained as it is ([agents](../docs/agents.md)).
"""

# %%
run = Run(
    load_config(
        "+experiment=sort_quick",
        f"checkpoint_root_dir={folder.name}",
        "name=agent",
        "buffer.explorer_input.taskset.workflow=second_try",
        "model.max_prompt_tokens=24",
    )
)

# %%
"""
## Try it on one task

No trainer, no cluster: one task through the workflow in this process, turn by turn. An error in
the workflow would be shown with its traceback.
"""

# %%
task = {"prompt": "sort 210=", "response": "012"}  # or the number of a row
run.trace(task)

# %%
"""
What is printed are objects, too: every token with its log-prob. Here row 7 of the data, four
times:
"""

# %%
tried = run.trace(task=7, runs=4)
[(turn.eid.run, turn.eid.step, turn.response_text, turn.reward) for turn in tried.experiences]

# %%
"""
## Train it
"""

# %%
run.start().wait()
run

# %%
"""
Per step: the reward, and how many turns it took. What a workflow puts into `metrics` is a curve.
"""

# %%
explored = run.metrics.query("role == 'explorer'").set_index("step")
explored[["rollout/reward/mean", "rollout/turns/mean"]].dropna().round(3).iloc[::4]

# %%
"""
The rows of one run of one task belong together: `turn` counts them.
"""

# %%
last = run.samples(20)
group = last.loc[last["turn"] == 1, "group"].iloc[0]
last[last["group"] == group][["run", "turn", "prompt_text", "response_text", "reward"]].head(6)

# %%
"""
## Try it again

The same task with the newest checkpoint, which is what `trace` takes where there is one.
"""

# %%
run.trace(task)

# %%
run.close()
folder.cleanup()
