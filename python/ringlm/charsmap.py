"""SentencePiece's precompiled normalization (``tokenizer.ggml.precompiled_charsmap``).

A double-array trie (Aoe 1989, in the layout of darts-clone) maps sequences of bytes to places in a block of
zero-terminated texts. The longest sequence at a position is replaced; what is in no sequence stays.
"""

from __future__ import annotations

import sys
from array import array

from ringlm.errors import FileFormatError

_KEY = "tokenizer.ggml.precompiled_charsmap"
_LONGEST = 1024  # bytes that one sequence may become; the longest of NFKC has 33


class Charsmap:
    """The compiled rules. No bytes: no rules. FileFormatError where sizes or places are out of bounds."""

    def __init__(self, compiled: bytes) -> None:
        size = int.from_bytes(compiled[:4], "little")
        if compiled and not (len(compiled) > 4 and size % 4 == 0 and 4 <= size <= len(compiled) - 4):
            raise FileFormatError(
                f"{_KEY} has {len(compiled)} bytes and says that its trie has {size}; convert the model again"
            )
        self._units = array("I", compiled[4 : 4 + size])
        if sys.byteorder == "big":
            self._units.byteswap()
        self._texts = compiled[4 + size :]
        self._found: dict[int, bytes] = {}  # texts by their place

    def replacement(self, raw: bytes, begin: int) -> tuple[bytes, int] | None:
        """The text for the longest sequence that begins there and its end; None if none begins there."""
        units, found = self._units, None
        if not units:
            return None
        n = len(units)
        node = _offset(units[0])
        for end in range(begin, len(raw)):
            node ^= raw[end]
            if node >= n:
                raise _out_of_bounds("node", node, n)
            unit = units[node]
            if unit & 0x800000FF != raw[end]:  # not a child of the node before
                break
            node ^= _offset(unit)
            if unit & 0x100:  # a sequence ends here; the node holds the place of its text
                if node >= n:
                    raise _out_of_bounds("node", node, n)
                found = (units[node] & 0x7FFFFFFF, end + 1)
        return (self._text(found[0]), found[1]) if found else None

    def _text(self, place: int) -> bytes:
        text = self._found.get(place)
        if text is None:
            end = self._texts.find(b"\0", place, place + _LONGEST)
            if end < 0:  # behind the block, or without an end
                raise _out_of_bounds("text", place, len(self._texts))
            text = self._found[place] = self._texts[place:end]
        return text


def _offset(unit: int) -> int:
    return (unit >> 10) << ((unit & 0x200) >> 6)


def _out_of_bounds(what: str, place: int, n: int) -> FileFormatError:
    return FileFormatError(f"{_KEY} points to {what} {place} of {n}; convert the model again")
