"""Completions in the shapes of the OpenAI API, with the parameter names that llama-cpp-python takes."""

from __future__ import annotations

import dataclasses
import json
import time
import uuid
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from ringlm.errors import InvalidArgument
from ringlm.sampling import Sampling, TokenLogprobs
from ringlm.text import Piece, generate_text, stop_list

if TYPE_CHECKING:
    from ringlm.model import Model

__all__ = ["Json", "create_chat_completion", "create_completion"]

Json = dict[str, Any]

_SAMPLING = {f.name: f.name for f in dataclasses.fields(Sampling)} | {"repeat_penalty": "repetition_penalty"}
_MAX_LOGPROBS = 20
# Parameters of the same calls elsewhere -> values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "suffix": (None, ""),
    "typical_p": (None, 1.0),
    "tfs_z": (None, 1.0),
    "mirostat_mode": (None, 0),
    "grammar": (None,),
    "logits_processor": (None, [], ()),
    "stopping_criteria": (None, [], ()),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto", "none"),
    "function_call": (None, "auto", "none"),
    "functions": (None, [], ()),
}
_IGNORED = frozenset({"model", "user", "mirostat_tau", "mirostat_eta"})


class _Options:
    """The options of a call. Every one must be taken; what is left over is an error."""

    def __init__(self, call: str, options: Mapping[str, Any]) -> None:
        self._call, self._left = call, dict(options)

    def take(self, name: str, default: Any = None) -> Any:
        return self._left.pop(name, default)

    def sampling(self) -> Sampling:
        given = {}
        for name in [name for name in self._left if name in _SAMPLING]:
            value = self._left.pop(name)
            if value is not None or name == "seed":
                given[_SAMPLING[name]] = value
        if given.get("logit_bias"):
            given["logit_bias"] = _bias(given["logit_bias"])
        return Sampling().replace(**given)

    def finish(self) -> None:
        for name, values in _NEUTRAL.items():
            if name in self._left and self._left[name] not in values:
                raise InvalidArgument(
                    f"{self._call}: {name}={self._left[name]!r} is not supported; leave it out"
                )
        unknown = sorted(self._left.keys() - _NEUTRAL.keys() - _IGNORED)
        if unknown:
            raise TypeError(f"{self._call} got unknown options: {', '.join(unknown)}")


@dataclasses.dataclass
class _Job:
    """One generation, from ids to pieces."""

    model: Model
    ids: list[int]
    max_tokens: int | None
    stop: list[str]
    sampling: Sampling
    logprobs: int | None
    continuation: bool  # raw text goes on with the prompt's; an answer begins a text
    # Set by run().
    cached: int = 0
    completion_tokens: int = 0
    finish_reason: str | None = None

    def run(self) -> Generator[Piece, None, None]:
        """Yields pieces with text or tokens."""
        with self.model.idle_session() as session:
            self.cached = session.reuse(self.ids)
            pieces = generate_text(
                session,
                self.model.tokenizer,
                self.ids[self.cached :],
                stop=self.stop,
                max_tokens=self.max_tokens,
                logprobs=self.logprobs,
                continuation=self.continuation,
                sampling=self.sampling,
            )
            try:
                yield from pieces
            finally:
                pieces.close()
            self.completion_tokens, self.finish_reason = len(pieces.ids), pieces.finish_reason

    def usage(self) -> Json:
        return {
            "prompt_tokens": len(self.ids),
            "completion_tokens": self.completion_tokens,
            "total_tokens": len(self.ids) + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


def _bias(given: Any) -> dict[int, float]:
    """Biases by token id; JSON has made strings of the ids."""
    try:
        return {int(token): float(bias) for token, bias in given.items()}
    except (AttributeError, TypeError, ValueError):
        raise InvalidArgument(
            f"logit_bias is {given!r:.80}; expected a mapping of token ids to numbers"
        ) from None


def _prompt_ids(model: Model, prompt: Any) -> list[int]:
    if isinstance(prompt, str):
        return model.tokenizer.encode(prompt)
    if not isinstance(prompt, Iterable) or isinstance(prompt, (bytes, bytearray)):
        raise InvalidArgument(f"the prompt is of type {type(prompt).__name__}; expected text or token ids")
    return list(prompt)


def _limit(max_tokens: Any) -> int | None:
    if max_tokens is None or (isinstance(max_tokens, int) and max_tokens <= 0):
        return None
    if not isinstance(max_tokens, int):
        raise InvalidArgument(f"max_tokens is {max_tokens!r}; expected an integer or None")
    return max_tokens


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_LOGPROBS:
        raise InvalidArgument(f"{name} is {value!r}; expected an integer from 0 to {_MAX_LOGPROBS}")
    return value


def _head(prefix: str, kind: str, model: Model) -> Json:
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": str(model.path),
    }


def _wants_usage(stream_options: Any) -> bool:
    return bool(isinstance(stream_options, Mapping) and stream_options.get("include_usage"))


# ---- raw text ----------------------------------------------------------------------------------------------


def create_completion(
    model: Model, prompt: str | Sequence[int], stream: bool, options: Mapping[str, Any]
) -> Json | Iterator[Json]:
    """See Model.create_completion."""
    given = _Options("create_completion", options)
    logprobs, echo = given.take("logprobs"), bool(given.take("echo", False))
    include_usage = _wants_usage(given.take("stream_options"))
    job = _Job(
        model,
        _prompt_ids(model, prompt),
        _limit(given.take("max_tokens", 16)),
        stop_list(given.take("stop")),
        given.sampling(),
        None if logprobs is None or logprobs is False else _count("logprobs", logprobs),
        continuation=True,
    )
    given.finish()
    if echo and job.logprobs is not None:
        raise InvalidArgument("echo together with logprobs is not supported; ask for one of them")
    if not job.ids:
        raise InvalidArgument(
            "the prompt is empty and the model has no BOS token; give at least one character"
        )
    echoed = (prompt if isinstance(prompt, str) else model.tokenizer.decode(job.ids)) if echo else ""
    head = _head("cmpl", "text_completion", model)
    if stream:
        return _stream_text(job, head, echoed, include_usage)
    return _whole_text(job, head, echoed)


def _text_choice(text: str, logprobs: Json | None, finish: str | None) -> Json:
    return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish}


def _stream_text(job: _Job, head: Json, echoed: str, include_usage: bool) -> Iterator[Json]:
    if echoed:
        yield head | {"choices": [_text_choice(echoed, None, None)]}
    with closing(job.run()) as pieces:
        for piece in pieces:
            logprobs = None if job.logprobs is None else _text_logprobs(job.model, piece, len(echoed))
            if piece.text or logprobs:
                yield head | {"choices": [_text_choice(piece.text, logprobs, None)]}
    yield head | {"choices": [_text_choice("", None, job.finish_reason)]}
    if include_usage:
        yield head | {"choices": [], "usage": job.usage()}


def _whole_text(job: _Job, head: Json, echoed: str) -> Json:
    text: list[str] = []
    logprobs: Json | None = None
    finish: str | None = None
    usage: Json = {}
    for chunk in _stream_text(job, head, echoed, True):
        usage = chunk.get("usage", usage)
        for choice in chunk["choices"]:
            text.append(choice["text"])
            finish = choice["finish_reason"] or finish
            if logprobs is None:
                logprobs = choice["logprobs"]
            elif choice["logprobs"]:
                for key, values in choice["logprobs"].items():
                    logprobs[key] += values
    return head | {"choices": [_text_choice("".join(text), logprobs, finish)], "usage": usage}


def _text_logprobs(model: Model, piece: Piece, offset: int) -> Json:
    def shown(token: int) -> str:
        raw: bytes = model.tokenizer.token_bytes(token)
        return raw.decode("utf-8", errors="replace")

    return {
        "tokens": [shown(token.id) for token in piece.tokens],
        "text_offset": [offset + piece.start for _ in piece.tokens],
        "token_logprobs": [token.logprob for token in piece.tokens],
        "top_logprobs": [{shown(i): p for i, p in token.top} for token in piece.tokens],
    }


# ---- conversations -----------------------------------------------------------------------------------------


def create_chat_completion(
    model: Model, messages: Iterable[Mapping[str, Any]], stream: bool, options: Mapping[str, Any]
) -> Json | Iterator[Json]:
    """See Model.create_chat_completion."""
    given = _Options("create_chat_completion", options)
    wanted, top = given.take("logprobs"), given.take("top_logprobs")
    include_usage = _wants_usage(given.take("stream_options"))
    template, variables = given.take("template"), given.take("template_variables") or {}
    tools = given.take("tools")
    limit = given.take("max_tokens")
    newer = given.take("max_completion_tokens")
    stop, sampling = stop_list(given.take("stop")), given.sampling()
    given.finish()
    if top is not None and not wanted:
        raise InvalidArgument("top_logprobs needs logprobs=True")
    if tools and template is None and "tool_use" in model.chat_templates:
        template = "tool_use"
    chosen = model.chat_template(template) if template is None or isinstance(template, str) else template
    rendered = chosen.render(_with_data_arguments(messages), tools=tools or None, **variables)
    job = _Job(
        model,
        rendered.encode(model.tokenizer),
        _limit(limit if newer is None else newer),
        stop,
        sampling,
        _count("top_logprobs", top or 0) if wanted else None,
        continuation=False,
    )
    if stream:
        return _stream_chat(job, _head("chatcmpl", "chat.completion.chunk", model), include_usage)
    return _whole_chat(job, _head("chatcmpl", "chat.completion", model))


def _with_data_arguments(messages: Iterable[Any]) -> list[Any]:
    """The API has the arguments of tool calls as JSON text; templates write them with ``tojson``."""

    def data(call: Any) -> Any:
        try:
            arguments = json.loads(call["function"]["arguments"])
        except (KeyError, TypeError, ValueError):
            return call
        return {**call, "function": {**call["function"], "arguments": arguments}}

    return [
        {**m, "tool_calls": [data(call) for call in m["tool_calls"]]}
        if isinstance(m, Mapping) and isinstance(m.get("tool_calls"), (list, tuple))
        else m
        for m in messages
    ]


def _stream_chat(job: _Job, head: Json, include_usage: bool) -> Iterator[Json]:
    def chunk(delta: Json, logprobs: Json | None = None, finish: str | None = None) -> Json:
        return head | {
            "choices": [{"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}]
        }

    yield chunk({"role": "assistant"})
    with closing(job.run()) as pieces:
        for piece in pieces:
            logprobs = None if job.logprobs is None else {"content": _chat_logprobs(job.model, piece.tokens)}
            if piece.text or logprobs:
                yield chunk({"content": piece.text}, logprobs)
    yield chunk({}, finish=job.finish_reason)
    if include_usage:
        yield head | {"choices": [], "usage": job.usage()}


def _whole_chat(job: _Job, head: Json) -> Json:
    content: list[str] = []
    logprobs: list[Json] = []
    finish: str | None = None
    usage: Json = {}
    for chunk in _stream_chat(job, head, True):
        usage = chunk.get("usage", usage)
        for choice in chunk["choices"]:
            content.append(choice["delta"].get("content", ""))
            logprobs += (choice["logprobs"] or {}).get("content", [])
            finish = choice["finish_reason"] or finish
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "".join(content)},
        "logprobs": None if job.logprobs is None else {"content": logprobs},
        "finish_reason": finish,
    }
    return head | {"choices": [choice], "usage": usage}


def _chat_logprobs(model: Model, tokens: list[TokenLogprobs]) -> list[Json]:
    def entry(token: int, logprob: float) -> Json:
        raw = model.tokenizer.token_bytes(token)
        return {"token": raw.decode("utf-8", errors="replace"), "logprob": logprob, "bytes": list(raw)}

    return [
        entry(token.id, token.logprob) | {"top_logprobs": [entry(i, p) for i, p in token.top]}
        for token in tokens
    ]
