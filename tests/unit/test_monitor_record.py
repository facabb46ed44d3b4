"""Metrics survive the way through the file exactly."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trinity_dask.monitor.history import RESERVED, as_floats, decode_line, encode_line

NAMES = st.text(min_size=1, max_size=20).filter(lambda name: name not in RESERVED)


@given(st.dictionaries(NAMES, st.floats(), max_size=5))
def test_any_floats_come_back_and_the_line_is_strict_json(metrics):
    text = encode_line(1.5, "explorer", 3, 2, metrics)
    assert text.endswith("\n")
    assert text.count("\n") == 1
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    line = decode_line(text)
    assert (line["role"], line["step"], line["incarnation"]) == ("explorer", 3, 2)
    for name, value in metrics.items():
        assert line[name] == value or (math.isnan(line[name]) and math.isnan(value))


def test_numbers_of_other_libraries_are_taken_and_other_things_named():
    metrics = {
        "a": np.float32(0.5),
        "b": torch.tensor(2),
        "c": True,
        "text": "3",
        "vector": np.zeros(2),
        "none": None,
        "step": 7,
    }
    values, rejected = as_floats(metrics)
    assert values == {"a": 0.5, "b": 2.0, "c": 1.0}
    assert all(type(value) is float for value in values.values())
    assert rejected == ["text", "vector", "none", "step"]


@pytest.mark.parametrize("text", ["", "[1]", '{"step": 1}', '{"role": "x", "step": 1, "a"'])
def test_a_line_that_is_none_is_a_value_error(text):
    with pytest.raises(ValueError):  # noqa: PT011  (the message is the JSON reader's)
        decode_line(text)
