"""ringlm quantize: rows against gguf.quants, metadata byte by byte, and what is left when it does not end."""

from __future__ import annotations

import os
import struct
import tracemalloc
import warnings
from collections.abc import Iterator
from pathlib import Path

import gguf_files
import numpy as np
import pytest
from plain_gguf import Stored, random_stored, read, stored, write
from ringlm import FileFormatError, InvalidArgument, NumericError, rewrite
from ringlm.quantize import quantize
from test_cli import Command, Models, models, ringlm

__all__ = ["models", "ringlm"]  # fixtures

EMBEDDINGS = ("token_embd.weight", "output.weight")
KEPT = (
    "blk.0.attn_norm.weight",
    "blk.0.attn_q.bias",
    "blk.0.attn_q_norm.weight",
    "blk.0.ffn_gate_inp.weight",
    "blk.0.table",
)


def tensors(type: str = "F32") -> dict[str, Stored]:
    """One of each kind. 48 columns are no multiple of a block, so that matrix is a float."""
    floats = type if type in ("F32", "F16", "BF16") else "F16"
    return {
        "token_embd.weight": random_stored(1, (40, 256), type),
        "output.weight": random_stored(2, (40, 256), type),
        "blk.0.attn_norm.weight": random_stored(3, (256,)),
        "blk.0.attn_q.weight": random_stored(4, (33, 256), type),
        "blk.0.attn_q.bias": random_stored(5, (33,)),
        "blk.0.attn_q_norm.weight": random_stored(6, (4, 64)),
        "blk.0.ffn_gate_inp.weight": random_stored(7, (3, 256)),
        "blk.0.ffn_up_exps.weight": random_stored(8, (3, 5, 256), type),
        "blk.0.ffn_down.weight": random_stored(9, (7, 48), floats),
        "blk.0.table": random_stored(10, (4, 64)),
    }


@pytest.mark.parametrize("source", ["F32", "F16", "BF16", "Q8_0", "Q5_1", "Q4_K", "Q6_K", "IQ4_NL"])
@pytest.mark.parametrize(
    ("type", "embedding"), [("q4_0", "Q8_0"), ("q4_1", "Q8_0"), ("q8_0", "Q8_0"), ("f16", "F16")]
)
def test_every_tensor(tmp_path: Path, source: str, type: str, embedding: str) -> None:
    before = tensors(source)
    write(tmp_path / "in.gguf", before)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        done = quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", type)
    after, _ = read(tmp_path / "out.gguf")
    assert list(after) == list(before)
    for name, t in before.items():
        wanted = embedding if name in EMBEDDINGS else type.upper()
        if name in KEPT:
            wanted = t.type
        elif name == "blk.0.ffn_down.weight":
            wanted = "F16"
        assert after[name] == (t if t.type == wanted else t.as_type(wanted)), name
    assert done.nbytes == (tmp_path / "out.gguf").stat().st_size
    assert done.source_nbytes == (tmp_path / "in.gguf").stat().st_size
    assert sum(done.types.values()) == len(before)
    assert done.changed == sum(after[name].type != t.type for name, t in before.items())
    assert done.uneven == (() if type == "f16" else ("blk.0.ffn_down.weight",))


@pytest.mark.parametrize("embedding", ["q4_0", "q4_1", "q8_0", "f16"])
def test_the_type_of_the_embeddings_is_a_choice(tmp_path: Path, embedding: str) -> None:
    write(tmp_path / "in.gguf", tensors())
    quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", "q8_0", embedding_type=embedding)
    after, _ = read(tmp_path / "out.gguf")
    assert {after[name].type for name in EMBEDDINGS} == {embedding.upper()}
    assert after["blk.0.attn_q.weight"].type == "Q8_0"


def test_pieces_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven rows at a time, or less than one."""
    write(tmp_path / "in.gguf", tensors())
    quantize(tmp_path / "in.gguf", tmp_path / "whole.gguf")
    for elements, copied in ((7 * 256, 1000), (10, 1)):
        monkeypatch.setattr(rewrite, "_ELEMENTS", elements)
        monkeypatch.setattr(rewrite, "_COPIED", copied)
        quantize(tmp_path / "in.gguf", tmp_path / "pieces.gguf")
        assert (tmp_path / "pieces.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()


def test_memory_is_that_of_a_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.ones((4096, 1024), np.float32)  # 16 MiB
    write(tmp_path / "in.gguf", {"blk.0.attn_q.weight": stored(values), "x": stored(values)})
    monkeypatch.setattr(rewrite, "_ELEMENTS", 1 << 16)
    monkeypatch.setattr(rewrite, "_COPIED", 1 << 18)
    quantize(tmp_path / "in.gguf", tmp_path / "out.gguf")  # with its imports
    tracemalloc.start()
    try:
        quantize(tmp_path / "in.gguf", tmp_path / "out.gguf")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 << 20


# ---- metadata ----------------------------------------------------------------------------------------------


def entries(*changed: bytes) -> list[bytes]:
    """Keys of all types, of no known meaning too; the last ones are what quantizing changes."""
    numbers = [
        (gguf_files.U8, "B"),
        (gguf_files.I8, "b"),
        (gguf_files.U16, "H"),
        (gguf_files.I16, "h"),
        (gguf_files.U32, "I"),
        (gguf_files.I32, "i"),
        (gguf_files.F32, "f"),
        (gguf_files.BOOL, "B"),
        (gguf_files.U64, "Q"),
        (gguf_files.I64, "q"),
        (gguf_files.F64, "d"),
    ]
    found = [gguf_files.text("general.architecture", "llama"), gguf_files.u32("general.alignment", 64)]
    found += [gguf_files.entry(f"n.{kind}", kind, struct.pack("<" + code, 1)) for kind, code in numbers]
    found += [
        gguf_files.array(f"a.{kind}", kind, 3, struct.pack("<3" + code, 1, 0, 1)) for kind, code in numbers
    ]
    found += [gguf_files.array(f"e.{kind}", kind, 0) for kind, _ in numbers]
    return [
        *found,
        *changed,
        gguf_files.array("no strings", gguf_files.STRING, 0),
        gguf_files.array(
            "strings", gguf_files.STRING, 3, b"".join(map(gguf_files.string, ["", "ä", b"\xff"]))
        ),
        gguf_files.text("empty", ""),
        gguf_files.text(b"not \xff utf-8", b"\xfe"),
        gguf_files.entry("nan", gguf_files.F32, bytes.fromhex("0100c07f")),
    ]


def file_with(*changed: bytes) -> bytes:
    info = gguf_files.Info("blk.0.attn_q.weight", (32, 2))
    return gguf_files.build(entries(*changed), [info], np.ones(64, "<f4").tobytes(), alignment=64)


def test_metadata_is_copied_byte_by_byte(tmp_path: Path) -> None:
    """The two keys that change keep their place, and come last where they were not there."""
    new = (gguf_files.u32("general.file_type", 3), gguf_files.u32("general.quantization_version", 2))
    old = (gguf_files.u32("general.file_type", 0), gguf_files.u32("general.quantization_version", 1))
    for source, expected in ((file_with(*old), entries(*new)), (file_with(), [*entries(), *new])):
        (tmp_path / "in.gguf").write_bytes(source)
        quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", "q4_1")
        assert (tmp_path / "in.gguf").read_bytes() == source
        found = (tmp_path / "out.gguf").read_bytes()
        header = struct.pack("<4sIQQ", b"GGUF", 3, 1, len(expected)) + b"".join(expected)
        assert found[: len(header)] == header
        info = gguf_files.Info("blk.0.attn_q.weight", (32, 2), 3).pack()
        behind = len(header) + len(info)
        assert found[len(header) : behind] == info
        data = stored(np.ones((2, 32), np.float32), "Q4_1").data
        begin = behind + -behind % 64  # the alignment that the file asks for
        assert found[behind:] == bytes(begin - behind) + data + bytes(64 - len(data))


@pytest.mark.parametrize(("type", "file_type"), [("q4_0", 2), ("q4_1", 3), ("q8_0", 7), ("f16", 1)])
def test_file_type(tmp_path: Path, type: str, file_type: int) -> None:
    write(tmp_path / "in.gguf", {"blk.0.attn_q.weight": random_stored(0, (2, 32))}, {"general.file_type": 0})
    quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", type)
    _, metadata = read(tmp_path / "out.gguf")
    assert metadata["general.file_type"] == file_type
    assert metadata.get("general.quantization_version") == (None if type == "f16" else 2)


def test_split_files_become_one(tmp_path: Path) -> None:
    write(tmp_path / "in.gguf", tensors(), {"general.name": "x"})
    write(tmp_path / "split.gguf", tensors(), {"general.name": "x"}, split=3)
    parts = sorted(tmp_path.glob("split-*-of-*.gguf"))
    assert len(parts) == 4
    quantize(tmp_path / "in.gguf", tmp_path / "whole.gguf", "q8_0")
    done = quantize(parts[0], tmp_path / "out.gguf", "q8_0")
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    assert done.source_nbytes == sum(part.stat().st_size for part in parts)
    with pytest.raises(InvalidArgument, match="is the input as well"):
        quantize(parts[0], parts[2], "q8_0")


# ---- warnings and refusals ---------------------------------------------------------------------------------


def test_quantizing_again_warns(tmp_path: Path) -> None:
    write(tmp_path / "in.gguf", tensors("Q8_0"))
    with pytest.warns(UserWarning, match="^2 Q8_0 tensors are quantized already"):
        quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", "q4_0")  # the embeddings stay
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", "q8_0").changed == 0
        assert quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", "f16").changed == 4


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """With in.gguf and an older out.gguf; the test must leave both and nothing else."""
    write(tmp_path / "in.gguf", tensors())
    (tmp_path / "out.gguf").write_bytes(b"older")
    before = (tmp_path / "in.gguf").read_bytes()
    yield tmp_path
    assert sorted(os.listdir(tmp_path)) == ["in.gguf", "out.gguf"]
    assert (tmp_path / "out.gguf").read_bytes() == b"older"
    assert (tmp_path / "in.gguf").read_bytes() == before


def test_an_interrupt_leaves_nothing(folder: Path) -> None:
    seen: list[tuple[int, int, str]] = []

    def interrupt(*at: object) -> None:
        seen.append(at)  # type: ignore[arg-type]
        beside = [name for name in os.listdir(folder) if name not in ("in.gguf", "out.gguf")]
        assert len(beside) == 1 and beside[0].startswith(".ringlm-")
        if len(seen) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(folder / "in.gguf", folder / "out.gguf", progress=interrupt)
    assert [name for _, _, name in seen] == list(tensors())[:4]
    assert len({total for _, total, _ in seen}) == 1 and seen[3][0] < seen[0][1]


def test_a_failure_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = tensors()["blk.0.attn_q.weight"].values.copy()
    for bad, says in (
        (np.nan, "has NaN or infinity"),
        (np.inf, "has NaN or infinity"),
        (-7e4, "has a value of 70000"),
    ):
        values[-1, -1] = bad
        write(folder / "in.gguf", tensors() | {"blk.0.attn_q.weight": stored(values)})
        before = (folder / "in.gguf").read_bytes()
        with pytest.raises(NumericError, match=f"'blk.0.attn_q.weight' {says}"):
            quantize(folder / "in.gguf", folder / "out.gguf")
        assert (folder / "in.gguf").read_bytes() == before
    write(folder / "in.gguf", tensors())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ringlm.quantize.quantized", full)
    with pytest.raises(OSError, match="No space left on device") as error:
        quantize(folder / "in.gguf", folder / "out.gguf")
    assert error.value.filename == str(folder / "out.gguf")


def test_the_output_is_not_the_input(folder: Path) -> None:
    (folder / "links").mkdir()
    (folder / "links" / "soft.gguf").symlink_to(folder / "in.gguf")
    os.link(folder / "in.gguf", folder / "links" / "hard.gguf")
    for name in ("in.gguf", "links/soft.gguf", "links/hard.gguf", "links/../in.gguf"):
        with pytest.raises(InvalidArgument, match="is the input as well"):
            quantize(folder / "in.gguf", folder / name)
    for link in (folder / "links").iterdir():
        link.unlink()
    (folder / "links").rmdir()


def test_other_refusals(folder: Path) -> None:
    with pytest.raises(InvalidArgument, match="type is 'q5_k'; supported are q4_0, q4_1, q8_0, f16"):
        quantize(folder / "in.gguf", folder / "out.gguf", "q5_k")
    with pytest.raises(InvalidArgument, match="embedding type is 'x'"):
        quantize(folder / "in.gguf", folder / "out.gguf", embedding_type="x")
    with pytest.raises(FileFormatError):
        quantize(folder / "out.gguf", folder / "new.gguf")
    with pytest.raises(FileNotFoundError):
        quantize(folder / "in.gguf", folder / "absent" / "out.gguf")
    with pytest.raises(IsADirectoryError):
        quantize(folder / "in.gguf", folder)


@pytest.mark.skipif(os.name == "nt", reason="permissions of POSIX")
def test_permissions(tmp_path: Path) -> None:
    write(tmp_path / "in.gguf", tensors())
    mask = os.umask(0o027)
    try:
        quantize(tmp_path / "in.gguf", tmp_path / "out.gguf")
        assert (tmp_path / "out.gguf").stat().st_mode & 0o777 == 0o640
        (tmp_path / "out.gguf").chmod(0o604)
        quantize(tmp_path / "in.gguf", tmp_path / "out.gguf")
        assert (tmp_path / "out.gguf").stat().st_mode & 0o777 == 0o604
    finally:
        os.umask(mask)


# ---- the command -------------------------------------------------------------------------------------------


def test_command(ringlm: Command, models: Models, tmp_path: Path) -> None:
    out = str(tmp_path / "out.gguf")
    done = ringlm("quantize", models.chain, out, "--type", "q8_0")
    assert (done.code, done.err) == (0, "quantizing out.gguf\n")
    size = os.path.getsize(out)
    assert done.out.startswith(
        f"{out}: {size:,} bytes, {size / os.path.getsize(models.chain):.3f} of the input\n"
    )
    assert "9 tensors changed; now 9 Q8_0, 3 F32; " in done.out
    # What the model says survives.
    assert ringlm("run", out, "-p", "abc", "-n", "5", "--temp", "0").out == "defgh\n"
    again = ringlm("quantize", out, str(tmp_path / "again.gguf"), "--embedding-type", "f16")
    assert again.code == 0 and "now 7 Q4_1, 3 F32, 2 F16; " in again.out
    assert again.err.startswith("ringlm: warning: 7 Q8_0 tensors are quantized already")


def test_command_says_what_became_f16(ringlm: Command, tmp_path: Path) -> None:
    write(tmp_path / "in.gguf", {f"blk.{i}.attn_q.weight": random_stored(i, (2, 33)) for i in range(5)})
    done = ringlm("quantize", str(tmp_path / "in.gguf"), str(tmp_path / "out.gguf"))
    names = ", ".join(f"blk.{i}.attn_q.weight" for i in range(4))
    assert done.out.endswith(f"F16 since their columns are no multiple of 32: {names} and 1 more\n")


def test_command_interrupted(ringlm: Command, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ringlm.quantize.quantized", interrupt)
    monkeypatch.setenv("RINGLM_CACHE", str(folder / "in.gguf" / "none"))
    done = ringlm("quantize", str(folder / "in.gguf"), str(folder / "out.gguf"))
    assert (done.code, done.out) == (130, "")


def test_command_refusals(ringlm: Command, folder: Path) -> None:
    source, target = str(folder / "in.gguf"), str(folder / "out.gguf")
    for args, code, says in (
        ((source, source), 1, "is the input as well"),
        ((source, target, "--type", "q3_k"), 1, "type is 'q3_k'"),
        ((source,), 2, "Missing argument"),
        ((str(folder / "absent.gguf"), target), 1, "absent.gguf"),
    ):
        done = ringlm("quantize", *args)
        assert (done.code, done.out) == (code, "") and says in done.err and done.err.count("\n") == 1
