"""Rules between the synchronizer's keys and those of both sides.

Invariant: a combination in which one side would wait for the other for ever is refused here.
"""

from __future__ import annotations

from collections.abc import Iterator

from trinity_dask.config import modes
from trinity_dask.config.schema import Config

_CAPACITY = "buffer.trainer_input.experience_buffer.capacity_batches"


def weight_path(config: Config) -> Iterator[str]:
    """Only method ``checkpoint`` has a place of its own choice, and its scheme must be known."""
    sync = config.synchronizer
    if sync.path is None:
        return
    if sync.sync_method != "checkpoint":
        yield (
            f"synchronizer.path={sync.path!r} has no meaning with synchronizer.sync_method="
            f"{sync.sync_method}; set sync_method=checkpoint, or leave it out"
        )
    scheme, separator, _ = sync.path.partition("://")
    if not separator:
        return
    import fsspec

    try:
        fsspec.get_filesystem_class(scheme)
    except (ValueError, ImportError) as error:
        yield (
            f"synchronizer.path={sync.path!r}: {error}; use a directory, or a scheme whose fsspec "
            "package is installed (s3:// needs s3fs)"
        )


def synchronizer(config: Config) -> Iterator[str]:
    yield from weight_path(config)
    if not (modes.explores(config.mode) and modes.trains(config.mode)):
        return
    sync = config.synchronizer
    capacity = config.buffer.trainer_input.experience_buffer.capacity_batches
    ahead = sync.sync_interval + sync.sync_offset
    if sync.sync_style == "fixed" and capacity < ahead:
        yield (
            f"{_CAPACITY}={capacity} is below synchronizer.sync_interval={sync.sync_interval} + "
            f"synchronizer.sync_offset={sync.sync_offset}: in style fixed the explorer commits "
            f"that many batches before the trainer may go on; set it to {ahead} or more"
        )
    least = ahead - 1
    if sync.max_staleness is not None and sync.max_staleness < least:
        yield (
            f"synchronizer.max_staleness={sync.max_staleness} cannot be kept: weights move every "
            f"synchronizer.sync_interval={sync.sync_interval} steps"
            + (f", {sync.sync_offset} batches late" if sync.sync_offset else "")
            + f"; set it to {least} or more, or lower the interval"
        )
    if sync.sync_offset and sync.sync_style == "fully_async":
        yield (
            f"synchronizer.sync_offset={sync.sync_offset} has no meaning in style fully_async, "
            "which has no boundaries; leave it out"
        )
    if sync.in_flight == "wait" and sync.in_flight_timeout_s >= sync.sync_timeout_s:
        yield (
            f"synchronizer.in_flight_timeout_s={sync.in_flight_timeout_s:g} must be below "
            f"synchronizer.sync_timeout_s={sync.sync_timeout_s:g}: an update that waits for its "
            "requests has to end before the transfer is given up"
        )
