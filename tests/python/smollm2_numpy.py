"""SmolLM2 in numpy, float32, without a cache: what INT8 rows cost with and without their two transformations.

Weights are read and dequantized by the `gguf` package. A K bias can be added to any layer, and the model with
it be written as a GGUF file of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from kv_divergence import log_softmax

Array = np.ndarray

HEAD_DIM = 64
LLAMA = "llama."


@dataclass(frozen=True)
class Int8:
    """How K and V are rounded: one f16 scale for a row, after a signed Hadamard rotation and, for keys of
    layers with a bias, centring in epochs of ``epoch`` positions."""

    rotate: bool = True
    centre: bool = True
    epoch: int = 256


class SmolLM2:
    """The model of a GGUF file. Reading it takes some seconds."""

    def __init__(self, path: Path) -> None:
        self.reader = gguf.GGUFReader(path)
        self.weights = {
            t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32, copy=False)
            for t in self.reader.tensors
        }
        self.n_layer = int(self._metadata("block_count"))
        self.n_head_kv = int(self._metadata("attention.head_count_kv"))
        self.eps = np.float32(self._metadata("attention.layer_norm_rms_epsilon"))
        base = float(self._metadata("rope.freq_base"))
        #: Radians that each pair turns by from one position to the next.
        self.frequencies = base ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)

    def _metadata(self, key: str) -> float:
        return self.reader.fields[LLAMA + key].contents()  # type: ignore[no-any-return]

    def write(self, path: Path, k_bias: Mapping[int, Array]) -> None:
        """A copy of the file with a K bias [n_head_kv, 64] in some layers."""
        writer = gguf.GGUFWriter(path, "llama")
        for name, field in self.reader.fields.items():
            if not name.startswith("GGUF.") and name != "general.architecture":
                element = field.types[-1] if len(field.types) > 1 else None
                writer.add_key_value(name, field.contents(), field.types[0], sub_type=element)
        for tensor in self.reader.tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        for layer, bias in k_bias.items():
            writer.add_tensor(f"blk.{layer}.attn_k.bias", bias.astype(np.float32).reshape(-1))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def log_probabilities(
        self, ids: Sequence[int], k_bias: Mapping[int, Array], int8: Int8 | None = None
    ) -> Array:
        """float64 [n_tokens, n_vocab], every token seeing all before it. K and V are float32 or ``int8``."""
        w, T = self.weights, len(ids)
        turn = self._turn(np.arange(T))
        future = np.where(np.tri(T, dtype=bool), np.float32(0), np.float32(-np.inf))
        x = w["token_embd.weight"][list(ids)]
        for i in range(self.n_layer):
            p = f"blk.{i}."
            h = self._norm(x, w[p + "attn_norm.weight"])
            q, k, v = ((h @ w[f"{p}attn_{n}.weight"].T).reshape(T, -1, HEAD_DIM) for n in ("q", "k", "v"))
            bias = k_bias.get(i)
            q, k = rope(q, turn), rope(k if bias is None else k + bias.astype(np.float32), turn)
            if int8 is not None:
                k = self._rounded_keys(k, bias, int8)
                v = rounded(v, int8.rotate)
            q = q.reshape(T, self.n_head_kv, -1, HEAD_DIM) / np.float32(np.sqrt(HEAD_DIM))
            # einsum's own loops: a threaded BLAS is slow at many small products where cores are busy.
            score = np.einsum("thgd,shd->hgts", q, k) + future
            weight = np.exp(score - score.max(-1, keepdims=True))
            weight /= weight.sum(-1, keepdims=True)
            att = np.einsum("hgts,shd->thgd", weight, v)
            x = x + att.reshape(T, -1) @ w[p + "attn_output.weight"].T
            h = self._norm(x, w[p + "ffn_norm.weight"])
            gate = h @ w[p + "ffn_gate.weight"].T
            gate *= (h @ w[p + "ffn_up.weight"].T) / (1 + np.exp(-gate))
            x = x + gate @ w[p + "ffn_down.weight"].T
        return log_softmax(self._norm(x, w["output_norm.weight"]) @ w["token_embd.weight"].T)

    def _norm(self, x: Array, weight: Array) -> Array:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * weight  # type: ignore[no-any-return]

    def _turn(self, positions: Array) -> Array:
        """complex64 [n, 1, pairs]"""
        return np.exp(1j * positions[:, None, None] * self.frequencies).astype(np.complex64)

    def _rounded_keys(self, k: Array, bias: Array | None, int8: Int8) -> Array:
        if bias is None or not int8.centre:
            return rounded(k, int8.rotate)
        slow = np.repeat(self.frequencies * int8.epoch < 1, 2)
        middle = np.arange(len(k)) // int8.epoch * int8.epoch + int8.epoch // 2
        centre = rope(np.broadcast_to(bias * slow, k.shape), self._turn(middle))
        return rounded(k - centre, int8.rotate) + centre  # type: ignore[no-any-return]


def rope(x: Array, turn: Array) -> Array:
    """x [n, heads, 64]; GGUF's llama turns neighbours."""
    pairs = np.ascontiguousarray(x, np.float32).view(np.complex64) * turn
    return pairs.view(np.float32)  # type: ignore[no-any-return]


def rotation() -> Array:
    """The signed Hadamard matrix of order 64, whose inverse is its transpose."""
    h = np.ones((1, 1))
    while len(h) < HEAD_DIM:
        h = np.block([[h, h], [h, -h]])
    signs = [(-1) ** bin(i & (i >> 1)).count("1") for i in range(HEAD_DIM)]
    return (h * signs / np.sqrt(HEAD_DIM)).astype(np.float32)  # type: ignore[no-any-return]


def rounded(x: Array, rotate: bool) -> Array:
    """Rows [..., 64] after having been stored in INT8 with one f16 scale."""
    r = rotation() if rotate else np.eye(HEAD_DIM, dtype=np.float32)
    y = x @ r.T
    scale = (np.abs(y).max(-1, keepdims=True) / 127).astype(np.float16).astype(np.float32)
    return (np.round(y / scale).clip(-127, 127) * scale) @ r  # type: ignore[no-any-return]
