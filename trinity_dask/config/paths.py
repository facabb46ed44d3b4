"""Where the presets are, and which there are.

Invariant: the same ``conf/`` is found in a checkout (next to the package) and in an
installed wheel (inside the package).
"""

from __future__ import annotations

from pathlib import Path
from typing import Optional

from trinity_dask.config.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parent.parent


def conf_dir() -> Path:
    """The directory that holds ``config.yaml`` and the groups."""
    candidates = (_PACKAGE / "conf", _PACKAGE.parent / "conf")
    for path in candidates:
        if (path / "config.yaml").is_file():
            return path
    looked = " or ".join(str(path) for path in candidates)
    raise ConfigError(
        f"the presets are missing: no config.yaml in {looked}; reinstall trinity-dask"
    )


def groups(config_dir: Optional[str] = None) -> dict[str, list[str]]:
    """Group name -> its options, sorted; with those of a directory of the user's."""
    if config_dir is not None and not Path(config_dir).is_dir():
        raise ConfigError(f"--config-dir={config_dir}: there is no such directory")
    found: dict[str, list[str]] = {}
    for home in (conf_dir(), *([Path(config_dir)] if config_dir else [])):
        for folder in sorted(path for path in home.iterdir() if path.is_dir()):
            options = (path.stem for path in folder.glob("*.yaml"))
            found[folder.name] = sorted({*found.get(folder.name, []), *options})
    return found
