"""GGUF reading against the `gguf` package's writer and constants."""

from __future__ import annotations

import gc
import os
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_files import BOOL, STRING, U32, Info, array, build, entry, small_model, string, text
from ringlm import _core
from ringlm.errors import Error, InvalidArgument

SCALARS: list[tuple[str, str, Any, str]] = [
    ("add_uint8", "t.uint8", 255, "u8"),
    ("add_int8", "t.int8", -128, "i8"),
    ("add_uint16", "t.uint16", 65535, "u16"),
    ("add_int16", "t.int16", -32768, "i16"),
    ("add_uint32", "t.uint32", 2**32 - 1, "u32"),
    ("add_int32", "t.int32", -(2**31), "i32"),
    ("add_uint64", "t.uint64", 2**64 - 1, "u64"),
    ("add_int64", "t.int64", -(2**63), "i64"),
    ("add_float32", "t.float32", 0.15625, "f32"),
    ("add_float64", "t.float64", 0.1, "f64"),
    ("add_bool", "t.true", True, "bool"),
    ("add_bool", "t.false", False, "bool"),
    ("add_string", "t.string", "Grüße, 世界 \N{WAVING HAND SIGN}", "string"),
]

ARRAYS: list[tuple[str, gguf.GGUFValueType, str, list[Any]]] = [
    ("u8", gguf.GGUFValueType.UINT8, "uint8", [0, 255]),
    ("i8", gguf.GGUFValueType.INT8, "int8", [-128, 127]),
    ("u16", gguf.GGUFValueType.UINT16, "uint16", [0, 65535]),
    ("i16", gguf.GGUFValueType.INT16, "int16", [-32768, 32767]),
    ("u32", gguf.GGUFValueType.UINT32, "uint32", [0, 2**32 - 1]),
    ("i32", gguf.GGUFValueType.INT32, "int32", [-(2**31), 2**31 - 1]),
    ("u64", gguf.GGUFValueType.UINT64, "uint64", [0, 2**64 - 1]),
    ("i64", gguf.GGUFValueType.INT64, "int64", [-(2**63), 2**63 - 1]),
    ("f32", gguf.GGUFValueType.FLOAT32, "float32", [1.5, -0.25, 3.0e38]),
    ("f64", gguf.GGUFValueType.FLOAT64, "float64", [0.1, -1.0e300]),
    ("bool", gguf.GGUFValueType.BOOL, "bool", [True, False, True]),
]


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_raw(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A file of the `gguf` package with every scalar and array type."""
    path = tmp_path / "metadata.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for method, key, value, _ in SCALARS:
        getattr(writer, method)(key, value)
    for name, kind, _, values in ARRAYS:
        writer.add_key_value(f"a.{name}", values, gguf.GGUFValueType.ARRAY, sub_type=kind)
    writer.add_array("a.string", ["x", "", "größer"])
    finish(writer)
    return path


def test_scalars_round_trip(written: Path) -> None:
    file = _core.GGUF(written)
    for _, key, value, kind in SCALARS:
        found = file.get(key)
        assert (found, type(found), file.value_type(key)) == (value, type(value), kind)


def test_arrays_round_trip(written: Path) -> None:
    file = _core.GGUF(str(written))
    for name, _, dtype, values in ARRAYS:
        found = file.get(f"a.{name}")
        assert isinstance(found, np.ndarray)
        assert found.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(found, np.array(values, dtype))
        assert file.value_type(f"a.{name}") == f"array[{name}]"
        found[0] = 0  # a copy: the file is untouched
        np.testing.assert_array_equal(file.get(f"a.{name}"), np.array(values, dtype))
    assert file.get("a.string") == ["x", "", "größer"]
    assert file.value_type("a.string") == "array[string]"


def test_keys_and_defaults(written: Path) -> None:
    file = _core.GGUF(written)
    keys = [key for _, key, _, _ in SCALARS] + [f"a.{name}" for name, _, _, _ in ARRAYS] + ["a.string"]
    assert file.keys() == ["general.architecture", *keys]
    assert "t.uint8" in file and "t.uint" not in file
    assert file.get("absent") is None
    assert file.get("absent", 7) == 7
    assert file.get("absent", default="x") == "x"
    with pytest.raises(InvalidArgument, match="'absent'"):
        file.value_type("absent")


def test_properties(written: Path) -> None:
    file = _core.GGUF(written)
    assert (file.version, file.alignment) == (3, 32)
    assert file.file_bytes == written.stat().st_size
    assert file.paths == [str(written)]
    assert file.tensors() == []
    assert "metadata.gguf" in repr(file) and "26 keys" in repr(file)
    with pytest.raises(TypeError):
        pickle.dumps(file)


def quantized(kind: gguf.GGMLQuantizationType, rows: int, blocks: int) -> np.ndarray[Any, Any]:
    """Random bytes that are `rows` rows of `blocks` blocks."""
    rng = np.random.default_rng(int(kind))
    size = blocks * gguf.GGML_QUANT_SIZES[kind][1]
    return rng.integers(0, 256, (rows, size), dtype=np.uint8)


def test_tensors_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "tensors.gguf"
    rng = np.random.default_rng(1)
    plain = {
        "f32": rng.standard_normal((3, 5, 7)).astype(np.float32),
        "f16": rng.standard_normal((2, 3, 4, 5)).astype(np.float16),
        "f64": rng.standard_normal(3),
        "i8": rng.integers(-128, 127, (3, 3), dtype=np.int8),
        "i16": rng.integers(-99, 99, 5, dtype=np.int16),
        "i32": rng.integers(-99, 99, (1, 1), dtype=np.int32),
        "i64": rng.integers(-99, 99, (2, 2), dtype=np.int64),
    }
    kinds = [kind for kind, (block, _) in gguf.GGML_QUANT_SIZES.items() if block > 1]
    raw = {kind.name: quantized(kind, 3, 2) for kind in kinds}
    writer = gguf.GGUFWriter(path, "llama")
    for name, values in plain.items():
        writer.add_tensor(name, values)
    for kind in kinds:
        writer.add_tensor(kind.name, raw[kind.name], raw_dtype=kind)
    finish(writer)

    file = _core.GGUF(path)
    content = path.read_bytes()
    infos = {info.name: info for info in file.tensors()}
    assert list(infos) == [*plain, *raw]
    for name, values in plain.items():
        assert (infos[name].shape, infos[name].type) == (values.shape, name.upper())
        found = file.tensor_data(name).view(values.dtype).reshape(infos[name].shape)
        np.testing.assert_array_equal(found, values)
    for kind in kinds:
        info = infos[kind.name]
        block = gguf.GGML_QUANT_SIZES[kind][0]
        assert (info.shape, info.type, info.n_elements) == ((3, 2 * block), kind.name, 6 * block)
        np.testing.assert_array_equal(file.tensor_data(kind.name), raw[kind.name].ravel())
    for info in infos.values():
        assert info.offset % 32 == 0 and info.shard == 0
        assert content[info.offset : info.offset + info.nbytes] == file.tensor_data(info.name).tobytes()
    assert repr(infos["f32"]) == "<GGUFTensor 'f32': F32 (3, 5, 7)>"


def test_type_sizes_agree_with_the_gguf_package() -> None:
    sizes = _core.gguf_type_sizes()
    theirs = {kind.name: (int(kind), *size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
    known = {name: size for name, size in sizes.items() if name in theirs}
    assert known == {name: theirs[name] for name in known}
    # The types of the oldest `gguf` that is allowed; a later one may know types that ringlm does not.
    assert len(known) >= 32 and {"F32", "BF16", "Q4_0", "Q6_K", "IQ1_M", "TQ2_0", "MXFP4"} <= known.keys()


def test_tensor_data_is_a_read_only_view_that_keeps_the_file(tmp_path: Path) -> None:
    content = small_model()
    file = _core.GGUF(write_raw(tmp_path / "small.gguf", content))
    view = file.tensor_data("token_embd.weight")
    assert view.dtype == np.uint8 and view.shape == (68,)
    assert np.shares_memory(view, file.tensor_data("token_embd.weight"))
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        view.flags.writeable = True
    del file
    gc.collect()
    assert view.tobytes() == bytes(range(68))
    # A new mapping would reuse the addresses of one that had been dropped.
    others = [_core.GGUF(tmp_path / "small.gguf") for _ in range(4)]
    assert view.tobytes() == bytes(range(68)) and len(others) == 4


def test_unknown_tensor(tmp_path: Path) -> None:
    file = _core.GGUF(write_raw(tmp_path / "small.gguf", small_model()))
    with pytest.raises(InvalidArgument, match=r"no tensor 'output\.weight' among its 2 tensors"):
        file.tensor_data("output.weight")


@pytest.mark.parametrize("version", [2, 3])
def test_versions(tmp_path: Path, version: int) -> None:
    content = build([text("general.name", "x")], [Info("t")], bytes(range(32)), version=version)
    file = _core.GGUF(write_raw(tmp_path / "v.gguf", content))
    assert (file.version, file.get("general.name")) == (version, "x")
    assert file.tensor_data("t").tobytes() == bytes(range(32))


@pytest.mark.parametrize("alignment", [8, 16, 256, 4096])
def test_alignment(tmp_path: Path, alignment: int) -> None:
    path = tmp_path / "aligned.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    tensors = {f"t{i}": np.arange(i + 1, dtype=np.float32) for i in range(3)}
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    finish(writer)
    file = _core.GGUF(path)
    assert file.alignment == alignment
    for info in file.tensors():
        assert info.offset % alignment == 0
        np.testing.assert_array_equal(file.tensor_data(info.name).view(np.float32), tensors[info.name])


def test_bytes_that_are_not_utf8_survive(tmp_path: Path) -> None:
    raw = [b"\xff\xfe", b"\xe2\x96", b"ok", b"a\0b"]
    tokens = array("tokens", STRING, len(raw), b"".join(map(string, raw)))
    content = build([text("name", b"\x80abc"), tokens, text(b"k\xff", "odd key")])
    file = _core.GGUF(write_raw(tmp_path / "bytes.gguf", content))
    assert file.get("name").encode("utf-8", "surrogateescape") == b"\x80abc"
    assert [token.encode("utf-8", "surrogateescape") for token in file.get("tokens")] == raw
    odd = file.keys()[-1]
    assert odd in file and file.get(odd) == "odd key"


def test_empty_values(tmp_path: Path) -> None:
    content = build([text("s", ""), array("strings", STRING, 0), array("ints", U32, 0), array("b", BOOL, 0)])
    file = _core.GGUF(write_raw(tmp_path / "empty.gguf", content))
    assert file.get("s") == "" and file.get("strings") == []
    assert file.get("ints").dtype == np.uint32 and len(file.get("ints")) == 0
    assert file.get("b").dtype == np.bool_ and len(file.get("b")) == 0


def test_gaps_and_any_order_of_tensors_are_allowed(tmp_path: Path) -> None:
    infos = [Info("late", offset=128), Info("early", offset=32)]
    data = bytes(32) + bytes([1] * 32) + bytes(64) + bytes([2] * 32)
    file = _core.GGUF(write_raw(tmp_path / "gaps.gguf", build([], infos, data)))
    assert file.tensor_data("early").tobytes() == bytes([1] * 32)
    assert file.tensor_data("late").tobytes() == bytes([2] * 32)


def test_path_with_other_letters(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "größe 模型.gguf", small_model())
    assert _core.GGUF(path).paths == [str(path)]
    with pytest.raises(Error, match="größe 模型2"):
        _core.GGUF(tmp_path / "größe 模型2.gguf")


@pytest.mark.skipif(sys.platform != "linux", reason="file names of arbitrary bytes")
def test_path_that_is_not_utf8(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/m\xff.gguf"
    with pytest.raises(Error, match=r"m\\xff\.gguf: cannot open"):
        _core.GGUF(os.fsdecode(path))
    Path(os.fsdecode(path)).write_bytes(small_model())
    assert os.fsencode(_core.GGUF(os.fsdecode(path)).paths[0]) == path


# ---- split files


def write_split(folder: Path, n_files: int = 3) -> dict[str, np.ndarray[Any, Any]]:
    """`folder/model-0000I-of-0000N.gguf`, two tensors each, by the `gguf` package."""
    tensors = {f"t{i}": np.full((2, 3), i, np.float32) for i in range(2 * n_files)}
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama", split_max_tensors=2)
    writer.add_string("general.name", "split")
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    finish(writer)
    return tensors


@pytest.mark.parametrize("given", [1, 2, 3])
def test_split_opens_from_any_file(tmp_path: Path, given: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = write_split(tmp_path)
    paths = [tmp_path / f"model-{i:05d}-of-00003.gguf" for i in (1, 2, 3)]
    file = _core.GGUF(paths[given - 1])
    assert file.paths == [str(path) for path in paths]
    assert file.file_bytes == sum(path.stat().st_size for path in paths)
    assert file.get("general.name") == "split"
    assert [(info.name, info.shard) for info in file.tensors()] == [(f"t{i}", i // 2) for i in range(6)]
    for name, values in tensors.items():
        np.testing.assert_array_equal(file.tensor_data(name).view(np.float32).reshape(2, 3), values)
    monkeypatch.chdir(tmp_path)
    assert len(_core.GGUF(paths[given - 1].name).tensors()) == 6  # a path without a folder


def test_merged_file_with_count_zero(tmp_path: Path) -> None:
    # What llama.cpp's `gguf-split --merge` leaves behind.
    entries = [entry(f"split.{key}", 2, b"\0\0") for key in ("no", "count")]
    entries.append(entry("split.tensors.count", 5, b"\x06\0\0\0"))
    file = _core.GGUF(write_raw(tmp_path / "merged.gguf", build(entries, [Info("t")], bytes(32))))
    assert len(file.tensors()) == 1 and len(file.paths) == 1


# ---- speed of a large vocabulary


def test_large_vocabulary_is_quick(tmp_path: Path) -> None:
    n = 262_144
    tokens = b"".join(string(f"token{i}") for i in range(n))
    path = write_raw(tmp_path / "vocab.gguf", build([array("tokens", STRING, n, tokens)]))

    def best(action: Callable[[], object]) -> float:
        """CPU seconds of the quickest of three runs."""
        seconds = []
        for _ in range(3):
            start = time.process_time()
            action()
            seconds.append(time.process_time() - start)
        return min(seconds)

    file = _core.GGUF(path)
    assert best(lambda: _core.GGUF(path)) < 0.05
    assert best(lambda: file.get("tokens")) < 0.2
    strings = file.get("tokens")
    assert len(strings) == n and strings[-1] == f"token{n - 1}"
