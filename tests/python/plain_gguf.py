"""GGUF files of given tensors, written and read with the `gguf` package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from random_blocks import random_blocks

Array = np.ndarray
Kind = gguf.GGMLQuantizationType


@dataclass(frozen=True)
class Stored:
    """A tensor as it is in a file: its type, its shape and its bytes."""

    type: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def values(self) -> Array:
        """What it means, float32."""
        kind = Kind[self.type]
        block, size = gguf.GGML_QUANT_SIZES[kind]
        raw = np.frombuffer(self.data, np.uint8).reshape(-1, self.shape[-1] // block * size)
        return gguf.quants.dequantize(raw, kind).reshape(self.shape)

    def as_type(self, type: str) -> Stored:
        """What ``gguf.quants`` makes of its values."""
        return stored(self.values, type)


def stored(values: Array, type: str = "F32") -> Stored:
    raw = gguf.quants.quantize(np.asarray(values, np.float32), Kind[type])
    return Stored(type, values.shape, np.ascontiguousarray(raw).tobytes())


def random_stored(seed: int, shape: tuple[int, ...], type: str = "F32") -> Stored:
    """Random blocks of any type that ringlm reads."""
    rows = int(np.prod(shape[:-1]))
    raw = random_blocks(np.random.default_rng(seed), Kind[type], rows, shape[-1], rms=0.5)
    return Stored(type, shape, np.ascontiguousarray(raw).tobytes())


def write(
    path: Path,
    tensors: Mapping[str, Stored],
    metadata: Mapping[str, object] | None = None,
    arch: str = "llama",
    split: int = 0,
) -> None:
    """Numbers are u32, lists of them arrays of i32. ``split`` is how many tensors a file takes."""
    w = gguf.GGUFWriter(path, arch, split_max_tensors=split)
    for key, value in (metadata or {}).items():
        add = {int: w.add_uint32, float: w.add_float32, str: w.add_string, list: w.add_array}[type(value)]
        add(key, value)
    for name, t in tensors.items():
        kind = Kind[t.type]
        if t.type in ("F32", "F16"):
            array = np.frombuffer(t.data, np.float32 if t.type == "F32" else np.float16).reshape(t.shape)
        else:
            block, size = gguf.GGML_QUANT_SIZES[kind]
            array = np.frombuffer(t.data, np.uint8).reshape(*t.shape[:-1], t.shape[-1] // block * size)
        w.add_tensor(name, array, raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def read(path: Path) -> tuple[dict[str, Stored], dict[str, object]]:
    """Tensors by name, and metadata."""
    reader = gguf.GGUFReader(path)
    tensors = {
        t.name: Stored(t.tensor_type.name, tuple(int(n) for n in reversed(t.shape)), t.data.tobytes())
        for t in reader.tensors
    }
    metadata = {key: f.contents() for key, f in reader.fields.items() if not key.startswith("GGUF.")}
    return tensors, metadata
