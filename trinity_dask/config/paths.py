"""Where the presets are.

Invariant: the same ``conf/`` is found in a checkout (next to the package) and in an
installed wheel (inside the package).
"""

from __future__ import annotations

from pathlib import Path

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


def groups() -> dict[str, list[str]]:
    """Group name -> its options, sorted."""
    found: dict[str, list[str]] = {}
    for folder in sorted(path for path in conf_dir().iterdir() if path.is_dir()):
        found[folder.name] = sorted(path.stem for path in folder.glob("*.yaml"))
    return found
