"""Who is answered by the configuration page's server, and what the calls do.

Invariant: a request that a foreign page or another user of the machine can make is refused.
"""

from __future__ import annotations

import asyncio
import json

import pytest
from tornado.httpclient import AsyncHTTPClient

from trinity_dask.studio.server import TOKEN, Server

TINY = ("+experiment=sort_digits_tiny",)


def asked(tmp_path, *requests, words=TINY):
    """(status, body, headers) of each request: path, JSON or None, changes to right headers."""

    async def main():
        server, client = Server(words, tmp_path), AsyncHTTPClient(force_instance=True)
        answers = []
        for path, body, headers in requests:
            right = {TOKEN: server.token, "Content-Type": "application/json"}
            sent = {k: v for k, v in (right | headers).items() if v is not None}
            path = path.replace("TOKEN", server.token)
            answer = await client.fetch(
                f"http://127.0.0.1:{server.port}/{path}",
                method="GET" if body is None else "POST",
                body=None if body is None else json.dumps(body),
                headers=sent,
                raise_error=False,
                request_timeout=60,
            )
            answers.append((answer.code, answer.body.decode(), answer.headers))
        client.close()
        server.close()
        return answers

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1:1"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({TOKEN: None}, 403),
        ({TOKEN: "guessed"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({}, 200),
    ],
)
def test_a_forged_call_is_refused(tmp_path, headers, status):
    ((code, body, _),) = asked(tmp_path, ("status", {}, headers))
    assert code == status
    assert (json.loads(body).get("state") == "none") == (status == 200)


def test_the_page_needs_the_token_of_its_link_and_forbids_foreign_code(tmp_path):
    without, wrong, right, script, passwords = asked(
        tmp_path,
        ("", None, {}),
        ("?token=x", None, {}),
        ("?token=TOKEN", None, {}),
        ("studio.js", None, {}),
        ("../server.py", None, {}),
    )
    assert (without[0], wrong[0], right[0], script[0], passwords[0]) == (403, 403, 200, 200, 404)
    for answer in (without, right, script):
        policy = answer[2]["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer[2]["X-Content-Type-Options"] == "nosniff"
    assert "innerHTML" not in script[1]


def test_a_get_changes_nothing(tmp_path):
    assert [code for code, *_ in asked(tmp_path, ("run", None, {}), ("set", None, {}))] == [
        405,
        405,
    ]


def test_only_what_changed_is_sent_back(tmp_path):
    page, change, undone = asked(
        tmp_path,
        ("page", {}, {}),
        ("set", {"key": "seed", "value": 3}, {}),
        ("undo", {}, {}),
    )
    fields = json.loads(page[1])["fields"]
    assert {field["mode"] for field in fields} == {"beginner", "expert"}
    changed = json.loads(change[1])
    assert [(f["key"], f["value"]) for f in changed["changed"]] == [("seed", 3)]
    assert "seed: 3" in changed["yaml"]
    assert "seed=3" in changed["command"]
    assert "seed" not in json.loads(undone[1])["yaml"]


@pytest.mark.parametrize(
    ("path", "body", "status", "sentence"),
    [
        ("set", {"key": "sede", "value": 3}, 422, "unknown key 'sede'"),
        ("set", {"colour": 3}, 400, "unexpected keyword argument"),
        ("preset", {"words": ["+experiment=sort_digit"]}, 422, "did you mean 'sort_digits'?"),
        ("load", {"yaml": "a: [1"}, 422, "not YAML"),
        ("save", {"name": "../x"}, 422, "is not a file name"),
        ("set", [1], 400, "set:"),
    ],
)
def test_a_call_that_cannot_be_says_why(tmp_path, path, body, status, sentence):
    ((code, text, _),) = asked(tmp_path, (path, body, {}))
    assert code == status
    assert sentence in text


def test_what_cannot_run_is_neither_saved_nor_run(tmp_path):
    saved, run, status = asked(
        tmp_path,
        ("save", {"name": "x"}, {}),
        ("run", {}, {}),
        ("status", {}, {}),
        words=(),
    )
    for code, body, _ in (saved, run):
        assert code == 422, body
        assert "model.model_path is empty" in body
    assert json.loads(status[1])["state"] == "none"
    assert list(tmp_path.iterdir()) == []
