"""The pages' models, without a browser: what is sent, how often, and that nothing is lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from bokeh.document import Document
from bokeh.document.events import DocumentPatchedEvent
from bokeh.models import ColumnDataSource
from bokeh.plotting import figure

from trinity_dask.dashboard.feed import Feeds
from trinity_dask.dashboard.pages.plots import harmless
from trinity_dask.dashboard.pages.site import PAGES, Site, page
from trinity_dask.monitor.curves import AGES


class Heard:
    """Feeds, and how a run tells them something."""

    def __init__(self) -> None:
        self.feeds = Feeds()

    def tell(self, kind: str, run: str = "run", **values: Any) -> None:
        event = {"kind": kind, "run": run, "stage": "", "time": time.time(), **values}
        self.feeds.apply(event)

    def begin(self, run: str = "run", bound: float | None = None) -> None:
        self.tell("stage", run, anew=True, began=time.time(), name=run, mode="both", bound=bound)

    def step(self, step: int, run: str = "run", **values: float) -> None:
        metrics = {"actor/pg_loss": 1.0 / step, "rollout/reward/mean": 0.5, **values}
        self.tell("metrics", run, role="trainer", incarnation=1, points=[[step, metrics]])


@pytest.fixture
def heard() -> Heard:
    return Heard()


def opened(heard: Heard, path: str = "/trinity") -> tuple[Document, Callable[[], None]]:
    """A page as a browser opens it, and its periodic callback."""
    doc = Document()
    PAGES[path](None, {}, doc, find=lambda _: heard.feeds)
    (callback,) = doc.session_callbacks
    return doc, callback.callback


def source(doc: Document, name: str) -> ColumnDataSource:
    found = doc.get_model_by_name(name)
    assert isinstance(found, ColumnDataSource), name
    return found


def test_an_open_page_does_nothing_while_nothing_happens(heard: Heard) -> None:
    heard.begin()
    heard.step(1)
    doc, update = opened(heard)
    update()
    sent = list[DocumentPatchedEvent]()
    doc.on_change(sent.append)
    for _ in range(5):
        update()
    assert sent == []
    heard.step(2)
    update()
    assert sent != []


def test_a_step_is_one_small_message_however_long_the_run(heard: Heard) -> None:
    heard.begin()
    for step in range(1, 1000):
        heard.step(step)
    doc, update = opened(heard)
    update()
    assert len(source(doc, "0/loss/actor/pg_loss").data["x"]) == 999
    sent = list[Any]()
    doc.on_change(sent.append)
    heard.step(1000)
    update()
    kinds = {type(event).__name__ for event in sent}
    assert kinds == {"ColumnsStreamedEvent"}
    assert len(source(doc, "0/loss/actor/pg_loss").data["x"]) == 1000


def test_a_look_at_a_running_run_makes_no_model(heard: Heard) -> None:
    """Bokeh looks at the whole page once more for each: a quarter of a second for three tables."""
    heard.begin()

    def half_a_second(number: int) -> None:
        heard.step(number, **{f"{AGES}0": 1.0})
        accounts = {"scheduled": number, "succeeded": number}
        values = {"accounts": accounts, "in_flight": number, "failures": {"E": number}}
        heard.tell("status", values=values)
        heard.tell("engines", engines={"engine-0": {"state": "serving", "version": number}})
        span = {"what": "wait", "start": 1.0, "seconds": 1.0, "who": "a", "awaited": "b"}
        heard.tell("span", span=span)

    half_a_second(1)
    doc, update = opened(heard)
    update()
    before = {model.id for model in doc.models}
    for number in range(2, 5):
        half_a_second(number)
        update()
    assert {model.id for model in doc.models} == before
    assert list(source(doc, "0/accounts").data["count"]) == [4, 4]


def test_what_a_look_could_not_show_the_next_one_does(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any part may fail once, as while another thread imports a library; nothing follows at the
    end of a run that would have it drawn again."""
    heard.begin()
    heard.step(1)
    doc, update = opened(heard)
    accounts = {"scheduled": 8, "succeeded": 8}
    heard.tell("status", values={"state": "done", "accounts": accounts, "step": 2})
    heard.step(2, **{f"{AGES}0": 1.0})
    heard.tell(
        "span", span={"what": "wait", "start": 1.0, "seconds": 1.0, "who": "a", "awaited": "b"}
    )

    def fail(*_: Any) -> None:
        raise AttributeError("partially initialized module")

    for name in ("stream", "data"):
        with monkeypatch.context() as broken:
            broken.setattr(ColumnDataSource, name, fail if name == "stream" else property(fail))
            with pytest.raises(AttributeError):
                update()
    update()
    assert list(source(doc, "0/loss/actor/pg_loss").data["x"]) == [1, 2]
    assert "scheduled" in source(doc, "0/accounts").data["account"]
    assert list(source(doc, "0/staleness").data["all"]) == [1.0]
    assert list(source(doc, "0/sync").data["who"]) == ["a"]


def test_a_resumed_run_replaces_its_points(heard: Heard) -> None:
    heard.begin()
    for step in range(1, 6):
        heard.step(step)
    doc, update = opened(heard)
    update()
    heard.begin()
    heard.step(1)
    heard.step(2)
    update()
    assert list(source(doc, "0/loss/actor/pg_loss").data["x"]) == [1, 2]


def test_each_run_has_a_tab_and_only_the_one_looked_at_is_drawn(heard: Heard) -> None:
    for run in ("a", "b"):
        heard.begin(run)
        heard.step(1, run)
        heard.tell("status", run, values={"state": "running"})
    site = Site(heard.feeds)
    site.update()
    assert [panel.title for panel in site.tabs.tabs] == ["b (running)", "a (running)"]
    assert [len(panel.child.children) for panel in site.tabs.tabs] == [1, 0]
    site.tabs.active = 1
    site.update()
    assert [len(panel.child.children) for panel in site.tabs.tabs] == [1, 1]


@pytest.mark.parametrize(("state", "looked_at"), [("running", "a"), ("done", "b")])
def test_a_new_run_takes_the_view_only_from_one_that_has_ended(
    heard: Heard, state: str, looked_at: str
) -> None:
    heard.begin("a")
    heard.tell("status", "a", values={"state": state})
    site = Site(heard.feeds)
    site.update()
    heard.begin("b")
    site.update()
    assert site.tabs.tabs[site.tabs.active].title.startswith(looked_at)


def test_the_bound_is_drawn_behind_the_last_age_that_it_allows(heard: Heard) -> None:
    heard.begin(bound=2.0)
    heard.step(1, **{f"{AGES}0": 3.0, f"{AGES}2": 1.0})
    doc, _ = opened(heard)
    ages = doc.get_model_by_name("0/staleness-figure")
    (bound,) = [r for r in ages.center if getattr(r, "dimension", "") == "height"]
    assert (bound.location, bound.visible) == (2.5, True)
    assert list(source(doc, "0/staleness").data["all"]) == [0.75, 0.25]


def test_every_part_has_a_page_and_says_what_it_is(heard: Heard) -> None:
    heard.begin()
    heard.step(1)
    for path in PAGES:
        doc, update = opened(heard, path)
        update()
        for found in doc.select({"type": figure}):
            assert found.html_attributes["aria-label"]
            assert found.xaxis.axis_label
            assert found.yaxis.axis_label


def test_an_old_session_holds_no_page(heard: Heard) -> None:
    """A closed page must leave nothing in the scheduler."""
    import gc
    import weakref

    heard.begin()
    heard.step(1)
    doc = Document()
    page(None, {}, doc, find=lambda _: heard.feeds)
    gone = weakref.ref(doc.roots[0])
    doc.clear()
    doc.remove_periodic_callback(doc.session_callbacks[0])
    del doc
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("rollout/reward", "rollout/reward"),
        ("a\n b\x00", "a b\x00"),
        ("$$x$$", "$ $x$ $"),
        (r"\(x\) \[y\]", r"\ (x\) \ [y\]"),
        ("x" * 100, "x" * 59 + "…"),
    ],
)
def test_a_name_is_no_formula(text: str, shown: str) -> None:
    assert harmless(text) == shown
