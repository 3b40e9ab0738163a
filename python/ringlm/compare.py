"""Two models over one text: perplexity of both, and how far the second predicts otherwise than the first."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ringlm.errors import InvalidArgument
from ringlm.perplexity import (
    begin_with_bos,
    logits_to_score,
    mean_and_error,
    negative_log_likelihoods,
    tokens_to_score,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ringlm.model import Model
    from ringlm.session import Session

__all__ = ["Comparison", "Side", "compare"]


@dataclass(frozen=True)
class Side:
    """One of the models. ``kv_nbytes_per_token`` is K and V of one token in all layers, ``kv_nbytes`` that of
    the session that read the text."""

    model: str
    perplexity: float
    stderr: float
    weight_nbytes: int
    kv: tuple[str, str]
    kv_nbytes_per_token: int
    kv_nbytes: int


@dataclass(frozen=True)
class Comparison:
    """``kl_mean`` and ``kl_p99`` are the mean and the 99th percentile of KL(a || b) in nats over the
    ``tokens`` scored tokens; ``same_top`` is the share of them for which both models find the same token
    most probable."""

    a: Side
    b: Side
    kl_mean: float
    kl_p99: float
    same_top: float
    tokens: int
    windows: int
    n_ctx: int
    seconds: float


def compare(
    a: Model,
    b: Model,
    text: str,
    *,
    n_ctx: int = 512,
    kv: str | tuple[str, str] = "f16",
    kv_b: str | tuple[str, str] | None = None,
    chunk: int = 128,
    progress: Callable[[int, int, float], None] | None = None,
) -> Comparison:
    """Reads ``text`` with both models, window by window as ``ringlm.perplexity.perplexity`` does, and
    compares what they expect in the place of every scored token: KL(a || b) is the sum over the vocabulary
    of p_a (log p_a - log p_b).

    ``kv`` is how the keys and values of both are stored, ``kv_b`` those of ``b`` if otherwise: the two may be
    the same model. No more logits than those of a chunk are held. ``progress(done, total, mean KL so far)``
    is called after each window.

    Raises InvalidArgument for different vocabularies, naming the first difference, and for a text that does
    not fill a window; NumericError.
    """
    import numpy as np

    began = time.perf_counter()
    _check_same_vocabulary(a, b)
    ids = tokens_to_score(a, text, n_ctx)
    _check_same_ids(ids, b.tokenizer.encode(text))
    windows = len(ids) // n_ctx
    scores: tuple[list[Any], list[Any]] = ([], [])
    divergences: list[float] = []
    same = 0
    size = min(chunk, n_ctx)
    with a.session(n_ctx, kv, size) as first, b.session(n_ctx, kv_b or kv, size) as second:
        for w in range(windows):
            window = ids[w * n_ctx : (w + 1) * n_ctx]
            begin_with_bos(a, window)
            if w:
                first.rewind(first.position)
                second.rewind(second.position)
            for (x, tokens), (y, _) in zip(
                logits_to_score(first, window, n_ctx // 2),
                logits_to_score(second, window, n_ctx // 2),
                strict=True,
            ):
                scores[0].append(negative_log_likelihoods(x, tokens))
                scores[1].append(negative_log_likelihoods(y, tokens))
                divergences.extend(map(_divergence, x, y))
                same += int((x.argmax(axis=-1) == y.argmax(axis=-1)).sum())
            if progress is not None:
                progress(w + 1, windows, math.fsum(divergences) / len(divergences))
        side_a, side_b = _side(first, scores[0]), _side(second, scores[1])
    return Comparison(
        a=side_a,
        b=side_b,
        kl_mean=math.fsum(divergences) / len(divergences),
        kl_p99=float(np.percentile(divergences, 99)),
        same_top=same / len(divergences),
        tokens=len(divergences),
        windows=windows,
        n_ctx=n_ctx,
        seconds=time.perf_counter() - began,
    )


def _divergence(x: npt.NDArray[np.float32], y: npt.NDArray[np.float32]) -> float:
    """KL divergence of two rows of logits ``[n_vocab]``, in float64."""
    import numpy as np

    p, q = _log_softmax(x), _log_softmax(y)
    return float(np.exp(p) @ (p - q))


def _log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    import numpy as np

    x = logits.astype(np.float64)
    x -= x.max()
    x -= np.log(np.exp(x).sum())
    return x


def _side(session: Session, scores: list[Any]) -> Side:
    value, error = mean_and_error(scores)
    native = session._core
    return Side(
        model=str(session.model.path),
        perplexity=value,
        stderr=error,
        weight_nbytes=session.model.nbytes,
        kv=native.kv,
        kv_nbytes_per_token=sum(kind.nbytes // kind.capacity for kind in session.kinds),
        kv_nbytes=session.kv_nbytes,
    )


def _check_same_vocabulary(a: Model, b: Model) -> None:
    """InvalidArgument unless an id means the same in both models."""
    x, y = a.tokenizer, b.tokenizer
    for i in range(min(x.n_vocab, y.n_vocab)):
        if x.token_text(i) != y.token_text(i):
            _refuse(a, b, f"token {i} is {x.token_text(i)!r:.60} and {y.token_text(i)!r:.60}")
    for what, m, n in (
        ("the number of tokens", x.n_vocab, y.n_vocab),
        ("the number of logits", a.n_vocab, b.n_vocab),
        ("BOS", x.bos_id, y.bos_id),
        ("whether BOS is added", x.add_bos, y.add_bos),
        ("whether EOS is added", x.add_eos, y.add_eos),
    ):
        if m != n:
            _refuse(a, b, f"{what} is {m} and {n}")


def _refuse(a: Model, b: Model, difference: str) -> None:
    raise InvalidArgument(
        f"{a.path} and {b.path} have different vocabularies: {difference}; compare models that were made "
        "from one tokenizer"
    )


def _check_same_ids(x: Sequence[int], y: Sequence[int]) -> None:
    """InvalidArgument unless both tokenizers cut the text in the same way."""
    if list(x) != list(y):
        at = next((i for i, (m, n) in enumerate(zip(x, y, strict=False)) if m != n), min(len(x), len(y)))
        raise InvalidArgument(
            f"the two tokenizers cut the text in different ways, first at token {at}: ids {x[at : at + 3]} "
            f"and {y[at : at + 3]}; compare models that were made from one tokenizer"
        )
