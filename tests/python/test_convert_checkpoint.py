"""safetensors files and their index: read as written, and errors for whatever else they may hold."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import as_bf16, from_bf16, safetensors
from ringlm import Error, FileFormatError
from ringlm.convert.checkpoint import Checkpoint

RNG = np.random.default_rng(3)
ARRAYS = {
    "a": RNG.standard_normal((5, 7)).astype(np.float32),
    "b": RNG.standard_normal(3).astype(np.float16),
    "c": as_bf16(RNG.standard_normal((2, 3, 4))),
    "d": np.arange(6, dtype=np.int32).reshape(2, 3),
    "empty": np.zeros((0, 4), np.float32),
}


def test_arrays_and_rows(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(safetensors(ARRAYS))
    checkpoint = Checkpoint(tmp_path)
    assert {name: checkpoint[name] for name in checkpoint} == {n: a.shape for n, a in ARRAYS.items()}
    for name in ("a", "b", "d", "empty"):
        found = checkpoint.array(name)
        assert found.dtype == ARRAYS[name].dtype
        np.testing.assert_array_equal(found, ARRAYS[name])
    np.testing.assert_array_equal(checkpoint.array("c"), from_bf16(ARRAYS["c"]))
    rows = checkpoint.matrix("c").read(np.array([5, 0, 3]))
    assert rows.dtype == np.float32
    np.testing.assert_array_equal(rows, from_bf16(ARRAYS["c"]).reshape(6, 4)[[5, 0, 3]])
    np.testing.assert_array_equal(checkpoint.matrix("b").read(slice(0, 1)), ARRAYS["b"][None])
    with pytest.raises(FileFormatError, match="d is I32; expected F32, F16, BF16"):
        checkpoint.matrix("d")


def test_one_file_of_another_name_is_taken(tmp_path: Path) -> None:
    (tmp_path / "weights.safetensors").write_bytes(safetensors(ARRAYS))
    assert "a" in Checkpoint(tmp_path)
    (tmp_path / "more.safetensors").write_bytes(safetensors(ARRAYS))
    with pytest.raises(FileFormatError, match=r"2 safetensors files, but no model\.safetensors\.index\.json"):
        Checkpoint(tmp_path)


def test_no_safetensors(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"there is no model\.safetensors"):
        Checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    with pytest.raises(FileFormatError, match="pickled weights are not read"):
        Checkpoint(tmp_path)


def packed(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def one(**changes: Any) -> bytes:
    return packed({"x": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **changes}}, bytes(16))


BROKEN: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "0 bytes; a safetensors file has at least 8"),
    "header-beyond-the-end": (struct.pack("<Q", 100) + b"{}", "a header of 100 bytes in a file of 10"),
    "header-of-exabytes": (struct.pack("<Q", 2**63) + b"{}", "a header of 9223372036854775808 bytes"),
    "header-no-json": (packed(b"{nonsense"), "the header is not JSON"),
    "header-no-utf8": (packed(b'{"\xff": 1}'), "the header is not JSON"),
    "header-nested": (packed(b"[" * 100_000), "the header is not JSON"),
    "header-a-list": (packed([1]), "the header is a list"),
    "entry-a-number": (packed({"x": 1}), "'x' is described by a int"),
    "dtype": (one(dtype="F4"), "'x' has dtype 'F4'; known are F64"),
    "dtype-a-list": (one(dtype=["F32"]), "'x' has dtype"),
    "no-shape": (one(shape=None), "'x': shape is None"),
    "negative": (one(shape=[-2, -2]), r"'x': shape is \[-2, -2\]"),
    "booleans": (one(shape=[True, 4]), "'x': shape is"),
    "overflow": (one(shape=[2**40, 2**40]), "takes 4835703278458516698824704"),
    "three-offsets": (one(data_offsets=[0, 8, 16]), "the file is truncated"),
    "backwards": (one(data_offsets=[16, 0]), "the file is truncated"),
    "beyond": (one(data_offsets=[4, 20]), r"bytes \[4, 20\] of 16; the file is truncated"),
    "another-size": (one(data_offsets=[0, 12]), "12 bytes; F32 of shape .2, 2. takes 16"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files(tmp_path: Path, name: str) -> None:
    data, words = BROKEN[name]
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(FileFormatError, match=words):
        Checkpoint(tmp_path)


def test_no_byte_of_a_header_can_do_harm(tmp_path: Path) -> None:
    good = safetensors({"a": ARRAYS["a"], "c": ARRAYS["c"]})
    rng = np.random.default_rng(0)
    n_failed = 0
    for _ in range(400):
        data = bytearray(good)
        for at in rng.integers(0, len(good) - 160, rng.integers(1, 4)):
            data[at] = rng.integers(0, 256)
        (tmp_path / "model.safetensors").write_bytes(data[: rng.integers(0, 2 * len(good))])
        try:
            checkpoint = Checkpoint(tmp_path)
            for name in checkpoint:
                assert checkpoint.array(name).shape == checkpoint[name]
        except Error:
            n_failed += 1
    assert n_failed > 200


@pytest.mark.parametrize(
    "value, words",
    [
        ([], "holds a list; expected a JSON object"),
        ({}, "weight_map is missing"),
        (
            {"weight_map": {"a": "../x.safetensors"}},
            "said to be in '../x.safetensors'; expected a file's name",
        ),
        ({"weight_map": {"a": ".."}}, "expected a file's name"),
        ({"weight_map": {"a": 3}}, "said to be in 3"),
        ({"weight_map": {"a": "absent.safetensors"}}, "absent.safetensors is not there; download"),
        ({"weight_map": {"z": "part.safetensors"}}, "z is not in part.safetensors"),
    ],
)
def test_broken_indices(tmp_path: Path, value: Any, words: str) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (tmp_path / "x.safetensors").write_bytes(safetensors(ARRAYS))
    (folder / "part.safetensors").write_bytes(safetensors(ARRAYS))
    (folder / "model.safetensors.index.json").write_text(json.dumps(value))
    with pytest.raises(FileFormatError, match=words):
        Checkpoint(folder)
