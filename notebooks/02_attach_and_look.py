"""
# Attach to a live run, and look

A run belongs to the process that started it, and can be seen from any other: another notebook,
another machine. Here it is a process in the background, as a terminal or a batch script would
have it. It would take an hour.
"""

# %%
import subprocess
import sys
import tempfile

import duckdb

import trinity_dask
from trinity_dask import Run

folder = tempfile.TemporaryDirectory(prefix="trinity-")
words = ["+experiment=sort_quick", f"checkpoint_root_dir={folder.name}", "name=theirs"]
words += ["buffer.total_steps=5000", "trainer.total_steps=5000"]
theirs = subprocess.Popen(
    [sys.executable, "-m", "trinity_dask", "run", *words],
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
)

# %%
"""
## Attach

By the job's directory, or by the address of the scheduler (`tcp://host:8786`). `wait_s` is for a
run that is only just being started.
"""

# %%
job = f"{folder.name}/trinity-dask/theirs"
run = Run.attach(job, wait_s=120)
run.show()

# %%
"""
An attached run has `status`, `metrics`, `samples`, `stop` as the run itself. It is watched until
it has made eight steps.
"""

# %%
while (run.status.get("step") or 0) < 8:
    run.wait_for_change(run.status["version"], 60)
print(run)

# %%
"""
## The dashboard

The same page as the run's owner has, in the Dask dashboard. `trinity-dask view JOB_DIR` opens it
for a run that has ended.

![Reward, evaluation, loss, KL, ratios and the time that each part waited, of a run that has
ended](../docs/images/dashboard.png)
"""

# %%
run.page_link

# %%
"""
## The rows, with pandas

Everything that was sampled lies in Arrow files in the job's directory. They can be read while the
run goes on, and after it.
"""

# %%
rows = trinity_dask.rollouts(job)
frame = rows.to_pandas()
frame.groupby("step")[["reward", "length"]].mean().round(3).head(8)

# %%
"""
One task, several answers: what differs, and what it was worth.
"""

# %%
first = frame["group"].iloc[0]
columns = ["run", "prompt_text", "response_text", "reward", "finish", "train_logprobs"]
rows.where(group=first).to_pandas(columns).head(5)

# %%
"""
## The rows, with DuckDB

An Arrow table is a table to DuckDB, without a copy. Which tasks does the model never get right?
"""

# %%
answers = rows.table(["step", "reward", "prompt_text", "response_text"])
duckdb.sql("""
    select prompt_text, count(*) as answers, avg(reward) as reward,
           mode(response_text) as most_frequent
    from answers group by all having avg(reward) = 0 order by answers desc, prompt_text limit 5
""").df()

# %%
"""
## End it

`stop` has the run save its state and end. The same command goes on from there. `close` would
leave it running.
"""

# %%
run.stop()
print(run.wait(timeout=120)["state"], theirs.wait(timeout=120))  # 130: interrupted, saved

# %%
folder.cleanup()
