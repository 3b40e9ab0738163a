"""Messages before a template sees them: checked, cleaned, and in the form that the template can take."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ringlm.errors import InvalidArgument

__all__ = ["ROLES", "altered", "call_forms", "checked", "cleaned", "merged"]

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

Message = dict[str, Any]


def checked(message: Mapping[str, Any], index: int, keep_parts: bool) -> Message:
    """A copy. Content parts are joined unless ``keep_parts``. Raises InvalidArgument."""
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
        return {**message, "content": None}
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


def cleaned(value: Any) -> tuple[Any, int]:
    """A deep copy of JSON-like data without unusable characters, and how many characters it has."""
    from ringlm._provenance import clean

    if isinstance(value, str):
        return clean(value), len(value)
    if isinstance(value, Mapping):
        pairs = [(cleaned(k), cleaned(v)) for k, v in value.items()]
        return {k[0]: v[0] for k, v in pairs}, sum(k[1] + v[1] for k, v in pairs)
    if isinstance(value, (list, tuple)):
        items = [cleaned(item) for item in value]
        return [item[0] for item in items], sum(item[1] for item in items)
    if value is None or isinstance(value, (bool, int, float)):
        return value, 1
    raise InvalidArgument(f"a template variable holds a {type(value).__name__}; expected JSON-like data")


def merged(messages: Sequence[Message], role: str) -> list[Message]:
    """Without messages of ``role``: their texts go, with an empty line behind, before the next user
    message; into one of their own where none follows."""
    out: list[Message] = []
    waiting = ""
    for message in messages:
        if message["role"] == role:
            waiting += _text(message["content"]).strip() + "\n\n"
        elif message["role"] == "user" and waiting:
            out.append({**message, "content": _joined(waiting, message["content"])})
            waiting = ""
        else:
            out.append(message)
    return [*out, {"role": "user", "content": waiting.strip()}] if waiting else out


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content or ())


def _joined(before: str, content: Any) -> Any:
    return before + content if isinstance(content, str) else [{"type": "text", "text": before}, *content]


# ---- tool calls --------------------------------------------------------------------------------------------


def call_forms(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """The messages as they are, then in the other forms in which templates want tool calls: without any text
    the content is empty or None, and arguments are data or JSON text."""
    yield list(messages)
    if not any(message.get("tool_calls") for message in messages):
        return
    for arguments in (_same, _json_text):
        for empty in ("", None):
            yield [_in_form(message, empty, arguments) for message in messages]


def _in_form(message: Message, empty: str | None, arguments: Callable[[Any], Any]) -> Message:
    if not message.get("tool_calls"):
        return message
    calls = _functions(message["tool_calls"], lambda f: {**f, "arguments": arguments(f.get("arguments"))})
    return {**message, "content": message["content"] or empty, "tool_calls": calls}


def _same(value: Any) -> Any:
    return value


def _json_text(value: Any) -> Any:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _functions(calls: Any, change: Callable[[Any], Any]) -> Any:
    """Tool calls with their functions changed; what is no tool call stays."""
    if not isinstance(calls, (list, tuple)):
        return calls
    return [
        {**call, "function": change(call["function"])}
        if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping)
        else call
        for call in calls
    ]


def altered(messages: Sequence[Message], role: str | None) -> list[Message] | None:
    """The messages with other texts in that role, or, for None, with other names of called functions: a
    template that renders both alike has dropped them. None if there is nothing to alter."""
    if role is None:
        changed = [
            {**m, "tool_calls": _functions(m["tool_calls"], lambda f: {**f, "name": f"{f.get('name')}."})}
            if m.get("tool_calls")
            else m
            for m in messages
        ]
    else:
        changed = [
            {**m, "content": m["content"] + "."} if m["role"] == role and isinstance(m["content"], str) else m
            for m in messages
        ]
    return None if changed == list(messages) else changed
