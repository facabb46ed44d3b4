"""Token ids as pieces of text, in linear time, and the tokenizer for it without torch.

Invariant: the pieces together are the text of the ids; a character of several tokens stands in
the last of them, whole, and the others are empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_TOKENS_OF_CHARACTER = 8  # more make no character: what is there is shown as it is


@lru_cache(maxsize=8)
def load_decoder(path: str, trust_remote_code: bool = False) -> Any:
    """What decodes ids of the model in directory ``path``: its ``tokenizer.json``, read without
    torch; else the tokenizer that training uses, which takes seconds to import.

    Raises:
        ValueError: there is no tokenizer.
    """
    file = Path(path, "tokenizer.json")
    if file.is_file():
        from tokenizers import Tokenizer

        try:
            return Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{file} is no tokenizer: {error}") from error
    from trinity_dask.models.tokenizer import load_tokenizer

    return load_tokenizer(path, trust_remote_code)


def pieces(decoder: Any, ids: Sequence[int]) -> list[str]:
    """One text per id, special tokens written out; ids that no token has are ``""``.

    Decoded alone a token may lack what stands before it (a space, half a character): a window is
    decoded from where the last whole piece began, and what it adds to the part before is new.
    """
    found: list[str] = []
    begin = start = 0  # of the last whole piece, and of the one that is being completed
    for stop in range(1, len(ids) + 1):
        before = _decode(decoder, ids[begin:start])
        text = _decode(decoder, ids[begin:stop])
        unfinished = text.endswith(REPLACEMENT) and stop - start < MAX_TOKENS_OF_CHARACTER
        if unfinished and stop < len(ids):
            found.append("")
            continue
        found.append(
            text[len(before) :] if text.startswith(before) else _decode(decoder, ids[start:stop])
        )
        begin, start = start, stop
    return found


def _decode(decoder: Any, ids: Sequence[int]) -> str:
    return str(decoder.decode(list(ids), skip_special_tokens=False)) if len(ids) else ""
