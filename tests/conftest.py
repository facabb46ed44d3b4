"""Settings every test needs, made before anything imports numpy or torch.

Invariant: no test talks to a model hub, and no test process starts more than one
OpenMP thread.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
