"""The generation loop of a session."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ringlm.sampling import TokenLogprobs, new_sampler

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ringlm.sampling import Sampling
    from ringlm.session import Progress, Session

__all__ = ["Generation"]

T = TypeVar("T")


class Generation(Generic[T]):
    """Iterates over generated tokens; see Session.generate."""

    def __init__(
        self, steps: Callable[[Generation[T]], Generator[T, None, None]], prompt_tokens: int, seed: int
    ) -> None:
        #: ``"stop"`` after a stop id, ``"length"`` after max_tokens or a full context, None before the end.
        self.finish_reason: str | None = None
        self.prompt_tokens = prompt_tokens
        #: Tokens yielded so far.
        self.completion_tokens = 0
        #: The seed that was used, so that a run can be repeated.
        self.seed = seed
        #: True when the prompt is in the cache.
        self.prefilled = False
        self._steps = steps(self)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        return next(self._steps)

    def close(self) -> None:
        """Ends the generation. What was yielded stays in the cache, but for the last token."""
        self._steps.close()


def generate(
    session: Session,
    ids: npt.NDArray[np.int32],
    *,
    max_tokens: int | None,
    stops: frozenset[int],
    logprobs: int | None,
    sampling: Sampling,
    progress: Progress | None,
) -> Generation[Any]:
    """Session.generate with its arguments checked."""
    sampler, seed = new_sampler(session.model.n_vocab, sampling)
    penalty_window, native = sampling.penalty_window, session._core

    def steps(generation: Generation[Any]) -> Generator[Any, None, None]:
        window = max(penalty_window - len(ids), 0)
        held = session.tokens[-window:] if window else []
        session._prefill(ids, None, False, progress)
        generation.prefilled = True
        sampler.accept([*held, *ids.tolist()[-penalty_window:]] if penalty_window else [])
        while True:
            token = native.sample(sampler)
            if token in stops:
                generation.finish_reason = "stop"
                return
            generation.completion_tokens += 1
            full = generation.completion_tokens == max_tokens or session.full
            if full:
                generation.finish_reason = "length"
            yield token if logprobs is None else _record(native, token, logprobs)
            if full:
                return
            session._decode(token, None)

    return Generation(steps, len(ids), seed)


def _record(native: Any, token: int, k: int) -> TokenLogprobs:
    top = tuple(native.top_log_probabilities(k)) if k else ()
    return TokenLogprobs(token, native.log_probability(token), top)
