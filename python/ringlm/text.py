"""From token ids to text as it is generated: stop strings and the generation loop."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ringlm.errors import InvalidArgument

if TYPE_CHECKING:
    from ringlm.detokenizer import TokenStream
    from ringlm.generation import Generation
    from ringlm.sampling import Sampling, TokenLogprobs
    from ringlm.session import Session
    from ringlm.tokenizer import Tokenizer

__all__ = ["Piece", "StopStrings", "TextGeneration", "generate_text", "stop_list"]


def stop_list(stop: str | Sequence[str] | None) -> list[str]:
    """Stop strings as a list, for the forms that a caller may use. Raises InvalidArgument."""
    stops = [stop] if isinstance(stop, str) else list(stop or ())
    for text in stops:
        if not isinstance(text, str) or not text:
            raise InvalidArgument(f"stop holds {text!r}; a stop string is a string of at least one character")
    return stops


class StopStrings:
    """Ends text at the first stop string to be complete; the longest one if several are complete at once.

    Text that might be the beginning of a stop string is held back until it is clear that it is none. The
    result does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stop_list(stops)
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # characters of each stop that the text ends with
        self._held = ""
        #: The stop string that ended the text, or None.
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Adds text and returns what can be released. After a stop string was found it is always empty."""
        if self.found is not None:
            return ""
        if not self._stops:
            return text
        for i, char in enumerate(text):
            for k, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
                n = self._matched[k]
                while n and stop[n] != char:
                    n = borders[n - 1]
                self._matched[k] = n = n + (stop[n] == char)
                if n == len(stop) and n > len(self.found or ""):
                    self.found = stop
            if self.found is not None:
                whole = self._held + text[: i + 1]
                self._held = ""
                return whole[: len(whole) - len(self.found)]
        whole = self._held + text
        cut = len(whole) - max(self._matched)
        self._held = whole[cut:]
        return whole[:cut]

    def flush(self) -> str:
        """What is still held back, at the end of the text."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held


def _borders(text: str) -> list[int]:
    """For every prefix, the length of its longest proper border (Knuth, Morris and Pratt 1977)."""
    out = [0] * len(text)
    n = 0
    for i in range(1, len(text)):
        while n and text[n] != text[i]:
            n = out[n - 1]
        out[i] = n = n + (text[n] == text[i])
    return out


@dataclass(frozen=True)
class Piece:
    """Text that was released; with log-probabilities, also the tokens generated since the last piece."""

    text: str
    tokens: list[TokenLogprobs] = field(default_factory=list)
    #: Characters that the tokens before had made, those that were held back too.
    start: int = 0


class TextGeneration:
    """Iterates over the pieces of one generation. A piece may have no text while characters are held back."""

    def __init__(
        self,
        generation: Generation[int] | Generation[TokenLogprobs],
        stream: TokenStream,
        stops: Sequence[str],
        keep_ids: bool = True,
    ) -> None:
        self._generation = generation
        self._stops = StopStrings(stops)
        self._stream = stream
        self._finish: str | None = None
        #: All generated ids, without the one that ended the text; none if they are not to be kept.
        self.ids: list[int] = []
        self._keep_ids = keep_ids
        self._pieces = self._run()

    @property
    def finish_reason(self) -> str | None:
        """``"stop"`` (end of generation or stop string), ``"length"`` (max_tokens or context), None before
        the end."""
        return self._finish

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stops.found

    @property
    def generation(self) -> Generation[int] | Generation[TokenLogprobs]:
        return self._generation

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        return next(self._pieces)

    def close(self) -> None:
        self._pieces.close()
        self._generation.close()

    def _run(self) -> Generator[Piece, None, None]:
        start = 0
        for token in self._generation:
            made = self._stream.push(number := token if isinstance(token, int) else token.id)
            if self._keep_ids:
                self.ids.append(number)
            piece = Piece(self._stops.push(made), [] if isinstance(token, int) else [token], start)
            start += len(made)
            if self._stops.found is not None:
                self._finish = "stop"
                self._generation.close()
                yield piece
                return
            yield piece
        rest = self._stops.push(self._stream.flush())
        rest += self._stops.flush()
        self._finish = "stop" if self._stops.found is not None else self._generation.finish_reason
        if rest:
            yield Piece(rest, [], start)


def generate_text(
    session: Session,
    tokenizer: Tokenizer,
    tokens: Sequence[int],
    *,
    stop: str | Sequence[str] | None = None,
    max_tokens: int | None = None,
    logprobs: int | None = None,
    continuation: bool = False,
    sampling: Sampling | None = None,
    progress: Callable[[int, int], None] | None = None,
    keep_ids: bool = True,
) -> TextGeneration:
    """Generates text after ``tokens``, which are appended to what is in the session's cache.

    With ``logprobs`` each Piece lists its tokens with that many of the most probable ones (a pass over the
    vocabulary for each token). ``continuation``: the text goes on with the prompt's, as a completion does,
    and does not begin one, as an answer in a chat does; see Tokenizer.stream. Without ``keep_ids`` nothing
    grows with the text, however long it becomes.
    """
    stops = stop_list(stop)
    # Of the overloads of `generate`, mypy needs one or the other.
    generation: Generation[int] | Generation[TokenLogprobs]
    if logprobs is None:
        generation = session.generate(tokens, max_tokens=max_tokens, sampling=sampling, progress=progress)
    else:
        generation = session.generate(
            tokens, max_tokens=max_tokens, logprobs=logprobs, sampling=sampling, progress=progress
        )
    return TextGeneration(generation, tokenizer.stream(continuation=continuation), stops, keep_ids)
