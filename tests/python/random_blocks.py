"""Weights of every type that ringlm reads as random valid blocks, not rounded from floats.

The `gguf` package cannot quantize to the K types, and drawing codes is much faster than finding them.
"""

from __future__ import annotations

from functools import cache

import gguf
import numpy as np

Array = np.ndarray
Kind = gguf.GGMLQuantizationType

#: The byte where a block's f16 factor d is; that of its minimum's f16 factor, or None; the latter in units of
#: d that centres the weights.
_FACTORS: dict[str, tuple[int, int | None, float]] = {
    "Q4_0": (0, None, 0.0),
    "Q4_1": (0, 2, -7.5),
    "Q5_0": (0, None, 0.0),
    "Q5_1": (0, 2, -15.5),
    "Q8_0": (0, None, 0.0),
    "Q2_K": (80, 82, 1.5),
    "Q3_K": (108, None, 0.0),
    "Q4_K": (0, 2, 7.5),
    "Q5_K": (0, 2, 15.5),
    "Q6_K": (208, None, 0.0),
    "IQ4_NL": (0, None, 0.0),
    "IQ4_XS": (0, None, 0.0),
}

#: Types without blocks.
PLAIN = ("F32", "F16", "BF16")
QUANTIZED = tuple(_FACTORS)
#: Those that have arithmetic in ringlm.
READABLE = (*PLAIN, *QUANTIZED)


def f16_places(kind: Kind) -> list[int]:
    """Where a block of a quantized type keeps its f16 factors, in bytes."""
    d, minimum, _ = _FACTORS[kind.name]
    return [d] if minimum is None else [d, minimum]


def random_blocks(rng: np.random.Generator, kind: Kind, rows: int, cols: int, rms: float) -> Array:
    """Raw rows [rows, bytes] of weights whose root mean square is about `rms` and whose mean is about 0.

    Codes and the scales inside a block are uniformly random; d varies by a factor of three, and has either
    sign where the type has no minimum.
    """
    if kind.name in PLAIN:
        return _plain(rng, kind.name, rows, cols, rms)
    return _blocks(rng, kind, rows, cols, rms / _rms_of_unit_blocks(kind))


def _blocks(rng: np.random.Generator, kind: Kind, rows: int, cols: int, d: float) -> Array:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    n = rows * cols // block
    words = rng.integers(0, 2**64, -(-n * size // 8), np.uint64)  # thrice as fast as drawing bytes
    data = words.view(np.uint8)[: n * size].reshape(n, size)
    place, minimum_place, minimum = _FACTORS[kind.name]
    factor = d * rng.uniform(0.5, 1.5, n).astype(np.float32)
    if minimum_place is None:
        factor *= rng.choice(np.array([-1.0, 1.0], np.float32), n)
    else:
        _put(data, minimum_place, minimum * factor)
    _put(data, place, factor)
    return data.reshape(rows, cols // block * size)


def _put(data: Array, place: int, values: Array) -> None:
    data[:, place : place + 2] = values.astype(np.float16).view(np.uint8).reshape(-1, 2)


def _plain(rng: np.random.Generator, name: str, rows: int, cols: int, rms: float) -> Array:
    values = rms * rng.standard_normal((rows, cols), np.float32)
    if name == "F16":
        values = values.astype(np.float16)
    elif name == "BF16":
        values = (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.view(np.uint8)


@cache
def _rms_of_unit_blocks(kind: Kind) -> float:
    """Of weights with d about 1."""
    raw = _blocks(np.random.default_rng(0), kind, 64, 4096, 1.0)
    weights = gguf.quants.dequantize(raw, kind).astype(np.float64)
    return float(np.sqrt((weights * weights).mean()))
