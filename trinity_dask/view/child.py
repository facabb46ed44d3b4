"""The process that reads jobs and answers: ``python -m trinity_dask.view.child``.

Invariant: one line of JSON in, one answer out, in order; between them it takes in what is new in
small pieces, so no answer waits for a whole job. It ends when its parent does, and when nobody has
asked for ``IDLE_S``.
"""

from __future__ import annotations

import json
import os
import select as waiting
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, BinaryIO

from trinity_dask.view import detail
from trinity_dask.view.job import MAX_PANES, Job
from trinity_dask.view.query import Query, QueryError

IDLE_S = 600.0
SLICE_S = 0.02  # of work between two looks at what is asked
FIRST_S = 0.5  # of work on a job before its first answer, so that most are whole at once
MAX_JOBS = 8
MAX_COUNT = 500
NICE = 5  # a scheduler or an engine of the same machine goes first


class Answers:
    """What is asked, by its name. An answer is a status and what JSON is made of."""

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}

    def answer(self, asked: Mapping[str, Any]) -> tuple[int, Any]:
        """Status 200, 400 (what was asked is wrong) or 404 (it is not there)."""
        calls: dict[str, Callable[[Job, Mapping[str, Any]], Any]] = {
            **{"state": _state, "rows": self._rows, "place": self._place, "row": _row},
            **{"tokens": _tokens, "panes": _panes},
        }
        try:
            return 200, calls[asked["call"]](self._job(str(asked["job"])), asked)
        except QueryError as error:
            return 400, {"error": str(error)}
        except (OSError, LookupError, ValueError, TypeError) as error:
            traceback.print_exc()
            return 404, {"error": f"{type(error).__name__}: {error}"}

    def _job(self, directory: str) -> Job:
        job = self._jobs.pop(directory, None)
        if job is None:
            job = Job(directory)
            job.look()
            job.work(time.monotonic() + FIRST_S)
            while len(self._jobs) >= MAX_JOBS:
                del self._jobs[next(iter(self._jobs))]
        self._jobs[directory] = job
        job.look()
        return job

    def work(self) -> bool:
        """A little of what is left to do, of the job that was asked for last; False: nothing."""
        last = next(reversed(self._jobs.values()), None)
        return last is not None and last.work(time.monotonic() + SLICE_S)

    def _query(self, asked: Mapping[str, Any]) -> Query:
        told = asked.get("query") or {}
        if not isinstance(told, dict):
            raise QueryError("a query must be an object")
        query = Query.parse(told)
        if told.get("same"):
            job, row = map(str, told["same"])
            query = replace(query, same=self._job(job).same(row))
            self._job(str(asked["job"]))  # the one that is asked for last
        return query

    def _rows(self, job: Job, asked: Mapping[str, Any]) -> Any:
        count = min(int(asked.get("count") or 100), MAX_COUNT)
        return job.page(self._query(asked), int(asked.get("from") or 0), count)

    def _place(self, job: Job, asked: Mapping[str, Any]) -> Any:
        """Where a row is among those that are found; null: it is not."""
        return {"place": job.place(self._query(asked), str(asked.get("row")))}


def _state(job: Job, asked: Mapping[str, Any]) -> Any:
    return job.state()


def _row(job: Job, asked: Mapping[str, Any]) -> Any:
    name = str(asked.get("row"))
    found = job.whole(name)
    length, total = found.get("prompt_length") or 0, found["tokens"]
    parts = [(max(length - detail.MAX_TOKENS, 0), length), (length, total)]
    return {**found, "slices": [job.tokens(name, start, stop) for start, stop in parts]}


def _tokens(job: Job, asked: Mapping[str, Any]) -> Any:
    return job.tokens(str(asked.get("row")), int(asked["from"]), int(asked["to"]))


def _panes(job: Job, asked: Mapping[str, Any]) -> Any:
    """Rows beside each other, and what of each is not as in the first; ``row``: all of its task."""
    names = list(map(str, asked.get("rows") or job.group(str(asked.get("row")))))[:MAX_PANES]
    found, base = [], list[int]()
    for name in names:
        ids = job.answer_ids(name)
        base = base or ids
        found.append({**_row(job, {"row": name}), "differs": detail.differences(base, ids)})
    return {"panes": found}


def serve(lines: BinaryIO, answers: BinaryIO) -> None:
    """Answer until ``lines`` ends, or nobody asks."""
    found, buffer, last = Answers(), b"", time.monotonic()
    busy = True
    while time.monotonic() - last < IDLE_S:
        ready, _, _ = waiting.select([lines], [], [], 0 if busy else min(IDLE_S, 30.0))
        if not ready:
            busy = found.work()
            continue
        data = os.read(lines.fileno(), 1 << 16)
        if not data:
            return
        buffer += data
        while (end := buffer.find(b"\n")) >= 0:
            line, buffer = buffer[:end], buffer[end + 1 :]
            status, told = found.answer(json.loads(line))
            body = json.dumps(told, separators=(",", ":")).encode()
            answers.write(b"%d %d\n%b" % (status, len(body), body))
            answers.flush()
        last, busy = time.monotonic(), True


def main() -> None:
    import pyarrow as pa

    os.nice(NICE)
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed by accident is no answer
    serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
