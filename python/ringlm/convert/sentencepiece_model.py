"""The few fields of a SentencePiece ``tokenizer.model`` (a protocol buffer) that a vocabulary needs."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ringlm.errors import FileFormatError, UnsupportedModelError

# Field numbers of sentencepiece_model.proto.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_PIECE, _SCORE, _TYPE = 1, 2, 3
_MODEL_TYPE = 3
_ADD_DUMMY_PREFIX = 3
_BPE = 2
_KINDS = {1: "Unigram", 3: "word", 4: "char"}

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True)
class SentencePieceModel:
    """Pieces by id. Types have the numbers of ``tokenizer.ggml.token_type``."""

    pieces: list[str]
    scores: list[float]
    types: list[int]
    add_space_prefix: bool


def read_model(file: Path) -> SentencePieceModel:
    """Raises FileFormatError for bytes that are no such model, UnsupportedModelError where it is no BPE."""
    model = SentencePieceModel([], [], [], True)
    kind, prefix = 1, True  # what the format means by a field that is not there
    for field, value in _fields(file, file.read_bytes()):
        if field == _PIECES:
            piece, score, type = _piece(file, value)
            model.pieces.append(piece)
            model.scores.append(score)
            model.types.append(type)
        elif field == _TRAINER:
            kind = next((v for f, v in _fields(file, value) if f == _MODEL_TYPE and isinstance(v, int)), kind)
        elif field == _NORMALIZER:
            found = [v for f, v in _fields(file, value) if f == _ADD_DUMMY_PREFIX]
            prefix = bool(found[-1]) if found else prefix
    if not model.pieces:
        raise FileFormatError(f"{file}: no pieces; expected a SentencePiece model")
    if kind != _BPE:
        raise UnsupportedModelError(
            f"{file}: a SentencePiece model of kind {_KINDS.get(kind, kind)}; supported is BPE"
        )
    return SentencePieceModel(model.pieces, model.scores, model.types, prefix)


def _piece(file: Path, message: bytes | int) -> tuple[str, float, int]:
    piece, score, type = "", 0.0, 1
    for field, value in _fields(file, message):
        if field == _PIECE and isinstance(value, bytes):
            piece = value.decode("utf-8", "surrogateescape")
        elif field == _SCORE and isinstance(value, bytes) and len(value) == 4:
            score = struct.unpack("<f", value)[0]
        elif field == _TYPE and isinstance(value, int):
            type = value
    if not 1 <= type <= 6:
        raise FileFormatError(f"{file}: the piece {piece!r} has type {type}; expected 1 to 6")
    return piece, score, type


def _fields(file: Path, message: bytes | int) -> Iterator[tuple[int, bytes | int]]:
    """Number and value of every field: an integer, or the bytes of anything else."""
    if isinstance(message, int):
        raise FileFormatError(f"{file}: a number where a message is expected; this is no SentencePiece model")
    at = 0
    while at < len(message):
        key, at = _varint(file, message, at)
        wire = key & 7
        if wire == _VARINT:
            number, at = _varint(file, message, at)
            yield key >> 3, number
            continue
        if wire == _BYTES:
            length, at = _varint(file, message, at)
        elif wire in (_FIXED32, _FIXED64):
            length = 4 if wire == _FIXED32 else 8
        else:
            raise FileFormatError(f"{file}: byte {at} is no field; this is no SentencePiece model")
        if length > len(message) - at:
            raise FileFormatError(
                f"{file}: a field of {length} bytes runs past the end; the file is truncated"
            )
        yield key >> 3, message[at : at + length]
        at += length


def _varint(file: Path, message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            raise FileFormatError(f"{file}: a number runs past the end; the file is truncated")
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if not byte & 0x80:
            return value, at
    raise FileFormatError(f"{file}: byte {at} is part of no number; this is no SentencePiece model")
