"""What SentencePiece's two kinds of vocabulary share: the spelling of spaces, bytes and the unknown."""

from __future__ import annotations

import re

from ringlm.errors import InvalidArgument
from ringlm.vocab import TokenType, Vocab

SPACE = "\u2581"  # stands for U+0020 in pieces
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


def escape(text: str) -> str:
    """Text as pieces spell it: U+2581 for a space."""
    return text.replace(" ", SPACE)


def token_bytes(vocab: Vocab, token: int) -> bytes:
    """What the token stands for: one byte for a byte token, else its text with spaces restored."""
    text = vocab.tokens[token]
    if vocab.types[token] == TokenType.BYTE and (m := _BYTE.fullmatch(text)):
        return bytes([int(m[1], 16)])
    return text.replace(SPACE, " ").encode("utf-8", "surrogateescape")


class Fallback:
    """Ids of what is no piece of the vocabulary: its bytes, or the unknown token where bytes are missing."""

    def __init__(self, vocab: Vocab) -> None:
        self._bytes = {
            int(match[1], 16): i
            for i in vocab.of_type(TokenType.BYTE)
            if (match := _BYTE.fullmatch(vocab.tokens[i]))
        }
        unknown = vocab.of_type(TokenType.UNKNOWN)
        self._unk_id = vocab.special.get("unknown", unknown[0] if unknown else None)

    def ids(self, piece: str) -> list[int]:
        """InvalidArgument for a vocabulary with neither its bytes nor an unknown token."""
        raw = piece.encode("utf-8")
        if all(byte in self._bytes for byte in raw):
            return [self._bytes[byte] for byte in raw]
        if self._unk_id is None:
            raise InvalidArgument(
                f"the character {piece!r} is not in the vocabulary, which has neither byte tokens nor an "
                "unknown token; remove it from the text"
            )
        return [self._unk_id]

    def one_unknown(self, ids: list[int]) -> list[int]:
        """SentencePiece gives one unknown token for a run of unknown characters."""
        if len(self._bytes) == 256:
            return ids
        return [t for k, t in enumerate(ids) if t != self._unk_id or k == 0 or ids[k - 1] != t]
