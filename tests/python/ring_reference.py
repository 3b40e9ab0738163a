"""What a llama over the ring K/V cache computes, in float64 and by the definitions.

There is no ring here: all rows of the text stay in memory, and a query takes those that the rule of
visibility gives it. An int8 row is rotated, rounded and turned back at once, so attention itself is the plain
one. Nothing is shared with ringlm.

- Visibility: the query at p sees t <= p with t < pinned or p - t < n_ctx - pinned. A layer with a window
  0 < W < n_ctx pins nothing and sees p - t < W.
- Pinned rows are scored with the query turned to min(p, n_ctx - 1) (StreamingLLM, arXiv:2309.17453).
- int8: one f16 scale a row, codes of -127 to 127, rounded in the basis of a signed, normalized Hadamard
  transform; where K has a bias, the slow part of it is subtracted before (`centre`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from random_llama import Array, Shape, forward, rope, rope_frequencies, rounded


@dataclass(frozen=True)
class Ring:
    """How the cache is opened. The switches at the end take away one part of the definition."""

    n_ctx: int
    pinned: int = 0
    kv: str | tuple[str, str] = "f32"
    second_query: bool = True
    rotate: bool = True
    centre: bool = True

    @property
    def formats(self) -> tuple[str, str]:
        return (self.kv, self.kv) if isinstance(self.kv, str) else self.kv

    def moving(self, window: int) -> int:
        """How many tokens behind the pinned ones a query sees, itself among them."""
        return window if 0 < window < self.n_ctx else self.n_ctx - self.pinned

    def pinned_in(self, window: int) -> int:
        return 0 if 0 < window < self.n_ctx else self.pinned


@dataclass
class Rows:
    """Of every layer the rows as stored [n_tokens, n_head_kv, dim], decoded."""

    k: list[Array]
    v: list[Array]


@dataclass
class Run:
    """Logits [n_tokens, n_vocab] and the rows of the cache."""

    logits: Array
    rows: Rows


# ---- the rotation ----------------------------------------------------------------------------------------


def signs(n: int) -> Array:
    """The Rudin-Shapiro sequence: -1 where the binary digits of i hold "11" an odd number of times."""
    return np.array([-1.0 if (i & i >> 1).bit_count() % 2 else 1.0 for i in range(n)])


def paley(q: int) -> Array:
    """Hadamard matrix of order q + 1 for a prime q of 3 modulo 4: I + S, Paley's first construction."""
    character = np.full(q, -1.0)
    character[[i * i % q for i in range(q)]] = 1.0
    character[0] = 0.0
    i = np.arange(q)
    out = np.eye(q + 1)
    out[0, 1:] = 1.0
    out[1:, 0] = -1.0
    out[1:, 1:] += character[(i[:, None] - i) % q]
    return out


def block_size(dim: int) -> int:
    """The largest 2^k, 12 2^k or 20 2^k that divides dim."""
    return max(m << k for m in (1, 12, 20) for k in range(16) if dim % (m << k) == 0)


def hadamard(b: int) -> Array:
    """[b, b] of +-1: a row of b is a matrix [m, 2^k], transformed along both axes."""
    m = next(m for m in (1, 12, 20) if b % m == 0 and (b // m).bit_count() == 1)
    out = np.ones((1, 1)) if m == 1 else paley(m - 1)
    for _ in range((b // m).bit_length() - 1):
        out = np.kron(out, np.array([[1.0, 1.0], [1.0, -1.0]]))
    return out


@cache
def rotation(dim: int) -> Array:
    """[dim, dim], orthogonal; a row x becomes x @ rotation.T."""
    b = block_size(dim)
    return np.kron(np.eye(dim // b), hadamard(b)) / np.sqrt(b) * signs(dim)


# ---- rows as stored --------------------------------------------------------------------------------------


def int8_scale(y: Array) -> Array:
    """[..., 1]: the f16 scale of rows [..., dim]; one that is subnormal (below 2^-14) is rounded up, to a
    multiple of 2^-24."""
    most = np.abs(y).max(-1, keepdims=True)
    scale = (most / 127.0).astype(np.float16).astype(np.float64)
    return np.where(scale < 2.0**-14, np.ceil(most / 127.0 * 2.0**24) / 2.0**24, scale)


def int8_rounded(y: Array) -> Array:
    """Rows [..., dim] as scale times code."""
    scale = int8_scale(y)
    return scale * np.clip(np.rint(y / np.where(scale > 0.0, scale, 1.0)), -127, 127)


def stored(x: Array, kv: str, rotate: bool = True) -> Array:
    """What rows [..., dim] are after having been stored."""
    if kv != "int8":
        return rounded(x, kv)
    if not rotate:
        return int8_rounded(x)
    turn = rotation(x.shape[-1])
    return int8_rounded(x @ turn.T) @ turn


def centres(bias: Array, positions: Array, frequency: Array, n_ctx: int) -> Array:
    """[T, n_head_kv, dim], what is subtracted from the key of each position.

    The bias [n_head_kv, dim], turned to the middle of the position's epoch, without the pairs that turn by a
    radian or more over an epoch.
    """
    epoch = -(-n_ctx // 64) * 64
    slow = bias.copy()
    for pair in np.flatnonzero(frequency * epoch >= 1.0):
        slow[:, 2 * pair : 2 * pair + 2] = 0.0
    middle = positions // epoch * epoch + epoch // 2
    return rope(np.broadcast_to(slow, (len(positions), *slow.shape)), middle, frequency)


def layer_centres(
    s: Shape, weights: dict[str, Array], layer: int, positions: Array, ring: Ring
) -> Array | float:
    """What the layer subtracts from its keys: 0 unless K has a bias and is int8."""
    bias = weights.get(f"blk.{layer}.attn_k.bias")
    if bias is None or ring.formats[0] != "int8" or not ring.centre:
        return 0.0
    heads = bias.astype(np.float64).reshape(s.n_head_kv, s.dim)
    return centres(heads, positions, rope_frequencies(s, weights), ring.n_ctx)


# ---- attention -------------------------------------------------------------------------------------------


def visible(positions: Array, moving: int, pinned: int) -> Array:
    """[T, T] of bool: whether the query of the row sees the key of the column."""
    p, t = positions[:, None], positions
    return (t <= p) & ((t < pinned) | (p - t < moving))


def ring_attention(
    q: Array, q_pinned: Array, k: Array, v: Array, positions: Array, *, moving: int, pinned: int
) -> Array:
    """[T, n_head, dim] from turned queries [T, n_head, dim] and rows as stored [T, n_head_kv, dim].

    ``q_pinned`` are the queries for the rows before ``pinned``.
    """
    group, n_head = q.shape[1] // k.shape[1], q.shape[1]
    k, v = np.repeat(k, group, 1).transpose(1, 2, 0), np.repeat(v, group, 1).transpose(1, 0, 2)
    q, q_pinned = (
        q.transpose(1, 0, 2) / np.sqrt(q.shape[-1]),
        q_pinned.transpose(1, 0, 2) / np.sqrt(q.shape[-1]),
    )
    sees, out = visible(positions, moving, pinned), np.empty((len(positions), n_head, v.shape[-1]))
    for start in range(
        0, len(positions), 64
    ):  # only to save time: keys that none of the queries sees are left out
        rows = slice(start, start + 64)
        keys = np.flatnonzero(sees[rows].any(0))
        first = positions[keys] < pinned
        score = np.where(first, q_pinned[:, rows] @ k[..., keys], q[:, rows] @ k[..., keys])
        score = np.where(sees[rows, keys], score, -np.inf)
        weight = np.exp(score - score.max(-1, keepdims=True))
        weight /= weight.sum(-1, keepdims=True)
        out[rows] = (weight @ v[:, keys]).transpose(1, 0, 2)
    return out


def ring_run(
    s: Shape,
    weights: dict[str, Array],
    tokens: list[int],
    ring: Ring,
    *,
    given: Rows | None = None,
    positions: Array | None = None,
) -> Run:
    """The whole text at once; the windows are those of the shape.

    With ``given`` rows attention reads those instead of its own, which are still what the result holds: the
    logits then do not depend on which way a value on the edge of two codes was rounded. ``positions`` are
    0 to T - 1 unless they are given.
    """
    frequency = rope_frequencies(s, weights)
    at = np.arange(len(tokens)) if positions is None else positions
    windows = s.windows or (0,) * s.n_layer
    kv_k, kv_v = ring.formats
    own = Rows([], [])

    def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
        c = layer_centres(s, weights, layer, at, ring)
        k = stored(rope(k, at, frequency) - c, kv_k, ring.rotate) + c
        v = stored(v, kv_v, ring.rotate)
        own.k.append(k)
        own.v.append(v)
        if given is not None:
            k, v = given.k[layer], given.v[layer]
        turned = rope(q, at, frequency)
        second = rope(q, np.minimum(at, ring.n_ctx - 1), frequency) if ring.second_query else turned
        moving, pinned = ring.moving(windows[layer]), ring.pinned_in(windows[layer])
        return ring_attention(turned, second, k, v, at, moving=moving, pinned=pinned)

    return Run(forward(s, weights, tokens, attend), own)


def ring_logits(s: Shape, weights: dict[str, Array], tokens: list[int], ring: Ring) -> Array:
    """Logits [n_tokens, n_vocab]."""
    return ring_run(s, weights, tokens, ring).logits


# ---- comparing -------------------------------------------------------------------------------------------


def codes_off(found: Array, expected: Array, centre: Array | float = 0.0) -> tuple[float, float]:
    """Of int8 rows [..., dim], decoded: by how many codes they differ at most, and what part of the codes
    differs."""
    turn = rotation(found.shape[-1])
    a, b = (found - centre) @ turn.T, (expected - centre) @ turn.T
    # A row's largest code is 127 but for the rounding of its scale.
    off = np.abs(a - b) / np.maximum(np.abs(b).max(-1, keepdims=True) / 127.0, 2.0**-24)
    return float(off.max()), float((off > 0.5).mean())


def mean_divergence(expected: Array, found: Array) -> float:
    """Mean KL divergence of softmax(found) from softmax(expected), rows of logits, in nats."""

    def log_softmax(x: Array) -> Array:
        x = x.astype(np.float64) - x.max(-1, keepdims=True)
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    p, q = log_softmax(expected), log_softmax(found)
    return float((np.exp(p) * (p - q)).sum(-1).mean())
