"""docs/walks.md is true as far as the source shows it, and short.

The trace of a real run is held against it in tests/vllm/test_walks.py.
"""

import pytest
from walk_support import WALKS, Hop, Walk, broken_links, definitions, read_walks

# Functions and files that one thing passes now; they may only go down. They were 111 and 42, 78
# and 29, 47 and 23; the aim is 55 and 22, 36 and 14, 20 and 10.
LIMITS = {"One experience": (55, 22), "One weight": (36, 14), "One config key": (20, 10)}


@pytest.fixture(scope="module")
def walks():
    return {walk.title: walk for walk in read_walks(WALKS.read_text())}


def test_the_page_has_the_three_walks(walks):
    assert list(walks) == list(LIMITS)


@pytest.mark.parametrize("title", LIMITS)
def test_every_hop_exists(walks, title):
    missing = [h.key for h in walks[title].hops if h.name not in definitions(h.file)]
    assert missing == []


@pytest.mark.parametrize("title", LIMITS)
def test_the_walk_is_short(walks, title):
    hops, files = LIMITS[title]
    walk = walks[title]
    assert len(walk.hops) <= hops
    assert walk.files <= files


def walk_of(*keys: str, woken: str = "") -> Walk:
    return Walk("w", [Hop(*key.split(":"), woken=key == woken) for key in keys])


def test_a_hop_that_was_left_out_is_found():
    a, b, c, d = (f"x.py:{name}" for name in "abcd")
    trace = {(a, b), (b, c), (d, a)}
    assert broken_links(walk_of(a, b, c), trace) == []
    assert broken_links(walk_of(c, b, a, d), trace) == [], "a result goes back to its callers"
    assert broken_links(walk_of(a, c), trace) == ["w: nothing leads to x.py:c"]
    assert broken_links(walk_of(a, b, d), trace) == []
    assert broken_links(walk_of(b, d), trace) == ["w: nothing leads to x.py:d"]
    assert broken_links(walk_of(b, d, woken=d), trace) == []


def test_an_entry_that_cannot_be_read_is_refused():
    with pytest.raises(ValueError, match="not `file"):
        read_walks("## One\n\n1. somewhere in buffer/store\n")
