"""The oracle of the ring, checked against what it should be equal to. Nothing of ringlm runs here."""

from __future__ import annotations

import numpy as np
import pytest
from random_llama import Array, Shape, random_weights, reference_logits, rope
from ring_reference import (
    Ring,
    block_size,
    hadamard,
    int8_rounded,
    int8_scale,
    paley,
    ring_attention,
    ring_logits,
    rotation,
    signs,
    stored,
)

TOKENS = np.random.default_rng(11).integers(0, 96, 300).tolist()
SIZES = [20, 64, 80, 96, 112, 128, 256]


@pytest.mark.parametrize("kv", ["f32", "f16"])
@pytest.mark.parametrize("pinned", [0, 37])
def test_before_the_first_wrap_it_is_full_attention(kv: str, pinned: int) -> None:
    shape = Shape()
    weights = random_weights(shape)
    full = reference_logits(shape, weights, TOKENS, kv)
    for n_ctx in (len(TOKENS), len(TOKENS) + 50):
        found = ring_logits(shape, weights, TOKENS, Ring(n_ctx, pinned, kv))
        np.testing.assert_allclose(found, full, rtol=0, atol=1e-12 * np.abs(full).max())
    # One token less of context and the last row, that row alone, is another one.
    found = ring_logits(shape, weights, TOKENS, Ring(len(TOKENS) - 1, pinned, kv))
    off = np.abs(found - full).max(-1)
    assert off[:-1].max() < 1e-12 * np.abs(full).max() and off[-1] > 1e-6


def streamed(q: Array, k: Array, v: Array, frequency: Array, n_ctx: int, sinks: int) -> Array:
    """StreamingLLM as published: the cache holds keys that are not turned; the sinks and the most recent rows
    get the positions of their places in the cache, and the query that of the last place."""
    out = np.empty_like(q)
    for p in range(len(q)):
        held = np.arange(p + 1)
        if len(held) > n_ctx:
            held = np.concatenate([held[:sinks], held[len(held) - (n_ctx - sinks) :]])
        places = np.arange(len(held))
        keys = rope(k[held], places, frequency)
        query = rope(q[p : p + 1], places[-1:], frequency)
        score = np.einsum("qhd,thd->ht", query, keys) / np.sqrt(q.shape[-1])
        weight = np.exp(score - score.max(-1, keepdims=True))
        out[p] = np.einsum("ht,thd->hd", weight / weight.sum(-1, keepdims=True), v[held])
    return out


@pytest.mark.parametrize("sinks", [0, 1, 4, 37])
@pytest.mark.parametrize("n_ctx", [40, 64])
def test_it_equals_attention_sink_streaming(sinks: int, n_ctx: int) -> None:
    rng = np.random.default_rng(sinks)
    T, dim = 12 * n_ctx, 16
    q, k, v = (scale * rng.standard_normal((T, 2, dim)) for scale in (2, 2, 1))
    frequency, positions = 10000.0 ** (-np.arange(0, dim, 2) / dim), np.arange(T)
    turned = rope(q, positions, frequency)
    second = rope(q, np.minimum(positions, n_ctx - 1), frequency)
    expected = streamed(q, k, v, frequency, n_ctx, sinks)

    def attended(q_pinned: Array, moving: int) -> Array:
        rows = rope(k, positions, frequency), v
        return ring_attention(turned, q_pinned, *rows, positions, moving=moving, pinned=sinks)

    assert np.abs(attended(second, n_ctx - sinks) - expected).max() < 1e-12
    assert np.abs(attended(second, n_ctx - sinks - 1) - expected).max() > 1e-2
    assert np.abs(attended(second, n_ctx - sinks + 1) - expected).max() > 1e-2
    if sinks:
        assert np.abs(attended(turned, n_ctx - sinks) - expected).max() > 1e-2


def test_signs_are_the_rudin_shapiro_sequence() -> None:
    s = signs(256)
    np.testing.assert_array_equal(s[:16], [1, 1, 1, -1, 1, 1, -1, 1, 1, 1, 1, -1, -1, -1, 1, -1])
    np.testing.assert_array_equal(s[::2], s[:128])  # its recurrence: a(2n) = a(n), a(2n+1) = (-1)^n a(n)
    np.testing.assert_array_equal(s[1::2], s[:128] * np.resize([1, -1], 128))


@pytest.mark.parametrize("n", [12, 20, 1, 2, 16, 24, 40, 64, 80, 96, 128, 160, 256])
def test_hadamard_matrices(n: int) -> None:
    h = hadamard(n)
    assert set(np.unique(np.abs(h))) == {1.0}
    np.testing.assert_array_equal(h @ h.T, n * np.eye(n))


def test_paley_matrices_are_skew() -> None:
    for q in (11, 19):
        np.testing.assert_array_equal(paley(q) + paley(q).T, 2 * np.eye(q + 1))


def test_blocks() -> None:
    assert {d: block_size(d) for d in (*SIZES, 36, 60, 8, 10, 7)} == {
        20: 20, 64: 64, 80: 80, 96: 96, 112: 16, 128: 128, 256: 256, 36: 12, 60: 20, 8: 8, 10: 2, 7: 1,
    }  # fmt: skip


@pytest.mark.parametrize("dim", SIZES)
def test_rotation_is_orthogonal_and_spreads_an_outlier(dim: int) -> None:
    turn = rotation(dim)
    np.testing.assert_allclose(turn @ turn.T, np.eye(dim), atol=1e-14)
    np.testing.assert_allclose(np.abs(turn[turn != 0]), 1 / np.sqrt(block_size(dim)), rtol=1e-14)
    # The signs keep an offset that all elements share from collecting in one coefficient.
    assert np.abs(turn @ np.ones(dim)).max() < (0.5 if block_size(dim) == dim else 0.8) * np.sqrt(dim)


@pytest.mark.parametrize("dim", SIZES)
def test_an_int8_row_is_within_half_a_step(dim: int) -> None:
    rng = np.random.default_rng(dim)
    x = rng.standard_normal((500, dim)) * 10.0 ** rng.uniform(-9, 3, (500, 1))
    x[0] = 0.0
    x[1] = 1.0
    turn = rotation(dim)
    y = x @ turn.T
    back = stored(x, "int8") @ turn.T
    scale = int8_scale(y)
    # Rounding the scale down to a half moves the end of the range by at most 2^-11 (2^-25 below normals).
    edge = np.maximum(np.abs(y).max(-1, keepdims=True) - 127 * scale, 0.0)
    assert (np.abs(back - y) <= np.maximum(scale / 2, edge) * (1 + 1e-9) + 1e-15).all()
    assert (edge <= 127 * np.maximum(scale * 2.0**-11, 2.0**-25) * (1 + 1e-9)).all()
    np.testing.assert_array_equal(stored(x, "int8")[0], 0.0)
    codes = int8_rounded(y) / np.where(scale > 0, scale, 1)
    np.testing.assert_allclose(codes, np.rint(codes), atol=1e-9)
    assert np.abs(codes).max() <= 127 + 1e-9
