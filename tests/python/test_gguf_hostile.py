"""Files that are truncated, altered or made to do harm: typed errors that name the key or tensor."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from gguf_files import (
    ARRAY,
    BOOL,
    F32,
    I32,
    I64,
    STRING,
    U8,
    U16,
    U32,
    U64,
    Info,
    array,
    build,
    entry,
    small_model,
    string,
    text,
    u32,
)
from ringlm import _core
from ringlm.errors import Error, FileFormatError, UnsupportedModelError

T = "blk.0.attn_q.weight"


@dataclass(frozen=True)
class Case:
    name: str
    content: bytes
    message: str  # a regular expression
    error: type[Error] = FileFormatError


def one(info: Info, data: bytes = bytes(32)) -> bytes:
    return build([], [info], data)


def aligned(alignment: int) -> bytes:
    return build([u32("general.alignment", alignment)], [Info("t")], bytes(32))


def length(n: int) -> bytes:
    return struct.pack("<Q", n)


UNSUPPORTED = UnsupportedModelError
CASES = [
    # the file as a whole
    Case("empty file", b"", "the file is empty"),
    Case("zip", b"PK\3\4" + bytes(60), r"not a GGUF file: it begins with 'PK\\x03\\x04'.*zip archive"),
    Case("safetensors", length(60) + b'{"__metadata__":{}}' + bytes(60), "safetensors"),
    Case("html", b"\n<!DOCTYPE html><html>not found</html>", "not a GGUF file.*HTML"),
    Case("git lfs pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git lfs pull"),
    Case("json", b'{"error":"gone"}', "JSON"),
    Case("pickle", b"\x80\x02}q\x00.", "pickle"),
    Case("ggjt", b"tjgg" + bytes(40), "GGJT"),
    Case("zeros", bytes(100), "interrupted download"),
    Case("random bytes", bytes(range(200, 256)), r"not a GGUF file: it begins with '\\xc8\\xc9\\xca\\xcb'"),
    Case("reversed magic", b"FUGG" + bytes(40), "big-endian", UNSUPPORTED),
    Case("big-endian", build([], [], byte_order=">"), "big-endian", UNSUPPORTED),
    Case("version 0", build(version=0), "version 0, expected 2 or 3", UNSUPPORTED),
    Case("version 1", build(version=1), "version 1, expected 2 or 3: convert", UNSUPPORTED),
    Case("version 4", build(version=4), "version 4, expected 2 or 3", UNSUPPORTED),
    Case("header cut", build()[:20], "number of keys lies beyond the end"),
    # counts
    Case("too many keys", build([u32("a", 1)], n_kv=10**6), "claims 1000000 keys"),
    Case("2^64-1 keys", build([u32("a", 1)], n_kv=2**64 - 1), f"claims {2**64 - 1} keys"),
    Case("one key more", build([u32("a", 1), text("b", "x" * 60)], n_kv=3), "key 3 of 3"),
    Case("more keys than any model", build(n_kv=70_000) + bytes(2 * 10**6), "at most 65536"),
    Case("too many tensors", build([], [Info("t")], bytes(32), n_tensors=10**6), "claims 1000000 tensors"),
    Case("2^63 tensors", build([], [Info("t")], bytes(32), n_tensors=2**63), f"claims {2**63} tensors"),
    Case("one tensor more", one(Info("t"), bytes(64)).replace(b"\1", b"\2", 1), "tensor 2 of 2"),
    # keys
    Case("empty key", build([u32("a", 1), u32("", 1)]), "key 2 of 2: its name is empty"),
    Case(
        "duplicate key", build([u32("a.b", 1), u32("c", 2), text("a.b", "x")]), "key 'a.b': it is there twice"
    ),
    Case(
        "key beyond the end", build([length(1000) + b"abc" + bytes(20)]), "key 1 of 1: its name claims 1000"
    ),
    Case(
        "key of 2^64-1 bytes",
        build([length(2**64 - 1) + bytes(40)]),
        f"key 1 of 1: its name claims {2**64 - 1}",
    ),
    Case("key of 2^63 bytes", build([length(2**63) + bytes(40)]), f"claims {2**63} bytes"),
    Case(
        "very long key",
        build([u32("k" * 70_000, 1)]),
        r"key 'k{100}\.\.\. \(70000 bytes\)': its name has 70000",
    ),
    Case(
        "control bytes in a key", build([entry(b"a\x1b[2J\n\xff", 99, b"\0" * 8)]), r"'a\\x1b\[2J\\x0a\\xff'"
    ),
    Case("right-to-left override", build([entry("a\u202eb", 99, b"\0" * 8)]), r"'a\\xe2\\x80\\xaeb'"),
    # values
    Case("value type 13", build([entry("a.b", 13, bytes(8))]), "key 'a.b': the type of its value is 13"),
    Case("value type 2^32-1", build([entry("a.b", 2**32 - 1, bytes(8))]), "key 'a.b'.* is 4294967295"),
    Case("value cut", build([entry("a.b", U64, bytes(4))]), "key 'a.b': its value claims 1 x u64"),
    Case(
        "string cut", build([entry("a.b", STRING, length(5) + b"abcd")]), "key 'a.b'.*claims 5 bytes.*4 left"
    ),
    Case(
        "string of 2^64-1",
        build([entry("a.b", STRING, length(2**64 - 1))]),
        "key 'a.b'.*claims 18446744073709551615",
    ),
    Case(
        "bool 2", build([entry("a.b", BOOL, b"\2")]), "key 'a.b': a bool of its value is 2, expected 0 or 1"
    ),
    Case("bool 255 in array", build([array("a.b", BOOL, 3, b"\1\0\xff")]), "key 'a.b': a bool .* is 255"),
    Case("array cut", build([array("a.b", F32, 4, bytes(12))]), "key 'a.b': its value claims 4 x f32"),
    Case("array of 2^62 u64", build([array("a.b", U64, 2**62, bytes(64))]), "key 'a.b': its value claims"),
    Case(
        "array of 2^64-1 u8", build([array("a.b", U8, 2**64 - 1, bytes(64))]), "key 'a.b': its value claims"
    ),
    Case("array of 2^61 strings", build([array("a.b", STRING, 2**61, bytes(64))]), "key 'a.b'.* x string"),
    Case("string array cut", build([array("a.b", STRING, 3, string("x") * 2)]), "key 'a.b'"),
    Case(
        "string in array cut",
        build([array("a.b", STRING, 2, string("x") + length(9) + b"y")]),
        "key 'a.b'.*claims 9",
    ),
    Case(
        "element type 13", build([array("a.b", 13, 1, bytes(8))]), "key 'a.b': the type of its elements is 13"
    ),
    Case(
        "nested array",
        build([array("a.b", ARRAY, 1, bytes(30))]),
        "key 'a.b': an array of arrays",
        UNSUPPORTED,
    ),
    # keys that the reader knows
    Case("alignment 0", aligned(0), "key 'general.alignment' is 0, expected a power of two"),
    Case("alignment 1", aligned(1), "key 'general.alignment' is 1, expected a power of two from 8"),
    Case("alignment 48", aligned(48), "key 'general.alignment' is 48, expected a power of two"),
    Case("alignment 2^30", aligned(2**30), "key 'general.alignment' is 1073741824"),
    Case("alignment 2^31", aligned(2**31), "key 'general.alignment' is 2147483648"),
    Case("alignment 2^32-1", aligned(2**32 - 1), "key 'general.alignment' is 4294967295"),
    Case(
        "alignment u64",
        build([entry("general.alignment", U64, length(32))]),
        "general.alignment' is u64, expected u32",
    ),
    Case(
        "alignment string",
        build([text("general.alignment", "32")]),
        "general.alignment' is string, expected u32",
    ),
    Case(
        "alignment array",
        build([array("general.alignment", U32, 1, bytes(4))]),
        r"is array\[u32\], expected u32",
    ),
    Case(
        "architecture u32",
        build([u32("general.architecture", 1)]),
        "general.architecture' is u32, expected string",
    ),
    Case(
        "architecture array",
        build([array("general.architecture", STRING, 1, string("llama"))]),
        r"general.architecture' is array\[string\], expected string",
    ),
    Case(
        "split.count string", build([text("split.count", "2")]), "split.count' is string, expected an integer"
    ),
    Case("split.no negative", build([entry("split.no", I32, b"\xff" * 4)]), r"split.no' is -1 \(i32\)"),
    Case("split.no float", build([entry("split.no", F32, bytes(4))]), "split.no' is f32"),
    Case(
        "split.count 2^40", build([entry("split.count", I64, length(2**40))]), "split.count' is 1099511627776"
    ),
    Case("split.count alone", build([u32("split.count", 2)]), "split.no' is missing"),
    Case(
        "split.no alone",
        build([u32("split.no", 2)]),
        "split.no' is 2, expected less than split.count, .* missing",
    ),
    Case(
        "split.no 2 of 2", build([u32("split.no", 2), u32("split.count", 2)]), "split.no' is 2, expected less"
    ),
    Case(
        "tensors.count float",
        build([entry("split.tensors.count", F32, bytes(4))]),
        "split.tensors.count' is f32",
    ),
    Case(
        "split with another name", build([u32("split.no", 0), u32("split.count", 2)]), "-00001-of-00002.gguf'"
    ),
    # tensors
    Case("empty tensor name", one(Info("")), "tensor 1 of 1: its name is empty"),
    Case(
        "duplicate tensor",
        build([], [Info(T), Info(T, offset=32)], bytes(64)),
        f"tensor '{T}' is there twice",
    ),
    Case(
        "tensor name beyond the end",
        build([], [], n_tensors=1) + length(99) + bytes(40),
        "tensor 1 of 1.*claims 99",
    ),
    Case(
        "control bytes in a tensor",
        one(Info(b"t\x07\x9b\n", (8,), 4)),
        r"tensor 't\\x07\\x9b\\x0a'",
        UNSUPPORTED,
    ),
    Case("0 dimensions", one(Info(T, ())), f"tensor '{T}': 0 dimensions, expected 1 to 4"),
    Case("5 dimensions", one(Info(T, (1, 1, 1, 1, 1))), f"tensor '{T}': 5 dimensions"),
    Case("2^32-1 dimensions", one(Info(T, (8,), n_dims=2**32 - 1)), f"tensor '{T}': 4294967295 dimensions"),
    Case("dimension 0", one(Info(T, (8, 0))), f"tensor '{T}': dimension 1 is 0"),
    Case("row of 0", one(Info(T, (0, 8))), f"tensor '{T}': dimension 0 is 0"),
    Case("huge dimension", one(Info(T, (2**63,))), f"tensor '{T}'"),
    Case("elements overflow", one(Info(T, (2**32, 2**32))), f"tensor '{T}': its dimensions multiply"),
    Case("elements overflow to 8", one(Info(T, (2**33, 2**31, 8))), f"tensor '{T}': its dimensions multiply"),
    Case("bytes overflow to 32", one(Info(T, (2**62 + 8,))), rf"tensor '{T}': its size is more than 2\^64"),
    Case("larger than the file", one(Info(T, (9,))), rf"tensor '{T}': 36 bytes \(F32\).*truncated"),
    Case("quantized, larger than the file", one(Info(T, (32, 1), 8)), rf"tensor '{T}': 34 bytes \(Q8_0\)"),
    Case(
        "type 4, removed", one(Info(T, (32,), 4)), f"tensor '{T}': unknown type 4; .*Q4_0, Q4_1", UNSUPPORTED
    ),
    Case("type 31, removed", one(Info(T, (32,), 31)), f"tensor '{T}': unknown type 31", UNSUPPORTED),
    Case("type 1000", one(Info(T, (32,), 1000)), f"tensor '{T}': unknown type 1000", UNSUPPORTED),
    Case(
        "type 2^32-1", one(Info(T, (32,), 2**32 - 1)), f"tensor '{T}': unknown type 4294967295", UNSUPPORTED
    ),
    Case(
        "row not whole blocks",
        one(Info(T, (48,), 2)),
        f"tensor '{T}': rows of 48 elements, but Q4_0 .* of 32",
    ),
    Case("rows of 128 in Q4_K", one(Info(T, (128, 2), 12), bytes(144)), f"tensor '{T}': rows of 128 .* Q4_K"),
    Case(
        "offset misaligned",
        one(Info(T, offset=8), bytes(64)),
        f"tensor '{T}': its offset 8 is not a multiple",
    ),
    Case("offset beyond the end", one(Info(T, offset=64)), f"tensor '{T}'.*offset 64.*beyond the end"),
    Case(
        "offset 2^64-32",
        one(Info(T, offset=2**64 - 32)),
        f"tensor '{T}'.*offset {2**64 - 32}.*beyond the end",
    ),
    Case("offset 2^63", one(Info(T, offset=2**63)), f"tensor '{T}'.*beyond the end"),
    Case(
        "same data twice", build([], [Info("a"), Info(T)], bytes(64)), f"tensor '({T}|a)': its data overlaps"
    ),
    Case(
        "overlap",
        build([], [Info("a", (16,)), Info(T, offset=32)], bytes(64)),
        f"tensor '{T}'.*overlaps.*'a'",
    ),
    Case("no data at all", one(Info(T), b""), f"tensor '{T}'.*beyond the end"),
    Case("data cut", one(Info(T), bytes(31)), f"tensor '{T}'.*beyond the end"),
    Case("type of the tensor cut", one(Info(T), b"")[:-9], f"tensor '{T}': its type lies beyond the end"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_hostile(tmp_path: Path, case: Case) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(case.content)
    with pytest.raises(Error, match=case.message) as caught:
        _core.GGUF(path)
    assert caught.type is case.error
    assert str(caught.value).startswith(f"{path}: ")
    assert str(caught.value).isprintable()


def test_the_same_files_are_valid_without_the_harm(tmp_path: Path) -> None:
    """The building blocks of the cases above are good, so that each case fails for its own reason."""
    entries = [u32("general.alignment", 32), text("general.architecture", "llama"), u32("split.no", 0)]
    entries += [
        entry("a", BOOL, b"\1"),
        array("b", STRING, 2, string("x") * 2),
        array("c", F32, 3, bytes(12)),
    ]
    infos = [Info(T), Info("q", (32, 1), 8, 32), Info("d4", (1, 1, 2, 1), offset=96)]
    path = tmp_path / "good.gguf"
    path.write_bytes(build(entries, infos, bytes(104)))
    assert [info.name for info in _core.GGUF(path).tensors()] == [T, "q", "d4"]
    path.write_bytes(build([u32("k" * 65535, 1), u32("split.count", 1)]))
    assert len(_core.GGUF(path).keys()) == 2


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(Error, match=r"absent\.gguf: cannot open the file: No such file") as caught:
        _core.GGUF(tmp_path / "absent.gguf")
    assert caught.type is Error


def test_directory(tmp_path: Path) -> None:
    with pytest.raises(Error, match="is a directory"):
        _core.GGUF(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
def test_named_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(Error, match="not an ordinary file"):
        _core.GGUF(tmp_path / "pipe.gguf")


def test_truncated_at_every_byte(tmp_path: Path) -> None:
    whole = small_model()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole)
    assert len(_core.GGUF(path).tensors()) == 2
    for size in reversed(range(len(whole))):
        os.truncate(path, size)
        with pytest.raises(FileFormatError):
            _core.GGUF(path)


def read_everything(file: _core.GGUF) -> int:
    """Touches every value and every byte of every tensor."""
    keys = file.keys()
    total = sum(len(file.value_type(key)) + len(repr(file.get(key))) for key in keys)
    for info in file.tensors():
        total += int(np.sum(file.tensor_data(info.name), dtype=np.uint64)) + len(repr(info))
    return total


def test_mutants_never_crash(tmp_path: Path) -> None:
    """Files with a few altered bytes: an error of ringlm, or a file of which all can be read."""
    whole = small_model()
    rng = random.Random(20240229)
    outcomes = {"opened": 0, "refused": 0}
    for i in range(3000):
        mutant = bytearray(whole)
        for _ in range(rng.choice((1, 1, 1, 2, 4, 8))):
            at = rng.randrange(len(mutant))
            mutant[at] = rng.choice(
                (0, 1, 0x7F, 0x80, 0xFF, mutant[at] ^ 1 << rng.randrange(8), rng.randrange(256))
            )
        if rng.random() < 0.1:
            start = rng.randrange(len(mutant))
            del mutant[start : start + rng.randrange(1, 9)]
        path = tmp_path / f"{i}.gguf"  # writing to a new file is much quicker than replacing one
        path.write_bytes(mutant)
        try:
            file = _core.GGUF(path)
        except Error:
            outcomes["refused"] += 1
        else:
            assert read_everything(file) > 0
            outcomes["opened"] += 1
        path.unlink()
    assert min(outcomes.values()) > 300, outcomes  # both ways through the reader were taken


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS")
def test_claims_do_not_allocate(tmp_path: Path) -> None:
    """30 MB that claim 2^19 tensors or 2^31 array elements are refused within 16 MB more than the mapping."""
    claims = [
        build(n_tensors=2**19) + bytes(30 * 2**20),
        build([array("a", STRING, 2**31)]) + bytes(30 * 2**20),
        build([array("a", U16, 2**31)]) + bytes(30 * 2**20),
    ]
    code = (
        "import resource, sys\n"
        "from ringlm import _core, errors\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "limit = used + (30 + 16) * 2**20\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "try: _core.GGUF(sys.argv[1])\n"
        "except errors.FileFormatError as error: print('refused')\n"
    )
    for content in claims:
        path = tmp_path / "claims.gguf"
        path.write_bytes(content)
        result = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
        assert result.stdout == "refused\n", result.stderr


# ---- split files that disagree


def part(no: int, count: int, total: int | None, name: str, alignment: int | None = None) -> bytes:
    entries = [
        entry("split.no", U16, struct.pack("<H", no)),
        entry("split.count", U16, struct.pack("<H", count)),
    ]
    if total is not None:
        entries.append(entry("split.tensors.count", I32, struct.pack("<i", total)))
    if alignment is not None:
        entries.append(u32("general.alignment", alignment))
    return build(entries, [Info(name)], bytes([no]) * 32, alignment=alignment or 32)


def write_parts(folder: Path, *parts: bytes) -> list[Path]:
    paths = [folder / f"m-{i + 1:05d}-of-{len(parts):05d}.gguf" for i in range(len(parts))]
    for path, content in zip(paths, parts, strict=True):
        path.write_bytes(content)
    return paths


def good_parts() -> list[bytes]:
    return [part(i, 3, 3, f"t{i}") for i in range(3)]


@pytest.mark.parametrize("total", [3, None])
def test_good_parts(tmp_path: Path, total: int | None) -> None:
    paths = write_parts(tmp_path, *(part(i, 3, total, f"t{i}") for i in range(3)))
    file = _core.GGUF(paths[1])
    assert [file.tensor_data(f"t{i}").tolist() for i in range(3)] == [[i] * 32 for i in range(3)]


@pytest.mark.parametrize("missing", [0, 1, 2])
@pytest.mark.parametrize("given", [0, 1, 2])
def test_missing_part_is_named(tmp_path: Path, missing: int, given: int) -> None:
    paths = write_parts(tmp_path, *good_parts())
    paths[missing].unlink()
    named = (
        f"{paths[missing].name}: cannot open"
        if given == missing
        else rf"{paths[missing].name}: file {missing + 1} of"
    )
    with pytest.raises(Error, match=named) as caught:
        _core.GGUF(paths[given])
    assert caught.type is Error


@pytest.mark.parametrize(
    ("replacement", "message"),
    [
        (part(0, 3, 3, "t1"), r"m-00002-of-00003.gguf: key 'split.no' is 0, expected 1"),
        (part(1, 4, 3, "t1"), r"m-00002-of-00003.gguf: key 'split.count' is 4, expected 3"),
        (part(1, 3, 4, "t1"), r"m-00002-of-00003.gguf: key 'split.tensors.count' is 4, expected 3"),
        (part(1, 3, None, "t1"), r"m-00002-of-00003.gguf: key 'split.tensors.count' is missing, expected 3"),
        (part(1, 3, 3, "t2"), r"m-00003-of-00003.gguf: tensor 't2' is there twice.*m-00002-of-00003.gguf"),
        (build([], [Info("t1")], bytes(32)), r"m-00002-of-00003.gguf: key 'split.no' is 0, expected 1"),
        (part(1, 3, 3, "t1")[:-1], r"m-00002-of-00003.gguf: tensor 't1'.*beyond the end"),
        (b"", r"m-00002-of-00003.gguf: the file is empty"),
    ],
)
def test_parts_that_disagree(tmp_path: Path, replacement: bytes, message: str) -> None:
    paths = write_parts(tmp_path, *good_parts())
    paths[1].write_bytes(replacement)
    for given in (0, 2):
        with pytest.raises(FileFormatError, match=message):
            _core.GGUF(paths[given])


def test_parts_with_too_few_tensors(tmp_path: Path) -> None:
    paths = write_parts(tmp_path, *(part(i, 2, 5, f"t{i}") for i in range(2)))
    with pytest.raises(FileFormatError, match=r"split\.tensors\.count' is 5, but the files hold 2 tensors"):
        _core.GGUF(paths[0])


def test_renamed_part(tmp_path: Path) -> None:
    paths = write_parts(tmp_path, *good_parts())
    renamed = paths[1].rename(tmp_path / "second.gguf")
    with pytest.raises(FileFormatError, match=r"second.gguf.*file 2 of 3.*'-00002-of-00003.gguf'"):
        _core.GGUF(renamed)


def test_alignment_of_parts_must_be_certain(tmp_path: Path) -> None:
    """A writer may apply the first file's alignment to the others without saying so."""
    paths = write_parts(tmp_path, part(0, 2, 2, "t0", 4096), part(1, 2, 2, "t1"))
    with pytest.raises(FileFormatError, match=r"m-00002-of-00002\.gguf: key 'general\.alignment' is missing"):
        _core.GGUF(paths[0])
    paths = write_parts(tmp_path, part(0, 2, 2, "t0", 4096), part(1, 2, 2, "t1", 32))
    assert _core.GGUF(paths[0]).tensor_data("t1").tolist() == [1] * 32
