"""The learning rate by train step, and the optimizer's own numbers."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from trinity_dask.config.schema import OptimizerConfig
from trinity_dask.trainer.model.optimizer import Schedule, build_optimizer, build_schedule

GOLDEN = Path(__file__).parents[1] / "golden" / "reference.py"
SPEC = importlib.util.spec_from_file_location("golden_reference", GOLDEN)
assert SPEC is not None
reference = importlib.util.module_from_spec(SPEC)
assert SPEC.loader is not None
SPEC.loader.exec_module(reference)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 10])
def test_the_schedule_is_the_documented_one(kind, warmup):
    schedule = Schedule(kind, warmup, 60, 0.1)
    for step in range(1, 80):
        assert schedule.factor(step) == pytest.approx(
            reference.lr_factor(kind, step, warmup, 60, 0.1)
        )


def test_the_demo_recipes():
    sft = Schedule("linear", 20, 100, 0.05)
    assert [sft.factor(s) for s in (10, 20, 60, 100)] == pytest.approx([0.5, 1.0, 0.525, 0.05])
    grpo = Schedule("linear", 10, 60, 0.1)
    assert [grpo.factor(s) for s in (1, 10, 35, 60)] == pytest.approx([0.1, 1.0, 0.55, 0.1])


def test_a_decay_without_an_end_is_refused():
    with pytest.raises(ValueError, match=r"trainer\.total_steps"):
        build_schedule(OptimizerConfig(lr_scheduler_type="linear"), None)
    with pytest.raises(ValueError, match="allowed: constant"):
        Schedule("linaer", 0, 10, 0.1)


def test_adamw_takes_its_numbers_from_the_config():
    parameter = torch.nn.Parameter(torch.ones(2))
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    cfg = OptimizerConfig(lr=0.1, betas=[0.9, 0.95], weight_decay=0.5, eps=1e-6)
    group = build_optimizer(cfg, [parameter, frozen]).param_groups[0]
    assert group["params"] == [parameter]
    assert (group["lr"], group["betas"], group["weight_decay"], group["eps"]) == (
        0.1,
        (0.9, 0.95),
        0.5,
        1e-6,
    )
    with pytest.raises(ValueError, match="adamw, sgd, adamw8bit"):
        build_optimizer(OptimizerConfig(optimizer_type="adma"), [parameter])


def test_wsd_is_flat_until_its_last_fifth():
    schedule = Schedule("wsd", 10, 100, 0.0, decay_ratio=0.2)
    assert [schedule.factor(s) for s in (5, 10, 50, 80)] == pytest.approx([0.5, 1.0, 1.0, 1.0])
    assert [schedule.factor(s) for s in (90, 100, 120)] == pytest.approx([0.5, 0.0, 0.0])
    late_warmup = Schedule("wsd", 90, 100, 0.1, decay_ratio=0.5)
    assert late_warmup.factor(90) == 1.0
    assert late_warmup.factor(100) == pytest.approx(0.1)
    with pytest.raises(ValueError, match=r"trainer\.total_steps"):
        build_schedule(OptimizerConfig(lr_scheduler_type="wsd"), None)


def test_sgd_takes_its_momentum():
    parameter = torch.nn.Parameter(torch.ones(2))
    cfg = OptimizerConfig(optimizer_type="sgd", lr=0.1, momentum=0.9)
    assert build_optimizer(cfg, [parameter]).param_groups[0]["momentum"] == 0.9


def test_eight_bits_without_its_library_are_refused(monkeypatch):
    for name in ("bitsandbytes", "bitsandbytes.optim"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="pip install bitsandbytes, or use adamw"):
        build_optimizer(OptimizerConfig(optimizer_type="adamw8bit"), [])
