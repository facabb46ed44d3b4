"""Workers as jobs of Slurm, or as steps of an allocation of it."""
