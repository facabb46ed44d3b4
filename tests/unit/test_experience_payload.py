"""Payload bytes: exact both ways, and nothing else is accepted."""

import pickle

import pyarrow as pa
import pytest

from trinity_dask.experience import EID, Experience
from trinity_dask.experience.schema import SCHEMA, decode, encode, from_table


def sample(n: int) -> list[Experience]:
    return [
        Experience(tokens=[1, 2, 3 + i], eid=EID(1, i), logprobs=[-0.5, -1.0], info={"i": i})
        for i in range(n)
    ]


@pytest.mark.parametrize("n", [0, 1, 5])
def test_payload_round_trip(n: int) -> None:
    header = {"completed_runs": n, "metrics": [{"a": 0.1}], "message": None, "text": "é"}
    table, back = decode(encode(sample(n), header))
    assert back == header
    assert table.schema.equals(SCHEMA, check_metadata=True)
    assert table.schema.metadata is None  # so tables of different payloads concatenate
    assert [e.info for e in from_table(table)] == [{"i": i} for i in range(n)]


def test_decoded_tables_concatenate() -> None:
    tables = [decode(encode(sample(2), {"id": k}))[0] for k in range(3)]
    assert pa.concat_tables(tables).num_rows == 6


def foreign_stream() -> bytes:
    sink = pa.BufferOutputStream()
    table = pa.table({"a": [1]})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize(
    "data",
    [b"", b"TRXP", pickle.dumps([1, 2, 3]), b"\x00" * 64, encode(sample(3), {})[:200]],
    ids=["empty", "magic", "pickle", "zeros", "truncated"],
)
def test_foreign_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not an experience payload"):
        decode(data)


def test_foreign_arrow_stream_is_refused() -> None:
    with pytest.raises(ValueError, match="version None in the Arrow stream"):
        decode(foreign_stream())


def test_encode_table_checks_the_schema() -> None:
    with pytest.raises(ValueError, match="lacks the columns"):
        encode(pa.table({"a": [1]}), {})
