"""A byte-level tokenizer: every byte is one token.

Invariant: any text round-trips, and every loader (transformers' ``AutoTokenizer``, vLLM,
the trainer) gives the same ids. A character-level vocabulary would not do: for a model of
type ``qwen2`` transformers ignores the saved tokenizer class and rebuilds a byte-level BPE
around the vocabulary, which silently drops every character the byte alphabet spells
differently, such as the space.
"""

from __future__ import annotations

from typing import Any

PAD_TOKEN = "<|endoftext|>"
BOT_TOKEN = "<|im_start|>"
EOS_TOKEN = "<|im_end|>"
SPECIAL_TOKENS = (PAD_TOKEN, BOT_TOKEN, EOS_TOKEN)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer() -> Any:
    """A tokenizer of 256 byte tokens, then :data:`SPECIAL_TOKENS`; 259 ids, no merges."""
    from tokenizers import pre_tokenizers
    from transformers import Qwen2Tokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
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
