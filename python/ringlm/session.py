"""A session: one stream of tokens over one K/V cache."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, cast, overload

from ringlm.errors import ContextOverflow, InvalidArgument, StateError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    import ringlm._core as core
    from ringlm.model import Model

__all__ = ["Generation", "Sampling", "Session", "SessionStats", "TokenLogprobs"]

T = TypeVar("T")
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from logits: bias and penalties, top-k, top-p, min-p, temperature, draw.

    ``temperature`` 0 takes the most probable token; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off.
    Penalties look at the last ``penalty_window`` tokens, those of the prompt too. ``logit_bias`` maps ids to
    what is added to their logits. The same ``seed`` draws the same tokens; None picks one.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int = 64
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None

    def replace(self, **changes: Any) -> Sampling:
        """A copy with changes. Raises TypeError for names that are no sampling parameters."""
        unknown = sorted(set(changes) - {f.name for f in dataclasses.fields(self)})
        if unknown:
            known = ", ".join(f.name for f in dataclasses.fields(self))
            raise TypeError(f"unknown sampling parameter {', '.join(unknown)}; known are {known}")
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class TokenLogprobs:
    """A generated token, its log-probability (natural, before any sampling parameter) and the most probable
    ones."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class SessionStats:
    """What a session has done since it was opened."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0


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


class Session:
    """One stream of tokens: a K/V cache of ``n_ctx`` positions, allocated here once.

    ``kv`` is ``"f16"`` or ``"f32"``, or a pair of them for keys and values. ``n_ctx`` is the smaller of 4096
    and the trained length by default; ``chunk`` is how many tokens one step of a prefill takes. Raises
    OutOfMemory, InvalidArgument. A session is used by one thread at a time, but ``cancel`` is called from
    any.
    """

    def __init__(
        self, model: Model, *, n_ctx: int | None = None, kv: str | tuple[str, str] = "f16", chunk: int = 128
    ) -> None:
        if n_ctx is not None:
            _check_count("n_ctx", n_ctx, "or None for the default")
        _check_count("chunk", chunk, "as many as one step takes")
        pair = (kv, kv) if isinstance(kv, str) else kv
        if not isinstance(pair, tuple) or [type(name) for name in pair] != [str, str]:
            raise InvalidArgument(f"kv is {kv!r}; expected 'f16' or 'f32', or a pair of them for K and V")
        kv_k, kv_v = pair
        import ringlm._core as core

        self._core = core.Session(model.core, n_ctx or 0, kv_k, kv_v, chunk)
        self.model = model
        self.stats = SessionStats()

    # ---- state ---------------------------------------------------------------------------------------------

    @property
    def n_ctx(self) -> int:
        """Tokens that the cache holds."""
        return self._core.n_ctx

    @property
    def chunk(self) -> int:
        return self._core.chunk

    @property
    def position(self) -> int:
        """Tokens in the cache, which is the position of the next one."""
        return self._core.position

    @property
    def tokens(self) -> list[int]:
        """Ids in the cache."""
        return self._core.tokens

    @property
    def nbytes(self) -> int:
        """Bytes of the session: cache and scratch memory."""
        return self._core.nbytes

    @property
    def kv_nbytes(self) -> int:
        """Bytes of the cache."""
        return self._core.kv_nbytes

    @property
    def closed(self) -> bool:
        return self._core.closed

    def close(self) -> None:
        """Frees the memory. Closing twice is fine; any other use afterwards raises StateError."""
        self._core.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise StateError(
            "a Session holds native memory and can not be pickled or copied; open one in each process"
        )

    def __repr__(self) -> str:
        if self.closed:
            return "Session(closed)"
        return f"Session({self.position} of {self.n_ctx} tokens, {self.kv_nbytes / 2**20:.1f} MiB of K/V)"

    # ---- steps ---------------------------------------------------------------------------------------------

    def prefill(
        self,
        tokens: Sequence[int] | npt.NDArray[np.integer[Any]],
        *,
        out: npt.NDArray[np.float32] | None = None,
        all_logits: bool = False,
        progress: Progress | None = None,
    ) -> npt.NDArray[np.float32]:
        """Appends tokens and returns logits: float32 ``[n_vocab]`` after the last token, or with
        ``all_logits`` ``[n_tokens, n_vocab]``.

        The result is a fresh array, or ``out``. ``progress(done, total)`` is called after each chunk. Raises
        ContextOverflow before anything is computed, Cancelled (finished chunks stay), NumericError.
        """
        import numpy as np

        ids = self._ids(tokens)
        n_vocab = self.model.n_vocab
        if out is None:
            out = np.empty((len(ids), n_vocab) if all_logits else n_vocab, np.float32)
        self._prefill(ids, out, all_logits, progress)
        return out

    def decode(self, token: int, *, out: npt.NDArray[np.float32] | None = None) -> npt.NDArray[np.float32]:
        """Appends one token and returns the logits after it, float32 ``[n_vocab]``: a fresh array, or
        ``out``."""
        import numpy as np

        ids = self._ids([token])
        if out is None:
            out = np.empty(self.model.n_vocab, np.float32)
        self._decode(int(ids[0]), out)
        return out

    def rewind(self, n: int) -> None:
        """Forgets the last ``n`` tokens."""
        self._core.rewind(n)

    def cancel(self, wanted: bool = True) -> None:
        """From any thread: the running step, or the next one to begin, raises Cancelled. ``cancel(False)``
        takes back what no step has heard yet."""
        self._core.cancel(wanted)

    def reuse(self, tokens: Sequence[int]) -> int:
        """Rewinds to the longest common prefix of the cache and ``tokens`` and returns its length.

        At least one of the tokens is left to be evaluated, as logits come from evaluation. Raises
        ContextOverflow, and leaves the cache alone, if ``tokens`` are more than ``n_ctx``.
        """
        if len(tokens) > self.n_ctx:
            trained = int(self.model.config.n_ctx_train * self.model.config.rope_factor)
            fits = f"open the session with n_ctx={len(tokens)} or more"
            raise ContextOverflow(
                f"the prompt has {len(tokens)} tokens and the context {self.n_ctx}; shorten it"
                + (f" or {fits}" if len(tokens) <= trained else f": the model was trained for {trained}")
            )
        held = self.tokens
        same = 0
        for a, b in zip(held, tokens[: max(len(tokens) - 1, 0)], strict=False):
            if a != b:
                break
            same += 1
        if same < len(held):
            self.rewind(len(held) - same)
        return same

    @overload
    def generate(
        self,
        tokens: Sequence[int],
        *,
        max_tokens: int | None = None,
        stop_ids: Collection[int] | None = None,
        logprobs: None = None,
        sampling: Sampling | None = None,
        progress: Progress | None = None,
        **changes: Any,
    ) -> Generation[int]: ...
    @overload
    def generate(
        self,
        tokens: Sequence[int],
        *,
        max_tokens: int | None = None,
        stop_ids: Collection[int] | None = None,
        logprobs: int,
        sampling: Sampling | None = None,
        progress: Progress | None = None,
        **changes: Any,
    ) -> Generation[TokenLogprobs]: ...
    def generate(
        self,
        tokens: Sequence[int],
        *,
        max_tokens: int | None = None,
        stop_ids: Collection[int] | None = None,
        logprobs: int | None = None,
        sampling: Sampling | None = None,
        progress: Progress | None = None,
        **changes: Any,
    ) -> Generation[int] | Generation[TokenLogprobs]:
        """Appends ``tokens`` and generates until a stop id, ``max_tokens``, or the end of the context.

        Yields ids, or TokenLogprobs with the ``logprobs`` most probable tokens. The id that ends the text is
        not yielded; ``stop_ids`` are the model's end-of-generation ids by default. ``changes`` are sampling
        parameters by name, applied to ``sampling``. The prefill runs at the first ``next``.
        """
        ids = self._ids(tokens)
        if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
            raise InvalidArgument(f"max_tokens is {max_tokens!r}; expected at least 1, or None for no limit")
        stops = frozenset(self.model.tokenizer.eog_ids if stop_ids is None else stop_ids)
        how = (sampling or Sampling()).replace(**changes)
        seed = secrets.randbits(63) if how.seed is None else how.seed
        sampler = self._sampler(how, seed)

        def steps(generation: Generation[Any]) -> Generator[Any, None, None]:
            window = max(how.penalty_window - len(ids), 0)
            held = self.tokens[-window:] if window else []
            self._prefill(ids, None, False, progress)
            generation.prefilled = True
            sampler.accept([*held, *ids.tolist()[-how.penalty_window :]] if how.penalty_window else [])
            while True:
                token = self._core.sample(sampler)
                if token in stops:
                    generation.finish_reason = "stop"
                    return
                generation.completion_tokens += 1
                full = generation.completion_tokens == max_tokens or self.position >= self.n_ctx
                if full:
                    generation.finish_reason = "length"
                yield token if logprobs is None else self._record(token, logprobs)
                if full:
                    return
                self._decode(token, None)

        # The ids are yielded as they are or as records, as the overloads say.
        return cast("Generation[int] | Generation[TokenLogprobs]", Generation(steps, len(ids), seed))

    # ---- parts ---------------------------------------------------------------------------------------------

    def _ids(self, tokens: Any) -> npt.NDArray[np.int32]:
        import numpy as np

        n_vocab = self.model.n_vocab
        if isinstance(tokens, (str, bytes)):
            raise InvalidArgument("tokens are text; encode it first: model.tokenizer.encode(text)")
        ids = np.array(list(tokens) if isinstance(tokens, Iterable) else tokens)
        if ids.shape == (0,):
            raise InvalidArgument("tokens are empty; give at least one, for instance model.tokenizer.bos_id")
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise InvalidArgument(
                f"tokens must be integers of the vocabulary, 0 to {n_vocab - 1}, in one sequence, "
                f"not {tokens!r:.80}"
            )
        outside = np.flatnonzero((ids < 0) | (ids >= n_vocab))
        if outside.size:
            i = int(outside[0])
            raise InvalidArgument(f"tokens[{i}] is {ids[i]}; the vocabulary has the ids 0 to {n_vocab - 1}")
        return ids.astype(np.int32)

    def _sampler(self, how: Sampling, seed: int) -> core.Sampler:
        import ringlm._core as core

        params = {f.name: getattr(how, f.name) for f in dataclasses.fields(how)} | {"seed": seed}
        if params["logit_bias"] is not None:
            params["logit_bias"] = dict(params["logit_bias"])
        try:
            return core.Sampler(self.model.n_vocab, **params)
        except TypeError:  # of no number, or of one that fits no machine word
            raise InvalidArgument(f"{how!r:.500} holds what is no number, or a number out of range") from None

    def _prefill(self, ids: Any, out: Any, all_logits: bool, progress: Progress | None) -> None:
        before, began = self.position, time.perf_counter()
        try:
            self._core.prefill(ids, out, all_logits, progress)
        finally:
            if not self.closed:
                self.stats.prefill_tokens += self.position - before
            self.stats.prefill_seconds += time.perf_counter() - began

    def _decode(self, token: int, out: Any) -> None:
        began = time.perf_counter()
        self._core.decode(token, out)
        self.stats.decode_tokens += 1
        self.stats.decode_seconds += time.perf_counter() - began

    def _record(self, token: int, k: int) -> TokenLogprobs:
        top = tuple(self._core.top_log_probabilities(k)) if k else ()
        return TokenLogprobs(token, self._core.log_probability(token), top)


def _check_count(name: str, value: Any, otherwise: str) -> None:
    if not isinstance(value, int) or not 1 <= value < 2**31:
        raise InvalidArgument(f"{name} is {value!r:.40}; expected a positive number of tokens, {otherwise}")
