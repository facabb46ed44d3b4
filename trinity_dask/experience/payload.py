"""Experiences as bytes between processes: one Arrow IPC stream with a JSON header.

Invariant: a payload is data only (nothing in it is executed on decoding), and bytes that
are not a payload are refused with a message, never half-read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from trinity_dask.experience.experience import Experience
from trinity_dask.experience.schema import SCHEMA, check_schema, to_table

VERSION = b"1"
_VERSION_KEY = b"trinity_dask.payload"
_HEADER_KEY = b"trinity_dask.header"


def encode(experiences: Sequence[Experience], header: dict[str, Any]) -> bytes:
    """``experiences`` and a JSON-able ``header`` as bytes. Zero experiences are allowed."""
    return encode_table(to_table(experiences), header)


def encode_table(table: pa.Table, header: dict[str, Any]) -> bytes:
    """Like :func:`encode` for a table that already has the schema of experiences."""
    check_schema(table)
    metadata = {_VERSION_KEY: VERSION, _HEADER_KEY: json.dumps(header).encode()}
    table = table.replace_schema_metadata(metadata)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def decode(data: bytes | memoryview) -> tuple[pa.Table, dict[str, Any]]:
    """Table and header of a payload; the table shares memory with ``data``.

    Raises:
        ValueError: ``data`` is not a payload, is cut short, or is of another version.
    """
    try:
        reader = pa.ipc.open_stream(pa.py_buffer(data))
        table = reader.read_all()
    except (pa.ArrowInvalid, OSError, EOFError) as error:
        raise ValueError(
            f"not an experience payload: {len(data)} bytes are no complete Arrow stream ({error})"
        ) from error
    metadata = table.schema.metadata or {}
    version = metadata.get(_VERSION_KEY)
    if version != VERSION:
        raise ValueError(
            f"not an experience payload: version {version!r} in the Arrow stream, "
            f"expected {VERSION!r}"
        )
    check_schema(table)
    bare = table.replace_schema_metadata(None)
    # a cast copies every column, and payloads of our own encode need none
    return bare if bare.schema.equals(SCHEMA) else bare.cast(SCHEMA), read_header(metadata)


def peek_header(data: bytes | memoryview) -> dict[str, Any]:
    """The header of a payload; its rows are not read.

    Raises:
        ValueError: ``data`` is not a payload.
    """
    try:
        with pa.ipc.open_stream(pa.py_buffer(data)) as stream:
            return read_header(stream.schema.metadata or {})
    except (pa.ArrowInvalid, KeyError) as error:
        raise ValueError(f"not an experience payload: {error!r}") from error


def read_header(metadata: dict[bytes, bytes]) -> dict[str, Any]:
    """The header in an Arrow schema's metadata; KeyError when there is none."""
    return json.loads(metadata[_HEADER_KEY])
