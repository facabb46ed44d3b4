#!/bin/bash
# From a login node: a job for each worker, the driver in one as well, which goes on in its next one
# when its time is over. Print the driver's script first with --dry-run.
trinity-dask submit +experiment=sort_digits engine=torch cluster=slurm \
  cluster.walltime=4:00:00 cluster.rollout.n_workers=4 cluster.driver.mem=4G "$@"
