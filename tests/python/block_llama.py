"""Llama models of random blocks in any type and of any size, written tensor by tensor.

For work that needs a model's shape and arithmetic but nothing that it says. Activations stay of order 1:
norms are near 1, and a matrix has weights of root mean square 1 / sqrt(inputs); 1 for embeddings that are not
the head too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice, product
from pathlib import Path
from string import ascii_lowercase

import gguf
import numpy as np
from random_blocks import random_blocks
from random_llama import Shape, type_of, writer_of

Kind = gguf.GGMLQuantizationType


@dataclass(frozen=True)
class Tensor:
    name: str
    rows: int  # 0: a vector
    cols: int
    kind: Kind
    rms: float  # of a matrix

    @property
    def nbytes(self) -> int:
        block, size = gguf.GGML_QUANT_SIZES[self.kind]
        return max(self.rows, 1) * self.cols // block * size

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows, self.cols) if self.rows else (self.cols,)

    def data(self, rng: np.random.Generator) -> np.ndarray:
        if not self.rows:
            return (1.0 + 0.1 * rng.standard_normal(self.cols)).astype(np.float32)
        return random_blocks(rng, self.kind, self.rows, self.cols, self.rms)


def tensors(s: Shape) -> list[Tensor]:
    """All tensors of the model (biases and frequency factors are not written).

    ValueError where a row is no whole number of blocks.
    """
    found = []
    for name, rows, cols in _names_and_sizes(s):
        kind = Kind[type_of(name, s.types)] if rows else Kind.F32
        block = gguf.GGML_QUANT_SIZES[kind][0]
        if cols % block:
            raise ValueError(
                f"'{name}' has rows of {cols}, no multiple of the {block} of a {kind.name} block"
            )
        looked_up = name == "token_embd.weight" and not s.tied
        found.append(Tensor(name, rows, cols, kind, 1.0 if looked_up else cols**-0.5))
    return found


def _names_and_sizes(s: Shape) -> Iterator[tuple[str, int, int]]:
    q, kv = s.n_head * s.dim, s.n_head_kv * s.dim
    yield "token_embd.weight", s.n_vocab, s.n_embd
    for p in (f"blk.{i}." for i in range(s.n_layer)):
        yield p + "attn_norm.weight", 0, s.n_embd
        yield p + "attn_q.weight", q, s.n_embd
        yield p + "attn_k.weight", kv, s.n_embd
        yield p + "attn_v.weight", kv, s.n_embd
        yield p + "attn_output.weight", s.n_embd, q
        yield p + "ffn_norm.weight", 0, s.n_embd
        yield p + "ffn_gate.weight", s.n_ff, s.n_embd
        yield p + "ffn_up.weight", s.n_ff, s.n_embd
        yield p + "ffn_down.weight", s.n_embd, s.n_ff
    yield "output_norm.weight", 0, s.n_embd
    if not s.tied:
        yield "output.weight", s.n_vocab, s.n_embd


def vocabulary(n: int) -> dict[str, object]:
    """Metadata of a SentencePiece vocabulary: special tokens, all bytes, a space, "a", "b", ... "aa", ..."""
    if n < 260:
        raise ValueError(f"{n} tokens do not hold three special ones, 256 bytes and a space")
    words = ("".join(word) for length in count(1) for word in product(ascii_lowercase, repeat=length))
    texts = ["\u2581", *islice(words, n - 260)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *texts],
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(texts))],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(texts)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def write_block_llama(path: Path, s: Shape, metadata: dict[str, object] | None = None) -> list[Tensor]:
    """Writes the model with extra metadata, the same bytes for the same shape; holds one tensor at a time."""
    parts = tensors(s)
    w = writer_of(path, s, metadata)
    for t in parts:
        w.add_tensor_info(t.name, t.shape, np.dtype(np.float32), t.nbytes, raw_dtype=t.kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_ti_data_to_file()
    for i, t in enumerate(parts):
        w.write_tensor_data(t.data(np.random.default_rng([s.seed, i])))
    w.close()
    return parts
