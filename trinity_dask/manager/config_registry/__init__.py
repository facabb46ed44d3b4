"""The registry of fields, filled: importing this package registers every field.

Invariant: no module of it imports torch.
"""

from trinity_dask.manager.config_registry import (
    algorithm_config_manager,
    buffer_config_manager,
    explorer_config_manager,
    model_config_manager,
    trainer_config_manager,
)
from trinity_dask.manager.config_registry.config_registry import CONFIG_GENERATORS, ConfigRegistry
from trinity_dask.manager.config_registry.state import Field, State, from_yaml

__all__ = [
    "CONFIG_GENERATORS",
    "ConfigRegistry",
    "Field",
    "State",
    "algorithm_config_manager",
    "buffer_config_manager",
    "explorer_config_manager",
    "from_yaml",
    "model_config_manager",
    "trainer_config_manager",
]
