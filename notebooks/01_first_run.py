"""
# A first run

A tiny model, made here, learns to sort three digits with GRPO. It needs no GPU, no account and no
download, and takes seconds.
"""

# %%
import tempfile

from trinity_dask import REWARD_FUNCTIONS, Run, load_config

folder = tempfile.TemporaryDirectory(prefix="trinity-")
words = ["+experiment=sort_quick", f"checkpoint_root_dir={folder.name}"]
run = Run(load_config(*words, "name=first")).start()  # returns at once
run.show()  # the card, kept up to date while the run goes on

# %%
"""
The card shows the run's last state without a kernel too. The stop button of the notebook ends the
waiting below, not the run.
"""

# %%
run.wait()["state"]

# %%
"""
## Curves

Everything that was measured is one data frame, with a row for each stage, role and step.
"""

# %%
metrics = run.metrics
shown = {"rollout/reward/mean": "sampled", "eval/heldout/reward/mean@1": "held out, greedy"}
curves = metrics[metrics["role"] == "explorer"].set_index("step")[list(shown)]
axes = (
    curves.rename(columns=shown)
    .interpolate()
    .plot(figsize=(5, 2.5), grid=True, ylabel="reward", ylim=(0, 1))
)

# %%
"""
## Samples

Every answer that was sampled, with tokens, log-probs, and the version of the model that sampled
it.
"""

# %%
run.samples(20)[["prompt_text", "response_text", "reward", "length", "version_min"]].head(6)

# %%
"""
## Your own reward

A function in a cell. It is sent by value to the processes that need it, and the next run uses the
cell as it was executed last. Its parameters are matched by name: `response`, `truth`, `prompt`,
`tokens`, … It may return several named parts; their sum is the reward.
"""


# %%
@REWARD_FUNCTIONS.register_module("in_place")
def in_place(response: str, truth: str) -> dict[str, float]:
    right = sum(mine == wanted for mine, wanted in zip(response, truth, strict=False))
    return {"digits": right / len(truth), "length": 0.5 * (len(response) == len(truth))}


mine = "buffer.explorer_input.taskset.reward_fn=in_place"
with Run(load_config(*words, "name=mine", mine)) as second:
    second.wait()
second

# %%
"""
Each part is a metric of its own.
"""

# %%
parts = [f"rollout/{part}/mean" for part in ("reward", "digits", "length")]
second.metrics.set_index("step")[parts].dropna().round(3).iloc[[0, 4, 9, 14, 19]]

# %%
"""
Next: [look at a run from another notebook](02_attach_and_look.ipynb), [an agent of your
own](03_your_own_agent.ipynb).
"""

# %%
run.close()
folder.cleanup()
