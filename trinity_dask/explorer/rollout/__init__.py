"""What runs on a rollout or runner worker: a sub-task, its workflow, its payload.

Invariant: whatever user code does ends as data in the payload of its sub-task.
"""
