"""The arithmetic of weight types against the `gguf` package, and models of random blocks in every type."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from random_blocks import QUANTIZED, f16_places
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
    """Every byte but those of the factors takes every value, with all other bytes clear and with all set."""
    kind = Kind[name]
    size = gguf.GGML_QUANT_SIZES[kind][1]
    factors = {place + i for place in f16_places(kind) for i in (0, 1)}
    for others in (0, 255):
        raw = np.full((size - len(factors), 256, size), others, np.uint8)
        for i, at in enumerate(at for at in range(size) if at not in factors):
            raw[i, :, at] = np.arange(256)
        for place, factor in zip(f16_places(kind), (0.37, -1.3), strict=False):
            raw[:, :, place : place + 2] = np.array([factor], np.float16).view(np.uint8)
        check_bits(kind, raw.reshape(-1, size))


@pytest.mark.parametrize("name", ["F16", "BF16"])
def test_every_half(name: str) -> None:
    check_bits(Kind[name], np.arange(2**16, dtype=np.uint16).view(np.uint8).reshape(1, -1))


def test_types_without_arithmetic_are_refused() -> None:
    with pytest.raises(errors.UnsupportedModelError, match=r"TQ2_0 cannot .* Q2_K, Q3_K, .* IQ4_NL, IQ4_XS"):
        _core.dequantize(int(Kind.TQ2_0), np.zeros(66, np.uint8))
    with pytest.raises(errors.InvalidArgument, match="83 bytes of Q2_K"):
        _core.dequantize(int(Kind.Q2_K), np.zeros(83, np.uint8))
