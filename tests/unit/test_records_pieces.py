"""Token ids as pieces of text: whole characters, in linear time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from trinity_dask.records.pieces import load_decoder, pieces

TEXT = "Grüße, 你好 🙂👩‍👩‍👧 the quick fox\n\n  ```x``` ½ naïve"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer with few merges: most characters are several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=270, initial_alphabet=alphabet, special_tokens=["<|end|>"]
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    path = tmp_path_factory.mktemp("model")
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def test_characters_of_several_tokens_are_whole(model: Path) -> None:
    decoder = load_decoder(str(model))
    ids = decoder.encode(TEXT).ids
    found = pieces(decoder, ids)
    assert len(found) == len(ids)
    assert "".join(found) == TEXT
    assert "🙂" in found
    assert "你" in found
    assert "" in found


def test_what_is_no_character_is_shown_and_ends(model: Path) -> None:
    decoder = load_decoder(str(model))
    half = decoder.encode("你").ids[:-1]
    assert pieces(decoder, half)[-1] != ""
    broken = half[:1] * 40 + decoder.encode("ok").ids
    found = pieces(decoder, broken)
    assert len(found) == len(broken)
    assert "".join(found).endswith("ok")
    assert pieces(decoder, []) == []


def test_special_tokens_are_written_out(model: Path) -> None:
    decoder = load_decoder(str(model))
    end = decoder.token_to_id("<|end|>")
    assert pieces(decoder, [*decoder.encode("a").ids, end]) == ["a", "<|end|>"]


def test_the_work_grows_with_the_text(model: Path) -> None:
    """Counted in ids handed to the decoder, not in seconds."""

    class Counting:
        ids = 0

        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            self.ids += len(ids)
            return str(load_decoder(str(model)).decode(ids, skip_special_tokens=False))

    counts = []
    for times in (10, 40):
        counting = Counting()
        pieces(counting, load_decoder(str(model)).encode(TEXT * times).ids)
        counts.append(counting.ids)
    assert counts[1] < 5 * counts[0]


def test_no_torch_is_imported(model: Path) -> None:
    code = (
        "import sys; from trinity_dask.records.pieces import load_decoder, pieces; "
        f"pieces(load_decoder({str(model)!r}), [1, 2]); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json is no tokenizer"):
        load_decoder(str(tmp_path))
