"""SentencePiece BPE (``tokenizer.ggml.model = "llama"``), exact and without a build step.

The algorithm is SentencePiece's: of all adjacent pairs whose concatenation is a piece, join the one
with the best score, the leftmost on ties; repeat. Pieces are looked up by their text, so nothing but one
dictionary is prepared: a vocabulary of 262,144 tokens opens in a fraction of a second. (Translating
scores into a merge list for another BPE engine takes seconds, and cannot express ties by position.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from ringlm.spm_vocab import SPACE, Fallback, escape, token_bytes
from ringlm.token_matcher import TokenMatcher
from ringlm.vocab import TokenType, Vocab

_CACHED_WORD = 32  # characters; longer words seldom come again
_CACHED_WORDS = 1 << 16


class SentencePieceBPE:
    """Encodes text to ids and renders ids to bytes. No normalization; special tokens are the caller's."""

    def __init__(self, vocab: Vocab, ids: dict[str, int]) -> None:
        self._vocab = vocab
        self._ids = ids
        # The cost of joining to this id; None for what SentencePiece never forms by merging.
        self._costs: list[float | None] = [-s for s in vocab.scores]
        for i in vocab.of_type(TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.BYTE):
            self._costs[i] = None
        self._unused = frozenset(vocab.of_type(TokenType.UNUSED))
        self._fallback = Fallback(vocab)
        user = {escape(vocab.tokens[i]): i for i in vocab.of_type(TokenType.USER_DEFINED)}
        self._user_defined = TokenMatcher(user)
        self._word_start = _word_start(vocab.tokens)
        self._cache: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Ids of one run of text between control tokens, with the space prefix of the vocabulary."""
        if not text:
            return []
        text = escape(text)
        if self._vocab.add_space_prefix:
            text = SPACE + text
        ids: list[int] = []
        for part in self._user_defined.split(text):
            if isinstance(part, int):
                ids.append(part)
            else:
                for word in self._word_start.split(part):
                    ids += self._encode_word(word)
        return self._fallback.one_unknown(ids)

    def token_bytes(self, token: int) -> bytes:
        return token_bytes(self._vocab, token)

    def _encode_word(self, word: str) -> list[int]:
        ids = self._cache.get(word)
        if ids is None:
            ids = [i for piece in self._merge(word) for i in self._piece_ids(piece)]
            if len(word) <= _CACHED_WORD:
                if len(self._cache) >= _CACHED_WORDS:
                    self._cache.clear()
                self._cache[word] = ids
        return ids

    def _piece_ids(self, piece: str) -> list[int]:
        token = self._ids.get(piece)
        if token is not None and self._costs[token] is not None:
            return [token]
        return self._fallback.ids(piece)

    def _merge(self, word: str) -> list[str]:
        """Pieces of a word. A doubly linked list of symbols and a heap: O(n log n)."""
        symbols = list(word)
        n = len(symbols)
        before = list(range(-1, n - 1))
        after = list(range(1, n + 1))
        find, costs = self._ids.get, self._costs
        heap: list[tuple[float, int, str]] = []  # (cost, index of the left symbol, joined text)
        for i in range(n - 1):
            joined = symbols[i] + symbols[i + 1]
            if (token := find(joined)) is not None and (cost := costs[token]) is not None:
                heap.append((cost, i, joined))
        heapify(heap)
        parts: dict[str, tuple[str, str]] = {}  # how unused pieces were formed
        while heap:
            _, i, joined = heappop(heap)
            left, j = symbols[i], after[i]
            # Stale if either symbol was joined to another one since: then lengths no longer add up.
            if not left or j >= n or len(left) + len(symbols[j]) != len(joined):
                continue
            if self._unused and self._ids[joined] in self._unused:
                parts[joined] = (left, symbols[j])
            symbols[i], symbols[j] = joined, ""
            after[i] = right = after[j]
            if right < n:
                before[right] = i
                text = joined + symbols[right]
                if (token := find(text)) is not None and (cost := costs[token]) is not None:
                    heappush(heap, (cost, i, text))
            if (left_of := before[i]) >= 0:
                text = symbols[left_of] + joined
                if (token := find(text)) is not None and (cost := costs[token]) is not None:
                    heappush(heap, (cost, left_of, text))
        pieces = [s for s in symbols if s]
        return list(_without_unused(pieces, parts)) if parts else pieces


def _word_start(tokens: list[str]) -> re.Pattern[str]:
    """Where text can be cut without changing the result: before a space that no piece can cross.

    A piece crosses the border between x and a space if it contains both side by side. Most vocabularies
    have only runs of spaces among those.
    """
    crossed = {m[0][0] for m in re.finditer(f"[^\0]{SPACE}", "\0".join(tokens))}
    crossed.add(SPACE)
    return re.compile(f"(?<=[^{re.escape(''.join(sorted(crossed)))}])(?={SPACE})")


def _without_unused(pieces: list[str], parts: dict[str, tuple[str, str]]) -> Iterator[str]:
    stack = pieces[::-1]
    while stack:
        piece = stack.pop()
        if piece in parts:
            stack.extend(reversed(parts[piece]))
        else:
            yield piece
