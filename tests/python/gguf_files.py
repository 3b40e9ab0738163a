"""GGUF files written byte by byte, also ones that no writer would write."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def entry(key: str | bytes, value_type: int, payload: bytes) -> bytes:
    """One metadata key with its value, already packed."""
    return string(key) + struct.pack("<I", value_type) + payload


def u32(key: str | bytes, value: int) -> bytes:
    return entry(key, U32, struct.pack("<I", value))


def text(key: str | bytes, value: str | bytes) -> bytes:
    return entry(key, STRING, string(value))


def array(key: str | bytes, element: int, count: int, payload: bytes = b"") -> bytes:
    return entry(key, ARRAY, struct.pack("<IQ", element, count) + payload)


@dataclass(frozen=True)
class Info:
    """One tensor info. The default is 8 float32 values, 32 bytes."""

    name: str | bytes
    dims: Sequence[int] = (8,)
    type: int = 0
    offset: int = 0
    n_dims: int | None = None

    def pack(self) -> bytes:
        n_dims = len(self.dims) if self.n_dims is None else self.n_dims
        return (
            string(self.name)
            + struct.pack("<I", n_dims)
            + struct.pack(f"<{len(self.dims)}Q", *self.dims)
            + struct.pack("<IQ", self.type, self.offset)
        )


def build(
    entries: Sequence[bytes] = (),
    infos: Sequence[Info] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_kv: int | None = None,
    n_tensors: int | None = None,
    alignment: int = 32,
    byte_order: str = "<",
) -> bytes:
    """A file; counts default to the true ones. `data` begins at the next multiple of `alignment`."""
    header = magic + struct.pack(
        byte_order + "IQQ",
        version,
        len(infos) if n_tensors is None else n_tensors,
        len(entries) if n_kv is None else n_kv,
    )
    head = header + b"".join(entries) + b"".join(info.pack() for info in infos)
    return head + bytes(-len(head) % alignment if data else 0) + data


def small_model() -> bytes:
    """A valid file with every value type and two tensors; its last byte is the last byte of a tensor."""
    numbers = [(U8, "B"), (I8, "b"), (U16, "H"), (I16, "h"), (U32, "I"), (I32, "i"), (U64, "Q"), (I64, "q")]
    entries = [text("general.architecture", "llama"), u32("general.alignment", 64)]
    entries += [entry(f"n.{kind}", kind, struct.pack("<" + code, 7)) for kind, code in numbers]
    entries += [array(f"a.{kind}", kind, 3, struct.pack("<3" + code, 1, 2, 3)) for kind, code in numbers]
    entries += [
        entry("n.f32", F32, struct.pack("<f", 0.5)),
        entry("n.f64", F64, struct.pack("<d", 0.25)),
        entry("n.bool", BOOL, b"\1"),
        array("a.f32", F32, 2, struct.pack("<2f", 1.5, -2.0)),
        array("a.bool", BOOL, 3, b"\1\0\1"),
        array("tokenizer.ggml.tokens", STRING, 3, string("a") + string("bc") + string("")),
    ]
    infos = [Info("token_embd.weight", (32, 2), 8, 0), Info("output_norm.weight", (4, 2, 1, 2), 0, 128)]
    return build(entries, infos, bytes(range(128)) + bytes(64), alignment=64)
