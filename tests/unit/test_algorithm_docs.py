"""The page of algorithms: its tables are the code's, its example runs."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch

from trinity_dask.algorithm import POLICY_LOSS_FN, Denominator

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "algorithms.md").read_text(encoding="utf-8")


def maker():
    spec = importlib.util.spec_from_file_location("make_algorithms", DOCS / "make_algorithms.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_current():
    assert maker().page(PAGE) == PAGE, "run python docs/make_algorithms.py"


def test_a_page_without_its_marker_is_refused():
    with pytest.raises(ValueError, match="marker"):
        maker().page("# Algorithms\n")


def test_the_example_of_a_loss_runs():
    code = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL).group(1)
    # under a name of this test's own: a registered name stays
    exec(compile(code.replace('"mine"', '"documented_example"'), "algorithms.md", "exec"), {})
    loss = POLICY_LOSS_FN.get("documented_example")(scale=2.0)
    POLICY_LOSS_FN._items.pop("documented_example")
    assert loss.needs == {"advantages"}
    one = torch.ones(1, 2)
    value, metrics = loss(
        logprob=-one, action_mask=one > 0, advantages=one, denominator=Denominator(2.0, 1.0)
    )
    assert value == metrics["my_loss"] == 2.0
