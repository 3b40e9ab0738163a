"""Session files: what is in them, what is refused, what a crash leaves."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import stat
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_llama import Shape, write_llama
from ringlm import Model, _core, state
from ringlm.errors import (
    FileFormatError,
    StateError,
)

SHAPE = Shape(n_ctx_train=256)
STATE = np.random.default_rng(5).bytes(3 * 2**20 + 17)  # past the border of some pieces


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Model]:
    write_llama(folder / "a.gguf", SHAPE)
    with Model(folder / "a.gguf", n_threads=2) as opened:
        yield opened


# ---- the file, without a core: these bytes instead of a session's ------------------------------------------


class Written:
    """In the place of a Session: it saves the given bytes in pieces of 1,000,000."""

    def __init__(self, model: Model, data: bytes = STATE, then: BaseException | None = None) -> None:
        self.model, self._core = model, self
        self._data, self._then = data, then

    def save(self, write: Callable[[bytes], object]) -> None:
        for at in range(0, len(self._data), 1_000_000):
            write(self._data[at : at + 1_000_000])
        if self._then is not None:
            raise self._then


class Loads:
    """In the place of core.Session: loads ``n`` bytes in pieces of 65,537, and remembers them."""

    def __init__(self, n: int = len(STATE)) -> None:
        self.n, self.got, self.closed = n, b"", False

    def load(self, model: Any, read: Callable[[int], bytes]) -> Loads:
        while len(self.got) < self.n:
            wanted = min(65_537, self.n - len(self.got))
            piece = read(wanted)
            if len(piece) != wanted:
                raise FileFormatError(f"truncated: {len(piece)} of {wanted} bytes")
            self.got += piece
        return self

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Loads:
    fake = Loads()
    monkeypatch.setattr(_core, "Session", fake)
    return fake


def save(session: Any, path: str | os.PathLike[str]) -> bytes:
    state.save_session(session, path)
    return Path(path).read_bytes()


def test_the_layout_is_the_documented_one(model: Model, tmp_path: Path) -> None:
    raw = save(Written(model), tmp_path / "s")
    magic, version, identity, length = struct.unpack("<8sI32sQ", raw[:52])
    assert (magic, version, length) == (b"RINGLM\x1aS", 1, len(STATE))
    assert identity == state.model_identity(model)
    assert raw[52:84] == hashlib.sha256(STATE).digest()
    assert raw[84:116] == hashlib.sha256(raw[:84]).digest()
    assert raw[116:] == STATE


def test_the_core_gets_back_what_it_wrote(model: Model, loads: Loads, tmp_path: Path) -> None:
    state.save_session(Written(model), str(tmp_path / "s"))  # type: ignore[arg-type]
    assert state.load_session(model, tmp_path / "s") is loads
    assert loads.got == STATE and not loads.closed


def test_every_bit_of_the_header_matters(model: Model, loads: Loads, tmp_path: Path) -> None:
    raw = save(Written(model, STATE[:1000]), tmp_path / "s")
    loads.n = 1000
    for at in range(state.HEADER_NBYTES):
        for bit in range(8):
            damaged = bytearray(raw)
            damaged[at] ^= 1 << bit
            (tmp_path / "s").write_bytes(damaged)
            with pytest.raises(FileFormatError, match=r"not a session|altered|truncated|of version"):
                state.load_session(model, tmp_path / "s")
    assert loads.got == b""


def test_bits_of_the_state_matter(model: Model, loads: Loads, tmp_path: Path) -> None:
    raw = save(Written(model), tmp_path / "s")
    places = np.random.default_rng(1).integers(state.HEADER_NBYTES, len(raw), 20).tolist()
    for at in [state.HEADER_NBYTES, *places, len(raw) - 1]:
        damaged = bytearray(raw)
        damaged[at] ^= 1 << at % 8
        (tmp_path / "s").write_bytes(damaged)
        with pytest.raises(FileFormatError, match="altered: its checksum does not fit"):
            state.load_session(model, tmp_path / "s")
    assert loads.got == b""  # not one byte before the checksum was verified


def test_truncated_and_longer(model: Model, loads: Loads, tmp_path: Path) -> None:
    raw = save(Written(model, STATE[:5000]), tmp_path / "s")
    for n in [1, 7, 8, 9, 51, 52, 115, 116, 117, 2000, len(raw) - 1]:
        (tmp_path / "s").write_bytes(raw[:n])
        with pytest.raises(FileFormatError, match="truncated") as e:
            state.load_session(model, tmp_path / "s")
        assert str(tmp_path / "s") in str(e.value)
    (tmp_path / "s").write_bytes(raw + b"\0")
    with pytest.raises(FileFormatError, match=r"altered: 5117 bytes, expected 5116"):
        state.load_session(model, tmp_path / "s")
    assert loads.got == b""


def test_no_session_file(model: Model, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "s"
    for content, what in [
        (b"", "empty"),
        (b"once upon a time", r"not a session file: it begins with b'once upo'"),
        ((folder / "a.gguf").read_bytes(), "not a session file: it begins with b'GGUF"),
        (bytes(1000), "not a session file"),
    ]:
        path.write_bytes(content)
        with pytest.raises(FileFormatError, match=what):
            state.load_session(model, path)
    os.mkfifo(tmp_path / "pipe")
    for device in (tmp_path / "pipe", Path(os.devnull)):
        with pytest.raises(FileFormatError, match="a pipe or device"):
            state.load_session(model, device)


def signed(fields: bytes, body: bytes) -> bytes:
    return fields + hashlib.sha256(fields).digest() + body


def test_hostile_headers_with_good_checksums(model: Model, loads: Loads, tmp_path: Path) -> None:
    path, raw = tmp_path / "s", save(Written(model, STATE[:1000]), tmp_path / "s")

    def with_(at: int, new: bytes) -> None:
        fields = raw[:at] + new + raw[at + len(new) : 84]
        path.write_bytes(signed(fields, raw[116:]))

    for length in (0, 999, 1001, 2**40, 2**64 - 1):
        with_(44, struct.pack("<Q", length))
        with pytest.raises(FileFormatError, match=r"truncated|altered"):
            state.load_session(model, path)
    with_(8, struct.pack("<I", 2))
    with pytest.raises(FileFormatError, match="version 2; this ringlm reads version 1: use a newer one"):
        state.load_session(model, path)
    with_(8, struct.pack("<I", 0))
    with pytest.raises(FileFormatError, match="altered"):
        state.load_session(model, path)
    assert loads.got == b""


def test_a_state_that_ends_early_or_late(model: Model, loads: Loads, tmp_path: Path) -> None:
    """The checksums fit, but the core wants more or fewer bytes."""
    state.save_session(Written(model), tmp_path / "s")  # type: ignore[arg-type]
    loads.n = len(STATE) + 1
    with pytest.raises(FileFormatError, match=r"s: truncated: \d+ of \d+ bytes"):
        state.load_session(model, tmp_path / "s")
    loads.n, loads.got = len(STATE) - 3, b""
    with pytest.raises(FileFormatError, match="3 bytes behind the end of the session"):
        state.load_session(model, tmp_path / "s")
    assert loads.closed


# ---- whose session it is -----------------------------------------------------------------------------------


def test_a_session_belongs_to_its_model(model: Model, folder: Path, loads: Loads, tmp_path: Path) -> None:
    state.save_session(Written(model), tmp_path / "s")  # type: ignore[arg-type]
    (folder / "copy.gguf").write_bytes((folder / "a.gguf").read_bytes())
    with Model(folder / "copy.gguf") as copy:  # under another name
        assert state.load_session(copy, tmp_path / "s") is loads
    write_llama(folder / "seed.gguf", SHAPE.with_(seed=1))  # same size, same header
    write_llama(folder / "named.gguf", SHAPE, {"general.name": "another"})
    for name in ("seed", "named"):
        with (
            Model(folder / f"{name}.gguf") as other,
            pytest.raises(FileFormatError, match=rf"saved from another model than .*{name}\.gguf"),
        ):
            state.load_session(other, tmp_path / "s")


def test_every_tensor_is_part_of_the_identity(model: Model, folder: Path) -> None:
    raw = (folder / "a.gguf").read_bytes()
    file = _core.GGUF(folder / "a.gguf")
    found = {state.model_identity(model)}
    middles = {t.name: t.offset + t.nbytes // 2 for t in file.tensors()}
    for name, at in [*middles.items(), ("metadata", raw.index(b"llama.context_length") + 24)]:
        path = folder / "changed.gguf"
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        identity = state._identity(_core.GGUF(path))
        assert identity not in found, name
        found.add(identity)


def test_identity_of_a_split_model(folder: Path) -> None:
    import gguf

    def write(change: int) -> Path:
        shards = folder / f"split{change}"
        shards.mkdir()
        w = gguf.GGUFWriter(shards / "m.gguf", "llama", split_max_tensors=1)
        for i, name in enumerate(("token_embd.weight", "output_norm.weight")):
            w.add_tensor(name, np.full((2, 32), i == change, np.float32))
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_tensors_to_file()
        w.close()
        return min(shards.glob("*.gguf"))

    files = [_core.GGUF(write(change)) for change in (-1, 0, 1)]
    assert len(files[0].paths) == 2
    assert len({state._identity(file) for file in files}) == 3


def test_the_identity_is_computed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Model(folder / "a.gguf") as opened:
        first = state.model_identity(opened)
        monkeypatch.setattr(state, "_identity", None)
        assert state.model_identity(opened) == first


# ---- a save that fails -------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [StateError("busy"), KeyboardInterrupt(), RuntimeError(), OSError("odd")])
def test_a_save_that_fails_leaves_the_old_file_alone(
    model: Model, tmp_path: Path, error: BaseException
) -> None:
    old = save(Written(model), tmp_path / "s")
    with pytest.raises(type(error)) as e:
        state.save_session(Written(model, then=error), tmp_path / "s")  # type: ignore[arg-type]
    assert e.value is error
    assert (tmp_path / "s").read_bytes() == old and os.listdir(tmp_path) == ["s"]


def test_a_file_is_replaced_in_one_step(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "s"
    old = save(Written(model, b"old"), path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    (tmp_path / "link").symlink_to("s")
    with open(path, "rb") as reader:
        new = save(Written(model, b"new"), tmp_path / "link")
        assert reader.read() == old != new
    assert path.read_bytes() == new and (tmp_path / "link").is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert sorted(os.listdir(tmp_path)) == ["link", "s"]


def test_errors_of_the_file_system_name_the_target(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(kind: type[OSError], path: Path, call: Callable[[Path], object]) -> None:
        with pytest.raises(kind) as e:
            call(path)
        assert e.value.filename == str(path) and e.value.filename2 is None and e.value.strerror

    def saving(path: Path) -> None:
        state.save_session(Written(model), path)  # type: ignore[arg-type]

    def loading(path: Path) -> None:
        state.load_session(model, path)

    fails(FileNotFoundError, tmp_path / "none", loading)
    fails(IsADirectoryError, tmp_path, loading)
    fails(FileNotFoundError, tmp_path / "none" / "s", saving)
    fails(IsADirectoryError, tmp_path, saving)
    fails(OSError, Path("/dev/null"), saving)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    (tmp_path / "file").write_bytes(b"")
    fails(NotADirectoryError, tmp_path / "file" / "s", saving)
    if os.geteuid() != 0:
        (tmp_path / "locked").mkdir(0o500)
        fails(PermissionError, tmp_path / "locked" / "s", saving)

    def no_room(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as m:
        m.setattr(os, "fsync", no_room)
        fails(OSError, tmp_path / "s", saving)
    assert {"file"} == set(os.listdir(tmp_path)) - {"locked"}


SAVES = """
    import os, resource, signal, sys
    from ringlm import Model, state

    def save(write):
        write(bytes(2_000_000))
        {now}
        write(bytes(2_000_000))

    class Session:
        model = Model(sys.argv[1], n_threads=1)
    Session._core = Session
    Session.save = staticmethod(save)
    state.save_session(Session, sys.argv[2])
"""


def run(now: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SAVES).replace("{now}", now), *args],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_killed_while_saving(model: Model, loads: Loads, tmp_path: Path) -> None:
    save(Written(model), tmp_path / "s")
    done = run("os.kill(os.getpid(), signal.SIGKILL)", str(model.path), str(tmp_path / "s"))
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = [p for p in tmp_path.iterdir() if p.name != "s"]  # nobody was there to remove it
    assert len(left) == 1
    with pytest.raises(FileFormatError, match="not a session file"):
        state.load_session(model, left[0])
    state.load_session(model, tmp_path / "s")
    assert loads.got == STATE
    done = run("pass", str(model.path), str(tmp_path / "s"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "s").read_bytes()[116:] == bytes(4_000_000)


def test_no_room_while_saving(model: Model, tmp_path: Path) -> None:
    old = save(Written(model), tmp_path / "s")
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, 3_000_000))"
    done = run(limit, str(model.path), str(tmp_path / "s"))
    assert done.returncode == 1
    assert "OSError" in done.stderr and repr(str(tmp_path / "s")) in done.stderr
    assert (tmp_path / "s").read_bytes() == old and os.listdir(tmp_path) == ["s"]
