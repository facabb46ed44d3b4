"""The demo is made from its seed, once, and its tokenizer gives everyone the same ids."""

import json
from types import SimpleNamespace

import pytest
import torch

from trinity_dask.demo.sort_digits import (
    MARKER,
    SortDigitsSpec,
    prepare,
    sort_digits_reward,
    sort_rows,
)
from trinity_dask.demo.tokenizer import CHARACTERS, ascii_tokenizer
from trinity_dask.models.checks import check_model_dir, check_vllm_cpu
from trinity_dask.models.wrapper import load_tokenizer
from trinity_dask.weights.files import read_safetensors

SMALL = {"n_train": 40, "n_eval": 10}
CFG = SimpleNamespace(seed=1)


def read_rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_are_sorted_disjoint_and_follow_from_the_seed():
    spec = SortDigitsSpec(seed=3)
    train, held_out = sort_rows(spec)
    assert (len(train), len(held_out)) == (8000, 500)
    assert not {r["prompt"] for r in train} & {r["prompt"] for r in held_out}
    assert len({r["prompt"] for r in train}) == 8000
    for row in (*train[:100], *held_out[:100]):
        digits = row["prompt"].removeprefix("sort ").removesuffix("=")
        assert len(digits) == 6
        assert row["response"] == "".join(sorted(digits))
    assert sort_rows(spec) == (train, held_out)
    assert sort_rows(SortDigitsSpec(seed=4)) != (train, held_out)


def test_prepare_writes_everything_once(tmp_path):
    root = tmp_path / "demo"
    prepare(CFG, dir=str(root), **SMALL)
    check_model_dir(str(root / "model"))
    check_vllm_cpu(str(root / "model"))
    assert len(read_rows(root / "train.jsonl")) == 40
    assert len(read_rows(root / "eval.jsonl")) == 10
    before = {p: p.stat().st_mtime_ns for p in root.rglob("*")}
    prepare(CFG, dir=str(root), **SMALL)
    assert {p: p.stat().st_mtime_ns for p in root.rglob("*")} == before


def test_the_seed_decides_the_weights_and_leaves_torch_s_own_alone(tmp_path):
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        prepare(CFG, dir=str(tmp_path / name), seed=seed, **SMALL)
    assert torch.equal(torch.rand(1), expected)
    a, b, c = (dict(read_safetensors(str(tmp_path / name / "model"))) for name in ("a", "b", "c"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not all(torch.equal(a[name], c[name]) for name in a)
    assert sum(t.numel() for t in a.values()) == 88_960


def test_an_incomplete_or_different_directory_is_built_again(tmp_path):
    root = tmp_path / "demo"
    prepare(CFG, dir=str(root), **SMALL)
    (root / MARKER).unlink()
    (root / "train.jsonl").write_text("half")
    prepare(CFG, dir=str(root), **SMALL)
    assert len(read_rows(root / "train.jsonl")) == 40
    prepare(CFG, dir=str(root), n_train=20, n_eval=5)
    assert len(read_rows(root / "train.jsonl")) == 20
    assert sorted(p.name for p in root.iterdir()) == sorted(
        [MARKER, "eval.jsonl", "model", "train.jsonl"]
    )


def test_bad_arguments_are_named(tmp_path):
    with pytest.raises(ValueError, match="n_trian"):
        prepare(CFG, dir=str(tmp_path), n_trian=3)
    with pytest.raises(ValueError, match="100 strings of 2 digits"):
        prepare(CFG, dir=str(tmp_path), n_digits=2)


def test_auto_tokenizer_gives_the_ids_of_the_tokenizer_that_was_saved(tmp_path):
    """The trap: a wrong class silently drops spaces. vLLM's ids are compared in tests/vllm."""
    prepare(CFG, dir=str(tmp_path), **SMALL)
    loaded = load_tokenizer(str(tmp_path / "model"))
    made = ascii_tokenizer()
    texts = ["sort 407193=", " two  spaces ", CHARACTERS, "<|im_end|>x<|endoftext|>", ""]
    for text in texts:
        ids = loaded.encode(text)
        assert ids == made.encode(text)
        assert loaded.decode(ids) == text
    assert len(loaded.encode("sort 407193=")) == 12
    assert len(loaded) == 99
    assert (loaded.eos_token, loaded.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_chat_template_marks_the_assistant_s_words(tmp_path):
    tokenizer = ascii_tokenizer()
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    encoded = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
    assert tokenizer.decode([token for token, mine in pairs if mine]) == "yo<|im_end|>"
    longer = tokenizer.apply_chat_template(
        [*messages, {"role": "user", "content": "?"}], tokenize=True, return_dict=True
    )
    n = len(encoded["input_ids"])
    assert longer["input_ids"][:n] == encoded["input_ids"]  # earlier turns are a prefix


@pytest.mark.parametrize(
    ("response", "finish_reason", "reward"),
    [("013479", "stop", 1.0), ("013479", "length", 0.0), ("031479", "stop", 0.0), ("", "stop", 0)],
)
def test_reward(response, finish_reason, reward):
    value = sort_digits_reward(
        response=response, truth="013479", finish_reason=finish_reason, anything_else=1
    )
    assert value == reward
    assert isinstance(value, float)
