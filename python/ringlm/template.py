"""Chat templates: from messages to the token ids that a model was trained on.

A template writes control tokens such as ``<|im_start|>``; a person may type the same characters.
ChatTemplate.render therefore keeps, for every character, who wrote it (see ringlm._provenance), and
Rendered.encode makes control tokens of the template's characters only. A conversation in which nobody typed
such text gets exactly the ids of the whole rendered string.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

from ringlm.errors import InvalidArgument, TemplateError

if TYPE_CHECKING:
    from ringlm.tokenizer import Tokenizer

__all__ = [
    "CHATML",
    "GEMMA",
    "LLAMA3",
    "PLAIN",
    "ROLES",
    "ChatTemplate",
    "Rendered",
    "Segment",
    "choose_template",
    "named_templates",
]

#: Roles of messages. Templates build control tokens out of them (``<|user|>``), so no others are taken.
ROLES = frozenset(
    {
        "assistant",
        "developer",
        "function",
        "ipython",
        "model",
        "system",
        "tool",
        "tool_call",
        "tool_response",
        "user",
    }
)

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""

LLAMA3 = """\
{{ bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
{{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""

GEMMA = """\
{{ bos_token }}
{%- set ns = namespace(system='') %}
{%- for message in messages %}
{%- if message['role'] in ['system', 'developer'] %}
{%- set ns.system = ns.system + message['content'] | trim + '\\n\\n' %}
{%- else %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{- '<start_of_turn>' + role + '\\n' + ns.system + message['content'] | trim + '<end_of_turn>\\n' }}
{%- set ns.system = '' %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{% endif %}
"""

PLAIN = """\
{%- for message in messages %}
{%- if message['role'] != 'system' %}{{- message['role'] | capitalize + ': ' }}{% endif %}
{{- message['content'] | trim + '\\n\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'Assistant:' }}{% endif %}
"""

#: A token that only the vocabulary of a family has -> (name of the format, template).
_BY_TOKEN = {
    "<|im_start|>": ("ChatML", CHATML),
    "<start_of_turn>": ("Gemma", GEMMA),
    "<|start_header_id|>": ("Llama 3", LLAMA3),
}

_MAX_SOURCE = 2**20


@dataclass(frozen=True)
class Segment:
    """A stretch of rendered text that the template wrote, or that came with the messages."""

    text: str
    is_template: bool


@dataclass(frozen=True)
class Rendered:
    """A rendered conversation. ``marked`` is its text with the marks of ringlm._provenance."""

    marked: str

    @cached_property
    def text(self) -> str:
        from ringlm._provenance import plain

        return plain(self.marked)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        from ringlm._provenance import runs

        return tuple(Segment(self.text[a:b], not marked) for a, b, marked in runs(self.marked))

    def encode(self, tokenizer: Tokenizer, *, start: int = 0) -> list[int]:
        """Token ids of the text from character ``start``, with BOS in front exactly once if the model wants
        it.

        If no control token's text touches a message, these are the ids of the whole text. Otherwise the text
        is cut at the template's own control tokens, and everything between them is encoded as ordinary text.
        """
        text, control = self.text[start:], _Controls.of(tokenizer)
        places = control.find(text)
        from ringlm._provenance import is_marked

        ids: list[int]
        trusted = [p for p in places if not is_marked(self.marked[start + p[0] : start + p[1]])]
        if len(trusted) == len(places):
            ids = tokenizer.encode(text, add_special=False, parse_special=True)
        else:
            ids, at = [], 0
            for begin, end, token in trusted:  # the first to begin wins, the longest of those
                if begin < at:
                    continue
                if at < begin:
                    ids += tokenizer.encode(text[at:begin], add_special=False, parse_special=False)
                ids.append(token)
                at = end
            if at < len(text):
                ids += tokenizer.encode(text[at:], add_special=False, parse_special=False)
        bos = tokenizer.bos_id
        if start == 0 and tokenizer.add_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def encode_after(self, prefix: str, tokenizer: Tokenizer) -> list[int] | None:
        """Token ids of what follows ``prefix`` (marked text), or None if they depend on it: where the text
        does not begin with it, or does not go on with a control token of the template."""
        from ringlm._provenance import is_marked

        if not self.marked.startswith(prefix):
            return None
        end = _Controls.of(tokenizer).at(self.text, len(prefix))
        if end is None or is_marked(self.marked[len(prefix) : end]):
            return None
        return self.encode(tokenizer, start=len(prefix))


class _Controls:
    """The texts of a vocabulary's control tokens, and where they occur."""

    _known: ClassVar[WeakKeyDictionary[Any, _Controls]] = WeakKeyDictionary()

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.ids = ids
        self._lengths: dict[str, list[int]] = {}  # by the first two characters, the longest first
        for text in sorted(ids, key=len, reverse=True):
            lengths = self._lengths.setdefault(text[:2], [])
            if len(text) not in lengths:
                lengths.append(len(text))

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> _Controls:
        known = cls._known.get(tokenizer)
        if known is None:
            texts = (
                (tokenizer.token_text(i), i) for i in range(tokenizer.n_vocab) if tokenizer.is_control(i)
            )
            known = cls._known[tokenizer] = cls({text: i for text, i in texts if text})
        return known

    def find(self, text: str) -> list[tuple[int, int, int]]:
        """Every ``(start, end, id)``, overlapping ones too, by start and the longest first."""
        found = []
        for begin in self._lengths:
            at = text.find(begin)
            while at >= 0:
                for n in self._lengths[begin]:
                    token = self.ids.get(text[at : at + n])
                    if token is not None and at + n <= len(text):
                        found.append((at, at + n, token))
                at = text.find(begin, at + 1)
        return sorted(found, key=lambda place: (place[0], -place[1]))

    def at(self, text: str, start: int) -> int | None:
        """Where the longest control token that begins at ``start`` ends."""
        for begin in (text[start : start + 2], text[start : start + 1]):
            for n in self._lengths.get(begin, ()):
                if text[start : start + n] in self.ids and start + n <= len(text):
                    return start + n
        return None


class ChatTemplate:
    """A compiled chat template. Rendering is safe in any thread, and from several at once.

    ``source`` is Jinja2 as Hugging Face tokenizers use it: blocks trimmed, loop controls,
    ``raise_exception``, ``strftime_now``, ``tojson``. It runs in the immutable sandbox for at most
    ``time_limit`` seconds; it is stopped from within (see ringlm._sandbox), so no thread stays behind.
    ``bos_token`` and ``eos_token`` are what it may write under these names. Raises TemplateError with the
    template's line.
    """

    def __init__(
        self,
        source: str,
        *,
        name: str = "default",
        bos_token: str = "",
        eos_token: str = "",
        time_limit: float = 5.0,
    ) -> None:
        from ringlm._sandbox import BUDGET, Sandbox

        if not time_limit > 0:
            raise InvalidArgument(f"time_limit is {time_limit!r} s; it must be positive")
        if len(source) > _MAX_SOURCE:
            raise TemplateError(
                f"chat template {name!r}: {len(source)} characters; at most {_MAX_SOURCE} are accepted"
            )
        self.name, self.source, self.time_limit = name, source, time_limit
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._env, self._budget = Sandbox(), BUDGET
        self._warned = False
        with self._env.metered(time_limit, BUDGET):
            try:
                self._template = self._env.from_string(source)
            except Exception as error:
                raise self._error(error) from None

    def __repr__(self) -> str:
        return f"ChatTemplate({self.name!r}, {len(self.source)} characters)"

    def render(
        self,
        messages: Iterable[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        now: datetime | None = None,
        **variables: Any,
    ) -> Rendered:
        """Renders messages of the form ``{"role": ..., "content": ...}``.

        Content may also be a list of ``{"type": "text", "text": ...}``. ``variables`` are passed on to the
        template, as ``enable_thinking=False``; ``now`` is what ``strftime_now`` sees. Characters that UTF-8
        text can not hold become U+FFFD. Raises InvalidArgument for malformed messages, TemplateError where
        the template fails, refuses the conversation or is stopped.
        """
        from ringlm._provenance import plain
        from ringlm._sandbox import strftime_now

        data = {
            **variables,
            "messages": [_checked(message, i, self._reads_parts) for i, message in enumerate(messages)],
            "tools": tools,
            "documents": documents,
        }
        data, size = _cleaned(data)
        fixed = {
            **self._tokens,
            "add_generation_prompt": add_generation_prompt,
            "strftime_now": strftime_now(now or datetime.now()),
        }
        expected = self._run({**data, **fixed}, size)
        marked = self._run({**_marked(data), **fixed}, size)
        if plain(marked) != plain(expected) and not self._warned:
            self._warned = True
            warnings.warn(
                f"chat template {self.name!r} reads the characters of a message in a way that can not be "
                "followed; typed text still never becomes a control token, but the wording may differ",
                RuntimeWarning,
                stacklevel=2,
            )
        return Rendered(marked)

    @cached_property
    def _reads_parts(self) -> bool:
        """True if the template takes lists of content parts itself."""
        return any(
            sign in self.source
            for sign in ("content is string", "content'] is string", 'content"] is string')
        )

    def _run(self, variables: dict[str, Any], size: int) -> str:
        with self._env.metered(self.time_limit, self._budget + 64 * size):
            try:
                context = self._template.new_context(variables)
                return self._env.concat(self._template.root_render_func(context))
            except Exception as error:
                raise self._error(error) from None

    def _error(self, error: Exception) -> TemplateError:
        line = getattr(error, "lineno", None) or _template_line(error.__traceback__)
        where = f"chat template {self.name!r}" + (f", line {line}" if line else "")
        if isinstance(error, RecursionError):
            return TemplateError(f"{where}: nested too deeply")
        return TemplateError(f"{where}: {str(error) or type(error).__name__}")


def _template_line(traceback: TracebackType | None) -> int | None:
    """The innermost line of a template in a traceback through its compiled code."""
    line = None
    while traceback is not None:
        template = traceback.tb_frame.f_globals.get("__jinja_template__")
        if template is not None:
            line = template.get_corresponding_lineno(traceback.tb_lineno)
        traceback = traceback.tb_next
    return line


# ---- messages ----------------------------------------------------------------------------------------------


def _checked(message: Mapping[str, Any], index: int, keep_parts: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidArgument(
            f"messages[{index}] is a {type(message).__name__}; expected a mapping with role and content"
        )
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidArgument(
            f"messages[{index}] has the role {role!r}; expected one of {', '.join(sorted(ROLES))}"
        )
    if isinstance(content, (list, tuple)):
        parts = [_part_text(part, index) for part in content]
        return dict(message) if keep_parts else {**message, "content": "".join(parts)}
    if content is None and (message.get("tool_calls") or message.get("function_call")):
        return {**message, "content": ""}
    if not isinstance(content, str):
        raise InvalidArgument(
            f"messages[{index}] has content of type {type(content).__name__}; expected a string"
        )
    return dict(message)


def _part_text(part: Any, index: int) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise InvalidArgument(
            f"messages[{index}] has a content part of type {kind!r}; only 'text' is supported"
        )
    return text


def _cleaned(value: Any) -> tuple[Any, int]:
    """A deep copy of JSON-like data without unusable characters, and how many characters it has."""
    from ringlm._provenance import clean

    if isinstance(value, str):
        return clean(value), len(value)
    if isinstance(value, Mapping):
        pairs = [(_cleaned(k), _cleaned(v)) for k, v in value.items()]
        return {k[0]: v[0] for k, v in pairs}, sum(k[1] + v[1] for k, v in pairs)
    if isinstance(value, (list, tuple)):
        items = [_cleaned(item) for item in value]
        return [item[0] for item in items], sum(item[1] for item in items)
    if value is None or isinstance(value, (bool, int, float)):
        return value, 1
    raise InvalidArgument(f"a template variable holds a {type(value).__name__}; expected JSON-like data")


def _marked(data: dict[str, Any]) -> dict[str, Any]:
    """All text marked, but the names of variables and the roles, which are of a known set."""
    from ringlm._provenance import Record, mark, mark_data

    marked: dict[str, Any] = {name: mark_data(value) for name, value in data.items() if name != "messages"}
    marked["messages"] = [
        Record({mark(k): v if k == "role" else mark_data(v) for k, v in message.items()})
        for message in data["messages"]
    ]
    return marked


# ---- which template ----------------------------------------------------------------------------------------


def named_templates(metadata: Any) -> dict[str, str]:
    """All templates of a model file, the unnamed one as ``"default"``. ``metadata`` has ``get(key,
    default)``."""
    found = {}
    default = metadata.get("tokenizer.chat_template", None)
    if isinstance(default, str):
        found["default"] = default
    for name in metadata.get("tokenizer.chat_templates", None) or ():
        source = metadata.get(f"tokenizer.chat_template.{name}", None)
        if isinstance(source, str):
            found[str(name)] = source
    return found


def choose_template(
    templates: Mapping[str, str], tokenizer: Tokenizer, name: str | None = None, *, time_limit: float = 5.0
) -> ChatTemplate:
    """The template of that name, or the default one, compiled.

    Without any, the format is guessed from the vocabulary, with a warning: ChatML where it has
    ``<|im_start|>``, Gemma's turns for ``<start_of_turn>``, Llama 3's headers for ``<|start_header_id|>``,
    else plain ``User:``/``Assistant:`` text. Raises InvalidArgument for a name that is not there.
    """
    if name is not None and name not in templates:
        known = ", ".join(sorted(templates)) or "none"
        raise InvalidArgument(f"the model has no chat template {name!r}; it has: {known}")
    chosen = name or ("default" if "default" in templates else next(iter(templates), None))
    if chosen is not None:
        source = templates[chosen]
    else:
        control = _Controls.of(tokenizer).ids
        chosen, source = next(
            (found for token, found in _BY_TOKEN.items() if token in control), ("plain text", PLAIN)
        )
        warnings.warn(
            f"the model has no chat template; its vocabulary suggests the {chosen} format. "
            "If it is a base model, its answers may be poor and may not end by themselves",
            UserWarning,
            stacklevel=2,
        )
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    return ChatTemplate(
        source,
        name=chosen,
        bos_token="" if bos is None else tokenizer.token_text(bos),
        eos_token="" if eos is None else tokenizer.token_text(eos),
        time_limit=time_limit,
    )
