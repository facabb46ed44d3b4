"""The rollout viewer: every row of a job in a table, one answer token by token, runs side by side.

Invariant: a job is only read. What is asked is answered by a process of its own (``child``), so a
scheduler that serves the pages never waits for a disk; what a model wrote is sent as JSON and shown
as text. ``routes`` mounts it beside the dashboard's page.
"""
