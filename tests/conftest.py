"""Settings every test needs, made before anything imports numpy or torch.

Invariant: no test talks to a model hub, no test process starts more than one OpenMP thread,
and a Ctrl-C that a test sends is not ignored because the tests run in the background of a
shell (which has its background jobs ignore it, and their children after them).
"""

import os
import signal

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
