"""Which rows, and in what order: conditions on columns, a text, tasks whose reward fell, a sort.

Invariant: what was typed is parsed before anything is looked at, and an error names what was
typed. Rows without a value are last, whichever way is sorted; rows that are equal stay in the order
of their files. Pure: no file, no process.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import numpy as np

from trinity_dask.view.columns import NONE, Rows, missing

CHANGE = "change"  # a column while it is asked for what fell
NOTHING, ANYTHING = "none", "any"
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[+-]?inf"
_COMPARED = re.compile(rf"(>=|<=|!=|=|>|<|!)?({_NUMBER})")
_BETWEEN = re.compile(rf"({_NUMBER})\.\.({_NUMBER})")
_COMPARE: dict[str, Callable[[np.ndarray, float], np.ndarray]] = {
    **{">": np.greater, ">=": np.greater_equal, "<": np.less, "<=": np.less_equal},
    **{"=": np.equal, "": np.equal, "!=": np.not_equal, "!": np.not_equal},
}


class QueryError(ValueError):
    """What was asked cannot be answered; says why."""


@dataclass(frozen=True)
class Query:
    """``where`` are conditions by column, ``text`` is looked for in prompts and answers, ``since``
    asks for tasks whose mean reward fell from before that step to since then, ``same`` for rows
    with the prompt of this hash."""

    where: Mapping[str, str] = field(default_factory=dict)
    text: str = ""
    since: Optional[int] = None
    same: Optional[int] = None
    sort: str = ""
    down: bool = False

    @classmethod
    def parse(cls, asked: Mapping[str, Any]) -> Query:
        """Of what a page sends. Raises QueryError."""
        where, since = asked.get("where") or {}, asked.get("since")
        texts = isinstance(where, dict) and all(isinstance(v, str) for v in where.values())
        if not texts or not isinstance(since, (int, type(None))) or isinstance(since, bool):
            raise QueryError("where must hold texts by column, since a step")
        return cls(
            {str(name): text.strip() for name, text in where.items() if text.strip()},
            text=str(asked.get("text") or ""),
            since=since,
            sort=str(asked.get("sort") or ""),
            down=bool(asked.get("down")),
        )


def condition(kind: str, typed: str) -> Callable[[np.ndarray, Sequence[str]], np.ndarray]:
    """What was typed into the filter of a column, as a function of its values (and, for a column
    of texts, the texts that they are codes of) to bool ``(rows,)``.

    Numbers: ``0.5``, ``>0.5``, ``0.2..0.8``, ``!=1``, several of them. Texts: a part of it,
    ``=all of it``, ``!not in it``. Both: ``none``, ``any``.

    Raises:
        QueryError: it is none of these.
    """
    if typed == NOTHING:
        return lambda values, _: missing(values)
    if typed == ANYTHING:
        return lambda values, _: ~missing(values)
    if kind == "text":
        return _text_condition(typed)
    tests = [_number_condition(word) for word in typed.split()]
    return lambda values, _: np.logical_and.reduce([test(values) for test in tests])


def _number_condition(word: str) -> Callable[[np.ndarray], np.ndarray]:
    if (two := _BETWEEN.fullmatch(word)) is not None:
        low, high = float(two[1]), float(two[2])
        return lambda values: (values >= low) & (values <= high) & ~missing(values)
    if (one := _COMPARED.fullmatch(word)) is None:
        raise QueryError(
            f"{word!r} is no condition on numbers; write 0.5, >0.5, 0.2..0.8, !=1, none or any"
        )
    compare, number = _COMPARE[one[1] or ""], float(one[2])
    return lambda values: compare(values, number) & ~missing(values)


def _text_condition(typed: str) -> Callable[[np.ndarray, Sequence[str]], np.ndarray]:
    negated, whole = typed.startswith("!"), typed.lstrip("!").startswith("=")
    wanted = typed[negated + whole :]

    def test(codes: np.ndarray, texts: Sequence[str]) -> np.ndarray:
        found = [t == wanted for t in texts] if whole else _containing(wanted, texts)
        matches = np.array([*found, False])  # the last: no text
        return matches[np.where(codes == NONE, len(texts), codes)] != negated

    return test


def _containing(part: str, texts: Sequence[str]) -> list[bool]:
    folded = part.casefold()
    return [folded in text.casefold() for text in texts]


def select(
    rows: Rows, query: Query, found: Optional[np.ndarray], prompts: Optional[np.ndarray]
) -> tuple[np.ndarray, Optional[np.ndarray]]:
    """Places of the rows that are wanted, in order, and, where ``since`` is asked, the change of
    each of them.

    Args:
        found: bool ``(rows,)``, where ``query.text`` is; None: not asked.
        prompts: uint64 ``(rows,)`` hashes, 0 where not known yet; None: not asked.

    Raises:
        QueryError: an unknown column, or a condition that is none.
    """
    keep = np.ones(len(rows), bool) if found is None else found.copy()
    for name, typed in query.where.items():
        kind = _kind(rows, name)
        test = condition(kind, typed)
        keep &= test(*(rows.coded(name) if kind == "text" else (rows.column(name), ())))
    if query.same is not None and prompts is not None:
        keep &= prompts == np.uint64(query.same)
    change = None
    if query.since is not None and prompts is not None:
        change = np.full(len(rows), np.nan)
        wanted = keep & (prompts != 0)
        change[wanted] = changes(
            prompts[wanted], rows.column("step")[wanted], rows.column("reward")[wanted], query.since
        )
        keep &= (change < 0) & ~missing(rows.column("reward"))
    places = np.flatnonzero(keep).astype(np.int32)
    if query.sort:
        places = places[_sorted(rows, query, places, change)]
    return places, None if change is None else change[places]


def _kind(rows: Rows, name: str) -> str:
    try:
        return rows.kind(name)
    except KeyError:
        raise QueryError(
            f"there is no column {name!r}; there are {', '.join(rows.names())}"
        ) from None


def changes(prompts: np.ndarray, steps: np.ndarray, rewards: np.ndarray, since: int) -> np.ndarray:
    """float64 ``(rows,)``: of each row's prompt the mean reward at steps from ``since`` on, less
    the mean before; NaN where there is no reward on one of the sides."""
    if not len(prompts):
        return np.empty(0)
    known, later = ~np.isnan(rewards), steps >= since
    _, task = np.unique(prompts, return_inverse=True)

    def mean(chosen: np.ndarray) -> np.ndarray:
        counts = np.bincount(task[chosen], minlength=task.max() + 1)
        sums = np.bincount(task[chosen], rewards[chosen], minlength=task.max() + 1)
        return np.divide(sums, counts, out=np.full(len(sums), np.nan), where=counts > 0)

    return (mean(known & later) - mean(known & ~later))[task]


def _sorted(
    rows: Rows, query: Query, places: np.ndarray, change: Optional[np.ndarray]
) -> np.ndarray:
    """The order of ``places``."""
    if query.sort == CHANGE and change is not None:
        values = change[places]
    elif _kind(rows, query.sort) == "text":
        codes, texts = rows.coded(query.sort)
        chosen = codes[places]
        ranks = np.array([*_ranks(texts), NONE], np.int32)
        values = ranks[np.where(chosen == NONE, len(texts), chosen)]
    else:
        values = rows.column(query.sort)[places]
    none = missing(values)
    if values.dtype.kind != "f":
        values = values.astype(np.int64)
    values = np.where(none, 0, -values if query.down else values)
    order = np.argsort(values, kind="stable")
    return np.concatenate([order[~none[order]], order[none[order]]])


def _ranks(texts: Sequence[str]) -> np.ndarray:
    """int32 ``(texts,)``: the place of each in an order in which numbers count as numbers."""
    ranks = np.empty(len(texts), np.int32)
    ranks[sorted(range(len(texts)), key=lambda i: _natural(texts[i]))] = np.arange(len(texts))
    return ranks


def _natural(text: str) -> list[tuple[int, int, str]]:
    return [
        (0, int(word), "") if word.isdecimal() and len(word) < 20 else (1, 0, word)
        for word in re.split(r"(\d+)", text)
        if word
    ]
