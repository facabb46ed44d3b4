"""Answers that share their prompt's pass: the same numbers and the same gradient, for less."""

from __future__ import annotations

import logging
from dataclasses import asdict

import numpy as np
import pytest
import torch
from trainer_support import GRPO, VOCAB, batch_of, engine, gradients, logprobs, tiny_model

from trinity_dask.config.schema import LoraConfig
from trinity_dask.experience import EID, Experience
from trinity_dask.models.lora import add_adapter
from trinity_dask.trainer.model.logprobs import Scorer
from trinity_dask.trainer.step.batching import MicroBatch, StepRows
from trinity_dask.trainer.step.shared_prompts import may_share, shared_prompts

N_PROMPTS, ANSWERS = 3, 6


def groups(seed: int = 0, equal: bool = False, longest: int = 5) -> list[Experience]:
    """``ANSWERS`` answers to each of ``N_PROMPTS`` prompts, unless ``equal`` of any length."""
    generator = np.random.default_rng(seed)
    made = []
    for task in range(N_PROMPTS):
        prompt = generator.integers(1, VOCAB, 9 if equal else 7 + 2 * task)
        for run in range(ANSWERS):
            answer = generator.integers(1, VOCAB, int(generator.integers(1, longest + 1)))
            made.append(
                Experience(
                    tokens=np.concatenate([prompt, answer]),
                    prompt_length=len(prompt),
                    eid=EID(batch=1, task=task, run=run),
                    reward=float(generator.random() > 0.5),
                    logprobs=-generator.random(len(answer)).astype(np.float32),
                    versions=np.zeros(len(answer), np.int32),
                    advantages=np.full(len(answer), generator.normal(), np.float32),
                )
            )
    return made


def micro_of(experiences: list[Experience], share: bool = True) -> MicroBatch:
    """All rows in one pass."""
    batch = batch_of(experiences)
    trained = engine()
    plan = trained.planner.plan(batch["lengths"].numpy(), 1)
    (micro,) = StepRows(batch, plan, 1 << 20, share_prompts=share).passes(plan.updates[0])
    return micro


def assert_same_gradients(found: dict[bool, dict[str, torch.Tensor]]) -> None:
    """Both ways add up the same numbers in another order, so an entry near zero may differ in
    many of its digits: what counts is the difference by the tensor's largest entry. The weights
    are float64, the logits float32 (eps 1.2e-7) whatever the weights are."""
    for name, gradient in found[False].items():
        allowed = 2e-6 * float(gradient.abs().max())
        torch.testing.assert_close(found[True][name], gradient, atol=allowed, rtol=0)


class Forwards:
    """Counts the tokens that go through a model."""

    def __init__(self, model) -> None:
        self.tokens = 0
        model.get_input_embeddings().register_forward_hook(self._seen)

    def _seen(self, module, inputs, output) -> None:
        self.tokens += inputs[0].numel()


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("longest", [1, 5])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_log_probs_are_those_of_each_row_by_itself(equal, longest, temperature):
    model, experiences = tiny_model(), groups(equal=equal, longest=longest)
    micro = micro_of(experiences)
    assert micro.shared is not None
    got = Scorer(model, temperature)(micro).logprob.detach()
    for row, index in enumerate(micro.rows.tolist()):
        e = experiences[index]
        expected = logprobs(model, e.tokens, e.prompt_length, temperature)
        np.testing.assert_allclose(got[row, : e.response_length], expected, atol=1e-5)


@pytest.mark.parametrize("logits_bytes", [0, 1 << 30])
@pytest.mark.parametrize("equal", [True, False])
def test_gradients_are_those_of_the_plain_pass(logits_bytes, equal):
    found = {}
    for share in (True, False):
        model, micro = tiny_model().double(), micro_of(groups(equal=equal), share)
        scores = Scorer(model, 0.7, logits_bytes=logits_bytes)(micro, entropy=True)
        mask = micro.fields["action_mask"]
        ((scores.logprob + 0.1 * scores.entropy) * mask).sum().backward()
        found[share] = {n: p.grad for n, p in model.named_parameters()}
    assert_same_gradients(found)


def test_a_whole_train_step_is_the_same():
    experiences = groups()
    found, metrics = {}, {}
    for share in (True, False):
        trained = engine(GRPO, share_prompts=share)
        metrics[share] = trained.train_step(batch_of(experiences), 1)
        found[share] = gradients(trained)
    for name, gradient in found[False].items():
        torch.testing.assert_close(found[True][name], gradient, atol=1e-6, rtol=1e-4)
    # a sum of terms near one that cancel: float32 leaves 1e-7 of a term, whatever the sum is
    plain = metrics[False]["actor/final_loss"]
    assert metrics[True]["actor/final_loss"] == pytest.approx(plain, abs=1e-7)


def test_after_the_proof_only_the_shared_tokens_are_passed_over():
    model, micro = tiny_model(), micro_of(groups(equal=True))
    with torch.no_grad():
        Scorer(model)(micro)
        counter = Forwards(model)
        Scorer(model)(micro)  # another scorer of the same model
    answers = len(micro.rows) * (micro.response_width - 1)
    assert counter.tokens == N_PROMPTS * micro.prompt_width + answers


@pytest.mark.parametrize("logits_bytes", [0, 1 << 30])
def test_equal_answers_are_computed_once_with_the_same_gradient(logits_bytes):
    """Each of six answers occurs four times, with other advantages and masks."""
    experiences = [e for e in groups(equal=True)[:6] for _ in range(4)]
    found, seen = {}, {}
    for share in (True, False):
        model, micro = tiny_model().double(), micro_of(experiences, share)
        scorer = Scorer(model, 0.7, logits_bytes=logits_bytes)
        with torch.no_grad():
            scorer(micro)  # proves the model's way
        counter = Forwards(model)
        scores = scorer(micro, entropy=True)
        weight = torch.linspace(-1, 1, len(micro.rows))[:, None] * micro.fields["action_mask"]
        ((scores.logprob + 0.1 * scores.entropy) * weight).sum().backward()
        found[share] = {n: p.grad for n, p in model.named_parameters()}
        seen[share] = counter.tokens
    assert_same_gradients(found)
    assert seen[True] * 4 <= seen[False]


def test_rows_that_differ_in_their_length_alone_are_different():
    """Padding is token 0, and so is the longer one's last token."""
    made = [
        Experience(tokens=np.array([5, 6, 7, *a], np.int32), prompt_length=3, eid=EID(run=i))
        for i, a in enumerate(([1], [1, 0], [1, 0], [1]))
    ]
    batch = batch_of(made)
    plan = engine().planner.plan(batch["lengths"].numpy(), 1)
    rows = StepRows(batch, plan, 1 << 20, share_prompts=True)
    assert rows._numbers.rows.tolist() == [0, 1, 1, 0]
    (micro,) = rows.passes(plan.updates[0])
    assert len(micro.distinct.micro.rows) == 2


def test_under_an_adapter_the_gradient_is_the_same():
    found = {}
    for share in (True, False):
        model = tiny_model()
        add_adapter(model, asdict(LoraConfig(rank=2)), "")
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        scores = Scorer(model)(micro_of(groups(), share))
        scores.logprob.mean().backward()
        found[share] = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    for name, gradient in found[False].items():
        torch.testing.assert_close(found[True][name], gradient, atol=2e-5, rtol=1e-4)


def test_bfloat16_stays_as_near_to_float32_as_the_plain_pass():
    model, micro = tiny_model(), micro_of(groups())
    with torch.no_grad():
        exact = Scorer(model)(micro).logprob
        rough = Scorer(model, autocast=torch.bfloat16)(micro).logprob
    assert 0 < (rough - exact).abs().mean() < 2e-2
    assert may_share(model)


@pytest.mark.parametrize("case", ["few", "short", "off"])
def test_rows_are_computed_alone_where_sharing_saves_little_or_is_off(case):
    if case == "few":
        assert shared_prompts(np.arange(8), 100, 10) is None
    elif case == "short":
        assert shared_prompts(np.zeros(8, np.int64), 1, 100) is None
    else:
        batch = batch_of(groups())
        plan = engine().planner.plan(batch["lengths"].numpy(), 1)
        rows = StepRows(batch, plan, 1 << 20, share_prompts=False)
        assert all(micro.shared is None for micro in rows.passes(plan.updates[0]))


def test_prompts_of_equal_padding_but_other_length_are_different():
    """Padding is an ordinary token id: [0, 5] is not [5]."""
    made = [
        Experience(tokens=np.array([*p, 3, 4], np.int32), prompt_length=len(p), eid=EID(task=i))
        for i, p in enumerate(([0, 5, 6, 7], [5, 6, 7], [0, 5, 6, 7]))
    ]
    micro = micro_of(made)
    if micro.shared is not None:
        assert len(micro.shared.first) == 2
    batch = batch_of(made)
    plan = engine().planner.plan(batch["lengths"].numpy(), 1)
    numbers = StepRows(batch, plan, 1 << 20, share_prompts=True)._numbers
    assert numbers.prompts.tolist() == [0, 1, 0]
    assert numbers.rows.tolist() == [0, 1, 0]


def test_models_that_cannot_share_do_not():
    sliding = tiny_model()
    sliding.config.layer_types = ["full_attention", "sliding_attention"]
    checkpointed = tiny_model()
    checkpointed.gradient_checkpointing_enable()
    assert may_share(tiny_model())
    assert not may_share(sliding)
    assert not may_share(checkpointed)


def test_a_model_that_answers_otherwise_is_found_out_and_computed_plainly(caplog):
    """Its positions start anew after the cache, as in a model that ignores position_ids."""
    model, micro = tiny_model(), micro_of(groups(equal=True))
    forward = model.forward

    def forgetful(input_ids=None, past_key_values=None, position_ids=None, use_cache=None, **more):
        if past_key_values is not None and past_key_values.get_seq_length():
            position_ids = torch.arange(input_ids.shape[1])[None]
        return forward(
            input_ids=input_ids,
            past_key_values=past_key_values,
            position_ids=position_ids,
            use_cache=use_cache,
            **more,
        )

    def signed(
        input_ids=None,
        past_key_values=None,
        position_ids=None,
        use_cache=None,
        logits_to_keep=0,
        **more,
    ):
        keep = {"logits_to_keep": logits_to_keep}
        return forgetful(input_ids, past_key_values, position_ids, use_cache, **keep, **more)

    model.forward = signed
    with caplog.at_level(logging.WARNING), torch.no_grad():
        got = Scorer(model)(micro).logprob
    assert "trainer.share_prompts=false" in caplog.text
    assert not may_share(model)
    torch.testing.assert_close(
        got, Scorer(tiny_model())(micro_of(groups(equal=True), False)).logprob
    )
