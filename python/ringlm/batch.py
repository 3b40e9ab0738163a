"""A static batch: one token for each of several sessions in one pass over the weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from ringlm.errors import BatchError, Error, InvalidArgument

if TYPE_CHECKING:
    import ringlm._core as core
    from ringlm.model import Model
    from ringlm.session import Session

__all__ = ["step"]


def step(model: Model, sessions: Sequence[Session], tokens: Sequence[int | None] | None = None) -> list[int]:
    """See Model.step."""
    import ringlm._core as core

    batch = _checked_sessions(model, sessions)
    given = _checked_tokens(model, tokens, len(batch))
    errors: dict[int, Error] = {}
    drawn: dict[int, tuple[int, core.Sampler | None]] = {}
    for i, (session, token) in enumerate(zip(batch, given, strict=True)):
        try:
            drawn[i] = session._draw() if token is None else (token, None)
        except Error as e:
            errors[i] = e
    before = {i: batch[i].position for i in drawn}
    began = time.perf_counter()
    try:
        results = core.step([batch[i]._core for i in drawn], [token for token, _ in drawn.values()])
    finally:  # whatever happened: a draw counts for the sessions that advanced
        seconds = time.perf_counter() - began
        for i, (_, sampler) in drawn.items():
            if batch[i].position > before[i]:
                batch[i]._stepped(sampler, seconds)
    errors |= {i: cast(Error, e) for i, e in zip(drawn, results, strict=True) if e is not None}
    fed = [drawn[i][0] if i not in errors else None for i in range(len(batch))]
    if errors:
        first = min(errors)
        raise BatchError(
            f"{len(errors)} of {len(batch)} sessions failed and are as before, the others advanced; "
            f"session {first}: {errors[first]}",
            fed,
            errors,
        ) from errors[first]
    return [token for token in fed if token is not None]


def _checked_sessions(model: Model, sessions: Sequence[Session]) -> list[Session]:
    from ringlm.session import Session

    batch = list(sessions)
    for i, session in enumerate(batch):
        if not isinstance(session, Session):
            raise InvalidArgument(f"sessions[{i}] is of type {type(session).__name__}; expected a Session")
        if session.model is not model:
            raise InvalidArgument(f"sessions[{i}] is one of another model; step those of each model together")
        if any(session is other for other in batch[:i]):
            raise InvalidArgument(f"sessions[{i}] is there twice; a step feeds a session one token")
    return batch


def _checked_tokens(model: Model, tokens: Any, n: int) -> list[int | None]:
    if tokens is None:
        return [None] * n
    given = list(tokens)
    if len(given) != n:
        raise InvalidArgument(f"there are {len(given)} tokens for {n} sessions; give one for each, or None")
    for i, token in enumerate(given):
        if token is None:
            continue
        if not hasattr(token, "__index__") or isinstance(token, bool):
            raise InvalidArgument(f"tokens[{i}] is {token!r:.40}; expected a token id, or None to draw one")
        given[i] = int(token)
        if not 0 <= given[i] < model.n_vocab:
            raise InvalidArgument(
                f"tokens[{i}] is {token}; the vocabulary has the ids 0 to {model.n_vocab - 1}"
            )
    return given
