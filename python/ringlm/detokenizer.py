"""Token ids back to text, all at once or piece by piece."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringlm.tokenizer import Tokenizer


class TokenStream:
    """Turns a growing sequence of ids into text that is never cut inside a character.

    ``push(id)`` returns what became readable: bytes that may be the beginning of a character are held
    back, bytes that cannot be are U+FFFD at once. ``flush()`` returns the rest and makes the stream
    ready for a new text. The concatenation of all pieces is ``Tokenizer.decode`` of all ids.
    Get one from ``Tokenizer.stream()``; it belongs to one thread.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, continuation: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._strip_first = tokenizer.add_space_prefix and not continuation
        self._strip = self._strip_first
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Text that this token completes, often "" or one word. InvalidArgument for an unknown id."""
        raw = self._tokenizer.token_bytes(token)
        if self._tokenizer.is_control(token):
            return "" if self._skip_special else self._decoder.decode(raw)
        if self._strip:
            self._strip = False
            raw = raw.removeprefix(b" ")
        return self._decoder.decode(raw)

    def flush(self) -> str:
        """What was held back, as U+FFFD."""
        self._strip = self._strip_first
        return self._decoder.decode(b"", final=True)
