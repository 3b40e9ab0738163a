"""SentencePiece Unigram (``tokenizer.ggml.model = "t5"``; Kudo 2018, arXiv:1804.10959).

Of all ways to cut the text into pieces the one with the highest sum of scores. Sums are rounded to float32
at every step, as SentencePiece rounds them, and of equal sums the one found first stays: ties fall alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import copysign, inf
from struct import Struct

from ringlm.charsmap import Charsmap
from ringlm.spm_vocab import SPACE, Fallback, token_bytes
from ringlm.token_matcher import TokenMatcher
from ringlm.vocab import TokenType, Vocab

_UNKNOWN_PENALTY = 10.0  # below the worst piece
_SMALLEST = 2.0**-126  # SentencePiece begins its search for the best score at the smallest float
_FLOAT = Struct("f")


class Unigram:
    """Encodes text to ids and renders ids to bytes. Special tokens are the caller's."""

    def __init__(self, vocab: Vocab, ids: dict[str, int]) -> None:
        self._vocab = vocab
        self._fallback = Fallback(vocab)
        self._charsmap = Charsmap(vocab.charsmap)
        self._ids = ids
        normal = vocab.of_type(TokenType.NORMAL)
        user = {vocab.tokens[i]: i for i in vocab.of_type(TokenType.USER_DEFINED)}
        self._user_defined = TokenMatcher(user)
        known = [vocab.scores[i] for i in normal] or [0.0]
        best = max(_SMALLEST, *known)
        self._unknown_score = _float32(min(known) - _UNKNOWN_PENALTY)
        # None for what no text becomes by itself: control, unused and byte tokens.
        self._scores: list[float | None] = [None] * len(vocab.tokens)
        for i in normal:
            self._scores[i] = vocab.scores[i]
        for text, i in user.items():  # better than the best piece, for each byte
            self._scores[i] = _float32(len(text.encode("utf-8", "surrogateescape")) * best - 0.1)
        lengths: dict[str, list[int]] = {}
        for first, length in sorted({(text[:1], len(text)) for text in ids}):
            lengths.setdefault(first, []).append(length)
        self._lengths = lengths

    def encode(self, text: str) -> list[int]:
        """Ids of one run of text between control tokens, with the space prefix of the vocabulary."""
        ids: list[int] = []
        for piece in self._best_pieces(self._normalize(text)):
            token = self._ids.get(piece)
            if token is None or self._scores[token] is None:
                ids += self._fallback.ids(piece)
            else:
                ids.append(token)
        return self._fallback.one_unknown(ids)

    def token_bytes(self, token: int) -> bytes:
        """What the token stands for: one byte for a byte token, else its text with spaces restored."""
        return token_bytes(self._vocab, token)

    def _normalize(self, text: str) -> str:
        """Text as pieces spell it: mapped characters, single spaces if the vocabulary wants them, U+2581."""
        squeeze = self._vocab.remove_extra_whitespaces
        parts: list[str] = []
        after_space = squeeze
        for part in self._mapped(text):
            if after_space:
                part = part.lstrip(" ")
            if part:
                parts.append(part)
                after_space = squeeze and part[-1] == " "
        spelled = "".join(parts).replace(" ", SPACE)
        if self._vocab.add_space_prefix and text:
            spelled = SPACE + spelled
        return spelled.rstrip(SPACE) if squeeze else spelled

    def _mapped(self, text: str) -> Iterator[str]:
        """The text in order: user-defined tokens as they are, and what the other characters become."""
        for part in self._user_defined.split(text):
            if isinstance(part, int):
                yield self._vocab.tokens[part]
                continue
            raw, begin = part.encode("utf-8"), 0
            while begin < len(raw):
                found = self._charsmap.replacement(raw, begin)
                if found is None:
                    end = begin + 1
                    while end < len(raw) and raw[end] & 0xC0 == 0x80:
                        end += 1
                    yield raw[begin:end].decode("utf-8", "replace")  # altered rules may cut a character
                else:
                    yield found[0].decode("utf-8", "replace")
                    end = found[1]
                begin = end

    def _best_pieces(self, text: str) -> list[str]:
        """The pieces of the best cut; characters that are no piece stay alone. O(n) look-ups."""
        n = len(text)
        best: list[float | None] = [None] * (n + 1)  # sum of the best cut of text[:i]
        start = [0] * (n + 1)  # where its last piece begins
        best[0] = 0.0
        find, scores, lengths = self._ids.get, self._scores, self._lengths
        for begin in range(n):
            here = best[begin]
            assert here is not None  # every character is a piece or unknown
            alone = False
            for length in lengths.get(text[begin], ()):
                end = begin + length
                if end > n:
                    break
                token = find(text[begin:end])
                if token is None or (score := scores[token]) is None:
                    continue
                alone |= length == 1
                total = _float32(score + here)
                so_far = best[end]
                if so_far is None or total > so_far:
                    best[end], start[end] = total, begin
            if not alone:
                total = _float32(self._unknown_score + here)
                so_far = best[begin + 1]
                if so_far is None or total > so_far:
                    best[begin + 1], start[begin + 1] = total, begin
        pieces = []
        end = n
        while end:
            pieces.append(text[start[end] : end])
            end = start[end]
        return pieces[::-1]


def _float32(x: float) -> float:
    try:
        return float(_FLOAT.unpack(_FLOAT.pack(x))[0])
    except OverflowError:
        return copysign(inf, x)
