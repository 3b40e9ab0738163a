"""A conversation over one session."""

from __future__ import annotations

import json
import os
import warnings
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from inspect import GEN_CLOSED, GEN_RUNNING, getgeneratorstate
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ringlm.errors import ContextOverflow, InvalidArgument, StateError, TemplateWarning
from ringlm.text import generate_text, stop_list

if TYPE_CHECKING:
    from ringlm.cache import CacheOptions
    from ringlm.model import Model
    from ringlm.sampling import Sampling
    from ringlm.session import Session
    from ringlm.template import ChatTemplate, Rendered
    from ringlm.tokenizer import Tokenizer

__all__ = ["Chat", "Usage", "pinned_tokens"]

_LONG = 16  # characters for each token of the context: a text of that length is mostly forgotten


@dataclass(frozen=True)
class Usage:
    """What one turn took. Of ``prompt_tokens``, ``cached_tokens`` were in the cache and the rest was
    prefilled. Tokens that the context has forgotten do not count."""

    prompt_tokens: int
    cached_tokens: int
    prefill_tokens: int
    completion_tokens: int
    prefill_seconds: float
    decode_seconds: float


class Chat:
    """A conversation: ``for piece in chat.send("Hello"): print(piece, end="")``.

    Each turn renders the conversation with the model's template and evaluates only what the session's cache
    does not hold yet. ``stop``, ``max_tokens`` and ``sampling`` apply to every turn unless ``send`` says
    otherwise; ``variables`` go to the template (``enable_thinking=False``, ``tools=[...]``). An answer is
    kept whole, with its ``<think>`` section; what the next turn sees of it is the template's decision. A
    system message that the template does not take goes into the first user message, with a TemplateWarning,
    once for each chat.

    With a session that slides the conversation never ends: the oldest tokens leave the context one by one,
    and the session's pinned ones, which hold the system message, stay. Where the cache cannot be gone on with
    (it was used for something else, or the template changes what was said before) the conversation is read
    again, and if it is longer than the context, only its newest turns, up to half of the context. Without
    ``max_tokens`` an answer then ends after as many tokens as the context moves, n_ctx - pinned: more would
    leave nothing of the question.
    """

    def __init__(
        self,
        session: Session,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        system: str | None = None,
        sampling: Sampling | None = None,
        stop: str | Sequence[str] | None = None,
        max_tokens: int | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        from ringlm.sampling import Sampling

        self.session, self.tokenizer, self.template = session, tokenizer, template
        self.sampling = sampling or Sampling()
        self.stop, self.max_tokens = stop_list(stop), max_tokens
        self.variables = dict(variables or {})
        self.system = system
        #: Of the last turn: ``"stop"``, ``"length"``, or None if it was cut short.
        self.finish_reason: str | None = None
        #: Of the last turn that was evaluated.
        self.last_usage: Usage | None = None
        self._active: weakref.ref[Generator[str, None, None]] | None = None
        self._messages: list[dict[str, Any]] = []
        self._held: _Held | None = None
        self._dropped = 0  # messages behind the system message that are not rendered any more
        self._noted: set[str] = set()  # what was warned of
        self.reset()

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation so far, the system message first; a copy."""
        return [dict(message) for message in self._messages]

    @property
    def forgetful(self) -> bool:
        """True once the context no longer holds the whole conversation."""
        return self.last_usage is not None and (self._dropped > 0 or self.session.stats.evicted > 0)

    def reset(self) -> None:
        """Forgets the conversation but the system message. The cache is reused where it still fits."""
        self._finish_active()
        self._messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self._held, self._dropped = None, 0
        self.finish_reason, self.last_usage = None, None

    def send(
        self,
        text: str,
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        progress: Callable[[int, int], None] | None = None,
        **changes: Any,
    ) -> Generator[str, None, None]:
        """Says ``text`` and yields the answer in pieces as it is generated. Work begins with the first piece.

        Leaving the loop keeps the partial answer in the conversation. An error or a cancellation before the
        first piece leaves the conversation as it was: ContextOverflow (nothing was computed), TemplateError,
        Cancelled. In a session that slides, ContextOverflow is for a message that alone is more than there is
        room for beside the pinned tokens: its beginning would be forgotten before it is answered. ``changes``
        are sampling parameters by name; ``progress(done, total)`` follows the prefill.
        """
        if not isinstance(text, str):
            raise InvalidArgument(f"a message is a string, not {type(text).__name__}")
        sampling = self.sampling.replace(**changes)
        stops = self.stop if stop is None else stop_list(stop)
        self._finish_active()
        turn = self._reply(
            text, self.max_tokens if max_tokens is None else max_tokens, stops, sampling, progress
        )
        self._active = weakref.ref(turn)  # no more than that: leaving the loop has to end the turn
        return turn

    def ask(self, text: str, **options: Any) -> str:
        """The whole answer of ``send``."""
        return "".join(self.send(text, **options))

    def cancel(self) -> None:
        """From any thread: a turn that is not over ends with Cancelled. Without one nothing happens."""
        turn = None if self._active is None else self._active()
        if turn is not None and getgeneratorstate(turn) != GEN_CLOSED:
            self.session.cancel()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the conversation as JSON, whole or not at all."""
        target = Path(path)
        record = {
            "model": str(self.session.model.path),
            "saved": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "messages": self._messages,
        }
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("w", encoding="utf-8", errors="replace") as file:
                json.dump(record, file, ensure_ascii=False, indent=2)
                file.write("\n")
            temporary.replace(target)
        except BaseException as error:
            temporary.unlink(missing_ok=True)
            if isinstance(error, OSError):
                error.filename, error.filename2 = str(target), None  # of no interest: the temporary name
            raise

    def close(self) -> None:
        """Ends a running turn and closes the session."""
        self._finish_active()
        self.session.close()

    def __enter__(self) -> Chat:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ---- one turn ------------------------------------------------------------------------------------------

    def _reply(
        self,
        text: str,
        max_tokens: int | None,
        stops: list[str],
        sampling: Sampling,
        progress: Callable[[int, int], None] | None,
    ) -> Generator[str, None, None]:
        from ringlm._provenance import mark

        session = self.session
        messages = [*self._messages, {"role": "user", "content": text}]
        marked, new = self._place(messages)
        start, before = session.position, session.stats
        pieces = generate_text(
            session,
            self.tokenizer,
            new,
            stop=stops,
            max_tokens=session.n_ctx - session.pinned if max_tokens is None and self._slides else max_tokens,
            sampling=sampling,
            progress=progress,
        )
        self.finish_reason, answer = None, ""
        try:
            for piece in pieces:
                if piece.text:
                    answer += piece.text
                    yield piece.text
            self.finish_reason = pieces.finish_reason
        finally:
            pieces.close()
            if answer or self.finish_reason:
                after = session.stats
                self._messages = [*messages, {"role": "assistant", "content": answer}]
                self.last_usage = Usage(
                    prompt_tokens=before.visible + len(new),
                    cached_tokens=before.visible,
                    prefill_tokens=len(new),
                    completion_tokens=len(pieces.ids),
                    prefill_seconds=after.prefill_seconds - before.prefill_seconds,
                    decode_seconds=after.decode_seconds - before.decode_seconds,
                )
            if self.finish_reason and pieces.stop is None:
                # The tokenizer may cut the same text in another way than the model did. The next turn goes on
                # from the model's ids, so that the cache fits.
                fed = session.position - start
                self._held = _Held(marked + mark(answer), session.position, [*new, *pieces.ids][fed:])
            if self._held is not None:
                self._held.left(session)

    # ---- what the cache holds ------------------------------------------------------------------------------

    @property
    def _slides(self) -> bool:
        return self.session.overflow == "slide"

    def _place(self, messages: list[dict[str, Any]]) -> tuple[str, list[int]]:
        """Brings the session to where the conversation can go on. Returns the rendered text, marked, and the
        ids that are to be fed. Raises ContextOverflow, and leaves the session alone, if they do not fit."""
        rendered = self._render(messages, self._dropped)
        new = self._continued(rendered)
        if new is None:
            rendered, ids = self._shortened(messages, rendered)
            new = ids[self.session.reuse(ids) :]
            self._held = None
        elif len(rendered.marked) > _LONG * self.session.n_ctx and self.session.stats.evicted:
            rendered = self._without_old_turns(messages, rendered)
        return rendered.marked, new

    def _continued(self, rendered: Rendered) -> list[int] | None:
        """What is to be fed behind the tokens that the session holds; None if it can not go on from them."""
        held, session = self._held, self.session
        if held is None or not held.is_in(session):
            return None
        rest = rendered.encode_after(held.text, self.tokenizer)
        if rest is None:
            return None
        if not self._slides:
            session.check_fits(held.position + len(held.tail) + len(rest))
        wanted, tokens = held.tail + rest, session.tokens
        since = session.position - held.position  # fed by turns that failed or were left
        if since > len(tokens) - (session.pinned if session.stats.evicted else 0):
            return None
        same = _common_prefix(tokens[len(tokens) - since :], wanted[:-1])
        if self._slides and min(len(rest), len(wanted) - same) > session.n_ctx - session.pinned:
            return None  # nothing of what is held would be left
        if since > same:
            try:
                session.rewind(since - same)
            except InvalidArgument:  # too far for what the ring still has
                return None
        return wanted[same:]

    def _without_old_turns(self, messages: list[dict[str, Any]], rendered: Rendered) -> Rendered:
        """The rendering without the older half of the turns, which are forgotten since long, if it ends in
        the same way: the text that a turn renders does not grow for ever."""
        held = self._held
        assert held is not None
        rest = rendered.marked[len(held.text) :]
        dropped = self._dropped + self._turns(messages) // 2 * 2
        shorter = self._render(messages, dropped)
        if not shorter.marked.endswith(rest):
            return rendered
        held.text, self._dropped = shorter.marked[: len(shorter.marked) - len(rest)], dropped
        return shorter

    def _shortened(self, messages: list[dict[str, Any]], rendered: Rendered) -> tuple[Rendered, list[int]]:
        """The conversation and its ids to be read from the beginning. If it slides and is longer than the
        context, turns are dropped until half of the context is enough, or until only the last is left."""
        ids = rendered.encode(self.tokenizer)
        if not self._slides or len(ids) <= self.session.n_ctx:
            return rendered, ids
        enough = self.session.pinned + (self.session.n_ctx - self.session.pinned) // 2
        few, many = 0, self._turns(messages)
        while few < many:
            middle = (few + many) // 2
            if len(self._render(messages, self._dropped + 2 * middle).encode(self.tokenizer)) <= enough:
                many = middle
            else:
                few = middle + 1
        dropped = self._dropped + 2 * many
        rendered = self._render(messages, dropped)
        ids = rendered.encode(self.tokenizer)
        n, pinned = len(ids), self.session.pinned
        if n > self.session.n_ctx:
            beside = f" beside the {pinned} that are pinned" if pinned else ""
            raise ContextOverflow(
                f"the message has {n - pinned} tokens and the context of {self.session.n_ctx} has room for "
                f"{self.session.n_ctx - pinned}{beside}; shorten it, or open the chat with a larger n_ctx"
            )
        self._dropped = dropped
        return rendered, ids

    def _turns(self, messages: list[dict[str, Any]]) -> int:
        """How many there are that are rendered, without the one that is not answered yet."""
        return (len(messages) - (self.system is not None) - self._dropped) // 2

    def _render(self, messages: list[dict[str, Any]], dropped: int) -> Rendered:
        first = 0 if self.system is None else 1
        rendered = self.template.render_noted(
            messages[:first] + messages[first + dropped :], **self.variables
        )
        for note in {*rendered.notes} - self._noted:
            self._noted.add(note)
            warnings.warn(note, TemplateWarning, stacklevel=2)
        return rendered

    def _finish_active(self) -> None:
        turn = None if self._active is None else self._active()
        if turn is not None:
            if getgeneratorstate(turn) == GEN_RUNNING:
                raise StateError(
                    "the chat is answering, in another thread or around this call: wait for the answer, or "
                    "end it with cancel()"
                )
            turn.close()
            self.session.cancel(False)  # a cancel that came too late for this turn is not for the next one
        self._active = None


@dataclass
class _Held:
    """Up to where the session holds the conversation, and how the next turn goes on from there."""

    text: str  # marked
    position: int  # behind it, but for
    tail: list[int]  # the last of its ids, not fed yet
    _seen: tuple[int, int] = (-1, -1)

    def left(self, session: Session) -> None:
        """Remembers the session as a turn leaves it."""
        self._seen = (session.position, session._rewinds)

    def is_in(self, session: Session) -> bool:
        """False if somebody else has used the session since. It may have gone back before ``position``."""
        return self._seen == (session.position, session._rewinds) and self.position <= session.position


def pinned_tokens(
    model: Model,
    template: ChatTemplate,
    system: str | None,
    variables: Mapping[str, Any],
    options: CacheOptions,
) -> int:
    """How many tokens every conversation with this system message begins with: the common prefix of two
    whose first messages differ. 0 for a model that cannot pin, since all of its layers have a window.

    Raises ContextOverflow if that is more than half of the context, TemplateError.
    """
    import ringlm._core as core

    plan = core.plan(model.core, **options)
    if all(kind["window"] for kind in plan["kinds"]):
        return 0
    head = [] if system is None else [{"role": "system", "content": system}]
    one, other = (
        template.render_noted([*head, {"role": "user", "content": text}], **variables).encode(model.tokenizer)
        for text in ("a", "Z")
    )
    n, n_ctx = _common_prefix(one, other), plan["n_ctx"]
    if n > n_ctx // 2:
        raise ContextOverflow(
            f"the system message has {n} tokens, more than half of the context of {n_ctx}, which leaves too "
            f"little for a conversation: shorten it, open the chat with n_ctx={2 * n} or more, or say with "
            "pinned=... how many of its tokens have to stay"
        )
    return n


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n
