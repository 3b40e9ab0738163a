"""A rendered conversation, and its token ids: control tokens are made of the template's characters only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from ringlm.tokenizer import Tokenizer

__all__ = ["Controls", "Rendered", "Segment"]


@dataclass(frozen=True)
class Segment:
    """A stretch of rendered text that the template wrote, or that came with the messages."""

    text: str
    is_template: bool


@dataclass(frozen=True)
class Rendered:
    """A rendered conversation. ``marked`` is its text with the marks of ringlm._provenance; ``notes`` say
    what the template could not take as it was."""

    marked: str
    notes: tuple[str, ...] = ()

    @cached_property
    def text(self) -> str:
        from ringlm._provenance import plain

        return plain(self.marked)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        from ringlm._provenance import runs

        return tuple(Segment(self.text[a:b], not marked) for a, b, marked in runs(self.marked))

    def encode(self, tokenizer: Tokenizer, *, start: int = 0) -> list[int]:
        """Token ids of the text from character ``start``, with BOS in front exactly once if the model wants
        it.

        If no control token's text touches a message, these are the ids of the whole text. Otherwise the text
        is cut at the template's own control tokens, and everything between them is encoded as ordinary text.
        """
        text, control = self.text[start:], Controls.of(tokenizer)
        places = control.find(text)
        from ringlm._provenance import is_marked

        ids: list[int]
        trusted = [p for p in places if not is_marked(self.marked[start + p[0] : start + p[1]])]
        if len(trusted) == len(places):
            ids = tokenizer.encode(text, add_special=False, parse_special=True)
        else:
            ids, at = [], 0
            for begin, end, token in trusted:  # the first to begin wins, the longest of those
                if begin < at:
                    continue
                if at < begin:
                    ids += tokenizer.encode(text[at:begin], add_special=False, parse_special=False)
                ids.append(token)
                at = end
            if at < len(text):
                ids += tokenizer.encode(text[at:], add_special=False, parse_special=False)
        bos = tokenizer.bos_id
        if start == 0 and tokenizer.add_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def encode_after(self, prefix: str, tokenizer: Tokenizer) -> list[int] | None:
        """Token ids of what follows ``prefix`` (marked text), or None if they depend on it: where the text
        does not begin with it, or does not go on with a control token of the template."""
        from ringlm._provenance import is_marked

        if not self.marked.startswith(prefix):
            return None
        end = Controls.of(tokenizer).at(self.text, len(prefix))
        if end is None or is_marked(self.marked[len(prefix) : end]):
            return None
        return self.encode(tokenizer, start=len(prefix))


class Controls:
    """The texts of a vocabulary's control tokens, and where they occur."""

    _known: ClassVar[WeakKeyDictionary[Any, Controls]] = WeakKeyDictionary()

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.ids = ids
        self._lengths: dict[str, list[int]] = {}  # by the first two characters, the longest first
        for text in sorted(ids, key=len, reverse=True):
            lengths = self._lengths.setdefault(text[:2], [])
            if len(text) not in lengths:
                lengths.append(len(text))

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Controls:
        known = cls._known.get(tokenizer)
        if known is None:
            texts = (
                (tokenizer.token_text(i), i) for i in range(tokenizer.n_vocab) if tokenizer.is_control(i)
            )
            known = cls._known[tokenizer] = cls({text: i for text, i in texts if text})
        return known

    def find(self, text: str) -> list[tuple[int, int, int]]:
        """Every ``(start, end, id)``, overlapping ones too, by start and the longest first."""
        found = []
        for begin in self._lengths:
            at = text.find(begin)
            while at >= 0:
                for n in self._lengths[begin]:
                    token = self.ids.get(text[at : at + n])
                    if token is not None and at + n <= len(text):
                        found.append((at, at + n, token))
                at = text.find(begin, at + 1)
        return sorted(found, key=lambda place: (place[0], -place[1]))

    def at(self, text: str, start: int) -> int | None:
        """Where the longest control token that begins at ``start`` ends."""
        for begin in (text[start : start + 2], text[start : start + 1]):
            for n in self._lengths.get(begin, ()):
                if text[start : start + n] in self.ids and start + n <= len(text):
                    return start + n
        return None
