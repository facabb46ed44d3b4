"""A byte-level tokenizer for ASCII text: every printable character is one token.

Invariant: printable ASCII and the newline round-trip, and every loader (transformers'
``AutoTokenizer``, vLLM, the trainer) gives the same ids. The vocabulary is spelled in the
byte-level alphabet, because for a model of type ``qwen2`` transformers ignores the saved
tokenizer class and rebuilds a byte-level BPE around the vocabulary: a plain character
vocabulary would silently lose every character that alphabet spells differently, such as
the space.

Only these bytes have a token, and other characters are lost. All 256 bytes would double the
vocabulary with ids that never occur, and a model with random weights spends its first
hundred steps on not sampling them.
"""

from __future__ import annotations

from typing import Any

PAD_TOKEN = "<|endoftext|>"
BOT_TOKEN = "<|im_start|>"
EOS_TOKEN = "<|im_end|>"
SPECIAL_TOKENS = (PAD_TOKEN, BOT_TOKEN, EOS_TOKEN)
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


# a few words of the demo's prompts and chats, put together from their letters
WORDS = ("Ġsort", "sort", "user", "assistant", "system", "Ġthe", "Ġdigits", "Ġof")


def bpe_tokenizer() -> Any:
    """A byte-level BPE with merges, over :data:`CHARACTERS`: :data:`WORDS` are one token each, and
    so are the parts that they are merged from. The end of a turn is no token of the model's
    configuration, there is no padding token, and ``<think>`` is an added token of plain text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = [spell.pre_tokenize_str(character)[0][0] for character in CHARACTERS]
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        for end in range(1, len(word)):
            pair = (word[:end], word[end])
            if pair not in merges:
                merges.append(pair)
    made = [left + right for left, right in merges]
    vocab = {token: i for i, token in enumerate(dict.fromkeys([*alphabet, *made]))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS_TOKEN)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def ascii_tokenizer() -> Any:
    """A tokenizer of :data:`CHARACTERS`, then :data:`SPECIAL_TOKENS`; 99 ids, no merges."""
    from tokenizers import pre_tokenizers
    from transformers import Qwen2Tokenizer

    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = [spell.pre_tokenize_str(character)[0][0] for character in CHARACTERS]
    vocab = {token: i for i, token in enumerate([*alphabet, *SPECIAL_TOKENS])}
    tokens: dict[str, Any] = {"unk_token": None, "bos_token": None, "eos_token": EOS_TOKEN}
    tokenizer = Qwen2Tokenizer(
        vocab=vocab,
        merges=[],
        pad_token=PAD_TOKEN,
        additional_special_tokens=[BOT_TOKEN],
        **tokens,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
