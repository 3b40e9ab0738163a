"""Token ids back to text, all at once or piece by piece."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringlm.tokenizer import Tokenizer

# A beginning of a character at the end of the bytes: the well-formed sequences of RFC 3629, cut short.
# (Python's incremental decoder would also wait behind the surrogates' ED A0..BF, which nothing completes.)
_INCOMPLETE = re.compile(
    rb"(?:[\xC2-\xDF]"
    rb"|\xE0[\xA0-\xBF]?|\xED[\x80-\x9F]?|[\xE1-\xEC\xEE\xEF][\x80-\xBF]?"
    rb"|\xF0(?:[\x90-\xBF][\x80-\xBF]?)?|\xF4(?:[\x80-\x8F][\x80-\xBF]?)?|[\xF1-\xF3][\x80-\xBF]{0,2})\Z"
)


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
        self._held = b""

    def push(self, token: int) -> str:
        """Text that this token completes, often "" or one word. InvalidArgument for an unknown id."""
        raw = self._tokenizer.token_bytes(token)
        if self._tokenizer.is_control(token):
            if self._skip_special:
                return ""
        elif self._strip:
            self._strip = False
            raw = raw.removeprefix(b" ")
        raw = self._held + raw
        tail = _INCOMPLETE.search(raw)
        end = tail.start() if tail else len(raw)
        self._held = raw[end:]
        return raw[:end].decode("utf-8", "replace")

    def flush(self) -> str:
        """What was held back, as U+FFFD."""
        rest, self._held = self._held, b""
        self._strip = self._strip_first
        return rest.decode("utf-8", "replace")
