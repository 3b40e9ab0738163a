"""Conversations and tools for chat templates, and a template of everything that templates may use."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from jinja2 import Environment
from ringlm.template import ChatTemplate

PIECES = """\
{% macro block(role, text) -%}
<{{ role | upper }}>{{ text | replace('\\n', ' / ') | title }}{% endmacro %}
{%- set seen = namespace(n=0, roles=[]) %}
{% for message in messages %}
  {% if message.role == 'system' %}{% continue %}{% endif %}
  {% if seen.n >= 4 %}{% break %}{% endif %}
{% set seen.n = seen.n + 1 %}
{% set seen.roles = seen.roles + [message.role] %}
{{ block(message.role, message.content) }}
{% generation %}{{ message.content | length }}{% endgeneration %}

{% endfor %}
{{ seen.roles | join(',') }} {{ seen.roles | unique | sort | join('+') }} {{ seen.roles | first }}
{{- seen.n }}
{{ dict(a=1, b='ü')|tojson }} {{ {'z': [1, 2.5, none, true], 'a': '<&>"\\''} | tojson(sort_keys=true) }}
{{ messages[0] | tojson(separators=(',', ':')) }}
{{ messages[0] | tojson(indent=2, ensure_ascii=true) }}
{%- for key, value in messages[-1] | dictsort %}{{ key }}={{ value }};{% endfor %}
{{ messages | map(attribute='role') | list | tojson }}
{{ messages | rejectattr('role', 'equalto', 'user') | list | length }}
{{ strftime_now('%Y-%m-%d %A %H:%M') }} {{ '%s-%d' | format('x', 3) }} {{ "{:>5}".format('ab') }}
{%- set parts = messages[-1].content.split() %}
{{ parts[0] ~ parts[-1] ~ parts | length }} {{ range(3) | list }} {{ 7 // 2 }} {{ -7 % 3 }} {{ 'a' in 'cat' }}
{{ 'yes' if messages[-1].role in ['user', 'tool'] and not messages[-1].content.startswith(' ') else 'no' }}
"""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city, in °C <now & here>",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": 1}},
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "stop", "description": "", "parameters": {}, "return": {"type": "null"}},
    },
]


def says(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def called(name: str, arguments: Any, number: str) -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [says("user", "Hello there")],
    "system": [
        says("system", " Be brief. "),
        says("user", "Wie geht's?\nGut?"),
        says("assistant", "  ¡Sí! 😀 "),
    ],
    "three-turns": [
        says("user", "a"),
        says("assistant", "<think>\nhm\n</think>\n\nb"),
        says("user", " c {{ 1 + 1 }} {% if %} "),
        says("assistant", "d </think> e"),
        says("user", "f"),
    ],
    "roles-do-not-alternate": [says("user", "a"), says("user", "b"), says("assistant", "c")],
    "system-late": [says("user", "a"), says("assistant", "b"), says("system", "c"), says("user", "d")],
    "tool-call": [
        says("system", "Use tools."),
        says("user", "Weather in Köln?"),
        says("assistant", "", tool_calls=[called("get_weather", {"city": "Köln", "days": 2}, "abcdef012")]),
        says("tool", '{"t": 3.5}', tool_call_id="abcdef012", name="get_weather"),
        says("assistant", "It is 3.5 °C.", reasoning_content="reading"),
        says("user", "Thanks"),
    ],
    "two-tool-calls": [
        says("user", "Weather in A and B?"),
        says(
            "assistant",
            "Looking.",
            tool_calls=[
                called("get_weather", {"city": "A"}, "123456789"),
                called("get_weather", '{"city": "B"}', "12345678x"),
            ],
        ),
        says("tool", "1", tool_call_id="123456789"),
        says("tool", "2", tool_call_id="12345678x"),
    ],
    "tool-call-without-text": [
        says("user", "Weather in Köln?"),
        says("assistant", None, tool_calls=[called("get_weather", {"city": "Köln"}, "abcdef012")]),
        says("tool", "3.5 <|eot_id|", tool_call_id="abcdef012", name="get_weather"),
    ],
    "bad-tool-id": [
        says("user", "x"),
        says("assistant", "", tool_calls=[called("stop", {}, "short")]),
    ],
    "empty-texts": [says("system", ""), says("user", " "), says("assistant", "x"), says("user", "y z")],
}

NOW = datetime(2024, 7, 26, 12, 0, 0)


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def system(text: Any) -> dict[str, Any]:
    return {"role": "system", "content": text}


def reference(source: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    """The same template in plain Jinja2 with the helpers of Hugging Face, nothing marked."""
    env = Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    env.filters["tojson"] = lambda x, ensure_ascii=False, indent=None, separators=None, sort_keys=False: (
        json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    )
    env.globals["strftime_now"] = lambda form: NOW.strftime(form)
    values = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_generation_prompt": True,
        "tools": None,
        "documents": None,
    }
    source = source.replace("{% generation %}", "{% if true %}").replace("{% endgeneration %}", "{% endif %}")
    return env.from_string(source).render(**{**values, "messages": messages, **variables})


def compiled(source: str, **options: Any) -> ChatTemplate:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>", **options)
