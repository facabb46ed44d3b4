"""What a task does: tasks, the workflow contract, and the built-in workflows.

Invariant: importing this package imports no built-in workflow; the registry does that when
a name is first used.
"""

from typing import Any

from trinity_dask.experience.task import Task
from trinity_dask.registry import Registry
from trinity_dask.workflows.workflow import PartialGroupError, Workflow

_SIMPLE = "trinity_dask.workflows.simple"

WORKFLOWS: Registry[Any] = Registry(
    "workflow",
    {
        "simple_workflow": f"{_SIMPLE}:SimpleWorkflow",
        "async_simple_workflow": f"{_SIMPLE}:SimpleWorkflow",
        "math_workflow": f"{_SIMPLE}:MathWorkflow",
        "async_math_workflow": f"{_SIMPLE}:MathWorkflow",
        "agent": "trinity_dask.workflows.agent:AgentWorkflow",
    },
)

__all__ = ["WORKFLOWS", "PartialGroupError", "Task", "Workflow"]
