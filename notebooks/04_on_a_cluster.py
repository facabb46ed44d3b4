"""
# On a cluster

The same run on workers that you already have, or on those that Slurm gives.
"""

# %%
import shutil
import subprocess
import tempfile

from distributed import Client, LocalCluster

from trinity_dask import Run, load_config

folder = tempfile.TemporaryDirectory(prefix="trinity-")
words = ["+experiment=sort_quick", f"checkpoint_root_dir={folder.name}"]
words += ["buffer.total_steps=6", "trainer.total_steps=6", "explorer.eval_interval=6"]

# %%
"""
## A client given

Any Dask cluster will do: `dask-jobqueue`, `dask-kubernetes`, one that a colleague started. Here
it is a local one in its place. A run needs a worker for control, one for each trainer rank and
one for each engine. It gives each worker a role, and takes the roles back at its end.
"""

# %%
cluster = LocalCluster(
    n_workers=3, threads_per_worker=2, dashboard_address="127.0.0.1:0", memory_limit=0
)
client = Client(cluster)
with Run(load_config(*words, "name=given"), client=client) as run:
    run.wait()
run

# %%
"""
The cluster is as it was, and free for the next run, or for anything else.
"""

# %%
print(client.status, len(client.scheduler_info()["workers"]), "workers")
print(client.submit(sum, [1, 2, 3]).result())
client.close()
cluster.close()

# %%
"""
## Slurm, where there is one

`cluster=slurm` has Slurm start each worker as a job: the notebook runs on a login node, the
directory is one that every node sees, and `cluster.partition`, `cluster.rollout.gpus_per_worker`
and others say what to ask for ([Slurm](../docs/slurm.md)). Where there is no `sbatch`, this cell
says so and does nothing.
"""

# %%
slurm = shutil.which("sbatch") is not None
if not slurm:
    print("no sbatch on this machine: nothing is submitted, and the cells below do nothing")
else:
    on_slurm = Run(load_config(*words, "name=slurm", "cluster=slurm")).start()
    on_slurm.show()

# %%
"""
Its jobs as Slurm sees them, once there are steps:
"""

# %%
if slurm:
    while not on_slurm.status.get("step"):
        on_slurm.wait_for_change(on_slurm.status["version"], 60)
    jobs = ["squeue", "--states=PENDING,RUNNING", "--format=%.4i %.24j %.8T %.6N"]
    print(subprocess.check_output(jobs, text=True))
    print(on_slurm.wait()["state"])
    on_slurm.close()
    print(subprocess.check_output(jobs, text=True))

# %%
"""
`trinity-dask submit` has the driver in a job too, so nothing has to stay open. A notebook finds
such a run by its directory: `Run.attach(job_directory)`.
"""

# %%
folder.cleanup()
