"""Session files: a session on disk, from which it goes on bit for bit.

    offset  bytes
         0      8  magic
         8      4  version, 1
        12     32  identity of the model, see model_identity
        44      8  n, the length of the state
        52     32  SHA-256 of the state
        84     32  SHA-256 of the 84 bytes before
       116      n  the state, as the core writes it

Numbers are little-endian. The checksums find damage; they are no signature: whoever can write the file can
write a session of his own making, so the core checks every length and id in the state once more.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
from typing import IO, TYPE_CHECKING
from weakref import WeakKeyDictionary

from ringlm._replace import replacing
from ringlm.errors import FileFormatError, InvalidArgument

if TYPE_CHECKING:
    import ringlm._core as core
    from ringlm.model import Model
    from ringlm.session import Session

__all__ = ["load_session", "model_identity", "save_session"]

VERSION = 1
_MAGIC = b"RINGLM\x1aS"  # 1a: a text viewer stops here
_FIELDS = struct.Struct("<8sI32sQ32s")
HEADER_NBYTES = _FIELDS.size + 32
_PIECE = 1 << 20
_SAMPLE = 4096


def save_session(session: Session, path: str | os.PathLike[str]) -> None:
    """Writes the session, whole or not at all: a file of that name is replaced in one step, and only when the
    new one is on disk. A new file can be read by its owner alone, since it holds what was said.

    Raises OSError with the name of the target, StateError for a session that is closed or busy.
    """
    identity = model_identity(session.model)
    state, length = hashlib.sha256(), 0
    with replacing(os.fsdecode(path), private=True) as file:

        def write(piece: bytes) -> None:
            nonlocal length
            file.write(piece)
            state.update(piece)
            length += len(piece)

        file.write(bytes(HEADER_NBYTES))  # a file that was not finished has no magic
        session._core.save(write)
        fields = _FIELDS.pack(_MAGIC, VERSION, identity, length, state.digest())
        file.seek(0)
        file.write(fields + hashlib.sha256(fields).digest())


def load_session(model: Model, path: str | os.PathLike[str]) -> core.Session:
    """The native session of a file that save_session wrote, with a model opened from the same GGUF file.

    The file is read twice: the core sees no byte before the checksums are verified. Raises FileFormatError
    for a file that is truncated, altered, of a newer version, of another model or no session at all, OSError
    with the file's name, OutOfMemory.
    """
    import ringlm._core as core

    name = os.fsdecode(path)
    if not stat.S_ISREG(mode := os.stat(name).st_mode) and not stat.S_ISDIR(mode):
        raise FileFormatError(f"{name}: a pipe or device; expected a session file")
    with open(name, "rb") as file:
        length, expected = _read_header(file, name, model)
        if _sha256(file, length) != expected:
            raise FileFormatError(f"{name}: altered: its checksum does not fit; save the session again")
        file.seek(HEADER_NBYTES)
        left = length

        def read(n: int) -> bytes:
            nonlocal left
            piece = file.read(min(n, left))
            left -= len(piece)
            return piece

        try:
            session = core.Session.load(model.core, read)
        except (FileFormatError, InvalidArgument) as e:
            raise type(e)(f"{name}: {e}") from None
        if left:
            session.close()
            raise FileFormatError(f"{name}: {left} bytes behind the end of the session; save it again")
        return session


def model_identity(model: Model) -> bytes:
    """32 bytes that tell models apart: SHA-256 over the size, the header (all before the first tensor's data)
    and the middle 4 KiB of every tensor, of every file of the model.

    Computed once per Model. Raises OSError if a file is gone.
    """
    known = _identities.get(model)
    if known is None:
        known = _identities[model] = _identity(model.gguf)
    return known


_identities: WeakKeyDictionary[Model, bytes] = WeakKeyDictionary()


def _identity(gguf: core.GGUF) -> bytes:
    places: list[list[tuple[int, int]]] = [[] for _ in gguf.paths]  # (offset, bytes) of tensors by file
    for tensor in gguf.tensors():
        places[tensor.shard].append((tensor.offset, tensor.nbytes))
    whole = hashlib.sha256()
    for path, tensors in zip(gguf.paths, places, strict=True):
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            header = min((offset for offset, _ in tensors), default=size)
            part = hashlib.sha256(struct.pack("<QQ", size, header))
            part.update(_sha256(file, header))
            for offset, nbytes in sorted(tensors):
                n = min(nbytes, _SAMPLE)
                part.update(os.pread(file.fileno(), n, offset + (nbytes - n) // 2))
        whole.update(part.digest())
    return whole.digest()


def _read_header(file: IO[bytes], name: str, model: Model) -> tuple[int, bytes]:
    """(length of the state, its SHA-256); the file stands behind the header."""
    size = os.fstat(file.fileno()).st_size
    header = file.read(HEADER_NBYTES)
    if not header:
        raise FileFormatError(f"{name}: empty; expected a session file")
    if header[: len(_MAGIC)] != _MAGIC[: len(header)]:
        raise FileFormatError(f"{name}: not a session file: it begins with {header[:8]!r}")
    if len(header) < HEADER_NBYTES:
        raise FileFormatError(f"{name}: truncated: {size} bytes; the header alone takes {HEADER_NBYTES}")
    fields = header[: _FIELDS.size]
    _, version, identity, length, state = _FIELDS.unpack(fields)
    if version > VERSION:
        raise FileFormatError(
            f"{name}: session file of version {version}; this ringlm reads version {VERSION}: use a newer one"
        )
    if version < VERSION or hashlib.sha256(fields).digest() != header[_FIELDS.size :]:
        raise FileFormatError(f"{name}: altered: the header's checksum does not fit; save the session again")
    if identity != model_identity(model):
        raise FileFormatError(
            f"{name}: saved from another model than {model.path}; open the file that it was saved from"
        )
    if size != HEADER_NBYTES + length:
        what = "truncated" if size < HEADER_NBYTES + length else "altered"
        raise FileFormatError(
            f"{name}: {what}: {size} bytes, expected {HEADER_NBYTES + length}; save the session again"
        )
    return length, state


def _sha256(file: IO[bytes], n: int) -> bytes:
    """Of the next ``n`` bytes, or those that there are."""
    digest = hashlib.sha256()
    while n and (piece := file.read(min(n, _PIECE))):
        digest.update(piece)
        n -= len(piece)
    return digest.digest()
