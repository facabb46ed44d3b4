"""State files and accounts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trinity_dask.config.schema import Config
from trinity_dask.files import read_json, write_json
from trinity_dask.launcher.accounts import (
    Accounts,
    AccountsError,
    BatchAccounts,
    lineage_accounts,
    require_balanced,
)
from trinity_dask.manager.state_manager import StateManager


def test_progress_files_go_by_their_known_names(tmp_path: Path) -> None:
    state = StateManager(str(tmp_path / "job"), "critic", "explorer1")  # in Trinity-RFT's order
    assert state.load_explorer() == state.load_trainer() == state.load_stage() == {}
    assert state.load_explorer_server_url() is None
    state.save_explorer(current_step=4, taskset_states=[{"index": 1}])
    state.save_trainer(current_step=3, sample_strategy_state={"seen": 2})
    state.save_stage(current_stage=1)
    state.save_explorer_server_url(url="http://host:1")
    assert sorted(path.name for path in (tmp_path / "job").iterdir()) == [
        "critic_meta.json", "explorer1_meta.json", "explorer1_server_url.txt", "stage_meta.json",
    ]  # fmt: skip
    again = StateManager(str(tmp_path / "job"), trainer_name="critic", explorer_name="explorer1")
    assert again.load_explorer() == {"latest_iteration": 4, "taskset_states": [{"index": 1}]}
    assert again.load_trainer() == {"latest_iteration": 3, "sample_strategy_state": {"seen": 2}}
    assert again.load_stage() == {"latest_stage": 1}
    assert again.load_explorer_server_url() == "http://host:1"


def test_names_that_are_not_given_are_those_of_the_configuration(tmp_path: Path) -> None:
    cfg = Config()
    cfg.explorer.name = "explorer2"
    StateManager(str(tmp_path), config=cfg).save_explorer(3, [])
    assert StateManager(str(tmp_path), None, "explorer2").load_explorer()["latest_iteration"] == 3
    assert StateManager(str(tmp_path), config=cfg).trainer_state_path.endswith("trainer_meta.json")
    with pytest.raises(ValueError, match="without explorer_name"):
        StateManager(str(tmp_path)).save_explorer(1, [])  # Trinity-RFT: None_meta.json


def test_a_directory_is_used_with_one_configuration(tmp_path: Path) -> None:
    cfg = Config(job_dir=str(tmp_path))
    StateManager(str(tmp_path), config=cfg)
    assert list(tmp_path.iterdir()) == []  # nothing is kept unless it is to be checked
    for _ in range(2):
        StateManager(str(tmp_path), config=cfg, check_config=True)
    cfg.buffer.batch_size += 1
    with pytest.raises(ValueError, match=r"config\.json \(different: buffer\)"):
        StateManager(str(tmp_path), config=cfg, check_config=True)


def test_a_crash_between_two_writes_leaves_a_whole_file(tmp_path: Path) -> None:
    manager = StateManager(str(tmp_path), "trainer", "explorer")
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
        StateManager(str(tmp_path), "trainer").load_trainer()


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
    counts = {name: 2 * value for name, value in GOOD.items()}
    stats = {"committed_batches": 2, "accounts": counts}
    stats |= {"consumed_rows": 6, "queued_rows": 4, "leased_rows": 0}
    accounts = lineage_accounts(stats, trained_rows=6)
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
