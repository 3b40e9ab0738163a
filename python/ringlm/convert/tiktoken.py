"""A ``.tiktoken`` file (a line ``base64-bytes rank`` for each token) as byte-level tokens and merges."""

from __future__ import annotations

import base64
import binascii
from functools import cache
from pathlib import Path

from ringlm.errors import FileFormatError


def read_tiktoken(file: Path) -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens in GPT-2's byte characters by rank, and the merges that make them, lowest rank first.

    A token is made of the two parts that are left when its bytes are merged by all lower ranks.
    Raises FileFormatError, OSError."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            word, rank = line.split()
            ranks[base64.b64decode(word, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise FileFormatError(f"{file}: line {number} is no base64 word and rank") from None
    tokens = sorted(ranks, key=ranks.__getitem__)
    if [ranks[t] for t in tokens] != list(range(len(tokens))):
        raise FileFormatError(f"{file}: the ranks are not 0 to {len(tokens) - 1}")
    merges = []
    for token in tokens:
        if len(token) == 1:
            continue
        parts = _merged(token, ranks)
        if len(parts) != 2:
            raise FileFormatError(f"{file}: the token of rank {ranks[token]} is not made of two others")
        merges.append((_text(parts[0]), _text(parts[1])))
    return [_text(token) for token in tokens], merges


def _merged(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """The token's bytes, joined by every merge of a rank below its own."""
    limit = ranks[token]
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 1:
        pairs = [(ranks.get(parts[i] + parts[i + 1], limit), i) for i in range(len(parts) - 1)]
        rank, i = min(pairs)
        if rank >= limit:
            break
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


@cache
def _characters() -> list[str]:
    """GPT-2's character for each byte: printable ones are themselves, the others follow U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(b if b in printable else next(others)) for b in range(256)]


def _text(token: bytes) -> str:
    table = _characters()
    return "".join(table[b] for b in token)
