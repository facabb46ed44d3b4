"""The trainer: policy of steps, saves and syncs; engine ranks; checkpoints."""
