"""State files and accounts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from trinity_dask.files import read_json, write_json
from trinity_dask.launcher.accounts import (
    Accounts,
    AccountsError,
    BatchAccounts,
    lineage_accounts,
    require_balanced,
)
from trinity_dask.manager.state_manager import StateManager


def test_state_round_trip(tmp_path: Path) -> None:
    manager = StateManager(tmp_path)
    assert manager.load_explorer() == {}
    manager.save_explorer(7, [{"position": 448}])
    manager.save_trainer(6, {"index": 3})
    manager.save_stage(1, finished=True)
    manager.save_explorer_server_url("http://127.0.0.1:9000")
    assert manager.load_explorer() == {"latest_iteration": 7, "taskset_states": [{"position": 448}]}
    assert manager.load_trainer()["latest_iteration"] == 6
    assert manager.load_stage() == {"latest_stage": 1, "finished": True}
    assert manager.load_explorer_server_url() == "http://127.0.0.1:9000"
    assert [p.name for p in tmp_path.glob("*.tmp")] == []


def test_every_explorer_has_its_own_files(tmp_path: Path) -> None:
    manager = StateManager(tmp_path, "explorer1")
    manager.save_explorer(3, [{"position": 1}])
    manager.save_explorer(5, [{"position": 2}], "explorer2")
    manager.save_explorer_server_url("http://127.0.0.1:9002", "explorer2")
    assert manager.load_explorer()["latest_iteration"] == 3
    assert manager.load_explorer("explorer2")["latest_iteration"] == 5
    assert StateManager(tmp_path, "explorer2").load_explorer() == manager.load_explorer("explorer2")
    assert manager.load_explorer_server_url() is None
    assert manager.load_explorer_server_url("explorer2") == "http://127.0.0.1:9002"


def test_a_crash_between_two_writes_leaves_a_whole_file(tmp_path: Path) -> None:
    manager = StateManager(tmp_path)
    manager.save_explorer_server_url("http://127.0.0.1:9000")

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", dies)  # the last moment before the new content counts
        for write in (
            lambda: manager.save_explorer_server_url("http://127.0.0.1:9001"),
            lambda: manager.save_trainer(4, {}),
        ):
            with pytest.raises(KeyboardInterrupt):
                write()
    assert manager.load_explorer_server_url() == "http://127.0.0.1:9000"
    assert manager.load_trainer() == {}
    assert len(list(tmp_path.iterdir())) == 1


def test_a_failed_write_leaves_the_old_state(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_json(path, {"step": 1})
    with pytest.raises(TypeError):
        write_json(path, {"step": object()})
    assert read_json(path) == {"step": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_damaged_state_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trainer_meta.json"
    path.write_text('{"latest_iter')
    with pytest.raises(ValueError, match=r"trainer_meta\.json is not JSON"):
        StateManager(tmp_path).load_trainer()


def _manifest(**accounts: int) -> SimpleNamespace:
    return SimpleNamespace(meta=json.loads(json.dumps({"accounts": accounts})))


GOOD = {
    "scheduled": 8,
    "succeeded": 7,
    "failed": 1,
    "cancelled": 0,
    "produced": 7,
    "committed": 5,
    "filtered": 2,
}


def test_balanced_accounts() -> None:
    stats = {"consumed_rows": 6, "queued_rows": 4, "leased_rows": 0}
    accounts = lineage_accounts([_manifest(**GOOD), _manifest(**GOOD)], stats, trained_rows=6)
    require_balanced(accounts)
    assert accounts.as_dict()["scheduled"] == 16
    assert accounts.batches == 2


@pytest.mark.parametrize("field", sorted(GOOD))
def test_every_lost_sample_is_noticed(field: str) -> None:
    accounts = BatchAccounts(**{**GOOD, field: GOOD[field] + 1})
    whole = Accounts(1, accounts, consumed=5, queued=0, leased=0, trained=5)
    with pytest.raises(AccountsError, match="do not balance"):
        require_balanced(whole)


def test_a_row_trained_twice_is_noticed() -> None:
    whole = Accounts(1, BatchAccounts(**GOOD), consumed=5, queued=0, leased=0, trained=6)
    with pytest.raises(AccountsError, match="5 rows consumed, but 6 trained"):
        require_balanced(whole)
