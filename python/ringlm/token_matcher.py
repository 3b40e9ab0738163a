"""Find token texts inside a text: leftmost match first, the longest of those that start together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping


class TokenMatcher:
    """Splits text at the occurrences of given tokens, in time linear in the text.

    Candidates are found by their first two characters and then looked up by length, so six thousand
    tokens cost nothing to prepare (a compiled alternation of them all takes long to build and to run).
    """

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._ids = {text: i for text, i in tokens.items() if text}
        lengths: dict[str, set[int]] = {}
        for text in self._ids:
            lengths.setdefault(text[:2], set()).add(len(text))
        for start, own in lengths.items():
            if len(start) == 2:
                own.update(lengths.get(start[0], ()))
        self._lengths = {start: sorted(own, reverse=True) for start, own in lengths.items()}
        starts = sorted(self._lengths, key=len, reverse=True)
        self._starts = re.compile("|".join(map(re.escape, starts))) if starts else None

    def spans(self, text: str) -> Iterator[tuple[int, int, int]]:
        """Yield (begin, end, id) of each match, in order, without overlap."""
        if self._starts is None:
            return
        pos = 0
        while match := self._starts.search(text, pos):
            begin = match.start()
            pos = begin + 1
            for n in self._lengths[match[0]]:
                token = self._ids.get(text[begin : begin + n])
                if token is not None:
                    pos = begin + n
                    yield begin, pos, token
                    break

    def split(self, text: str) -> Iterator[str | int]:
        """Yield the pieces of the text in order: the id of a match, or the (non-empty) text between."""
        last = 0
        for begin, end, token in self.spans(text):
            if begin > last:
                yield text[last:begin]
            yield token
            last = end
        if last < len(text):
            yield text[last:]
