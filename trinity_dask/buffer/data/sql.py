"""The rows of a database, as ``pandas.read_sql`` gives them.

Invariant: the query is run once, when the data set is opened; what it gives is kept on the
disk, so rows can be read by index and a resumed run that finds other rows says so.
"""

from __future__ import annotations

import json
import re
import sqlite3
import warnings
from collections.abc import Iterator
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import fsspec

from trinity_dask.buffer.data.parts import LinesPart
from trinity_dask.buffer.errors import DataError

CHUNK_ROWS = 10_000
# behind comments and brackets
QUERY = re.compile(
    r"(?:\s|--[^\n]*(?:\n|$)|/\*.*?\*/|\()*(?:select|with|values|from|table|call|exec|execute)\b",
    re.IGNORECASE | re.DOTALL,
)
NAME = re.compile(r"[\w.$]+|[\"`\[].*[\"`\]]")  # of a table, plain or in quotes already
SQLITE, DUCKDB = "sqlite:///", "duckdb:///"


def is_database(path: str) -> bool:
    """A URL whose scheme no file system has: ``sqlite:///tasks.db``, ``postgresql://...``."""
    scheme, found, _ = path.partition("://")
    return bool(found) and scheme.split("::")[-1] not in fsspec.available_protocols()


def read_sql(url: str, query: str | None) -> LinesPart:
    """The rows of ``query``: a SELECT or a table; None where the database has one table only.

    Raises:
        DataError: no such database or table, or a query that it refuses.
    """
    import pandas as pd

    name = f"{url}, {query or 'its table'}"
    try:
        with closing(_connect(url)) as connection:
            statement = _statement(url, connection, query)
            with warnings.catch_warnings():  # pandas names the connections that it tests
                warnings.filterwarnings("ignore", message="pandas only supports SQLAlchemy")
                chunks = pd.read_sql(
                    statement, connection, chunksize=CHUNK_ROWS, dtype_backend="pyarrow"
                )
            return LinesPart(name, _lines(chunks))
    except DataError:
        raise
    except Exception as error:  # each driver has errors of its own
        raise DataError(f"{name} cannot be read: {type(error).__name__}: {error}") from error


def _lines(chunks: Iterator[Any]) -> Iterator[bytes]:
    import pandas as pd

    for chunk in chunks:  # to_json would round floats and drop what is infinite
        lines = [
            json.dumps(
                {
                    key: None if value is pd.NA or value is pd.NaT else value
                    for key, value in row.items()
                },
                ensure_ascii=False,
                default=_plain,
            )
            for row in chunk.to_dict(orient="records")
        ]
        yield "".join(f"{line}\n" for line in lines).encode()


def _plain(value: Any) -> Any:
    """What JSON has for a value that it does not know."""
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, bytes | memoryview):
        return bytes(value).decode()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _connect(url: str) -> Any:
    if url.startswith(SQLITE):
        file = Path(url.removeprefix(SQLITE)).expanduser()
        return sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True)
    try:
        if url.startswith(DUCKDB):
            import duckdb

            file = Path(url.removeprefix(DUCKDB)).expanduser()
            return duckdb.connect(str(file), read_only=True)
        import sqlalchemy
    except ImportError as error:
        raise DataError(
            f"{url} is read through {error.name}, which is not installed; "
            "pip install 'trinity-dask[sql]' and, but for DuckDB, the database's driver"
        ) from error
    return sqlalchemy.create_engine(url).connect()


def _statement(url: str, connection: Any, query: str | None) -> str:
    """``query``, or a SELECT of the table that it names; without it the only table.

    Raises:
        DataError: there is no query, and not one table.
    """
    if isinstance(connection, sqlite3.Connection) or url.startswith(DUCKDB):
        where = "sqlite_master WHERE type IN ('table', 'view')"
        column = "name"
        if url.startswith(DUCKDB):
            where, column = "information_schema.tables", "table_name"
        cursor = connection.execute(f"SELECT {column} FROM {where}")
        tables = [name for (name,) in cursor.fetchall()]
    else:
        import sqlalchemy

        there = sqlalchemy.inspect(connection)
        tables = [*there.get_table_names(), *there.get_view_names()]
    if query is None and len(tables) != 1:
        raise DataError(f"{url} has the tables {', '.join(tables) or 'none'}; set query")
    name = tables[0] if query is None else query.strip()
    if name not in tables and (QUERY.match(name) or NAME.fullmatch(name)):
        return name if QUERY.match(name) else f"SELECT * FROM {name}"
    if hasattr(connection, "dialect"):  # backticks in some
        return f"SELECT * FROM {connection.dialect.identifier_preparer.quote_identifier(name)}"
    doubled = name.replace('"', '""')
    return f'SELECT * FROM "{doubled}"'
