"""What is typed into the viewer's filters, and what rows it means."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_dask.records.index import INDEX
from trinity_dask.view.columns import NONE, Rows
from trinity_dask.view.query import Query, QueryError, changes, condition, select

MIXED = [
    {"batch": "1", "task": "9", "status": "kept", "step": 1, "reward": 0.5, "length": 10},
    {"batch": "1", "task": "10", "status": "kept", "step": 1, "reward": None, "length": 3},
    {"batch": "2", "task": "9", "status": "failed", "step": 2, "error": "KeyError: 'x'"},
    {"batch": "2", "task": "9", "status": "kept", "step": 2, "reward": 1.0, "length": 3},
    {"batch": "3", "task": "7", "status": "eval", "step": 3, "reward": -2.0, "length": 8},
]


def rows_of(*files: list[dict[str, Any]]) -> Rows:
    rows = Rows()
    for at, values in enumerate(files):
        rows.put(at, rows.chunk_of(pa.Table.from_pylist(values, schema=INDEX)))
    rows.arrange(range(len(files)))
    return rows


def places(rows: Rows, **asked: Any) -> list[int]:
    return select(rows, Query.parse(asked), None, None)[0].tolist()


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ({"reward": "0.5"}, [0]),
        ({"reward": ">0"}, [0, 3]),
        ({"reward": "-2..0.5"}, [0, 4]),
        ({"reward": ">-3 <1"}, [0, 4]),
        ({"reward": "!=1"}, [0, 4]),
        ({"reward": "none"}, [1, 2]),
        ({"length": "any"}, [0, 1, 3, 4]),
        ({"length": "3", "reward": "any"}, [3]),
        ({"status": "ept"}, [0, 1, 3]),
        ({"status": "!=kept"}, [2, 4]),
        ({"error": "keyerror"}, [2]),
        ({"error": "none"}, [0, 1, 3, 4]),
        ({"error": "!KeyError"}, [0, 1, 3, 4]),
        ({"group": "=2/9"}, [2, 3]),
        ({"group": "/9"}, [0, 2, 3]),
        ({"task": ""}, [0, 1, 2, 3, 4]),
    ],
)
def test_conditions_choose_rows(where: dict[str, str], expected: list[int]) -> None:
    assert places(rows_of(MIXED[:2], MIXED[2:]), where=where) == expected


@pytest.mark.parametrize("typed", ["high", "1..", "> 0.5x", "..", ">=", "1,5", "0x10"])
def test_what_is_no_condition_on_numbers_is_told(typed: str) -> None:
    with pytest.raises(QueryError, match="no condition on numbers"):
        condition("number", typed)


def test_a_column_that_there_is_not_is_told_with_those_there_are() -> None:
    with pytest.raises(QueryError, match=r"no column 'rewards'; there are status, .*reward"):
        places(rows_of(MIXED), where={"rewards": "1"})
    with pytest.raises(QueryError, match="no column 'prompt'"):
        places(rows_of(MIXED), sort="prompt")


@pytest.mark.parametrize(
    "asked", [{"where": ["reward"]}, {"where": {"reward": 1}}, {"since": "7"}, {"since": True}]
)
def test_a_query_of_another_form_is_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(QueryError, match="where must hold"):
        Query.parse(asked)


def test_rows_without_a_value_are_last_both_ways_and_equals_stay_in_order() -> None:
    rows = rows_of(MIXED[:3], MIXED[3:])
    assert places(rows, sort="length") == [1, 3, 4, 0, 2]
    assert places(rows, sort="length", down=True) == [0, 4, 1, 3, 2]
    assert places(rows, sort="reward", down=True) == [3, 0, 4, 1, 2]
    assert places(rows, sort="task") == [4, 0, 2, 3, 1]  # 7, 9, 10: numbers count as numbers
    assert places(rows, sort="error") == [2, 0, 1, 3, 4]
    assert places(rows, sort="group", down=True) == [4, 2, 3, 1, 0]


def test_tasks_whose_reward_fell_are_found_by_their_prompt() -> None:
    prompts = np.array([5, 5, 7, 7, 9, 5, 7], np.uint64)
    steps = np.array([1, 2, 1, 3, 1, 3, 3])
    rewards = np.array([1.0, np.nan, 0.2, 0.9, 1.0, 0.0, 0.1])
    found = changes(prompts, steps, rewards, since=3)
    np.testing.assert_allclose(found[[0, 1, 5]], -1.0)
    np.testing.assert_allclose(found[[2, 3, 6]], 0.3)
    assert np.isnan(found[4])  # never seen again


def test_what_fell_is_asked_of_rows_that_pass_the_other_filters() -> None:
    values = [
        {"status": "kept", "step": 1, "reward": 1.0},
        {"status": "kept", "step": 2, "reward": 1.0},
        {"status": "eval", "step": 2, "reward": 0.0},
    ]
    rows, prompts = rows_of(values), np.array([4, 4, 4], np.uint64)
    found, change = select(rows, Query.parse({"since": 2}), None, prompts)
    assert found.tolist() == [0, 1, 2]
    np.testing.assert_allclose(change, -0.5)
    kept = Query.parse({"since": 2, "where": {"status": "kept"}})
    assert select(rows, kept, None, prompts)[0].tolist() == []


numbers = st.none() | st.floats(-5, 5).map(lambda v: round(v, 1))


@settings(max_examples=100, deadline=None)
@given(st.lists(numbers, max_size=30), st.floats(-5, 5), st.booleans(), st.randoms())
def test_filters_and_sorts_are_those_of_plain_python(
    rewards: list[float | None], bound: float, down: bool, chance: random.Random
) -> None:
    values = [{"reward": r, "status": "kept"} for r in rewards]
    cut = chance.randint(0, len(values))
    rows = rows_of(values[:cut], values[cut:])
    wanted = [i for i, r in enumerate(rewards) if r is not None and r > bound]
    assert places(rows, where={"reward": f">{bound!r}"}) == wanted
    have = [i for i, r in enumerate(rewards) if r is not None]
    in_order = sorted(have, key=lambda i: -rewards[i] if down else rewards[i])  # type: ignore[operator]
    none = [i for i, r in enumerate(rewards) if r is None]
    assert places(rows, sort="reward", down=down) == in_order + none


def test_columns_of_one_value_take_no_room_and_others_are_whole() -> None:
    rows = rows_of(MIXED)
    chunk = rows.get(0)
    assert chunk is not None
    assert chunk["stage"].strides == (0,)
    assert chunk["step"].tolist() == [1, 1, 2, 2, 3]
    assert chunk["length"].tolist() == [10, 3, NONE, 3, 8]


def test_numbers_that_do_not_fit_are_clipped_and_odd_parts_are_left_out() -> None:
    odd = ['{"a": 1, "b": "x"}', "[1]", "no json", '{"a": NaN}', '{"a": 1e999}', None]
    values = [{"length": 5, "version_max": 2**40, "parts": text} for text in odd]
    rows = rows_of(values)
    assert rows.names()[7] == "parts.a"
    assert places(rows, where={"parts.a": "1"}) == [0]
    assert places(rows, where={"version_max": f">{2**31 - 2}"}) == [0, 1, 2, 3, 4, 5]
    cells = [rows.value(rows.get(0), i, "parts.a") for i in range(6)]  # type: ignore[arg-type]
    assert cells == [1.0, None, None, None, None, None]
