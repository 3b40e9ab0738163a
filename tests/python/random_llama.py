"""Random-weight llama models, written with the `gguf` package, and what they compute in float64.

Both are made from the same arrays, so the oracle shares nothing with ringlm but the file format's definition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import gguf
import numpy as np
from random_blocks import random_blocks

Array = np.ndarray

#: (layer, q [T, n_head, dim], k and v [T, n_head_kv, dim], none of them turned yet) -> [T, n_head, dim]
Attention = Callable[[int, Array, Array, Array], Array]


@dataclass(frozen=True)
class Shape:
    """A small llama. `types` maps the last parts of a tensor name (or "default") to a GGUF type.

    `windows` is what each layer sees, 0 for everything; none are in the file, `Model(window=...)` takes them.
    `slow_bias` adds a bias of norm 900 on so many of the slowest pairs to every K head of the layers
    `slow_bias_layers`. `k_outlier` makes one channel of K so many times larger, and that of Q smaller: the
    scores stay as they are.
    """

    n_vocab: int = 96
    n_embd: int = 64
    n_layer: int = 2
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int | None = None
    n_ff: int = 96
    n_ctx_train: int = 256
    rope_base: float = 10000.0
    rope_dims: int | None = None
    rope_factor: float | None = None
    freq_factors: bool = False
    tied: bool = False
    biases: bool = True
    eps: float = 1e-5
    seed: int = 0
    windows: tuple[int, ...] = ()
    slow_bias: int = 0
    slow_bias_layers: tuple[int, ...] = (0, 1)
    k_outlier: float = 1.0
    types: dict[str, str] = field(default_factory=lambda: {"default": "F32"})

    @property
    def dim(self) -> int:
        return self.head_dim or self.n_embd // self.n_head

    @property
    def turning(self) -> int:
        return self.rope_dims or self.dim

    def with_(self, **changes: object) -> Shape:
        return replace(self, **changes)  # type: ignore[arg-type]


def random_weights(s: Shape) -> dict[str, Array]:
    """float32 tensors by GGUF name; a matrix is [outputs, inputs]."""
    rng = np.random.default_rng(s.seed)

    def matrix(rows: int, cols: int) -> Array:
        return (rng.standard_normal((rows, cols)) / np.sqrt(cols)).astype(np.float32)

    def norm(n: int) -> Array:
        return (1.0 + 0.3 * rng.standard_normal(n)).astype(np.float32)

    def bias(n: int) -> Array:
        return (0.2 * rng.standard_normal(n)).astype(np.float32)

    q, kv = s.n_head * s.dim, s.n_head_kv * s.dim
    w: dict[str, Array] = {"token_embd.weight": rng.standard_normal((s.n_vocab, s.n_embd)).astype(np.float32)}
    for i in range(s.n_layer):
        p = f"blk.{i}."
        w[p + "attn_norm.weight"] = norm(s.n_embd)
        w[p + "attn_q.weight"] = 2 * matrix(q, s.n_embd)
        w[p + "attn_k.weight"] = 2 * matrix(kv, s.n_embd)
        w[p + "attn_v.weight"] = matrix(kv, s.n_embd)
        w[p + "attn_output.weight"] = matrix(s.n_embd, q)
        w[p + "ffn_norm.weight"] = norm(s.n_embd)
        w[p + "ffn_gate.weight"] = matrix(s.n_ff, s.n_embd)
        w[p + "ffn_up.weight"] = matrix(s.n_ff, s.n_embd)
        w[p + "ffn_down.weight"] = matrix(s.n_embd, s.n_ff)
        if s.biases:
            for name, n in [("attn_q", q), ("attn_k", kv), ("attn_v", kv), ("attn_output", s.n_embd)]:
                w[p + name + ".bias"] = bias(n)
            for name, n in [("ffn_gate", s.n_ff), ("ffn_up", s.n_ff), ("ffn_down", s.n_embd)]:
                w[p + name + ".bias"] = bias(n)
        if s.k_outlier != 1.0:
            _enlarge_a_channel(s, w, p)
        if s.slow_bias and i in s.slow_bias_layers:
            w[p + "attn_k.bias"] = w.get(p + "attn_k.bias", np.zeros(kv, np.float32)) + _slow_bias(s, i)
    w["output_norm.weight"] = norm(s.n_embd)
    if not s.tied:
        w["output.weight"] = matrix(s.n_vocab, s.n_embd)
    if s.freq_factors:
        w["rope_freqs.weight"] = rng.uniform(1.0, 8.0, s.turning // 2).astype(np.float32)
    return w


def _slow_bias(s: Shape, layer: int) -> Array:
    """[n_head_kv * dim]: norm 900 in every head, on the pairs that turn most slowly."""
    slow = np.random.default_rng([s.seed, layer]).standard_normal((s.n_head_kv, 2 * s.slow_bias))
    slow *= 900.0 / np.linalg.norm(slow, axis=1, keepdims=True)
    out = np.zeros((s.n_head_kv, s.dim), np.float32)
    out[:, s.turning - 2 * s.slow_bias : s.turning] = slow
    return out.ravel()


def _enlarge_a_channel(s: Shape, w: dict[str, Array], p: str) -> None:
    """Of both elements of the middle pair, so that the larger K and the smaller Q cancel after RoPE too."""
    pair = slice(s.turning // 4 * 2, s.turning // 4 * 2 + 2)
    for name, heads, factor in [("attn_q", s.n_head, 1 / s.k_outlier), ("attn_k", s.n_head_kv, s.k_outlier)]:
        for part in (".weight", ".bias"):
            if p + name + part in w:
                w[p + name + part].reshape(heads, s.dim, -1)[:, pair] *= factor


def type_of(name: str, types: dict[str, str]) -> str:
    """The GGUF type of a matrix."""
    return next((t for end, t in types.items() if f".{name}".endswith(f".{end}")), types["default"])


def stored_as(
    name: str, array: Array, types: dict[str, str], rng: np.random.Generator
) -> tuple[Array, gguf.GGMLQuantizationType, Array]:
    """(bytes to write, their type, the float32 values that they mean)."""
    wanted = "F32" if array.ndim == 1 else type_of(name, types)
    qtype = gguf.GGMLQuantizationType[wanted]
    if wanted == "F32":
        return array, qtype, array
    if "_K" in wanted or "IQ" in wanted:  # the package reads these but cannot write them
        raw = random_blocks(rng, qtype, *array.shape, rms=float(array.std()))
    else:
        raw = gguf.quants.quantize(array, qtype)
    return raw, qtype, gguf.quants.dequantize(raw, qtype).reshape(array.shape).astype(np.float32)


def writer_of(path: Path, s: Shape, metadata: dict[str, object] | None = None) -> gguf.GGUFWriter:
    """A writer that has the keys of a llama and extra ones, and no tensors yet."""
    w = gguf.GGUFWriter(path, "llama")
    w.add_context_length(s.n_ctx_train)
    w.add_embedding_length(s.n_embd)
    w.add_block_count(s.n_layer)
    w.add_feed_forward_length(s.n_ff)
    w.add_head_count(s.n_head)
    w.add_head_count_kv(s.n_head_kv)
    w.add_layer_norm_rms_eps(s.eps)
    w.add_rope_freq_base(s.rope_base)
    w.add_rope_dimension_count(s.turning)
    if s.head_dim:
        w.add_key_length(s.head_dim)
        w.add_value_length(s.head_dim)
    if s.rope_factor:
        w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        w.add_rope_scaling_factor(s.rope_factor)
    for key, value in (metadata or {}).items():
        kinds = {bool: w.add_bool, int: w.add_uint32, float: w.add_float32, str: w.add_string}
        (kinds | {list: w.add_array})[type(value)](key, value)
    return w


def write_llama(path: Path, s: Shape, metadata: dict[str, object] | None = None) -> dict[str, Array]:
    """Writes the model with extra metadata; returns the weights as the file means them."""
    rng = np.random.default_rng(s.seed + 1)
    w = writer_of(path, s, metadata)
    meant = {}
    for name, array in random_weights(s).items():
        raw, qtype, meant[name] = stored_as(name, array, s.types, rng)
        w.add_tensor(name, raw, raw_dtype=qtype)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return meant


def rounded(x: Array, kv: str) -> Array:
    """What a K or V row is after having been stored."""
    return x.astype({"f32": np.float32, "f16": np.float16}[kv]).astype(np.float64)


def rope_frequencies(s: Shape, weights: dict[str, Array]) -> Array:
    """Radians a position, [turning / 2], float64."""
    frequency = s.rope_base ** (-np.arange(0, s.turning, 2) / s.turning) / (s.rope_factor or 1.0)
    return frequency / weights["rope_freqs.weight"].astype(np.float64) if s.freq_factors else frequency


def rope(x: Array, positions: Array, frequency: Array) -> Array:
    """x [T, heads, dim] turned to positions [T]; GGUF's llama turns neighbours."""
    n = 2 * len(frequency)
    pairs = (x[..., 0:n:2] + 1j * x[..., 1:n:2]) * np.exp(1j * positions[:, None, None] * frequency)
    out = x.copy()
    out[..., 0:n:2], out[..., 1:n:2] = pairs.real, pairs.imag
    return out


def forward(s: Shape, weights: dict[str, Array], tokens: list[int], attend: Attention) -> Array:
    """Logits [n_tokens, n_vocab] in float64: everything of a llama but its attention, which is given."""
    w = {name: a.astype(np.float64) for name, a in weights.items()}
    T = len(tokens)

    def bias(name: str) -> Array:
        return w.get(name, np.zeros(1))

    def norm(x: Array, weight: Array) -> Array:
        return weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float64(np.float32(s.eps)))

    x = w["token_embd.weight"][tokens]
    for i in range(s.n_layer):
        p = f"blk.{i}."
        h = norm(x, w[p + "attn_norm.weight"])
        q, k, v = (
            (h @ w[f"{p}attn_{n}.weight"].T + bias(f"{p}attn_{n}.bias")).reshape(T, -1, s.dim)
            for n in ("q", "k", "v")
        )
        att = attend(i, q, k, v).reshape(T, -1)
        x = x + att @ w[p + "attn_output.weight"].T + bias(p + "attn_output.bias")
        h = norm(x, w[p + "ffn_norm.weight"])
        gate = h @ w[p + "ffn_gate.weight"].T + bias(p + "ffn_gate.bias")
        up = h @ w[p + "ffn_up.weight"].T + bias(p + "ffn_up.bias")
        x = x + (gate / (1.0 + np.exp(-gate)) * up) @ w[p + "ffn_down.weight"].T + bias(p + "ffn_down.bias")
    return norm(x, w["output_norm.weight"]) @ w.get("output.weight", w["token_embd.weight"]).T


def reference_logits(s: Shape, weights: dict[str, Array], tokens: list[int], kv: str = "f32") -> Array:
    """Logits [n_tokens, n_vocab] of full attention, by the definitions, for the whole text at once."""
    T, group = len(tokens), s.n_head // s.n_head_kv
    frequency, positions = rope_frequencies(s, weights), np.arange(T)
    causal = np.where(np.tri(T, dtype=bool), 0.0, -np.inf)

    def attend(_: int, q: Array, k: Array, v: Array) -> Array:
        q, k = rope(q, positions, frequency), rounded(rope(k, positions, frequency), kv)
        k, v = np.repeat(k, group, 1), np.repeat(rounded(v, kv), group, 1)
        score = np.einsum("thd,shd->hts", q, k) / np.sqrt(s.dim) + causal
        weight = np.exp(score - score.max(-1, keepdims=True))
        weight /= weight.sum(-1, keepdims=True)
        return np.einsum("hts,shd->thd", weight, v)

    return forward(s, weights, tokens, attend)


def worst(found: Array, expected: Array) -> float:
    """Largest difference over largest logit."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())
