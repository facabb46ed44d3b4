"""A configuration of Trinity-RFT read as one of ours.

Invariant: nothing of a configuration is dropped in silence; what is written passes through the
same validation as a file written by hand.
"""

from trinity_dask.compat.trinity_config.convert import Conversion, Note, convert
from trinity_dask.compat.trinity_config.keys_run import KEYS

__all__ = ["KEYS", "Conversion", "Note", "convert"]
