"""
# Algorithms side by side

The same tasks and the same start model, three algorithms, and then a loss of one's own. One
cluster serves all runs, one after the other.
"""

# %%
import tempfile
from typing import Any

import pandas as pd
from distributed import Client, LocalCluster

from trinity_dask import Run, load_config
from trinity_dask.algorithm import POLICY_LOSS_FN

folder = tempfile.TemporaryDirectory(prefix="trinity-")
cluster = LocalCluster(
    n_workers=3, threads_per_worker=2, dashboard_address="127.0.0.1:0", memory_limit=0
)
client = Client(cluster)


def train(name: str, *words: str) -> pd.DataFrame:
    """The metrics of the explorer, by step."""
    shared = ["+experiment=sort_quick", f"checkpoint_root_dir={folder.name}", f"name={name}"]
    shared += ["buffer.total_steps=16", "trainer.total_steps=16", "explorer.eval_interval=16"]
    with Run(load_config(*shared, *words), client=client) as run:
        run.wait()
        return run.metrics.query("role == 'explorer'").set_index("step")


# %%
"""
## Three algorithms

`grpo` compares each answer with the others of its group, `rloo` leaves the answer itself out of
that mean, `raft` trains on the best answers alone. The [table of
algorithms](../docs/algorithms.md) has all of them with formula, paper and settings.
"""

# %%
found = {name: train(name, f"algorithm.algorithm_type={name}") for name in ("grpo", "rloo", "raft")}

# %%
"""
## A loss of one's own

A function of tensors, by the names of what it reads. Here PPO's loss counts answers that are worse
than their group half as much. What it returns beside the loss are metrics of the trainer.
"""


# %%
@POLICY_LOSS_FN.register_module("hopeful")
def hopeful(logprob: Any, old_logprob: Any, advantages: Any, action_mask: Any) -> Any:
    """Tensors [rows, tokens]; the mean over the tokens of the mask."""
    ratio = (logprob - old_logprob).exp()[action_mask]
    worth = advantages[action_mask].clamp(min=0) + 0.5 * advantages[action_mask].clamp(max=0)
    gain = (ratio * worth).minimum(ratio.clamp(0.8, 1.28) * worth)
    return -gain.mean(), {"hopeful/ratio": ratio.mean().detach()}


found["grpo with a loss of one's own"] = train("hopeful", "algorithm.policy_loss_fn=hopeful")

# %%
"""
## Side by side
"""

# %%
reward, score = "rollout/reward/mean", "eval/heldout/reward/mean@1"
pd.DataFrame(
    {
        name: {
            "sampled, first 3 steps": metrics[reward].dropna()[:3].mean(),
            "sampled, last 3 steps": metrics[reward].dropna()[-3:].mean(),
            "held out, before": metrics[score].dropna().iloc[0],
            "held out, after": metrics[score].dropna().iloc[-1],
        }
        for name, metrics in found.items()
    }
).T.round(3)

# %%
curves = pd.DataFrame({name: metrics[reward] for name, metrics in found.items()}).dropna()
axes = (
    curves.rolling(3, min_periods=1)
    .mean()
    .plot(figsize=(6, 3), grid=True, ylabel="sampled reward, mean of 3 steps")
)

# %%
client.close()
cluster.close()
folder.cleanup()
