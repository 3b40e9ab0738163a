"""The cache folder: where models lie, locks between processes, room on the disk, hashes.

Layout below :func:`cache_dir`::

    models/<name>/<file>.gguf             a model of the registry
    models/hf/<owner>/<repo>/<path>.gguf  a file of Hugging Face; <path>.gguf.json holds its size and hash
    <any of these>.gguf.download/         what a download in progress, or an interrupted one, has so far
    locks/                                one empty file per model; whoever holds its lock may write there
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ringlm.errors import DownloadError, StateError

CHUNK = 1 << 20
NO_ROOM = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}


@dataclass(frozen=True)
class Progress:
    """How far a pull is. ``done`` of ``total`` bytes of the stage; both 0 in ``wait``, which says that
    another process is pulling the same model."""

    model: str
    stage: Literal["wait", "download", "verify"]
    done: int = 0
    total: int = 0


ProgressCallback = Callable[[Progress], None]


def cache_dir() -> Path:
    """Folder of everything ringlm keeps between runs: ``RINGLM_CACHE``, else the platform's cache folder."""
    if override := os.environ.get("RINGLM_CACHE"):
        return Path(override).expanduser().absolute()
    from platformdirs import user_cache_path

    return user_cache_path("ringlm", appauthor=False)


def models_dir() -> Path:
    return cache_dir() / "models"


def staging_dir(path: Path) -> Path:
    """The folder beside ``path`` where its download is put together."""
    return path.with_name(path.name + ".download")


def offline() -> bool:
    """Whether ``RINGLM_OFFLINE`` forbids the network."""
    return os.environ.get("RINGLM_OFFLINE", "").strip().lower() not in ("", "0", "false", "no", "off")


@contextmanager
def locked(path: Path, on_wait: Callable[[], None] | None) -> Iterator[None]:
    """Hold the lock of the model file ``path`` against other threads and processes.

    While another one holds it, wait after calling ``on_wait``; with None raise ``StateError`` instead."""
    from filelock import FileLock, Timeout

    key = hashlib.sha256(os.fsencode(path.relative_to(models_dir()))).hexdigest()[:16]
    lock_file = cache_dir() / "locks" / f"{path.stem}-{key}.lock"
    lock_file.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(str(lock_file))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if on_wait is None:
            raise StateError(
                f"{path.name} is being pulled by another process; try again when it is done"
            ) from None
        on_wait()
        lock.acquire(poll_interval=0.2)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def storage_errors(name: str, folder: Path, need: int) -> Iterator[None]:
    """Turn errors of the file system into ``DownloadError``; ``need`` bytes were to be written."""
    try:
        yield
    except (BrokenPipeError, ConnectionError):
        raise  # of a progress callback
    except OSError as e:
        if e.errno in NO_ROOM:
            raise no_room(name, folder, need) from e
        raise DownloadError(
            f"cannot write {name} into the cache folder {cache_dir()}: {e.strerror or e}; "
            "make the folder writable or set RINGLM_CACHE to one that is"
        ) from e


def require_room(name: str, folder: Path, need: int) -> None:
    """Raise ``DownloadError`` unless the disk of ``folder`` has ``need`` bytes free."""
    if shutil.disk_usage(folder).free < need:
        raise no_room(name, folder, need)


def no_room(name: str, folder: Path, need: int) -> DownloadError:
    try:
        free = format_bytes(shutil.disk_usage(folder).free)
    except OSError:
        free = "an unknown amount"
    return DownloadError(
        f"no room for {name}: it needs {format_bytes(need)} in {folder.parent}, where {free} is free; "
        "free some (ringlm rm NAME), or set RINGLM_CACHE to a folder on a larger disk"
    )


def sha256_of(path: Path, on_bytes: Callable[[int], None]) -> str:
    """SHA-256 of a file; ``on_bytes`` hears how many bytes are done."""
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as f:
        while chunk := f.read(CHUNK):
            digest.update(chunk)
            done += len(chunk)
            on_bytes(done)
    return digest.hexdigest()


def flush_to_disk(path: Path) -> None:
    with path.open("rb+") as f:
        os.fsync(f.fileno())


def tree_bytes(path: Path) -> int:
    """Bytes of the file ``path``, or of all files below the folder ``path``; 0 when it is not there."""
    if path.is_file():
        return path.stat().st_size
    return sum(size for _, size in files_below(path))


def files_below(folder: Path) -> Iterator[tuple[Path, int]]:
    """Files and their sizes; a file that vanishes meanwhile is left out."""
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root, name)
            try:
                yield path, path.lstat().st_size
            except FileNotFoundError:
                continue


def format_bytes(n: int) -> str:
    """``98.4 MB``: three digits, powers of 1000."""
    size = float(n)
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{n} bytes" if unit == "bytes" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
