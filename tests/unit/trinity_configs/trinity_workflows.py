"""Workflows as they are written for Trinity-RFT: nothing in them knows of this project."""

from typing import Optional

from trinity.common.experience import Experience
from trinity.common.models.model import ModelWrapper
from trinity.common.workflows import WORKFLOWS, Task, Workflow


@WORKFLOWS.register_module("grid_workflow")
class GridWorkflow(Workflow):
    can_reset = True

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: Optional[list] = None):
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.reset(task)

    def reset(self, task: Task):
        self.task = task
        self.question = task.raw_task.get("question") or task.task_desc
        self.max_steps = int(task.workflow_args.get("max_step_num", 2))

    def run(self) -> list[Experience]:
        found = []
        messages = [{"role": "user", "content": self.question}]
        for step in range(self.max_steps):
            responses = self.model.chat(messages, n=1, temperature=1.0)
            for exp in responses:
                exp.eid.step = step
                exp.reward = float(len(exp.response_text or "") > 0)
                exp.metrics = {"steps": float(step)}
            found.extend(responses)
            messages.append({"role": "assistant", "content": responses[0].response_text})
            messages.append({"role": "user", "content": "go on"})
        return found


class JudgedWorkflow(GridWorkflow):
    pass
