"""A conversation over one session."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from inspect import GEN_CLOSED, GEN_RUNNING, getgeneratorstate
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ringlm.errors import InvalidArgument, StateError
from ringlm.text import generate_text, stop_list

if TYPE_CHECKING:
    from ringlm.session import Sampling, Session
    from ringlm.template import ChatTemplate, Rendered
    from ringlm.tokenizer import Tokenizer

__all__ = ["Chat", "Usage"]


@dataclass(frozen=True)
class Usage:
    """What one turn took. Of ``prompt_tokens``, ``cached_tokens`` were in the cache and the rest was
    prefilled."""

    prompt_tokens: int
    cached_tokens: int
    prefill_tokens: int
    completion_tokens: int
    prefill_seconds: float
    decode_seconds: float


class Chat:
    """A conversation: ``for piece in chat.send("Hello"): print(piece, end="")``.

    Each turn renders the whole conversation with the model's template and evaluates only what the session's
    cache does not hold yet. ``stop``, ``max_tokens`` and ``sampling`` apply to every turn unless ``send``
    says otherwise; ``variables`` go to the template (``enable_thinking=False``).
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
        from ringlm.session import Sampling

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
        self._said: tuple[str, list[int]] | None = None
        self.reset()

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation so far, the system message first; a copy."""
        return [dict(message) for message in self._messages]

    def reset(self) -> None:
        """Forgets the conversation but the system message. The cache is reused where it still fits."""
        self._finish_active()
        self._messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self._said = None
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
        Cancelled. ``changes`` are sampling parameters by name; ``progress(done, total)`` follows the prefill.
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

        session, stats = self.session, self.session.stats
        messages = [*self._messages, {"role": "user", "content": text}]
        rendered = self.template.render(messages, **self.variables)
        ids = self._encode(rendered)
        cached = session.reuse(ids)
        decoded, prefilled = stats.decode_seconds, stats.prefill_seconds
        pieces = generate_text(
            session,
            self.tokenizer,
            ids[cached:],
            stop=stops,
            max_tokens=max_tokens,
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
                self._messages = [*messages, {"role": "assistant", "content": answer}]
                self.last_usage = Usage(
                    prompt_tokens=len(ids),
                    cached_tokens=cached,
                    prefill_tokens=len(ids) - cached,
                    completion_tokens=len(pieces.ids),
                    prefill_seconds=stats.prefill_seconds - prefilled,
                    decode_seconds=stats.decode_seconds - decoded,
                )
            if self.finish_reason and pieces.stop is None:
                # The tokenizer may cut the same text in another way than the model did. The next turn goes on
                # from the model's ids, so that the cache fits.
                self._said = (rendered.marked + mark(answer), ids + pieces.ids)

    def _encode(self, rendered: Rendered) -> list[int]:
        if self._said is not None:
            text, ids = self._said
            rest = rendered.encode_after(text, self.tokenizer)
            if rest is not None:
                return ids + rest
        return rendered.encode(self.tokenizer)

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
