"""Experience <-> Arrow: exact for every field, through slices, chunks and files."""

import copy
import math
import pickle
from dataclasses import fields
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_dask.experience import EID, RESPONSE_TRUNCATED, Experience
from trinity_dask.experience.experience import RESPONSE_FIELDS
from trinity_dask.experience.schema import SCHEMA, LazyRows, conform, from_table, to_table

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
ID = st.one_of(st.integers(-(2**40), 2**40), TEXT)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=6,
)
F32 = st.floats(width=32, allow_nan=False)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        same_kind = type(a) is type(b) and a.dtype == b.dtype
        return same_kind and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    return type(a) is type(b) and a == b


def assert_same(first: list[Experience], second: list[Experience]) -> None:
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        for f in fields(Experience):
            left, right = getattr(a, f.name), getattr(b, f.name)
            assert same(left, right), (f.name, left, right)


@st.composite
def experiences(draw: Any) -> Experience:
    prompt, response = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    number = {np.float32: F32, np.int32: st.integers(-(2**31), 2**31 - 1), np.bool_: st.booleans()}
    optional = {
        name: draw(st.none() | st.lists(number[dtype], min_size=response, max_size=response))
        for name, dtype in RESPONSE_FIELDS.items()
    }
    pair = draw(st.booleans())
    ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4)
    return Experience(
        tokens=np.arange(prompt + response),
        prompt_length=prompt,
        eid=EID(draw(ID), draw(ID), draw(st.integers(0, 99)), draw(st.integers(0, 99)), draw(TEXT)),
        reward=draw(st.none() | st.floats()),
        chosen=draw(ids) if pair else None,
        rejected=draw(ids) if pair else None,
        truncate_status=draw(st.sampled_from([None, RESPONSE_TRUNCATED])),
        prompt_text=draw(st.none() | TEXT),
        response_text=draw(st.none() | TEXT),
        messages=draw(st.none() | st.lists(st.dictionaries(TEXT, JSON, max_size=2), max_size=2)),
        tools=draw(st.none() | st.lists(st.dictionaries(TEXT, JSON, max_size=2), max_size=2)),
        info=draw(st.dictionaries(TEXT, JSON, max_size=3)),
        metrics=draw(st.dictionaries(TEXT, st.floats(allow_nan=False), max_size=2)),
        **({} if pair else optional),
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(experiences(), max_size=5))
def test_round_trip_is_exact_for_every_field(exps: list[Experience]) -> None:
    table = to_table(exps)
    assert table.schema.equals(SCHEMA)
    assert_same(exps, from_table(table))


@settings(max_examples=30, deadline=None)
@given(st.lists(experiences(), min_size=2, max_size=5), st.data())
def test_round_trip_through_slices_and_chunks(exps: list[Experience], data: Any) -> None:
    cut = data.draw(st.integers(0, len(exps)))
    table = to_table(exps)
    chunked = pa.concat_tables([table.slice(cut), table.slice(0, cut)])
    assert_same(exps[cut:] + exps[:cut], from_table(chunked))


def test_ids_keep_their_type() -> None:
    exps = [Experience(tokens=[1, 2], eid=EID(batch=b, task=b)) for b in (7, "7", -1, "", "a/b")]
    back = from_table(to_table(exps))
    assert [e.eid.batch for e in back] == [7, "7", -1, "", "a/b"]
    assert [type(e.eid.task) for e in back] == [int, str, int, str, str]


def test_numpy_and_torch_values_become_plain() -> None:
    torch = pytest.importorskip("torch")
    info = {"a": np.float32(0.5), "b": np.arange(2), "c": torch.tensor([1, 2]), "d": (1, None)}
    back = from_table(to_table([Experience(tokens=[1, 2], info=info)]))[0]
    assert back.info == {"a": 0.5, "b": [0, 1], "c": [1, 2], "d": [1, None]}


def test_arrays_are_writable_and_do_not_share_rows() -> None:
    first, second = from_table(to_table([Experience(tokens=[1, 2, 3])] * 2))
    first.action_mask[:] = False
    assert second.action_mask.all()


def test_what_json_cannot_hold_names_the_field() -> None:
    exp = Experience(tokens=[1, 2], info={"bad": {1, 2}})
    with pytest.raises(ValueError, match="info holds a value of type set"):
        to_table([exp])


def test_invalid_text_names_the_field() -> None:
    with pytest.raises(ValueError, match="response_text holds text that is not valid Unicode"):
        to_table([Experience(tokens=[1, 2], response_text="\ud800")])


def test_foreign_and_inconsistent_tables_are_refused() -> None:
    with pytest.raises(ValueError, match="lacks the columns"):
        from_table(pa.table({"tokens": [[1, 2]]}))
    table = to_table([Experience(tokens=[1, 2, 3], logprobs=[0.0, 0.0])])
    index = table.schema.get_field_index("logprobs")
    short = table.set_column(
        index, SCHEMA.field("logprobs"), pa.array([[0.0]], pa.list_(pa.float32()))
    )
    with pytest.raises(ValueError, match="logprobs does not have one value per response token"):
        from_table(short)
    wrong = table.set_column(index, "logprobs", pa.array(["x"]))
    with pytest.raises(ValueError, match="column logprobs is string"):
        from_table(wrong)


def test_tables_of_other_versions_are_read() -> None:
    table = to_table([Experience(tokens=[1, 2, 3])])
    older = table.drop_columns(["teacher_logprobs", "tools"])
    assert conform(older).equals(table)
    newer = table.append_column("later", pa.array([1]))
    assert conform(newer.select(sorted(newer.column_names))).equals(table)
    with pytest.raises(ValueError, match="lacks the columns tokens"):
        conform(table.drop_columns(["tokens"]))


def test_equal_looking_values_of_other_types_stay_apart_and_rows_share_no_dict():
    infos = [{"a": 1}, {"a": 1.0}, {"a": True}, {"a": -0.0}, {"a": 0.0}, {"1": 2}, {"a": "1"}]
    infos += [{"at": {"x": 1}}, {"at": {"x": True}}, {"a": 1}, {"at": {"x": 1}}]
    made = [Experience(tokens=np.array([1, 2]), info=dict(info)) for info in infos]
    again = from_table(to_table(made))
    assert [repr(e.info) for e in again] == [repr(info) for info in infos]
    again[0].info["a"] = again[7].info["at"]["x"] = 5
    assert again[9].info == {"a": 1}
    assert again[10].info == {"at": {"x": 1}}


def test_rows_that_say_the_same_share_nothing() -> None:
    same: list[dict[str, Any]] = [{}, {"a": 1, "b": {"c": 2}}]
    for value in same:
        first, second = from_table(to_table([Experience(tokens=[1, 2], info=value)] * 2))
        first.info["new"] = 1
        first.info.get("b", {})["c"] = 3
        assert second.info == value


def test_rows_read_on_demand_convert_what_is_looked_at_and_no_more() -> None:
    exps = [
        Experience(tokens=[1, 2, 3], eid=EID(1, i), reward=float(i), response_text="x")
        for i in range(4)
    ]
    table = to_table(exps)
    rows = LazyRows(table)
    third, first = rows.experiences[3], rows.experiences[1]
    assert third.reward == 3.0
    third.advantages = np.array([0.5, 0.5], np.float32)
    third.info["seen"] = True
    assert first.advantages is None
    result = rows.to_table([third, first])
    assert result.column("response_text").equals(table.column("response_text").take([3, 1]))
    exps[3].advantages = np.array([0.5, 0.5], np.float32)
    exps[3].info["seen"] = True
    assert result.equals(to_table([exps[3], exps[1]]))


def test_copies_of_rows_read_on_demand_are_plain_experiences() -> None:
    rows = LazyRows(to_table([Experience(tokens=[1, 2, 3], eid=EID(1, i)) for i in range(2)]))
    kept = rows.experiences[0]
    for copied in (copy.copy(kept), copy.deepcopy(kept), pickle.loads(pickle.dumps(kept))):
        assert type(copied) is Experience
        copied.reward = 2.0
        assert kept.reward is None
        rewards = rows.to_table([kept, copied]).column("reward").to_pylist()
        assert rewards == [None, 2.0]
