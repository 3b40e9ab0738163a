"""How much two ways of storing K and V differ in what a model predicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from ringlm import Model

Array = np.ndarray

ROWS = 64  # of logits held at a time


@dataclass(frozen=True)
class Divergence:
    """``kl``: KL(expected || found) behind every token, in nats; the others: -log p of every token that has
    one before it."""

    kl: Array
    expected: Array
    found: Array

    @property
    def perplexities(self) -> tuple[float, float]:
        return float(np.exp(self.expected.mean())), float(np.exp(self.found.mean()))

    @property
    def perplexity_change(self) -> float:
        """Of ``found`` against ``expected``; 0 is none."""
        expected, found = self.perplexities
        return found / expected - 1


def divergence(
    model: Model,
    ids: Sequence[int],
    expected: str,
    found: str,
    *,
    n_ctx: int,
    pinned: int = 0,
    slide: bool = False,
) -> Divergence:
    """Feeds the text to a session of either K/V format.

    It is cut into windows of n_ctx tokens, each read from an empty cache, and all are scored; with ``slide``
    it goes through the ring as one stream.
    """
    overflow = "slide" if slide else "error"
    a, b = (model.session(n_ctx, kv, pinned=pinned, overflow=overflow) for kv in (expected, found))
    length = len(ids) if slide else n_ctx
    kl, scores = [], []
    for start in range(0, len(ids), length):
        window = ids[start : start + length]
        for session in (a, b):
            session.rewind(session.position)
        for at in range(0, len(window), ROWS):
            part, behind = window[at : at + ROWS], window[at + 1 : at + 1 + ROWS]
            p, q = (log_softmax(s.prefill(part, all_logits=True)) for s in (a, b))
            kl.append(kl_divergence(p, q))
            scores.append([-x[np.arange(len(behind)), behind] for x in (p, q)])
    a.close()
    b.close()
    return Divergence(np.concatenate(kl), *(np.concatenate(x) for x in zip(*scores, strict=True)))


def log_softmax(logits: Array) -> Array:
    """In float64, of each row."""
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    x -= np.log(np.exp(x).sum(-1, keepdims=True))
    return x


def kl_divergence(expected: Array, found: Array) -> Array:
    """KL(expected || found) of each row, of log-probabilities [n, n_vocab]."""
    return (np.exp(expected) * (expected - found)).sum(-1)  # type: ignore[no-any-return]
