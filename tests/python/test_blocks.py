"""The arithmetic of weight types against the `gguf` package, and models of random blocks in every type."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from block_llama import write_block_llama
from random_blocks import QUANTIZED, READABLE, f16_places
from random_llama import Shape, worst
from ringlm import _core, errors

Kind = gguf.GGMLQuantizationType


def check_bits(kind: Kind, raw: np.ndarray) -> None:
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, kind).ravel()
    found = _core.dequantize(int(kind), raw.ravel())
    assert expected.dtype == found.dtype == np.float32
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), nan)
    np.testing.assert_array_equal(found.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])


def raw_blocks(kind: Kind, n: int, seed: int) -> np.ndarray:
    """[n, bytes]: any bytes at all, so any f16 as a factor, NaN and infinity among them."""
    size = gguf.GGML_QUANT_SIZES[kind][1]
    return np.random.default_rng(seed).integers(0, 256, (n, size), dtype=np.uint8)


@pytest.mark.parametrize("name", QUANTIZED)
def test_any_bytes(name: str) -> None:
    check_bits(Kind[name], raw_blocks(Kind[name], 3000, 1))


@pytest.mark.parametrize("name", QUANTIZED)
def test_factors_at_the_ends_of_f16(name: str) -> None:
    """Zeros, the smallest and largest subnormal and normal numbers, one: every pair of d and minimum."""
    kind = Kind[name]
    ends = np.array([0, 0x0001, 0x03FF, 0x0400, 0x3C00, 0x7BFF], np.uint16)
    ends = np.concatenate([ends, ends | 0x8000])
    places = f16_places(kind)
    pairs = np.stack(np.meshgrid(*[ends] * len(places)), -1).reshape(-1, len(places))
    raw = raw_blocks(kind, 4 * len(pairs), 2)
    for i, place in enumerate(places):
        raw[:, place : place + 2] = np.tile(pairs[:, i], 4).view(np.uint8).reshape(-1, 2)
    check_bits(kind, raw)


@pytest.mark.parametrize("name", QUANTIZED)
def test_every_code_and_scale(name: str) -> None:
    """Every byte but those of the factors takes every value, beside different ones."""
    kind = Kind[name]
    i, v = np.arange(gguf.GGML_QUANT_SIZES[kind][1]), np.arange(256)
    for step, offset in [(1, 0), (1, 37), (3, 101), (85, 7), (127, 53)]:  # odd steps reach all values
        raw = (step * v[:, None] + offset * i).astype(np.uint8)
        for place, factor in zip(f16_places(kind), (0.37, -1.3), strict=False):
            raw[:, place : place + 2] = np.array([factor], np.float16).view(np.uint8)
        check_bits(kind, raw)


@pytest.mark.parametrize("name", ["F16", "BF16"])
def test_every_half(name: str) -> None:
    check_bits(Kind[name], np.arange(2**16, dtype=np.uint16).view(np.uint8).reshape(1, -1))


def test_types_without_arithmetic_are_refused() -> None:
    with pytest.raises(errors.UnsupportedModelError, match=r"TQ2_0 cannot .* Q2_K, Q3_K, .* IQ4_NL, IQ4_XS"):
        _core.dequantize(int(Kind.TQ2_0), np.zeros(66, np.uint8))
    with pytest.raises(errors.InvalidArgument, match="83 bytes of Q2_K"):
        _core.dequantize(int(Kind.Q2_K), np.zeros(83, np.uint8))


# ---- models


def shapes(name: str) -> dict[str, Shape]:
    """Rows of three and five blocks; then rows of one block, in numbers that nothing divides."""
    block = max(gguf.GGML_QUANT_SIZES[Kind[name]][0], 32)
    three = {"n_embd": 3 * block, "n_ff": 5 * block, "n_head": block // 4, "n_head_kv": 1, "head_dim": 12}
    odd = {"n_embd": block, "n_ff": 83, "n_head": 5, "n_head_kv": 5, "head_dim": 6, "tied": True}
    plain = {
        "attn_output.weight": "F32",
        "ffn_down.weight": "F32",
    }  # their rows are as long as others are many
    return {
        "blocks": Shape(n_vocab=101, types={"default": name}, **three),
        "odd rows": Shape(n_vocab=37, types=plain | {"default": name}, **odd),
    }


def some_logits(path: Path, backend: str) -> np.ndarray:
    """Logits [14, n_vocab] of a prefill in chunks of 5 and 1, and of three steps behind it."""
    model = _core.Model(str(path), 2, backend)
    n_vocab = model.config.n_vocab
    tokens = np.random.default_rng(5).integers(0, n_vocab, 14).astype(np.int32)
    session = _core.Session(model, kv_k="f32", kv_v="f32", chunk=5)
    out = np.zeros((14, n_vocab), np.float32)
    session.prefill(tokens[:11], out[:11], all_logits=True)
    for i in range(11, 14):
        session.decode(int(tokens[i]), out[i])
    return out


@pytest.mark.parametrize("kind", ["blocks", "odd rows"])
@pytest.mark.parametrize("name", READABLE)
def test_a_model_in_every_type(tmp_path: Path, name: str, kind: str) -> None:
    write_block_llama(tmp_path / "m.gguf", shapes(name)[kind])
    found, expected = (some_logits(tmp_path / "m.gguf", backend) for backend in ("cpu", "reference"))
    assert 0.3 < expected.std() < 3.0 and np.abs(expected).max() < 30.0  # order 1, as block_llama.py promises
    assert worst(found, expected) < 1e-3
