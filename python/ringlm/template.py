"""Chat templates: from messages to the token ids that a model was trained on.

A template writes control tokens such as ``<|im_start|>``; a person may type the same characters.
ChatTemplate.render therefore keeps, for every character, who wrote it (see ringlm._provenance), and
Rendered.encode makes control tokens of the template's characters only. A conversation in which nobody typed
such text gets exactly the ids of the whole rendered string.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ringlm._messages import ROLES, altered, call_forms, checked, cleaned, merged
from ringlm.errors import InvalidArgument, TemplateError, TemplateWarning
from ringlm.rendered import Controls, Rendered, Segment

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
# Roles of which templates render all that they are to render.
_EVERYWHERE = frozenset({"assistant", "developer", "model", "system", "user"})
_Run = Callable[[dict[str, Any]], str]


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
        self._takes: dict[str, bool] = {}
        with self._env.metered(time.monotonic() + time_limit, BUDGET, time_limit):
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
        text can not hold become U+FFFD.

        A system message that the template refuses or ignores goes into the first user turn, with a
        TemplateWarning. An answer that is only ``tool_calls`` may have the content None. Raises
        InvalidArgument for malformed messages, TemplateError where the template fails, refuses the
        conversation, is stopped, or would drop tools, documents, calls, or messages of other roles.
        """
        rendered = self.render_noted(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            documents=documents,
            now=now,
            **variables,
        )
        for note in rendered.notes:
            warnings.warn(note, TemplateWarning, stacklevel=2)
        return rendered

    def render_noted(
        self,
        messages: Iterable[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        now: datetime | None = None,
        **variables: Any,
    ) -> Rendered:
        """As ``render``, but what that warns of is only in ``Rendered.notes``."""
        from ringlm._provenance import plain

        given = [checked(message, i, self._reads_parts) for i, message in enumerate(messages)]
        given, notes = self._with_roles_it_takes(given)
        data, size = cleaned({**variables, "messages": given, "tools": tools, "documents": documents})
        run = self._runner(add_generation_prompt, now, size)
        data["messages"], expected = self._in_a_form_it_takes(data, run)
        marked = run(_marked(data))
        if plain(marked) != plain(expected) and not self._warned:
            self._warned = True
            warnings.warn(
                f"chat template {self.name!r} reads the characters of a message in a way that can not be "
                "followed; typed text still never becomes a control token, but the wording may differ",
                RuntimeWarning,
                stacklevel=2,
            )
        return Rendered(marked, notes)

    def takes(self, role: str) -> bool:
        """Whether the template renders messages of that role, tried before a user message."""
        known = self._takes.get(role)
        if known is None:
            known = self._takes[role] = self._tries(role)
        return known

    def _tries(self, role: str) -> bool:
        user = {"role": "user", "content": "a"}
        run = self._runner(True, None, 1)
        texts = []
        for messages in (
            [user],
            [{"role": role, "content": "b"}, user],
            [{"role": role, "content": "c"}, user],
        ):
            try:
                texts.append(run({"messages": messages, "tools": None, "documents": None}))
            except TemplateError:
                texts.append("")
        # Where nothing renders it is not the role.
        return not texts[0] or texts[1] != texts[2]

    def _with_roles_it_takes(
        self, messages: list[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
        notes = []
        for role in ("developer", "system"):
            if not any(message["role"] == role for message in messages) or self.takes(role):
                continue
            if role == "developer" and self.takes("system"):  # its older name
                messages = [{**m, "role": "system"} if m["role"] == role else m for m in messages]
                continue
            messages = merged(messages, role)
            notes.append(
                f"chat template {self.name!r} does not take a {role} message; its text was put before the "
                "first user message, which the model may follow less"
            )
        return messages, tuple(notes)

    def _in_a_form_it_takes(self, data: dict[str, Any], run: _Run) -> tuple[list[dict[str, Any]], str]:
        """The messages in the first form of which nothing is lost, and their text. Raises TemplateError."""
        failed: list[TemplateError] = []
        lost: list[TemplateError] = []
        for messages in call_forms(data["messages"]):
            form = {**data, "messages": messages}
            try:
                text = run(form)
            except TemplateError as error:
                failed.append(error)
                continue
            dropped = _dropped(form, text, run)
            if not dropped:
                return messages, text
            lost.append(
                TemplateError(
                    f"chat template {self.name!r} does not know {' and '.join(dropped)} and would drop them: "
                    "leave them out, describe them in the system message, or take a model whose template does"
                )
            )
        # Of a call without text the second form has empty text, which every template can read.
        raise lost[0] if lost else failed[:2][-1]

    def _runner(self, add_generation_prompt: bool, now: datetime | None, size: int) -> _Run:
        """The template as a function of its variables. All calls together take at most ``time_limit``."""
        from ringlm._sandbox import strftime_now

        until = time.monotonic() + self.time_limit
        fixed = {
            **self._tokens,
            "add_generation_prompt": add_generation_prompt,
            "strftime_now": strftime_now(now or datetime.now()),
        }
        return lambda variables: self._run({**variables, **fixed}, size, until)

    @cached_property
    def _reads_parts(self) -> bool:
        """True if the template takes lists of content parts itself."""
        return any(
            sign in self.source
            for sign in ("content is string", "content'] is string", 'content"] is string')
        )

    def _run(self, variables: dict[str, Any], size: int, until: float) -> str:
        with self._env.metered(until, self._budget + 64 * size, self.time_limit):
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


def _dropped(data: dict[str, Any], text: str, run: _Run) -> list[str]:
    """What of tools, calls and results could be something else without another ``text``."""

    def same(**other: Any) -> bool:
        try:
            return run({**data, **other}) == text
        except TemplateError:
            return False

    dropped = [f"the {name}" for name in ("tools", "documents") if data[name] and same(**{name: None})]
    calls = altered(data["messages"], None)
    if calls and same(messages=calls):
        dropped.append("tool calls")
    for role in sorted({m["role"] for m in data["messages"]} - _EVERYWHERE):
        other = altered(data["messages"], role)
        if other and same(messages=other):
            dropped.append(f"messages of the role {role!r}")
    return dropped


def _template_line(traceback: TracebackType | None) -> int | None:
    """The innermost line of a template in a traceback through its compiled code."""
    line = None
    while traceback is not None:
        template = traceback.tb_frame.f_globals.get("__jinja_template__")
        if template is not None:
            line = template.get_corresponding_lineno(traceback.tb_lineno)
        traceback = traceback.tb_next
    return line


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
    names = metadata.get("tokenizer.chat_templates", None)
    for name in names if isinstance(names, list) else ():
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
        control = Controls.of(tokenizer).ids
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
