"""What a stage's engines and its start model are, derived from its config."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Optional

from trinity_dask.cluster.slots import engine_slot, own_engine_slots
from trinity_dask.config.schema import Config
from trinity_dask.models.checks import check_model_dir
from trinity_dask.models.protocol import EngineSpec
from trinity_dask.trainer.checkpoints.checkpoint import latest_hf_export


def engine_specs(cfg: Config) -> list[EngineSpec]:
    """One engine per rollout worker; in a shared cluster, on the slots that are this run's."""
    first = cfg.cluster.rollout.first_index or 0
    return [engine_spec(cfg, engine_slot(first + i)) for i in range(cfg.cluster.rollout.n_workers)]


def engine_spec(cfg: Config, slot: str) -> EngineSpec:
    """The engine of this run on ``slot``."""
    engine = cfg.explorer.rollout_model
    return EngineSpec(
        slot=slot,
        engine_type=engine.engine_type,
        model_path=cfg.model.model_path,
        config=asdict(engine),
        model=asdict(cfg.model),
        device="cuda" if cfg.cluster.rollout.gpus_per_worker else "cpu",
        in_flight=cfg.synchronizer.in_flight,
        in_flight_timeout_s=cfg.synchronizer.in_flight_timeout_s,
        plugin_dirs=tuple(cfg.plugin_dirs),
    )


def joining_spec(cfg: Config, slot: str) -> Optional[EngineSpec]:
    """The engine for a worker that joins a live run; None: its slot is another run's."""
    own = own_engine_slots(cfg.cluster)
    return engine_spec(cfg, slot) if own is None or slot in own else None


def stage_model_path(cfg: Config, previous: Optional[Config]) -> str:
    """The directory this stage starts from: the previous stage's newest export, if any.

    Raises:
        FileNotFoundError: the previous stage left no complete export.
        ValueError: the directory lacks weights, config or tokenizer (says which).
    """
    path = cfg.model.model_path
    if previous is not None:
        export = latest_hf_export(Path(str(previous.job_dir)))
        if export is None:
            raise FileNotFoundError(
                f"stage {cfg.stage_name!r} starts from stage {previous.stage_name!r}, but "
                f"{previous.job_dir} holds no complete Hugging Face export; run that stage "
                f"with trainer.save_hf_checkpoint=last (and, with model.lora, "
                f"model.lora.merge_export=true: a stage starts from a whole model)"
            )
        path = str(export)
    check_model_dir(path)
    return path
