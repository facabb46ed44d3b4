"""Mixing tasksets and selecting by difficulty: exact orders, complete state."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timing_support import thread_seconds

from trinity_dask.buffer.data.readers import RowReader
from trinity_dask.buffer.data.selectors import DifficultySelector, make_selector
from trinity_dask.buffer.data.taskset import Taskset, TasksetScheduler
from trinity_dask.buffer.errors import DataError, EndOfTasks
from trinity_dask.config.schema import FormatConfig, SelectorConfig, TasksetConfig

SIZES = (5, 7)
# taskset of every row of the two epochs, as measured on the system that is followed here
EPOCH_0 = [1, 0, 1, 0, 1, 1, 0, 0, 1, 1, 1, 0]
EPOCH_1 = [1, 1, 0, 1, 1, 0, 0, 1, 0, 1, 1, 0]
FEATURES = np.array([[0.2, 0.8], [0.5, 0.9], [0.0, 0.1], [0.3, 0.3]])


def file_of(path: Path, n: int) -> Path:
    rows = [{"prompt": f"{path.stem} {i}", "f0": i / 10, "f1": (i + 2) / 10} for i in range(n)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("tasksets")
    return [file_of(root / f"{size}.jsonl", size) for size in SIZES]


def mix(paths: list[Path], selector: str = "sequential", **kw: Any) -> TasksetScheduler:
    keys = {"feature_keys": ["f0", "f1"]} if "difficulty" in selector or "hard" in selector else {}
    chosen = SelectorConfig(selector, 42, **keys, kwargs=kw.pop("kwargs", {}))
    cfgs = [TasksetConfig(path=str(p), workflow="w", data_selector=chosen) for p in paths]
    return TasksetScheduler(cfgs, **{"batch_size": 2, "total_epochs": 2, **kw})


def places(tasks: list[Any]) -> list[tuple[int, int]]:
    return [(task.index["index"], task.index["taskset_id"]) for task in tasks]


def drain(source: TasksetScheduler) -> list[list[tuple[int, int]]]:
    batches = []
    while True:
        try:
            batches.append(places(source.read()))
        except EndOfTasks:
            return batches


def test_the_mixing_order_over_two_epochs(paths: list[Path]) -> None:
    batches = drain(mix(paths, batch_size=1))
    assert [place[1] for batch in batches for place in batch] == EPOCH_0 + EPOCH_1
    for number, size in enumerate(SIZES):
        indices = [i for batch in batches for i, taskset in batch if taskset == number]
        assert indices == [*range(size), *range(size)]  # sequential: every row once an epoch


def test_a_batch_groups_the_tasksets_in_order_of_first_appearance(paths: list[Path]) -> None:
    batches = drain(mix(paths, batch_size=5))  # the third one crosses the epoch's edge
    assert [[taskset for _, taskset in batch] for batch in batches] == [
        [1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 0, 0],
    ]  # fmt: skip
    assert len(batches) == 24 // 5


SELECTORS = ["sequential", "shuffle", "random", "offline_easy2hard", "difficulty_based"]


@pytest.mark.parametrize("selector", SELECTORS)
def test_recreated_from_its_state_every_third_step(paths: list[Path], selector: str) -> None:
    def observed(step: int, batch: list[tuple[int, int]]) -> dict[str, Any]:
        metric: dict[int, dict[str, list[Any]]] = {}
        for index, taskset in batch:
            entry = metric.setdefault(taskset, {"indices": [], "values": []})
            entry["indices"].append(index)
            entry["values"].append(((index + step) % 4) / 3)
        return {"selector_metric": metric, "reward": 1.0}

    def run(every: int) -> list[list[tuple[int, int]]]:
        source, batches = mix(paths, selector), []
        for step in range(1, 13):
            batches.append(places(source.read()))
            source.feedback(observed(step, batches[-1]))
            if step % every == 0:
                state = json.loads(json.dumps(source.state_dict()))
                source = mix(paths, selector)
                source.load_state_dict(state)
        with pytest.raises(EndOfTasks, match="all their 12 batches"):
            source.read()
        return batches

    whole = run(every=99)
    assert run(every=3) == whole
    if selector != "random":  # draws anew for every batch
        assert len(whole) == 12
    if selector in ("shuffle", "offline_easy2hard"):
        first = [i for batch in whole for i, taskset in batch if taskset == 0][:5]
        assert first == ([4, 2, 3, 1, 0] if selector == "shuffle" else [4, 3, 2, 1, 0])


def test_one_taskset_reads_as_it_does_alone(paths: list[Path]) -> None:
    cfg = TasksetConfig(path=str(paths[0]), workflow="w", data_selector=SelectorConfig("shuffle"))
    alone = Taskset(cfg, batch_size=2, total_epochs=2)
    mixed = mix(paths[:1], "shuffle")
    head = [places(alone.read()) for _ in range(2)]
    assert [places(mixed.read()) for _ in range(2)] == head
    # the position of a run that an earlier version saved
    resumed = mix(paths[:1], "shuffle")
    resumed.load_state_dict({"read": 4, "rows": 5})
    assert drain(resumed) == drain(mixed)


def test_fault_38_a_refill_moves_no_step_of_the_schedule(paths: list[Path]) -> None:
    source = mix(paths)
    assert source.total_batches == 12
    for _ in range(12):
        source.read()
        assert len(source.read_extra(3)) == 3
    with pytest.raises(EndOfTasks):
        source.read()


def test_total_steps_overrule_epochs_and_tasks_carry_their_settings(paths: list[Path]) -> None:
    source = mix(paths, total_steps=50, default_repeat_times=8, greedy_baseline=True)
    batches = [source.read() for _ in range(50)]
    assert {(t.repeat_times, t.greedy_baseline) for t in batches[0]} == {(8, True)}


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_feedback_is_learned_at_its_step_however_late_it_comes(paths: list[Path], lag: int) -> None:
    """Batches in flight finish when they like; the order must be the same."""

    def run(delay: int) -> list[list[tuple[int, int]]]:
        source = mix(paths, "difficulty_based", feedback_lag=lag, kwargs={"tau": 0})
        batches: list[list[tuple[int, int]]] = []
        for step in range(1, 13):
            for due in range(1, step):
                if due + delay <= step:  # as a resumed run does, some come twice
                    entry = {"indices": [due % 5], "values": [1.0]}
                    source.feedback({"selector_metric": {"0": entry}}, due)
            batches.append(places(source.read()))
        return batches

    assert run(delay=1) == run(delay=lag)


def test_fault_35_too_few_rows_for_a_batch_is_no_finished_run(paths: list[Path]) -> None:
    with pytest.raises(DataError, match=r"12 rows, in 2 epochs fewer than one batch"):
        mix(paths, batch_size=25)


def test_feedback_pops_its_metric_and_refuses_strangers(paths: list[Path]) -> None:
    source = mix(paths)
    metrics = {"selector_metric": {0: {"indices": [0], "values": [1]}}, "other": 1.0}
    source.feedback(metrics)
    assert metrics == {"other": 1.0}
    with pytest.raises(ValueError, match="taskset 2; there are 2"):
        source.feedback({"selector_metric": {2: {"indices": [0], "values": [1]}}})
    with pytest.raises(ValueError, match="row 5 of taskset 0, which has 5"):
        source.feedback({"selector_metric": {0: {"indices": [5], "values": [1]}}})
    with pytest.raises(ValueError, match="1 tasksets, the configuration has 2"):
        source.load_state_dict(mix(paths[:1]).state_dict())


def test_rows_may_name_their_own_workflow_and_reward(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "wf": "mine", "rf": "other:fn"}, {"prompt": "b", "wf": ""}]
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    fmt = FormatConfig(workflow_key="wf", reward_fn_key="rf")
    first, second = Taskset(
        TasksetConfig(path=str(path), workflow="w", format=fmt), batch_size=2
    ).read()
    assert (first.workflow, first.reward_fn) == ("mine", "other:fn")
    assert (second.workflow, second.reward_fn) == ("w", None)


def test_the_belief_of_the_difficulty_selector() -> None:
    selector = DifficultySelector(4, features=FEATURES)
    selector.update([0, 1], [0.5, 0.75])
    assert selector.cap == pytest.approx(0.5499989, abs=1e-7)
    assert selector.alpha == pytest.approx([9, 13, 1.176, 1.96], abs=1e-5)
    assert selector.beta == pytest.approx([9, 5, 4.024, 3.24], abs=1e-5)
    selector.update([2], [0.25])
    assert selector.cap == pytest.approx(0.7449965, abs=1e-7)
    assert selector.alpha == pytest.approx([9.470393, 13.153596, 5.1408, 2.728], abs=1e-6)
    rates = [0.526133, 0.730755, 0.250039, 0.351546]
    beliefs = selector.alpha / (selector.alpha + selector.beta)
    assert beliefs == pytest.approx(rates, abs=1e-6)


def test_the_nearest_to_the_target_come_first_without_temperature() -> None:
    selector = DifficultySelector(4, features=FEATURES, tau=0, target_reward=0.25)
    selector.update([0, 1], [0.5, 0.75])
    selector.update([2], [0.25])
    assert selector.get_indices(3) == [2, 3, 0]
    assert DifficultySelector(3, features=FEATURES[:3], tau=0).get_indices(3) == [0, 1, 2]


def test_adaptive_rho_halves_when_the_anchors_mislead() -> None:
    selector = DifficultySelector(4, features=FEATURES, adaptive_rho=True)
    selector.update([0, 1], [1.0, 0.0])  # the prediction is .5 and .7
    assert selector.rho == 0.1
    sure = DifficultySelector(4, features=FEATURES, adaptive_rho=True)
    sure.update([0, 1], [0.5, 0.75])  # about as predicted
    assert sure.rho == 0.2


@settings(max_examples=30, deadline=None)
@given(
    updates=st.lists(st.tuples(st.integers(0, 3), st.floats(-5, 5, allow_nan=False)), max_size=6),
    do_sample=st.booleans(),
    tau=st.sampled_from([0.0, 1e-4, 1.0]),
    cut=st.integers(0, 6),
)
def test_a_learning_selector_continues_bit_by_bit(
    updates: list[tuple[int, float]], do_sample: bool, tau: float, cut: int
) -> None:
    def new() -> DifficultySelector:
        return DifficultySelector(4, 7, features=FEATURES, do_sample=do_sample, tau=tau)

    whole, first, chosen = new(), new(), []
    for step, (index, value) in enumerate(updates):
        if step == cut:
            state = json.loads(json.dumps(first.state_dict()))
            first = new()
            first.load_state_dict(state)
        for selector in (whole, first):
            selector.update([index], [value])
        chosen.append(whole.get_indices(2))
        assert first.get_indices(2) == chosen[-1]
        assert (whole.alpha > 0).all()
        assert (whole.beta > 0).all()
        assert len(set(chosen[-1])) == 2
    assert np.array_equal(whole.alpha, first.alpha)


def test_features_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 0.5, "b": "0.75"}\n{"a": 0.5, "b": "hard"}')
    reader = RowReader(str(path))
    with pytest.raises(DataError, match=r"row 1: feature column 'b' holds 'hard', not a number"):
        make_selector(SelectorConfig("offline_easy2hard", feature_keys=["a", "b"]), reader)
    with pytest.raises(ValueError, match="exactly two feature_keys"):
        make_selector(SelectorConfig("difficulty_based", feature_keys=["a"]), reader)
    with pytest.raises(ValueError, match="needs feature_keys"):
        make_selector(SelectorConfig("difficulty_based"), reader)
    misspelt = SelectorConfig("difficulty_based", feature_keys=["a", "a"], kwargs={"taw": 1})
    (tmp_path / "y.jsonl").write_text('{"a": 0.5}')
    with pytest.raises(ValueError, match="did you mean 'tau'"):
        make_selector(misspelt, RowReader(str(tmp_path / "y.jsonl")))


def test_beliefs_about_other_rows_begin_anew(caplog: pytest.LogCaptureFixture) -> None:
    saved = DifficultySelector(4, features=FEATURES)
    saved.update(saved.get_indices(2), [1.0, 0.0])
    fewer = DifficultySelector(3, features=FEATURES[:3])
    fewer.load_state_dict(saved.state_dict())
    assert (fewer.position, fewer.alpha.tolist(), fewer.cap) == (2, [1.0] * 3, None)
    assert "about 4 rows, the file has 3" in caplog.text
    assert len(fewer.get_indices(3)) == 3


def test_easy_to_hard_sorts_by_features_then_index() -> None:
    from trinity_dask.buffer.data.selectors import EasyToHardSelector

    features = np.array([[0.5, 1.0], [0.9, 0.0], [0.5, 1.0], [0.5, 2.0]])
    selector = EasyToHardSelector(4, features=features)
    assert selector.get_indices(6) == [1, 3, 2, 0, 1, 3]


def test_what_was_learned_of_other_rows_is_forgotten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As many rows as before, in another order: no belief, and no feedback about the old ones."""

    def tasksets(rows: list[int], **kw: Any) -> TasksetScheduler:
        for name in "ab":
            lines = [json.dumps({"prompt": f"{name}{r}", "f0": 0.1, "f1": 0.9}) for r in rows]
            (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
        paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
        return mix(paths, "difficulty_based", feedback_lag=2, total_steps=9, **kw)

    def seen(row: int) -> dict[str, Any]:
        return {"selector_metric": {n: {"indices": [row], "values": [1.0]} for n in (0, 1)}}

    before = tasksets([1, 2, 3, 4, 5])
    for step in (1, 2, 3):
        before.read()
        before.feedback(seen(4), step)
    state = json.loads(json.dumps(before.state_dict()))
    assert state["pending"]
    same = tasksets([1, 2, 3, 4, 5])
    same.load_state_dict(state)
    assert same.tasksets[0]._selector.cap is not None
    after = tasksets([5, 4, 3, 2, 1])
    after.load_state_dict(state)
    assert "is not what it was" in caplog.text
    for step in (2, 3):  # told again, as after every resume
        after.feedback(seen(4), step)
    again = tasksets([5, 4, 3, 2, 1])
    again.load_state_dict(json.loads(json.dumps(after.state_dict())))
    for scheduler in (after, again):
        scheduler.feedback(seen(4), 3)
        for _ in range(3):
            scheduler.read()
        for taskset in scheduler.tasksets:
            assert (taskset._selector.alpha == 1).all()
        scheduler.feedback(seen(2), 4)  # about the new rows
        scheduler.read()
        assert scheduler.tasksets[0]._selector.alpha[2] > 1


def test_fewer_rows_than_an_old_batch_had_are_no_error(tmp_path: Path) -> None:
    before = mix([file_of(tmp_path / "x.jsonl", 6)], "difficulty_based", feedback_lag=2)
    before.read()
    state = before.state_dict()
    after = mix([file_of(tmp_path / "x.jsonl", 3)], "difficulty_based", feedback_lag=2)
    after.load_state_dict(state)
    after.feedback({"selector_metric": {"0": {"indices": [5], "values": [1.0]}}}, 1)
    with pytest.raises(ValueError, match="row 5 of taskset 0, which has 3 rows"):
        after.feedback({"selector_metric": {"0": {"indices": [5], "values": [1.0]}}}, 2)


def test_a_million_rows_are_sorted_quickly(tmp_path: Path) -> None:
    with open(tmp_path / "x.jsonl", "w") as file:
        for start in range(0, 300_000, 1000):
            file.write(
                "".join(f'{{"n": {i}, "r": {i % 97 / 97}}}\n' for i in range(start, start + 1000))
            )
    reader = RowReader(str(tmp_path / "x.jsonl"))
    cfg = SelectorConfig("offline_easy2hard", feature_keys=["r"])
    assert thread_seconds(lambda: make_selector(cfg, reader), 0.3) < 0.3
    selector = make_selector(cfg, reader)
    assert [reader[i]["n"] for i in selector.get_indices(2)] == [299_923, 299_826]
