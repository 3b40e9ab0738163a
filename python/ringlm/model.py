"""A model file, opened."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

from ringlm.cache import cache_options
from ringlm.errors import InvalidArgument, StateError
from ringlm.rope import rope_options
from ringlm.sampling import Sampling
from ringlm.session import Session

if TYPE_CHECKING:
    import ringlm._core as core
    from ringlm.chat import Chat
    from ringlm.completion import Json
    from ringlm.plan import Plan
    from ringlm.template import ChatTemplate
    from ringlm.tokenizer import Tokenizer

__all__ = ["Model"]


class Model:
    """The weights of a GGUF file, read-only and shared by all sessions of the model.

    ``n_threads`` None takes a thread for each physical core that the process may use, without the small cores
    of a part that has big ones, within the CPU quota. ``window`` is for files that do not say that their
    layers see only the last tokens: how many, in all layers, or a sequence with an entry for each layer, in
    which 0 or None is no window. ``n_ctx`` is that of the sessions that completions open.
    ``rope`` replaces the file's RoPE scaling, with the names of a Hugging Face config: ``rope_type`` (none,
    linear, ntk, dynamic, yarn, llama3 or longrope), ``factor``, ``rope_theta``,
    ``original_max_position_embeddings`` and what else the type has (docs/models.md); what is left out stays
    the file's. Layers that have a base of their own for their window keep it.
    ``device`` is ``"cpu"``, or ``"cuda"``: the first GPU that CUDA_VISIBLE_DEVICES leaves (docs/cuda.md).
    ``backend`` ``"reference"`` computes on the CPU, slowly and plainly, for comparison.
    ``repack`` False leaves the weights in the mapped file instead of copying them in the order in which the
    CPU reads them: opening takes no time and no memory of its own, and every step is slower.

    Raises FileFormatError, UnsupportedModelError, DeviceError, InvalidArgument. Tokenizer, metadata and
    templates are read when first asked for.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        n_threads: int | None = None,
        device: str = "cpu",
        backend: str | None = None,
        n_ctx: int | None = None,
        window: int | Sequence[int | None] | None = None,
        rope: Mapping[str, Any] | None = None,
        repack: bool = True,
    ) -> None:
        if n_threads is not None and (not isinstance(n_threads, int) or not 1 <= n_threads < 2**31):
            raise InvalidArgument(
                f"n_threads is {n_threads!r:.40}; expected at least 1, or None for the default"
            )
        implementation = _implementation(device, backend)
        import ringlm._core as core

        self.path = Path(path)
        #: The native model.
        self.core = core.Model(
            self.path, n_threads or 0, implementation, _windows(window), rope_options(rope), repack
        )
        self._config = self.core.config  # sessions outlive close()
        #: n_ctx of the sessions that completions open by themselves.
        self.completion_n_ctx = n_ctx
        self._idle: list[Session] = []
        # Reentrant: a stream that nobody wants any more gives its session back wherever it is collected.
        self._lock = threading.RLock()
        self._closed = False

    @classmethod
    def pull(cls, name: str, **options: Any) -> Model:
        """Downloads the model of that name unless it is in the cache folder, and opens it."""
        from ringlm import hub

        return cls(hub.pull(name), **options)

    # ---- what it is ----------------------------------------------------------------------------------------

    @property
    def config(self) -> core.Config:
        """The architecture: ``n_layer``, ``n_head``, ``n_head_kv``, ``head_dim``, ``n_ctx_train`` and so
        on."""
        return self._config

    @property
    def n_vocab(self) -> int:
        return self._config.n_vocab

    @property
    def n_threads(self) -> int:
        return self.core.n_threads

    @property
    def backend(self) -> str:
        return self.core.backend

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return self.core.nbytes

    @cached_property
    def tokenizer(self) -> Tokenizer:
        from ringlm.tokenizer import Tokenizer

        return Tokenizer(self.gguf)

    @cached_property
    def gguf(self) -> core.GGUF:
        """The file's metadata: ``get(key, default)`` and ``keys()``."""
        import ringlm._core as core

        return core.GGUF(self.path)

    @cached_property
    def chat_templates(self) -> dict[str, str]:
        """Sources of the file's chat templates by name; the unnamed one is ``"default"``."""
        from ringlm.template import named_templates

        return named_templates(self.gguf)

    def chat_template(self, name: str | None = None) -> ChatTemplate:
        """The compiled template of that name, or the default one; guessed, with a warning, if the file has
        none."""
        from ringlm.template import choose_template

        with self._lock:
            if name not in self._templates:
                self._templates[name] = choose_template(self.chat_templates, self.tokenizer, name)
            return self._templates[name]

    @cached_property
    def _templates(self) -> dict[str | None, ChatTemplate]:
        return {}

    # ---- what it does --------------------------------------------------------------------------------------

    def session(
        self,
        n_ctx: int | None = None,
        kv: str | tuple[str, str] = "f16",
        chunk: int = 128,
        *,
        pinned: int = 0,
        overflow: str = "error",
        sampling: Sampling | None = None,
    ) -> Session:
        """Opens a session; see Session."""
        self._check_open()
        return Session(
            self, n_ctx=n_ctx, kv=kv, chunk=chunk, pinned=pinned, overflow=overflow, sampling=sampling
        )

    def load_session(self, path: str | os.PathLike[str], sampling: Sampling | None = None) -> Session:
        """The session of a file that Session.save wrote; it goes on where the saved one was, bit for
        bit on the device that saved it.

        Its counters and, in Model.step, its draws begin anew. Raises FileFormatError for a file that is
        damaged, of another model or no session, OutOfMemory, OSError.
        """
        from ringlm.state import load_session

        self._check_open()
        return Session.wrap(self, load_session(self, path), sampling)

    def plan(
        self,
        n_ctx: int | None = None,
        kv: str | tuple[str, str] = "f16",
        chunk: int = 128,
        *,
        pinned: int = 0,
        sessions: int = 1,
        memory: int | None = None,
    ) -> Plan:
        """What sessions of this kind need, in bytes, before one is opened; see ringlm.plan."""
        from ringlm.plan import plan

        self._check_open()
        return plan(self, n_ctx=n_ctx, kv=kv, pinned=pinned, chunk=chunk, sessions=sessions, memory=memory)

    def step(self, sessions: Sequence[Session], tokens: Sequence[int | None] | None = None) -> list[int]:
        """Feeds one token to each of several sessions, reading the weights once, and returns the tokens.

        Each is drawn from its session's logits with the session's own ``sampling``, or is the one in
        ``tokens`` where that is not None. The sessions may differ in length, context and cache. On the CPU,
        and on a GPU up to eight of them, the result equals the sessions stepped alone, bit for bit.

        Raises InvalidArgument, before anything is computed, for sessions that are there twice or of another
        model and for tokens outside the vocabulary; BatchError when sessions failed (nothing to draw from, a
        full context, NaN, cancelled, closed): these are as before, their samplers too, and the others have
        advanced.
        """
        from ringlm.batch import step

        return step(self, sessions, tokens)

    def chat(
        self,
        system: str | None = None,
        template: str | ChatTemplate | None = None,
        *,
        n_ctx: int | None = None,
        kv: str | tuple[str, str] = "f16",
        chunk: int = 128,
        pinned: int | None = None,
        overflow: str = "slide",
        stop: str | Sequence[str] | None = None,
        max_tokens: int | None = None,
        sampling: Sampling | None = None,
        variables: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> Chat:
        """Opens a conversation with a session of its own, which goes on for ever: when the context is full
        the oldest turns leave it, and the system message stays (unless every layer has a window shorter than
        the context). With ``overflow="error"`` it ends there.

        ``template`` is the name of one of the file's templates or a ChatTemplate; ``variables`` go to it.
        ``pinned`` None pins what the template makes of the system message; if that is more than half of the
        context it is a ContextOverflow. ``changes`` are sampling parameters by name.
        """
        from ringlm.chat import Chat, pinned_tokens

        self._check_open()
        chosen = self.chat_template(template) if template is None or isinstance(template, str) else template
        how = (sampling or Sampling()).replace(**changes)
        options = cache_options(n_ctx, kv, chunk, pinned or 0, overflow)
        if pinned is None and overflow == "slide":
            pinned = pinned_tokens(self, chosen, system, variables or {}, options)
        session = self.session(n_ctx, kv, chunk, pinned=pinned or 0, overflow=overflow, sampling=how)
        try:
            return Chat(
                session,
                self.tokenizer,
                chosen,
                system=system,
                sampling=how,
                stop=stop,
                max_tokens=max_tokens,
                variables=variables,
            )
        except BaseException:
            session.close()
            raise

    @overload
    def create_completion(
        self, prompt: str | Sequence[int] = "", *, stream: Literal[False] = False, **options: Any
    ) -> Json: ...
    @overload
    def create_completion(
        self, prompt: str | Sequence[int] = "", *, stream: Literal[True], **options: Any
    ) -> Iterator[Json]: ...
    @overload
    def create_completion(
        self, prompt: str | Sequence[int] = "", *, stream: bool, **options: Any
    ) -> Json | Iterator[Json]: ...
    def create_completion(
        self, prompt: str | Sequence[int] = "", *, stream: bool = False, **options: Any
    ) -> Json | Iterator[Json]:
        """Continues raw text, no template. Returns an OpenAI ``text_completion``, or with ``stream`` its
        chunks.

        Options: those of Sampling (``repeat_penalty`` is ``repetition_penalty``), ``max_tokens`` (16; None or
        at most 0 is no limit), ``stop``, ``logprobs`` (how many of the most probable tokens to list),
        ``echo``, ``stream_options``. Raises TypeError for unknown ones.
        """
        from ringlm.completion import create_completion

        return create_completion(self, prompt, stream, options)

    __call__ = create_completion

    @overload
    def create_chat_completion(
        self, messages: Iterable[Mapping[str, Any]], *, stream: Literal[False] = False, **options: Any
    ) -> Json: ...
    @overload
    def create_chat_completion(
        self, messages: Iterable[Mapping[str, Any]], *, stream: Literal[True], **options: Any
    ) -> Iterator[Json]: ...
    @overload
    def create_chat_completion(
        self, messages: Iterable[Mapping[str, Any]], *, stream: bool, **options: Any
    ) -> Json | Iterator[Json]: ...
    def create_chat_completion(
        self, messages: Iterable[Mapping[str, Any]], *, stream: bool = False, **options: Any
    ) -> Json | Iterator[Json]:
        """Answers a conversation. Returns an OpenAI ``chat.completion``, or with ``stream`` its chunks.

        Options as create_completion, but ``max_tokens`` has no limit by default, ``logprobs`` is true or
        false with ``top_logprobs``, and there are ``tools``, ``template`` and ``template_variables`` for the
        template.
        """
        from ringlm.completion import create_chat_completion

        return create_chat_completion(self, messages, stream, options)

    @contextmanager
    def idle_session(self) -> Iterator[Session]:
        """A session that no other completion uses, the one used last if there is one: its cache may fit."""
        self._check_open()
        with self._lock:
            session = self._idle.pop() if self._idle else None
        session = session or self.session(self.completion_n_ctx)
        try:
            yield session
        finally:
            with self._lock:
                keep = not self._closed and not self._idle and not session.closed
                if keep:
                    self._idle.append(session)
            if not keep:
                session.close()

    def close(self) -> None:
        """Closes the sessions of completions and lets go of the weights. Sessions still open keep them."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for session in idle:
            session.close()
        self.core.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("the model is closed; open it again with Model(path)")

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise StateError("a Model holds native memory and can not be pickled; open the file in each process")

    def __repr__(self) -> str:
        return f"Model({str(self.path)!r})"


def _implementation(device: str, backend: str | None) -> str:
    """The core's name for it; which there are, it knows itself."""
    if device not in ("cpu", "cuda"):
        raise InvalidArgument(f"device is {device!r:.40}; expected 'cpu' or 'cuda'")
    if device == "cuda" and backend not in (None, "cuda"):
        raise InvalidArgument(f"backend {backend!r:.40} computes on the CPU; leave out device='cuda'")
    return backend or device


def _windows(window: Any) -> list[int]:
    """The core's form: empty for what the file says, one number for all layers, or one for each."""
    if window is None:
        return []
    given = [window] if isinstance(window, int) else window
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
        given = [window]  # refused below
    windows = [0 if w is None else w for w in given]
    if not windows or not all(isinstance(w, int) and 0 <= w < 2**31 for w in windows):
        raise InvalidArgument(
            f"window is {window!r:.80}; expected a number of tokens, or a sequence with one for each layer, "
            "where 0 or None is no window"
        )
    return windows
