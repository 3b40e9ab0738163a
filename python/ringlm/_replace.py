"""Writing a file whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

__all__ = ["replacing"]


@contextmanager
def replacing(name: str, *, private: bool) -> Iterator[IO[bytes]]:
    """A file that takes the place of ``name`` when the block ends, or goes away when it raises.

    Until then it has another name in the same folder. It gets the permissions of the file that it replaces; a
    new one those that are usual for the process, or, if ``private``, can be read by its owner alone. Raises
    OSError with the name of the target.
    """
    temporary = None
    try:
        target = os.path.realpath(name)  # a link stays a link
        mode = _mode_of(target)
        if mode is None and not private:
            mode = 0o666 & ~_umask()
        folder = os.path.dirname(target)
        descriptor, temporary = tempfile.mkstemp(prefix=".ringlm-", suffix=".tmp", dir=folder)
        with open(descriptor, "wb") as file:
            yield file
            if mode is not None:
                with suppress(OSError):
                    os.fchmod(descriptor, mode)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, target)
        temporary = None
        _flush_folder(folder)
    except OSError as e:
        if e.errno is None:  # raised by hand, not by the system
            raise
        raise OSError(e.errno, e.strerror, name) from None
    finally:
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)


def _mode_of(target: str) -> int | None:
    """Permissions of the file that will be replaced, if there is one. Raises OSError if it is no file."""
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file")
    return stat.S_IMODE(mode)


def _umask() -> int:
    """Of the process, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _flush_folder(folder: str) -> None:
    """The renaming itself survives a power cut too, where the file system can promise it."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
