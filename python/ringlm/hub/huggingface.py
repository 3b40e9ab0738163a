"""Single files of Hugging Face repositories, through ``huggingface_hub`` (extra ``hub``)."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringlm.errors import DownloadError

from .cache import NO_ROOM, files_below, require_room
from .registry import HfFile


@dataclass(frozen=True)
class Remote:
    """What the server says of a file. ``sha256`` is None for the few that are not in large-file storage."""

    size: int
    sha256: str | None
    commit: str


def look_up(name: str, source: HfFile) -> Remote:
    """Ask the server for size, hash and commit of a file."""
    hub = _import_hub(name)
    with _hub_errors(name, source):
        url = hub.hf_hub_url(source.repo, source.path, revision=source.revision)
        meta = hub.get_hf_file_metadata(url)
    if meta.size is None or meta.commit_hash is None:
        raise DownloadError(
            f"{name}: the server at {url} names no size or no commit; is it a Hugging Face hub?"
        )
    sha256 = meta.etag if meta.etag and len(meta.etag) == 64 else None
    return Remote(meta.size, sha256, meta.commit_hash)


def fetch(
    name: str, source: HfFile, remote: Remote, staging: Path, report: Callable[[int, int], None]
) -> Path:
    """Download the file into ``staging`` and return it, with the size checked.

    ``report(done, total)`` counts bytes and is called from a thread of its own. An interrupted download
    goes on from what is in ``staging`` with those versions of huggingface_hub that do, else it restarts."""
    hub = _import_hub(name)
    staging.mkdir(parents=True, exist_ok=True)
    for left in staging.rglob("*.incomplete"):
        if len(left.name.split(".")[-2]) == 8:  # named by one process: never taken up again
            left.unlink()
    have = sum(size for _, size in files_below(staging))
    require_room(name, staging, max(remote.size - have, 0))
    watch = _watch(staging, lambda n: report(min(n, remote.size), remote.size))
    with _hub_errors(name, source), _no_bars(), watch:
        path = Path(
            hub.hf_hub_download(
                source.repo, source.path, revision=remote.commit, local_dir=staging, library_name="ringlm"
            )
        )
    if (size := path.stat().st_size) != remote.size:
        path.unlink()
        raise DownloadError(f"{name}: got {size} bytes, expected {remote.size}; removed them")
    report(remote.size, remote.size)
    return path


@contextmanager
def _no_bars() -> Iterator[None]:
    """Keep huggingface_hub from drawing its bars over those of the command line."""
    utils = importlib.import_module("huggingface_hub.utils")
    if utils.are_progress_bars_disabled():
        yield
        return
    utils.disable_progress_bars()
    try:
        yield
    finally:
        utils.enable_progress_bars()


def _import_hub(name: str) -> Any:
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError as e:
        raise DownloadError(
            f"{name} needs the package huggingface_hub ({e}): pip install 'ringlm[hub]'"
        ) from e


@contextmanager
def _hub_errors(name: str, source: HfFile) -> Iterator[None]:
    """Turn what huggingface_hub and its HTTP library raise (it differs by version) into ``DownloadError``."""
    errors = importlib.import_module("huggingface_hub.utils")
    try:
        yield
    except errors.GatedRepoError as e:
        raise DownloadError(
            f"{name}: {source.repo} asks for its terms to be accepted: do so on its page, "
            "then run 'hf auth login' or set HF_TOKEN"
        ) from e
    except errors.RepositoryNotFoundError as e:
        raise DownloadError(
            f"{name}: no repository {source.repo}; if it is private, run 'hf auth login' or set HF_TOKEN"
        ) from e
    except errors.RevisionNotFoundError as e:
        raise DownloadError(f"{name}: {source.repo} has no revision {source.revision!r}") from e
    except errors.OfflineModeIsEnabled as e:
        raise DownloadError(
            f"{name} is not in the cache and HF_HUB_OFFLINE is set: unset it to download"
        ) from e
    except errors.LocalEntryNotFoundError as e:  # how a broken connection is reported
        raise _failed(name, e) from e
    except errors.EntryNotFoundError as e:
        raise DownloadError(
            f"{name}: {source.repo} has no file {source.path} at revision {source.revision}"
        ) from e
    except OSError as e:
        # Of the file system, not of the network: the caller knows what to say.
        if e.errno in NO_ROOM or e.filename is not None:
            raise
        raise _failed(name, e) from e
    except Exception as e:
        raise _failed(name, e) from e


def _failed(name: str, e: Exception) -> DownloadError:
    reason = str(e).strip().partition("\n")[0]
    return DownloadError(f"{name}: download failed: {type(e).__name__}: {reason}")


@contextmanager
def _watch(folder: Path, on_bytes: Callable[[int], None]) -> Iterator[None]:
    """Tell ``on_bytes`` every tenth of a second how large the largest file in ``folder`` is."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(0.1):
            on_bytes(max((size for _, size in files_below(folder)), default=0))

    thread = threading.Thread(target=run, name="ringlm-download-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
