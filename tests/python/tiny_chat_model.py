"""Small models with a tokenizer and a chat template: one with random weights, one that says a known text."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import random_llama
from random_llama import Array, Shape, random_weights, write_llama

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|bos|>"]
START, END, BOS = range(256, 256 + len(SPECIAL))
N_VOCAB = 256 + len(SPECIAL)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RANDOM = Shape(n_vocab=N_VOCAB, n_embd=32, n_ff=32, n_head=2, n_head_kv=1, n_ctx_train=256)


def byte_letters() -> list[str]:
    """How GPT-2's vocabularies spell each byte: printable ones as they are, the others from U+0100 on."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(others)) for b in range(256)]


def tokenizer_metadata(
    add_bos: bool = False, template: str | None = TEMPLATE, more: dict[str, object] | None = None
) -> dict[str, object]:
    """A byte is a token, its id the byte's value; the special tokens come behind."""
    metadata: dict[str, object] = {
        "general.name": "tiny",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": byte_letters() + SPECIAL,
        "tokenizer.ggml.token_type": [1] * 256 + [3] * len(SPECIAL),
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": END,
        "tokenizer.ggml.add_bos_token": add_bos,
    }
    if template is not None:
        metadata["tokenizer.chat_template"] = template
    return metadata | (more or {})


def write_random(path: Path, shape: Shape = RANDOM, **how: object) -> dict[str, Array]:
    """A model with random weights. Returns them, for random_llama.reference_logits."""
    return write_llama(path, shape, tokenizer_metadata(**how))  # type: ignore[arg-type]


def write_chain(path: Path, answer: str, *, n_ctx: int = 512, endless: bool = False, **how: object) -> None:
    """A model in which a token decides the next one: behind a newline comes ``answer``, then ``<|im_end|>``.

    ``endless`` goes back to the first letter instead. A letter may occur once. Every other byte is followed
    by the next one in the byte's order. The layers add nothing; the head finds the token behind.
    """
    said = [ord("\n"), *answer.encode()]
    assert len(set(said)) == len(said), "a letter occurs twice"
    following = [(b + 1) % 256 for b in range(256)] + [END] * len(SPECIAL)
    following = dict(enumerate(following)) | dict(
        zip(said, [*said[1:], said[1] if endless else END], strict=True)
    )
    shape = Shape(
        n_vocab=N_VOCAB, n_embd=64, n_ff=32, n_head=2, n_head_kv=1, n_layer=1, n_ctx_train=n_ctx, biases=False
    )
    weights = random_weights(shape)
    for name in ("blk.0.attn_output.weight", "blk.0.ffn_down.weight"):
        weights[name][:] = 0
    weights["output_norm.weight"][:] = 1
    embedding = weights["token_embd.weight"]
    embedding /= np.linalg.norm(embedding, axis=1, keepdims=True)
    weights["output.weight"][:] = 0
    for token, behind in following.items():
        weights["output.weight"][behind] += 30 * embedding[token]
    with mock.patch.object(random_llama, "random_weights", lambda _: weights):
        write_llama(path, shape, tokenizer_metadata(**how))  # type: ignore[arg-type]
