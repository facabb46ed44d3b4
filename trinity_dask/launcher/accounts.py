"""The accounts: every run and every row of a lineage ends in exactly one place.

Invariant (checked while the run goes on and once more at its end):

* runs:  scheduled = succeeded + failed + cancelled, for every committed batch;
* rows:  produced = committed + filtered, for every committed batch;
* rows:  committed = consumed + dropped + queued + leased, in the buffer; dropped are those
  that were too old, or gave way to better ones in a replay buffer;
* rows:  consumed + reused + foreign = trained + skipped, over the lineage (all incarnations
  of the job); reused are trainings of a replayed row after its first, foreign are expert
  rows from a file, skipped those in damaged files (only with ``skip_corrupt``).

Durable numbers come from the manifests and the trainer's checkpoint, so they hold over
crashes; a batch that was in flight at a crash has no manifest and is simply run again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


class AccountsError(RuntimeError):
    """The accounts do not balance: samples were lost or counted twice."""


@dataclass(frozen=True)
class BatchAccounts:
    """Counts of one batch: runs (scheduled to cancelled) and rows (produced to filtered)."""

    scheduled: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    produced: int = 0
    committed: int = 0
    filtered: int = 0

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> BatchAccounts:
        accounts = meta.get("accounts", {})
        return cls(**{f.name: int(accounts.get(f.name, 0)) for f in fields(cls)})

    def __add__(self, other: BatchAccounts) -> BatchAccounts:
        mine, theirs = asdict(self), asdict(other)
        return BatchAccounts(**{name: mine[name] + theirs[name] for name in mine})

    def errors(self, name: str) -> list[str]:
        found = []
        if self.scheduled != self.succeeded + self.failed + self.cancelled:
            found.append(
                f"{name}: {self.scheduled} runs scheduled, but {self.succeeded} succeeded + "
                f"{self.failed} failed + {self.cancelled} cancelled"
            )
        if self.produced != self.committed + self.filtered:
            found.append(
                f"{name}: {self.produced} rows produced, but {self.committed} committed + "
                f"{self.filtered} filtered"
            )
        return found


@dataclass(frozen=True)
class Accounts:
    """The whole lineage at one moment. Rows unless the name says runs."""

    batches: int
    total: BatchAccounts
    consumed: int
    queued: int
    leased: int
    trained: int
    skipped: int = 0
    dropped: int = 0
    reused: int = 0
    foreign: int = 0

    def errors(self) -> list[str]:
        found = self.total.errors("all batches")
        held = self.consumed + self.dropped + self.queued + self.leased
        if self.total.committed != held:
            found.append(
                f"buffer: {self.total.committed} rows committed, but {self.consumed} consumed"
                f"{_also('dropped', self.dropped)} + {self.queued} queued + {self.leased} leased"
            )
        if self.trained + self.skipped != self.consumed + self.reused + self.foreign:
            found.append(
                f"trainer: {self.consumed} rows consumed{_also('reused', self.reused)}"
                f"{_also('foreign', self.foreign)}, but {self.trained} trained"
                f"{_also('skipped', self.skipped)}"
            )
        return found

    def as_dict(self) -> dict[str, int]:
        """Every count by its name, those of the batches among them."""
        own = asdict(self)
        return {"batches": own.pop("batches"), **own.pop("total"), **own}


def errors_of(counts: Mapping[str, int]) -> list[str]:
    """What does not balance in counts by their names, as :meth:`Accounts.as_dict` gives them."""
    total = BatchAccounts.from_meta({"accounts": counts})
    names = {f.name for f in fields(Accounts)} - {"total"}
    return Accounts(total=total, **{name: int(counts.get(name, 0)) for name in names}).errors()


def _also(name: str, rows: int) -> str:
    return f" + {rows} {name}" if rows else ""


def lineage_accounts(
    buffer_stats: Mapping[str, Any], trained_rows: int, skipped_rows: int = 0
) -> Accounts:
    """Accounts from the buffer's counters (those of its manifests among them) and the trainer's
    count; asked twice a second, so nothing here goes through the batches."""
    return Accounts(
        batches=int(buffer_stats["committed_batches"]),
        total=BatchAccounts.from_meta(buffer_stats),
        consumed=int(buffer_stats["consumed_rows"]),
        queued=int(buffer_stats["queued_rows"]),
        leased=int(buffer_stats["leased_rows"]),
        trained=trained_rows,
        skipped=skipped_rows,
        **{
            name: int(buffer_stats.get(f"{name}_rows", 0))
            for name in ("dropped", "reused", "foreign")
        },
    )


def require_balanced(accounts: Accounts) -> None:
    """Raise :class:`AccountsError` with every equation that does not hold."""
    errors = accounts.errors()
    if errors:
        raise AccountsError("the accounts do not balance: " + "; ".join(errors))
