"""A configuration in the making, asked for field by field.

Invariant: the manager holds one state and the states before it; everything it shows follows from
the state, and what it generates has passed the validation of the command line.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Optional

from trinity_dask.config.compose import compose_tree, finish
from trinity_dask.config.errors import ConfigError
from trinity_dask.config.secrets import shown_override
from trinity_dask.files import write_text
from trinity_dask.manager.config_registry import CONFIG_GENERATORS, Field, State
from trinity_dask.manager.config_registry.state import field_of, keys

#: section -> the fields of the short form
BEGINNER = {
    "Job": ("project", "exp_name", "checkpoint_root_dir", "monitor_type", "save_interval"),
    "Model": ("model_path", "max_model_len", "max_response_tokens"),
    "Algorithm": ("algorithm_type", "repeat_times", "actor_lr", "critic_lr"),
    "Data": (
        *("taskset_path", "explore_batch_size", "default_workflow_type"),
        *("default_reward_fn_type", "experience_buffer_path", "train_batch_size"),
        *("total_epochs", "total_steps"),
    ),
    "Resources": ("node_num", "gpu_per_node", "trainer_gpu_num", "tensor_parallel_size"),
    "Synchronisation": ("sync_method", "sync_style", "sync_interval"),
}


class ConfigManager:
    """One page: what was chosen, what can be chosen, and what comes of it."""

    def __init__(self, words: Sequence[str] = ()) -> None:
        self.state = State(tuple(words))
        self._before: list[State] = []
        self._start = self.state

    def reset_session_state(self) -> State:
        """Everything as at the beginning; it can be undone."""
        return self.maintain_session_state(self._start)

    def maintain_session_state(self, state: State) -> State:
        """Go on with ``state``; the one before it is kept for :meth:`undo`."""
        if state != self.state:
            self._before.append(self.state)
            self.state = state
        return self.state

    def set(self, key: str, value: Any) -> State:
        """Set one of our keys, with what depends on it."""
        field_of(self.state, key)  # which says when there is no such key
        return self.maintain_session_state(self.state.set(key, value))

    def undo(self) -> State:
        """Back to the state before the last change."""
        if self._before:
            self.state = self._before.pop()
        return self.state

    def get_configs(
        self, *config_names: str, columns_config: Optional[Sequence[int]] = None
    ) -> list[Field]:
        """Fields by Trinity-RFT's names, without ``set_``."""
        return CONFIG_GENERATORS.get_configs(
            *config_names, columns_config=columns_config, state=self.state
        )

    def beginner_mode(self) -> dict[str, list[Field]]:
        """The fields most runs are made of, by section; those that do not apply are left out."""
        return {
            section: [field for field in self.get_configs(*names) if field.visible]
            for section, names in BEGINNER.items()
        }

    def expert_mode(self) -> dict[str, list[Field]]:
        """Every key, by its section."""
        found: dict[str, list[Field]] = {}
        for key in keys():
            section = key.partition(".")[0] if "." in key else "job"
            found.setdefault(section, []).append(field_of(self.state, key, label=key))
        return found

    def problems(self) -> list[str]:
        """What the command line would refuse, in its own sentences, and secrets; empty: nothing."""
        words = self.state.overrides()
        secrets = [
            f"{key} is a secret in plain text, which no file may hold: export it as a variable and "
            "write ${oc.env:NAME}"
            for key in self.state.plain_secrets()
        ]
        try:
            finish(compose_tree(words), words)
        except ConfigError as error:
            return [*secrets, *str(error).splitlines()]
        return secrets

    def command(self) -> str:
        """The command line that means this state, its secrets masked."""
        words = map(shown_override, self.state.overrides())
        return " ".join(["trinity-dask run", *map(_quoted, words)])

    def generate_config(self) -> str:
        """The preset file. Raises ConfigError with all :meth:`problems`."""
        if problems := self.problems():
            raise ConfigError("\n".join(problems))
        return self.state.to_yaml()

    def differences(self, words: Sequence[str] = ()) -> Iterator[str]:
        """``key: theirs -> ours`` for every key that differs from a preset."""
        other = State(tuple(words))
        for key in dict.fromkeys((*keys(), *self.state.values)):
            before, now = other.get(key), self.state.get(key)
            if before != now:
                yield f"{key}: {before} -> {now}"

    def run_config(self, directory: str | os.PathLike[str]) -> subprocess.Popen[bytes]:
        """Save under ``directory`` and run it in a process of its own; its output is in run.log.

        Raises:
            ConfigError: it cannot run.
        """
        home = Path(directory)
        write_text(home / "experiment" / "studio.yaml", self.generate_config())
        words = ["--config-dir", str(home), "+experiment=studio", "monitor.progress=plain"]
        with (home / "run.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "trinity_dask", "run", *words],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )


def _quoted(word: str) -> str:
    """For a shell, where it needs it."""
    if all(c.isalnum() or c in "+=._-/:,@%" for c in word):
        return word
    return '"' + re.sub(r'[\\"$`]', r"\\\g<0>", word) + '"'
