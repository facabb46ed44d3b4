"""The certificate of one run: who holds it is on that run's cluster, and nobody else.

Invariant: the files are readable for their owner alone from their first moment on.
"""

from __future__ import annotations

import os
from pathlib import Path

from distributed import Security

from trinity_dask.config.errors import ConfigError

FOLDER = "tls"
ROLES = ("client", "scheduler", "worker")


def make_certificate(directory: Path) -> Security:
    """A new key with its certificate in ``directory/tls``, and the settings of a driver.

    Raises:
        ConfigError: the package that makes certificates is missing.
    """
    try:
        made = Security.temporary()
    except ImportError as error:
        raise ConfigError(
            "encrypted connections need the package cryptography: pip install "
            "'trinity-dask[slurm]', or set cluster.tls=false"
        ) from error
    folder = directory / FOLDER
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, text in (("key.pem", made.tls_client_key), ("cert.pem", made.tls_client_cert)):
        fd = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(fd, "w", encoding="ascii") as file:
            file.write(str(text))
    security = load_certificate(directory)
    assert security is not None
    return security


def load_certificate(directory: Path) -> Security | None:
    """The settings of who may read ``directory/tls``; None where there is none."""
    key, certificate = (directory / FOLDER / name for name in ("key.pem", "cert.pem"))
    if not key.exists():
        return None
    files = {f"tls_{role}_key": str(key) for role in ROLES}
    files |= {f"tls_{role}_cert": str(certificate) for role in ROLES}
    return Security(require_encryption=True, tls_ca_file=str(certificate), **files)
