"""Sinks for experiment trackers: TensorBoard, Weights & Biases, MLflow.

Invariant: a tracker's package is imported when its sink is made, in the sink's own
thread, and each role has its own tracker run with its own step axis.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trinity_dask.monitor.sinks import Sink, SinkContext, register_sink


@register_sink("tensorboard")
class TensorBoardSink(Sink):
    """``<job>/monitor/tensorboard/<role>``; tables are not shown."""

    def __init__(self, context: SinkContext) -> None:
        self._context = context
        self._writer: Any = None

    def log(self, time_s: float, step: int, metrics: Mapping[str, float]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            directory = self._context.job_dir / "monitor" / "tensorboard" / self._context.role
            # a resumed run repeats steps that the killed one had logged after its checkpoint
            purge_step = step if self._context.incarnation > 1 else None
            self._writer = SummaryWriter(str(directory), purge_step=purge_step, flush_secs=10)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step, walltime=time_s)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


@register_sink("wandb")
class WandbSink(Sink):
    """One run per role, continued by id after a resume.

    ``sink_args.wandb`` goes to ``wandb.init`` (``entity``, ``mode``, ``tags`` ...).
    Metrics are plotted over their own ``step``, so a late eval is not lost.
    """

    def __init__(self, context: SinkContext) -> None:
        import wandb

        directory = context.job_dir / "monitor"
        directory.mkdir(parents=True, exist_ok=True)
        settings: dict[str, Any] = {
            "project": context.config.get("project", "trinity-dask"),
            "group": context.config.get("group") or context.run_name,
            "name": f"{context.run_name}_{context.role}",
            "id": f"{context.run_id}-{context.role}",
            "resume": "allow",
            "dir": str(directory),
            "config": context.config,
            # explorer and trainer may share a process
            "reinit": "create_new",
        }
        self._table = wandb.Table
        self._run = wandb.init(**{**settings, **context.args})
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, time_s: float, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def log_table(self, name: str, rows: list[dict[str, Any]], step: int) -> None:
        columns: list[Any] = list(dict.fromkeys(key for row in rows for key in row))
        data: list[Any] = [[_cell(row.get(column)) for column in columns] for row in rows]
        self._run.log({"step": step, name: self._table(columns=columns, data=data)})

    def close(self) -> None:
        self._run.finish()


@register_sink("mlflow")
class MlflowSink(Sink):
    """One run per role in the experiment named by ``project``.

    ``sink_args.mlflow.tracking_uri`` (default: MLflow's own, from its environment
    variable) and ``experiment`` are the only arguments.
    """

    def __init__(self, context: SinkContext) -> None:
        from mlflow.tracking import MlflowClient

        args = dict(context.args)
        self._client = MlflowClient(tracking_uri=args.pop("tracking_uri", None))
        name = args.pop("experiment", context.config.get("project", "trinity-dask"))
        if args:
            raise ValueError(
                f"unknown sink_args.mlflow {sorted(args)}; there are tracking_uri, experiment"
            )
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = (
            experiment.experiment_id if experiment else self._client.create_experiment(name)
        )
        key = f"{context.run_id}-{context.role}"
        found = self._client.search_runs([experiment_id], f"tags.trinity_dask_run = '{key}'")
        if found:
            self._run = found[0].info.run_id
            return
        run = self._client.create_run(
            experiment_id,
            run_name=f"{context.run_name}_{context.role}",
            tags={"trinity_dask_run": key},
        )
        self._run = run.info.run_id
        for name, value in _flatten(context.config):
            self._client.log_param(self._run, name, str(value)[:500])

    def log(self, time_s: float, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        stamp = int(time_s * 1000)
        batch = [Metric(_mlflow_name(n), value, stamp, step) for n, value in metrics.items()]
        self._client.log_batch(self._run, metrics=batch)

    def log_table(self, name: str, rows: list[dict[str, Any]], step: int) -> None:
        cells = [{key: _cell(value) for key, value in row.items()} for row in rows]
        self._client.log_dict(
            self._run, {"rows": cells}, f"tables/{_mlflow_name(name)}-{step}.json"
        )

    def close(self) -> None:
        self._client.set_terminated(self._run)


def _mlflow_name(name: str) -> str:
    """MLflow allows letters, digits and ``_-. :/`` in names; ``mean@4`` is ours."""
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"))


def _flatten(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Dotted keys of a nested mapping, in order."""
    flat: list[tuple[str, Any]] = []
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            flat += _flatten(value, f"{prefix}{name}.")
        else:
            flat.append((f"{prefix}{name}", value))
    return flat


def _cell(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
