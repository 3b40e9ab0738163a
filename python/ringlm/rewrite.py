"""A GGUF file made of another one: some tensors and keys are new, all else is copied byte by byte.

Metadata is copied as bytes and not through ``gguf.GGUFWriter``, which drops empty strings and refuses empty
arrays. Tensors pass through memory a few rows at a time, read from the file and not through its mapping, so
that the process never holds more than such a piece.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ringlm._replace import replacing
from ringlm.errors import FileFormatError, InvalidArgument, NumericError, UnsupportedModelError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    import ringlm._core as core

    Bytes = npt.NDArray[np.uint8]
    Floats = npt.NDArray[np.float32]

__all__ = [
    "FLOAT_TYPES",
    "WRITABLE_TYPES",
    "NewTensor",
    "Progress",
    "Source",
    "packed",
    "quantized",
    "rewrite",
]

#: Bytes done, bytes of all tensors, the name of the tensor.
Progress = Callable[[int, int, str], None]

FLOAT_TYPES = ("F32", "F16", "BF16")
#: Types that `quantized` makes.
WRITABLE_TYPES = (*FLOAT_TYPES, "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")

_ELEMENTS = 1 << 21  # of a piece: 8 MiB as float32
_COPIED = 1 << 23  # bytes copied at a time
_F16_MAX = 65504.0

# By the name that the core gives a value type: its number in the file and how struct writes it.
_STRING, _ARRAY = 8, 9
_NUMBERS = {
    "u8": (0, "B"),
    "i8": (1, "b"),
    "u16": (2, "H"),
    "i16": (3, "h"),
    "u32": (4, "I"),
    "i32": (5, "i"),
    "f32": (6, "f"),
    "bool": (7, "?"),
    "u64": (10, "Q"),
    "i64": (11, "q"),
    "f64": (12, "d"),
}
_SIZES = {number: struct.calcsize(code) for number, code in _NUMBERS.values()}


@dataclass(frozen=True)
class NewTensor:
    """A tensor of the new file: ``pieces()`` are its bytes in order."""

    name: str
    #: The last dimension is contiguous.
    shape: tuple[int, ...]
    #: As the field writes it, "Q4_1".
    type: str
    pieces: Callable[[], Iterable[npt.NDArray[Any]]]

    @property
    def nbytes(self) -> int:
        return _nbytes(self.shape, self.type)


class Source:
    """A GGUF file or set of split files to read from. Raises what ringlm's reader raises."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        import ringlm._core as core

        self.path = Path(path)
        self.file = core.GGUF(self.path)
        self.tensors = self.file.tensors()
        self._by_name = {t.name: t for t in self.tensors}

    def tensor(self, name: str) -> core.GGUFTensor | None:
        return self._by_name.get(name)

    def copied(self, tensor: core.GGUFTensor) -> NewTensor:
        """The tensor as it is."""

        def pieces() -> Iterator[Bytes]:
            for at in range(0, tensor.nbytes, _COPIED):
                yield self._bytes(tensor, at, min(_COPIED, tensor.nbytes - at))

        return NewTensor(tensor.name, tensor.shape, tensor.type, pieces)

    def raw_rows(self, tensor: core.GGUFTensor, first: int, n: int) -> Bytes:
        """``n`` rows as they are in the file, uint8 ``[n, bytes of a row]``; rows of all but the last
        dimension are counted through, and a vector has one column."""
        row = _nbytes((_columns(tensor),), tensor.type)
        return self._bytes(tensor, first * row, n * row).reshape(n, row)

    def rows(self, tensor: core.GGUFTensor, first: int, n: int) -> Floats:
        """``n`` rows as float32 ``[n, columns]``.

        Raises UnsupportedModelError for a type that ringlm cannot read, NumericError for NaN or infinity.
        """
        import numpy as np

        import ringlm._core as core

        raw = self.raw_rows(tensor, first, n).ravel()
        try:
            values = core.dequantize(core.gguf_type_sizes()[tensor.type][0], raw)
        except UnsupportedModelError as e:
            raise UnsupportedModelError(f"tensor '{tensor.name}': {e}") from None
        if not np.isfinite(values).all():
            raise NumericError(f"tensor '{tensor.name}' has NaN or infinity: the file is damaged")
        return values.reshape(n, _columns(tensor))

    def slabs(self, tensor: core.GGUFTensor) -> Iterator[Floats]:
        """All rows, a few at a time."""
        columns = _columns(tensor)
        n_rows = tensor.n_elements // columns
        step = max(1, _ELEMENTS // columns)
        for first in range(0, n_rows, step):
            yield self.rows(tensor, first, min(step, n_rows - first))

    def _bytes(self, tensor: core.GGUFTensor, first: int, n: int) -> Bytes:
        import numpy as np

        path = self.file.paths[tensor.shard]
        found = np.fromfile(path, np.uint8, n, offset=tensor.offset + first)
        if len(found) != n:
            raise FileFormatError(f"{path}: tensor '{tensor.name}' is cut short: the file changed meanwhile")
        return found


def quantized(values: Floats, type: str, name: str) -> Bytes:
    """Rows of float32 as rows of bytes of a type of WRITABLE_TYPES, as ``gguf.quants.quantize`` makes them.

    Raises NumericError, naming the tensor, for a value that the type's float16 factors cannot hold.
    """
    import gguf
    import numpy as np

    if type not in ("F32", "BF16") and values.size and (peak := float(np.abs(values).max())) > _F16_MAX:
        raise NumericError(f"tensor '{name}' has a value of {peak:g}; {type} holds at most {_F16_MAX:g}")
    blocks = gguf.quants.quantize(values, gguf.GGMLQuantizationType[type])
    return np.ascontiguousarray(blocks).view(np.uint8)


def packed(kind: str, value: Any) -> bytes:
    """A metadata value with its type in front; ``kind`` as ``GGUF.value_type`` names it: u32, array[i32]."""
    if kind.startswith("array["):
        number, code = _NUMBERS[kind[len("array[") : -1]]
        return struct.pack(f"<IIQ{len(value)}{code}", _ARRAY, number, len(value), *value)
    number, code = _NUMBERS[kind]
    return struct.pack(f"<I{code}", number, value)


def rewrite(
    source: Source,
    target: str | os.PathLike[str],
    tensors: Sequence[NewTensor],
    changes: Mapping[str, bytes],
    progress: Progress | None = None,
) -> int:
    """Writes the file ``target``, whole or not at all, and returns its size.

    ``changes`` has packed values of keys that are replaced, or added behind the others. The keys of a split
    are left out, since the result is one file. Raises InvalidArgument if the target is a file of the source,
    OSError.
    """
    name = os.fsdecode(target)
    for path in source.file.paths:
        if os.path.exists(name) and os.path.samefile(path, name):
            raise InvalidArgument(f"{name} is the input as well; give another name for the output")
    with replacing(name, private=False) as file:
        return _write(file, source, tensors, changes, progress)


def _write(
    file: IO[bytes],
    source: Source,
    tensors: Sequence[NewTensor],
    changes: Mapping[str, bytes],
    progress: Progress | None,
) -> int:
    import ringlm._core as core

    keys = list(_entries(source, changes))
    file.write(struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(keys)))
    file.writelines(keys)
    alignment = source.file.alignment
    numbers = core.gguf_type_sizes()
    offset = 0
    for t in tensors:
        shape = struct.pack(f"<I{len(t.shape)}Q", len(t.shape), *reversed(t.shape))
        file.write(_string(t.name) + shape + struct.pack("<IQ", numbers[t.type][0], offset))
        offset += t.nbytes + -t.nbytes % alignment
    file.write(bytes(-file.tell() % alignment))

    write_data(file, tensors, alignment, progress)
    return file.tell()


def write_data(
    file: IO[bytes], tensors: Sequence[NewTensor], alignment: int, progress: Progress | None
) -> None:
    """The data of all tensors, each padded to whole multiples of ``alignment`` bytes."""
    total, done = sum(t.nbytes for t in tensors), 0
    for t in tensors:
        begin = done
        for piece in t.pieces():
            file.write(piece.data)
            done += piece.nbytes
            if progress is not None:
                progress(done, total, t.name)
        if done - begin != t.nbytes:
            raise AssertionError(f"{t.name}: {done - begin} bytes were made, {t.nbytes} announced")
        file.write(bytes(-t.nbytes % alignment))


def _entries(source: Source, changes: Mapping[str, bytes]) -> Iterator[bytes]:
    """Key and value of every entry of the new file."""
    new = {_string(key): value for key, value in changes.items()}
    split = {_string(f"split.{key}") for key in ("no", "count", "tensors.count")}
    left_out = split if len(source.file.paths) > 1 else set()
    with (
        open(source.file.paths[0], "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        _, _, n = struct.unpack_from("<IQQ", data, 4)
        at = 24
        for _ in range(n):
            value = _behind_string(data, at)
            end = _behind_value(data, value)
            key = data[at:value]
            if key not in left_out:
                yield key + new.pop(key, data[value:end])
            at = end
    for key, packed_value in new.items():
        yield key + packed_value


# The reader has checked every length before.


def _behind_string(data: mmap.mmap, at: int) -> int:
    (length,) = struct.unpack_from("<Q", data, at)
    return at + 8 + int(length)


def _behind_value(data: mmap.mmap, at: int) -> int:
    (kind,) = struct.unpack_from("<I", data, at)
    count, at = 1, at + 4
    if kind == _ARRAY:
        kind, count = struct.unpack_from("<IQ", data, at)
        at += 12
    if kind != _STRING:
        return at + int(count) * _SIZES[kind]
    for _ in range(count):
        at = _behind_string(data, at)
    return at


def _string(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


def _columns(tensor: core.GGUFTensor) -> int:
    return tensor.shape[-1] if len(tensor.shape) > 1 else 1


def _nbytes(shape: Sequence[int], type: str) -> int:
    import math

    import ringlm._core as core

    _, block, size = core.gguf_type_sizes()[type]
    return math.prod(shape) // block * size
