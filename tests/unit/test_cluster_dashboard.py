"""The link to the dashboard, on sites whose template a batch job cannot fill in."""

from __future__ import annotations

from collections.abc import Iterator

import dask
import pytest
from distributed import Client

from trinity_dask.cluster.local import at_host, dashboard_of


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    options = {"processes": False, "n_workers": 0, "set_as_default": False}
    with Client(dashboard_address="127.0.0.1:0", **options) as found:
        yield found


@pytest.mark.parametrize(
    "template",
    [
        "{NO_SUCH_HUB_PREFIX}proxy/{port}/status",  # a JupyterHub's variable
        "/user/{0}/proxy/{port}/status",
        "{scheme}://{host}:{port}/{status",  # not a template
        "{host.no_such}:{port}",
    ],
)
def test_a_template_that_cannot_be_filled_in_gives_the_plain_link(
    client: Client, template: str
) -> None:
    plain = dashboard_of(client)
    with dask.config.set({"distributed.dashboard.link": template}):
        assert dashboard_of(client) == plain
        assert dask.config.get("distributed.dashboard.link") == template
    assert plain is not None
    assert plain.endswith("/status")


def test_a_template_that_can_be_filled_in_is_used(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_HUB_PREFIX", "/user/a/")
    with dask.config.set({"distributed.dashboard.link": "{A_HUB_PREFIX}proxy/{port}/status"}):
        link = dashboard_of(client)
    assert link is not None
    assert link.startswith("/user/a/proxy/")


@pytest.mark.parametrize(
    ("link", "listens", "wanted"),
    [
        ("http://10.0.0.7:8787/status", "127.0.0.1:0", "http://127.0.0.1:8787/status"),
        ("http://10.0.0.7:8787/status", "0.0.0.0:8787", "http://10.0.0.7:8787/status"),
        ("http://10.0.0.7:8787/status", ":8787", "http://10.0.0.7:8787/status"),
        ("https://hub/user/joe/proxy/8787/status", "127.0.0.1:0", None),  # a site's template
        ("/user/joe/proxy/8787/status", "127.0.0.1:0", None),
    ],
)
def test_the_link_leads_to_where_the_dashboard_listens(
    link: str, listens: str, wanted: str | None
) -> None:
    assert at_host(link, "tls://10.0.0.7:34000", listens) == (wanted or link)
