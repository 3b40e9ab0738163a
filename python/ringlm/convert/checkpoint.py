"""Tensors of a folder of safetensors files: mapped, checked when opened, read by rows.

The format: a little-endian 64-bit length, that many bytes of JSON (name -> dtype, shape, data_offsets), data.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ringlm.errors import FileFormatError

Array = npt.NDArray[Any]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_HEADER = 100 << 20  # as the safetensors package has it
_BF16 = "BF16"
_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    _BF16: np.dtype("<u2"),  # the upper half of a float32
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
FLOATS = ("F32", "F16", _BF16)


@dataclass(frozen=True)
class _Entry:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    data: Array  # bytes of the file


class Checkpoint(Mapping[str, tuple[int, ...]]):
    """The tensors of a checkpoint: name -> shape.

    Raises FileFormatError where a file contradicts its format, the index its files, or there are none;
    OSError.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._entries: dict[str, _Entry] = {}
        self._maps: list[mmap.mmap] = []
        index = folder / INDEX
        if index.is_file():
            self._open_all(index)
        else:
            self._entries = self._open(_only_file(folder))

    def _open_all(self, index: Path) -> None:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise FileFormatError(f"{index}: weight_map is missing; expected tensor name -> file name")
        files: dict[str, dict[str, _Entry]] = {}
        for name, file in weight_map.items():
            if not isinstance(file, str) or file != os.path.basename(file) or file in ("", ".", ".."):
                raise FileFormatError(f"{index}: {name} is said to be in {file!r}; expected a file's name")
            if file not in files:
                if not (self.folder / file).is_file():
                    raise FileFormatError(f"{index}: {file} is not there; download the whole checkpoint")
                files[file] = self._open(self.folder / file)
            if name not in files[file]:
                raise FileFormatError(f"{index}: {name} is not in {file}; download the checkpoint again")
            self._entries[name] = files[file][name]

    def _open(self, file: Path) -> dict[str, _Entry]:
        size = file.stat().st_size
        if size < 8:
            raise FileFormatError(f"{file}: {size} bytes; a safetensors file has at least 8")
        with open(file, "rb") as opened:
            self._maps.append(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
        return _parse(file, np.frombuffer(self._maps[-1], np.uint8))

    def release(self) -> None:
        """What was read so far need not stay in memory."""
        for mapping in self._maps:
            if hasattr(mapping, "madvise"):
                mapping.madvise(mmap.MADV_DONTNEED)

    def __getitem__(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    @property
    def files(self) -> list[Path]:
        return sorted({entry.file for entry in self._entries.values()})

    def dtype(self, name: str) -> str:
        """``F32``, ``BF16``, … as the file names it."""
        return self._entries[name].dtype

    def file(self, name: str) -> Path:
        return self._entries[name].file

    def array(self, name: str) -> Array:
        """The whole tensor in its own type; bfloat16 as float32. Views of the mapped file where possible."""
        raw = self._raw(name)
        return widen(raw) if self.dtype(name) == _BF16 else raw

    def matrix(self, name: str) -> Matrix:
        """Rows of the last dimension. Raises FileFormatError for a tensor that is no float tensor."""
        if self.dtype(name) not in FLOATS:
            raise FileFormatError(
                f"{self.file(name)}: {name} is {self.dtype(name)}; expected {', '.join(FLOATS)}"
            )
        raw = self._raw(name)
        return Matrix(raw.reshape(-1, raw.shape[-1] if raw.ndim else 1), self.dtype(name) == _BF16)

    def _raw(self, name: str) -> Array:
        e = self._entries[name]
        nbytes = math.prod(e.shape) * _DTYPES[e.dtype].itemsize
        flat: Array = e.data[e.offset : e.offset + nbytes].view(_DTYPES[e.dtype])
        return flat.reshape(e.shape)


@dataclass(frozen=True)
class Matrix:
    """Rows of numbers that become float32 when read."""

    raw: Array  # [n_rows, n_columns]
    is_bf16: bool

    def read(self, rows: slice | Array) -> npt.NDArray[np.float32]:
        block = self.raw[rows]
        return widen(block) if self.is_bf16 else block.astype(np.float32)


def widen(bf16: Array) -> npt.NDArray[np.float32]:
    """bfloat16, given as uint16, is the upper half of a float32."""
    return (bf16.astype("<u4") << 16).view("<f4")


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object. Raises FileFormatError for anything else, OSError."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:
        raise FileFormatError(f"{file} is not JSON: {e}") from None
    if not isinstance(value, dict):
        raise FileFormatError(f"{file} holds a {type(value).__name__}; expected a JSON object")
    return value


def optional_json(file: Path) -> dict[str, Any]:
    """The same; nothing where there is no such file."""
    return read_json(file) if file.is_file() else {}


def _only_file(folder: Path) -> Path:
    if (folder / SINGLE).is_file():
        return folder / SINGLE
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    if found:
        raise FileFormatError(f"{folder}: {len(found)} safetensors files, but no {INDEX} that joins them")
    has_pickle = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
    hint = "; pickled weights are not read, save the model as safetensors" if has_pickle else ""
    raise FileFormatError(f"{folder}: there is no {SINGLE} and no {INDEX}{hint}")


def _parse(file: Path, data: Array) -> dict[str, _Entry]:
    size = len(data)
    length = int.from_bytes(data[:8].tobytes(), "little")
    if length > min(size - 8, _MAX_HEADER):
        raise FileFormatError(f"{file}: a header of {length} bytes in a file of {size}; download it again")
    try:
        header = json.loads(data[8 : 8 + length].tobytes().decode("utf-8"))
    except (ValueError, RecursionError) as e:
        raise FileFormatError(f"{file}: the header is not JSON: {e}") from None
    if not isinstance(header, dict):
        raise FileFormatError(f"{file}: the header is a {type(header).__name__}; expected a JSON object")
    begin = 8 + length
    return {
        name: _entry(file, name, value, begin, data)
        for name, value in header.items()
        if name != "__metadata__"
    }


def _entry(file: Path, name: str, value: Any, begin: int, data: Array) -> _Entry:
    where = f"{file}: {name!r}"
    if not isinstance(value, dict):
        raise FileFormatError(f"{where} is described by a {type(value).__name__}; expected an object")
    dtype = value.get("dtype")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise FileFormatError(f"{where} has dtype {dtype!r}; known are {', '.join(_DTYPES)}")
    shape, offsets = _sizes(where, value, "shape"), _sizes(where, value, "data_offsets")
    if len(offsets) != 2 or not offsets[0] <= offsets[1] <= len(data) - begin:
        raise FileFormatError(
            f"{where}: bytes {offsets} of {len(data) - begin}; the file is truncated, download it again"
        )
    expected = math.prod(shape) * _DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != expected:
        raise FileFormatError(
            f"{where}: {offsets[1] - offsets[0]} bytes; {dtype} of shape {shape} takes {expected}"
        )
    return _Entry(file, dtype, tuple(shape), begin + offsets[0], data)


def _sizes(where: str, value: dict[str, Any], key: str) -> list[int]:
    sizes = value.get(key)
    if not isinstance(sizes, list) or not all(type(n) is int and 0 <= n < 2**48 for n in sizes):
        raise FileFormatError(f"{where}: {key} is {sizes!r:.80}; expected a list of sizes")
    return sizes
