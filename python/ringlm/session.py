"""A session: one stream of tokens over one K/V cache."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast, overload

from ringlm.cache import KV, LayerKind, SessionStats, cache_options, check_count
from ringlm.errors import ContextOverflow, InvalidArgument, StateError
from ringlm.generation import Generation, generate
from ringlm.sampling import Sampling, StepSampler, TokenLogprobs

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    import ringlm._core as core
    from ringlm.model import Model
    from ringlm.trace import Trace

__all__ = ["Progress", "Session"]

Progress = Callable[[int, int], None]


class Session:
    """One stream of tokens over a ring of keys and values, allocated here once.

    ``n_ctx`` tokens are visible; by default the smaller of 4096 and the trained length. With ``overflow``
    ``"error"`` no more than these can be fed. With ``"slide"`` there is no limit: the oldest token leaves
    when a new one comes, except for the first ``pinned``, which stay for ever. ``kv`` is how rows are stored:
    ``"f16"``, ``"int8"`` (about half of it) or ``"f32"``, or a pair of them for keys and values. ``chunk`` is
    how many tokens one step of a prefill takes. ``sampling`` is what ``generate`` and ``Model.step`` draw
    with, unless told otherwise.

    Raises OutOfMemory, before anything is touched, and InvalidArgument. A session is used by one thread at a
    time, but ``cancel`` is called from any.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int | None = None,
        kv: str | tuple[str, str] = "f16",
        chunk: int = 128,
        pinned: int = 0,
        overflow: str = "error",
        sampling: Sampling | None = None,
    ) -> None:
        options = cache_options(n_ctx, kv, chunk, pinned, overflow)
        import ringlm._core as core

        self._begin(model, core.Session(model.core, **options), sampling)

    @classmethod
    def wrap(cls, model: Model, native: core.Session, sampling: Sampling | None = None) -> Session:
        """A Session around a native one, whose owner it becomes."""
        session = cls.__new__(cls)
        session._begin(model, native, sampling)
        return session

    def _begin(self, model: Model, native: core.Session, sampling: Sampling | None) -> None:
        self.model, self._core = model, native
        self._prefill_tokens = self._decode_tokens = 0
        self._prefill_seconds = self._decode_seconds = 0.0
        #: How often the session went back: with the position it tells whether the cache is still the same.
        self._rewinds = 0
        self._steps = StepSampler(model.n_vocab, sampling or Sampling())
        self._trace: Trace | None = None

    # ---- state ---------------------------------------------------------------------------------------------

    @property
    def n_ctx(self) -> int:
        """Tokens that are visible at most."""
        return self._core.n_ctx

    @property
    def chunk(self) -> int:
        return self._core.chunk

    @property
    def pinned(self) -> int:
        """The first tokens that never leave."""
        return self._core.pinned

    @property
    def overflow(self) -> str:
        """``"error"`` or ``"slide"``."""
        return self._core.overflow

    @property
    def position(self) -> int:
        """Tokens fed, which is the position of the next one."""
        return self._core.position

    @property
    def tokens(self) -> list[int]:
        """Ids that the last token saw: the pinned ones, then the moving part."""
        return self._core.tokens

    @property
    def full(self) -> bool:
        """True when no more can be fed; never if the session slides."""
        return self._core.overflow == "error" and self._core.position >= self._core.n_ctx

    @property
    def sampling(self) -> Sampling:
        """What is drawn with by default. Setting it begins Model.step's draws anew."""
        return self._steps.how

    @sampling.setter
    def sampling(self, how: Sampling) -> None:
        self._steps = StepSampler(self.model.n_vocab, how)

    @property
    def stats(self) -> SessionStats:
        """As it is now; it does not change afterwards."""
        native = self._core
        return SessionStats(
            self._prefill_tokens,
            self._prefill_seconds,
            self._decode_tokens,
            self._decode_seconds,
            native.position,
            native.visible,
            native.evicted,
            native.slots,
        )

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The rings: one entry for the layers that are alike."""
        return tuple(LayerKind(**kind) for kind in self._core.kinds)

    @property
    def nbytes(self) -> int:
        """Bytes of the session: cache, activations and all the rest."""
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
        stats, kv = self.stats, f"{self.kv_nbytes / 2**20:.1f} MiB of K/V"
        evicted = f" and {stats.evicted} evicted" if stats.evicted else ""
        return f"Session({stats.visible} of {self.n_ctx} tokens{evicted}, {kv})"

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
        ContextOverflow before anything is computed (unless the session slides), Cancelled (finished chunks
        stay), NumericError.
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
        """Forgets the last ``n`` tokens.

        Raises InvalidArgument, and changes nothing, where rows that the next token would see are gone: once
        the ring has wrapped, a session goes back by ``chunk`` tokens from the furthest it has been (a step
        that failed counts), into its pinned tokens where no layer has a window, or to the beginning.
        """
        self._core.rewind(check_count("n", n, 0, "how many of the last tokens to forget"))
        self._rewinds += n != 0

    def cancel(self, wanted: bool = True) -> None:
        """From any thread: the running step, or the next one to begin, raises Cancelled. ``cancel(False)``
        takes back what no step has heard yet."""
        self._core.cancel(wanted)

    def reuse(self, tokens: Sequence[int]) -> int:
        """Goes back to the longest prefix of ``tokens`` that the cache holds and can go back to, and returns
        its length.

        At least one of the tokens is left to be evaluated, as logits come from evaluation. Raises
        ContextOverflow, and leaves the cache alone, if ``tokens`` are more than ``n_ctx`` and the session
        does not slide.
        """
        ids, before = self._ids(tokens), self.position
        if self.overflow == "error":
            self.check_fits(len(ids))
        kept = self._core.reuse(ids)
        self._rewinds += kept != before
        return kept

    def check_fits(self, n: int) -> None:
        """Raises ContextOverflow if a prompt of ``n`` tokens is more than the context."""
        if n <= self.n_ctx:
            return
        trained = self.model.config.n_ctx_limit
        fits = f"open the session with n_ctx={n} or more"
        raise ContextOverflow(
            f"the prompt has {n} tokens and the context {self.n_ctx}; shorten it"
            + (f" or {fits}" if n <= trained else f": the model was trained for {trained}")
        )

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
        """Appends ``tokens`` and generates until a stop id, ``max_tokens``, or the end of the context, which
        a session that slides does not have.

        Yields ids, or TokenLogprobs with the ``logprobs`` most probable tokens. The id that ends the text is
        not yielded; ``stop_ids`` are the model's end-of-generation ids by default. ``changes`` are sampling
        parameters by name, applied to ``sampling``, or the session's. The prefill runs at the first ``next``.
        """
        ids = self._ids(tokens)
        if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
            raise InvalidArgument(f"max_tokens is {max_tokens!r}; expected at least 1, or None for no limit")
        generation = generate(
            self,
            ids,
            max_tokens=max_tokens,
            stops=frozenset(self.model.tokenizer.eog_ids if stop_ids is None else stop_ids),
            logprobs=logprobs,
            sampling=(sampling or self.sampling).replace(**changes),
            progress=progress,
        )
        # The ids are yielded as they are or as records, as the overloads say.
        return cast("Generation[int] | Generation[TokenLogprobs]", generation)

    # ---- tools ---------------------------------------------------------------------------------------------

    def fork(self) -> Session:
        """A session with a copy of everything, except for a trace: both go on independently.

        Also the random state of Model.step's draws is copied: with the same logits both draw the same.
        """
        twin = Session.wrap(self.model, self._core.fork())
        twin._prefill_tokens, twin._decode_tokens = self._prefill_tokens, self._decode_tokens
        twin._prefill_seconds, twin._decode_seconds = self._prefill_seconds, self._decode_seconds
        twin._rewinds, twin._steps = self._rewinds, self._steps.copy()
        return twin

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the session to a file, whole or not at all; Model.load_session reads it."""
        from ringlm.state import save_session

        save_session(self, path)

    def trace(self, n: int = 4096) -> Trace:
        """Begins to record what steps do, and returns the records of those to come: see Trace.

        At most ``n`` records wait to be read; then the oldest are dropped. The room is allocated here. A
        trace that was begun before ends.
        """
        from ringlm.trace import Trace

        check_count("n", n, 1, "a positive number of records to keep", most=1 << 20)
        if self._trace is not None:
            self._trace.close()
        self._trace = Trace(self._core, self.kinds, n)
        return self._trace

    def kv(self, layer: int, head: int) -> KV:
        """The rows of one KV head that the last token saw, decoded, in position order."""
        expected = "its index, from 0"
        return KV(
            *self._core.kv_rows(
                check_count("layer", layer, 0, expected), check_count("head", head, 0, expected)
            )
        )

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

    def _prefill(self, ids: Any, out: Any, all_logits: bool, progress: Progress | None) -> None:
        before, began = self.position, time.perf_counter()
        try:
            self._core.prefill(ids, out, all_logits, progress)
        finally:
            if not self.closed:
                self._prefill_tokens += self.position - before
            self._prefill_seconds += time.perf_counter() - began

    def _decode(self, token: int, out: Any) -> None:
        began = time.perf_counter()
        self._core.decode(token, out)
        self._count_decode(time.perf_counter() - began)

    def _draw(self) -> tuple[int, core.Sampler]:
        """A token from the logits, and the sampler as it is afterwards; for _stepped."""
        return self._steps.draw(self._core, self._rewinds)

    def _stepped(self, sampler: core.Sampler | None, seconds: float) -> None:
        """A batch has fed the session a token, which ``sampler`` has drawn if it was not given."""
        if sampler is not None:
            self._steps.commit(sampler, self.position, self._rewinds)
        self._count_decode(seconds)

    def _count_decode(self, seconds: float) -> None:
        self._decode_tokens += 1
        self._decode_seconds += seconds
