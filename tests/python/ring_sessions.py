"""The core's sessions as the tests of the ring use them, and the book-keeping of slots by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from random_llama import Array, Shape, write_llama
from ring_reference import Ring, Rows, Run
from ringlm import _core


def text(n: int, seed: int = 7, n_vocab: int = 96) -> Array:
    return np.random.default_rng(seed).integers(0, n_vocab, n).astype(np.int32)


def write(path: Path, shape: Shape) -> dict[str, Array]:
    """The model's file; returns its weights."""
    return write_llama(path, shape)


def open_model(path: Path, shape: Shape, backend: str = "cpu", n_threads: int = 2) -> Any:
    return _core.Model(str(path), n_threads, backend, list(shape.windows))


def open_session(model: Any, ring: Ring, chunk: int = 16, overflow: str = "slide") -> Any:
    return _core.Session(model, ring.n_ctx, *ring.formats, chunk, ring.pinned, overflow)


def fed(session: Any, tokens: Array, pieces: list[int] | None = None, n_vocab: int = 96) -> Array:
    """Logits [n_tokens, n_vocab] of tokens fed in calls of so many tokens, in turn; all at once by default.

    A piece of 1 is a decode, a longer one a prefill.
    """
    out = np.full((len(tokens), n_vocab), np.nan, np.float32)
    at, turn = 0, 0
    pieces = pieces or [len(tokens)]
    while at < len(tokens):
        n = min(pieces[turn % len(pieces)], len(tokens) - at)
        if n == 1:
            session.decode(int(tokens[at]), out[at])
        else:
            session.prefill(tokens[at : at + n], out[at : at + n], all_logits=True)
        at, turn = at + n, turn + 1
    return out


def cached(session: Any, shape: Shape) -> list[list[tuple[Array, Array, Array]]]:
    """By layer and head: positions, keys and values that the last token saw."""
    return [[session.kv_rows(i, h) for h in range(shape.n_head_kv)] for i in range(shape.n_layer)]


def recorded(session: Any, shape: Shape, tokens: Array, piece: int) -> Run:
    """Feeds tokens, ``piece`` in a call, and takes the rows down after each.

    Asserts on the way that a row that was there before is the same, bit for bit, and that exactly the rows
    that the rule of visibility gives are there.
    """
    T = len(tokens)
    n_ctx, pinned = session.n_ctx, session.pinned
    rows = [
        [np.full((T, shape.n_head_kv, shape.dim), np.nan, np.float32) for _ in range(shape.n_layer)]
        for _ in range(2)
    ]
    windows = shape.windows or (0,) * shape.n_layer
    logits = []
    for start in range(0, T, piece):
        part = tokens[start : start + piece]
        logits.append(fed(session, part))
        last = start + len(part) - 1
        for layer, heads in enumerate(cached(session, shape)):
            ring = Ring(n_ctx, pinned)
            t = np.arange(last + 1)
            seen = t[(t < ring.pinned_in(windows[layer])) | (last - t < ring.moving(windows[layer]))]
            for head, (positions, *found) in enumerate(heads):
                assert np.array_equal(positions, seen)
                old = seen < start
                for kept, now in zip(rows, found, strict=True):
                    assert now.dtype == np.float32 and now.shape == (len(seen), shape.dim)
                    assert np.array_equal(
                        now[old].view(np.uint32), kept[layer][seen[old], head].view(np.uint32)
                    )
                    kept[layer][seen, head] = now
    assert all(np.isfinite(a).all() for kept in rows for a in kept), "a row was never seen"
    return Run(np.concatenate(logits), Rows(*rows))


class Slots:
    """Which position each slot of a layer's ring holds, written one by one."""

    def __init__(self, n_ctx: int, chunk: int, pinned: int = 0, window: int = 0) -> None:
        ring = Ring(n_ctx, pinned)
        self.pinned, self.moving = ring.pinned_in(window), ring.moving(window)
        self.slots = np.full(self.pinned + self.moving + min(chunk, n_ctx) - 1, -1)

    def write(self, position: int) -> None:
        turn = len(self.slots) - self.pinned
        slot = position if position < self.pinned else self.pinned + (position - self.pinned) % turn
        self.slots[slot] = position

    def can_continue_at(self, position: int) -> bool:
        """Whether everything that the query at ``position`` sees but itself is there."""
        t = np.arange(position)
        seen = t[(t < self.pinned) | (position - t < self.moving)]
        return bool(np.isin(seen, self.slots).all())
