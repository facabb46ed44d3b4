"""A real Chromium, and what every page must keep: no error, nothing from elsewhere."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

HERE = {"127.0.0.1", "localhost"}


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """The machine's Chromium; skipped where there is none."""
    api = pytest.importorskip("playwright.sync_api")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no chromium: apt-get install --no-install-recommends chromium")
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program)
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page in a context of its own; it fails the test on an error or a foreign request."""
    context, wrong = browser.new_context(), list[str]()
    found = context.new_page()
    found.set_default_timeout(60_000)
    found.on("pageerror", lambda error: wrong.append(f"error on the page: {error}"))

    def watched(request: Any) -> None:
        where = urlsplit(request.url)
        if where.scheme.startswith("http") and where.hostname not in HERE:
            wrong.append(f"a request to {where.hostname}")

    found.on("request", watched)
    yield found
    context.close()
    assert wrong == []
