"""What an answer says, and whether two answers say the same.

Invariant: nothing here needs a process, a signal or a deadline: every text is read and
compared in bounded time, and what cannot be read is said to be so (``UNDECIDED``), never
guessed.
"""
