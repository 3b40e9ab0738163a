"""Perplexity of a model over a text: of windows, as llama.cpp's tool defines it, or of one stream."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ringlm.errors import InvalidArgument

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ringlm.model import Model
    from ringlm.session import Session

__all__ = [
    "Perplexity",
    "begin_with_bos",
    "logits_to_score",
    "mean_and_error",
    "negative_log_likelihoods",
    "perplexity",
    "tokens_to_score",
]

_LOGITS = 1 << 22  # at most so many are held at a time: 16 MiB


@dataclass(frozen=True)
class Perplexity:
    """``perplexity`` is exp of the mean negative log-likelihood of ``tokens`` scored tokens, ``stderr`` its
    standard error; NaN when only one token was scored. A stream is one window."""

    perplexity: float
    stderr: float
    tokens: int
    windows: int
    n_ctx: int
    seconds: float


def perplexity(
    model: Model,
    text: str | Sequence[int],
    *,
    n_ctx: int = 512,
    kv: str | tuple[str, str] = "f16",
    chunk: int = 128,
    pinned: int = 0,
    overflow: str = "error",
    progress: Callable[[int, int, float], None] | None = None,
) -> Perplexity:
    """How badly ``model`` predicts ``text`` (or its token ids): exp(mean negative log-likelihood).

    The text is tokenized with the model's BOS and EOS rules and cut into windows of ``n_ctx`` tokens; the
    remainder is dropped. Each window is read from an empty cache. Where the model adds BOS, it replaces the
    window's first token. The logits of positions n_ctx // 2 to n_ctx - 2 predict the tokens behind them, and
    these are scored: every one has at least half a window of context.

    With ``overflow="slide"`` it is the perplexity of a stream: the whole text goes once through a context of
    ``n_ctx`` tokens, the first ``pinned`` of which stay while the oldest of the others leave. The logits of
    position n_ctx // 2 and of every later one predict the tokens behind them, and these are scored. For a
    text of ``n_ctx`` tokens both definitions are the same.

    ``progress(done, total, perplexity so far)`` is called after each window, or after so many tokens of a
    stream. Raises InvalidArgument if there is not one whole window, NumericError.
    """
    ids = tokens_to_score(model, text, n_ctx)
    windows = len(ids) // n_ctx
    stream = overflow == "slide"
    texts = [ids] if stream else [ids[w * n_ctx : (w + 1) * n_ctx] for w in range(windows)]
    total = -(-len(ids) // n_ctx) if stream else windows
    began = time.perf_counter()
    scores: list[npt.NDArray[np.float64]] = []
    with model.session(n_ctx, kv, min(chunk, n_ctx), pinned=pinned, overflow=overflow) as session:
        for w, window in enumerate(texts):
            begin_with_bos(model, window)
            if w:
                session.rewind(session.position)
            told, ends = w, total if stream else w + 1
            for scored in _scored(session, window, n_ctx // 2):
                scores.append(scored)
                at = session.position
                done = ends if at == len(window) - 1 else w + at // n_ctx
                if progress is not None and done > told:
                    told = done
                    progress(done, total, mean_and_error(scores)[0])
    value, error = mean_and_error(scores)
    return Perplexity(value, error, sum(map(len, scores)), len(texts), n_ctx, time.perf_counter() - began)


def tokens_to_score(model: Model, text: str | Sequence[int], n_ctx: int) -> list[int]:
    """Ids of the text. Raises InvalidArgument if they do not fill a window of ``n_ctx``."""
    if n_ctx < 3:
        raise InvalidArgument(f"n_ctx is {n_ctx}; a window of fewer than 3 tokens has none to score")
    ids = model.tokenizer.encode(text) if isinstance(text, str) else list(text)
    if len(ids) < n_ctx:
        raise InvalidArgument(
            f"the text has {len(ids)} tokens and one window takes {n_ctx}: "
            + (
                f"give a longer text, or a context of at most {len(ids)}"
                if len(ids) >= 3
                else "give a longer text"
            )
        )
    return ids


def begin_with_bos(model: Model, window: list[int]) -> None:
    """Puts BOS in the place of a window's first token where the model adds it."""
    tokenizer = model.tokenizer
    if tokenizer.add_bos and tokenizer.bos_id is not None:
        window[0] = tokenizer.bos_id


def _scored(session: Session, ids: Sequence[int], first: int) -> Iterator[npt.NDArray[np.float64]]:
    """How badly the tokens behind position ``first`` are predicted, some at a time."""
    for logits, tokens in logits_to_score(session, ids, first):
        yield negative_log_likelihoods(logits, tokens)


def logits_to_score(
    session: Session, ids: Sequence[int], first: int
) -> Iterator[tuple[npt.NDArray[np.float32], Sequence[int]]]:
    """Feeds ``ids``, but for the last, to an empty session, and yields the logits ``[n, n_vocab]`` of
    position ``first`` and later ones, some at a time, with the ``n`` tokens that they predict. The array is
    used again for the next ones."""
    import numpy as np

    n_vocab, last = session.model.n_vocab, len(ids) - 1
    rows = max(1, min(session.chunk, _LOGITS // n_vocab))
    buffer = np.empty((rows, n_vocab), np.float32)
    session.prefill(ids[:first], out=buffer[0])
    for at in range(first, last, rows):
        end = min(at + rows, last)
        logits = session.prefill(ids[at:end], out=buffer[: end - at], all_logits=True)
        yield logits, ids[at + 1 : end + 1]


def negative_log_likelihoods(
    logits: npt.NDArray[np.float32], tokens: Sequence[int]
) -> npt.NDArray[np.float64]:
    """-log softmax(logits[i])[tokens[i]] in float64, for logits ``[n, n_vocab]`` and ``n`` tokens."""
    import numpy as np

    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    chosen = x[np.arange(len(tokens)), tokens]
    result: npt.NDArray[np.float64] = np.log(np.exp(x, out=x).sum(axis=-1)) - chosen
    return result


def mean_and_error(scores: list[Any]) -> tuple[float, float]:
    """Perplexity and its standard error: d exp(m) = exp(m) dm, with the standard error of the mean for dm."""
    import numpy as np

    nll = np.concatenate(scores)
    value = math.exp(float(nll.mean()))
    return value, value * float(nll.std(ddof=1)) / math.sqrt(len(nll)) if len(nll) > 1 else math.nan
