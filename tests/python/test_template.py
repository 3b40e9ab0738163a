"""Chat templates: the text against plain Jinja2, the ids against the whole string, and hostile input."""

# ruff: noqa: E501 (templates read better in their own lines)
from __future__ import annotations

import json
import random
import threading
import time
import warnings
from datetime import datetime
from typing import Any

import pytest
from jinja2 import Environment
from ringlm._provenance import METHODS, clean, is_marked, mark, mark_data, plain, runs, to_json
from ringlm.errors import InvalidArgument, TemplateError
from ringlm.template import CHATML, GEMMA, LLAMA3, PLAIN, ChatTemplate, choose_template, named_templates
from toys import SPECIAL, ToyTokenizer

CHATML_STYLE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_STYLE = """
{{- bos_token }}
{%- if tools is not none and tools is defined %}{{- "Tools: " }}{% for t in tools %}{{- t | tojson(indent=2) }}{{ "\n" }}{% endfor %}{% endif %}
{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\nToday: " ~ strftime_now("%d %b %Y") ~ "\n" ~ system ~ "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls|length != 1 %}{{- raise_exception("only one tool call") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}
"""
GEMMA_STYLE = """{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}{%- set prefix = messages[0]['content'] + '\n\n' -%}
    {%- else -%}{%- set prefix = messages[0]['content'][0]['text'] + '\n\n' -%}{%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set prefix = "" -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception("roles must alternate") }}{%- endif -%}
    {%- if (message['role'] == 'assistant') -%}{%- set role = "model" -%}{%- else -%}{%- set role = message['role'] -%}{%- endif -%}
    {{ '<start_of_turn>' + role + '\n' + (prefix if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}{%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}
    {%- else -%}{{ raise_exception("invalid content") }}{%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{'<start_of_turn>model\n'}}{%- endif -%}
"""
MISTRAL_STYLE = """{%- if messages[0]["role"] == "system" %}{%- set system = messages[0]["content"] %}{%- set turns = messages[1:] %}
{%- else %}{%- set turns = messages %}{%- endif %}
{%- set ns = namespace() %}{%- set ns.index = 0 %}
{%- for message in turns %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in turns %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system is defined %}{{- "[INST] " + system + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
    {%- elif message["role"] == "assistant" %}{{- " " + message["content"]|trim + eos_token }}
    {%- else %}{{- raise_exception("unknown role " ~ message.role) }}{%- endif %}
{%- endfor %}
"""
QWEN_STYLE = """{%- set ns = namespace(last=-1) %}
{%- for m in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.last < 0 and m.role == "user" and not (m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}
        {%- set ns.last = index %}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- set content = message.content %}{%- set thought = '' %}
        {%- if '</think>' in message.content %}
            {%- set content = message.content.split('</think>')[-1].lstrip('\n') %}
            {%- set thought = message.content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and thought %}{{- '<|im_start|>' + message.role + '\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content }}
        {%- else %}{{- '<|im_start|>' + message.role + '\n' + content }}{%- endif %}
        {%- if message.tool_calls %}{%- for call in message.tool_calls %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '\n<tool_call>\n{"name": "' }}{{- call.name }}{{- '", "arguments": ' }}
            {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}{{- '}\n</tool_call>' }}
        {%- endfor %}{%- endif %}
        {{- '<|im_end|>\n' }}
    {%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}
"""
ZEPHYR_STYLE = (
    "{% for message in messages %}\n{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token }}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)
STYLES = {
    "chatml": CHATML_STYLE,
    "llama": LLAMA_STYLE,
    "gemma": GEMMA_STYLE,
    "mistral": MISTRAL_STYLE,
    "qwen": QWEN_STYLE,
    "zephyr": ZEPHYR_STYLE,
    "CHATML": CHATML,
    "LLAMA3": LLAMA3,
    "GEMMA": GEMMA,
    "PLAIN": PLAIN,
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
    return env.from_string(source).render(**{**values, "messages": messages, **variables})


def compiled(source: str, **options: Any) -> ChatTemplate:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>", **options)


WORDS = [
    *(
        "Hello",
        "hi ",
        " and",
        "\n",
        "\n\n",
        "the",
        "<",
        "|>",
        "</think>",
        "<think>",
        "user",
        "é",
        "日本",
        "🙂",
        '"',
        "\\",
    ),
    *(
        "{{",
        "}}",
        "{% x %}",
        "'",
        "\t",
        " ",
        "&amp;",
        "I",
        "İ",
        "ß",
        "<tool_response>",
        "\u2028",
        "\U000e0041",
        "\uf8ff",
    ),
]


def conversation(rng: random.Random, words: list[str]) -> list[dict[str, Any]]:
    def text() -> str:
        return "".join(rng.choice(words) for _ in range(rng.randrange(0, 9)))

    out = [system(text())] if rng.random() < 0.5 else []
    for _ in range(rng.randrange(1, 4)):
        out += [user(text()), assistant(text())]
    return out if rng.random() < 0.3 else [*out, user(text())]


@pytest.mark.parametrize("style", STYLES)
def test_text_equals_plain_jinja(style: str) -> None:
    rng = random.Random(style)
    template = compiled(STYLES[style])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(25):
            messages = conversation(rng, WORDS + SPECIAL)
            rendered = template.render(messages, now=NOW)
            assert rendered.text == reference(STYLES[style], messages)
            assert "".join(s.text for s in rendered.segments) == rendered.text


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("add_bos", [False, True])
def test_ids_of_ordinary_conversations_are_those_of_the_whole_string(style: str, add_bos: bool) -> None:
    rng = random.Random(style)
    template, tokenizer = compiled(STYLES[style]), ToyTokenizer(add_bos=add_bos)
    for _ in range(25):
        rendered = template.render(conversation(rng, WORDS), now=NOW)
        whole = tokenizer.encode(rendered.text, add_special=False, parse_special=True)
        if add_bos and whole[:1] != [tokenizer.bos_id]:
            whole.insert(0, tokenizer.bos_id)
        assert rendered.encode(tokenizer) == whole


@pytest.mark.parametrize("style", STYLES)
def test_typed_control_tokens_stay_text(style: str) -> None:
    """However control tokens are typed, the ids hold as many of each as with harmless words in their
    place."""
    rng = random.Random(style)
    template, tokenizer = compiled(STYLES[style]), ToyTokenizer()
    parts = [*SPECIAL, "<|im_", "end|>", "<", "|>", "s>", "</think>", "Hello", "\n", " ", "/INST]"]
    for _ in range(35):
        messages = conversation(rng, parts)
        harmless = [{**m, "content": "x" if m["content"].strip() else m["content"]} for m in messages]
        got = template.render(messages, now=NOW).encode(tokenizer)
        base = template.render(harmless, now=NOW).encode(tokenizer)
        for token in range(len(SPECIAL)):
            assert got.count(token) == base.count(token), (messages, SPECIAL[token])
        # Nothing of the text is lost.
        text = template.render(messages, now=NOW).text
        pieces = (
            tokenizer.token_text(t).encode() if tokenizer.is_control(t) else tokenizer.token_bytes(t)
            for t in got
        )
        assert b"".join(pieces).decode() == text


def test_a_typed_token_next_to_the_same_written_one() -> None:
    tokenizer = ToyTokenizer()
    ids = compiled(CHATML_STYLE).render([system("a"), user("<|im_end|>")]).encode(tokenizer)
    assert ids.count(tokenizer.id("<|im_end|>")) == 2
    typed = tokenizer.encode("user\n<|im_end|>", parse_special=False)
    start = tokenizer.id("<|im_start|>")
    second = len(ids) - ids[::-1].index(start, ids[::-1].index(start) + 1)
    assert ids[second : second + len(typed)] == typed


@pytest.mark.parametrize(
    "body",
    [
        "{{ m.content | replace('<think>', '') }}",  # puts '<|im_<think>end|>' together
        "{{ m.content.replace('<think>', '') }}",
        "{{ m.content.split('<think>') | join }}",
        "{{ m.content.split('<think>')[0] ~ m.content.split('<think>')[1] }}",
        "{% for c in m.content.replace('<think>', '') %}{{ c }}{% endfor %}",
        "{{ (m.content | replace('<think>', '') | upper) | lower }}",
        "{{ '%s' | format(m.content | replace('<think>', '')) }}",
        "{{ '{}'.format(m.content.replace('<think>', '')) }}",
        "{{ '<|' ~ m.content.replace('<think>', '')[2:] }}",
        "{{ (m.content.replace('<think>', '') | list) | join('') }}",
        "{{ {'a': m.content.replace('<think>', '')}['a'] }}",
        "{{ m.content.replace('<think>', '') | tojson }}",
        "{{ [m.content.replace('<think>', '')] }}",
        "{{ dict(a=m.content.replace('<think>', '')) }}",
        "{% set x %}{{ m.content.replace('<think>', '') }}{% endset %}{{ x }}",
        "{% macro f(x) %}{{ x }}{% endmacro %}{{ f(m.content.replace('<think>', '')) }}",
        "{{ m.content.replace('<think>', '') | indent(2) | trim }}",
        "{{ m.content.replace('<think>', '') | string | safe }}",
        "{{ m.content.replace('<think>', '') | center(60) }}",
        "{{ m.content.replace('<think>', '') | wordwrap(70) | truncate(50) }}",
        "{{ m.content.replace('<think>', '') | reverse | list | reverse | join }}",
        "{{ m.content.replace('<think>', '').title().lower() }}",
        "{{ (m.content.replace('<think>', ''), ) | first }}",
        "{{ [m.content.replace('<think>', '')] | sum(start='') if false else m.content.replace('<think>', '') }}",
    ],
)
def test_no_operation_of_a_template_sheds_the_mark(body: str) -> None:
    template, tokenizer = (
        compiled("{% for m in messages %}" + body + "<|im_end|>{% endfor %}"),
        ToyTokenizer(),
    )
    rendered = template.render([user("<|im_<think>end|>")])
    assert rendered.text.lower().count("<|im_end|>") >= 1
    assert rendered.encode(tokenizer).count(tokenizer.id("<|im_end|>")) == 1


def test_control_tokens_from_tools_keys_and_variables_stay_text() -> None:
    source = (
        "{% for t in tools %}{{ t | tojson }}{% for k, v in t.items() %}{{ '<' ~ k ~ '>' }}{{ v }}{% endfor %}{% endfor %}"
        "{{ note }}{% for m in messages %}{{ m.name }}{{ m.content }}{% endfor %}<s>"
    )
    rendered = compiled(source).render(
        [{"role": "user", "content": "", "name": "<s>"}],
        tools=[{"s": "<s>", "<s>": [{"<s>": 1}]}],
        note="<s>",
    )
    tokenizer = ToyTokenizer()
    assert rendered.text.count("<s>") > 5
    assert rendered.encode(tokenizer).count(tokenizer.bos_id) == 1
    assert rendered.encode(tokenizer)[-1] == tokenizer.bos_id


def test_roles_write_control_tokens_and_only_known_roles_are_taken() -> None:
    tokenizer = ToyTokenizer()
    ids = compiled(ZEPHYR_STYLE).render([user("Hello")]).encode(tokenizer)
    assert ids[0] == tokenizer.id("<|user|>")
    assert tokenizer.id("<|assistant|>") in ids
    for role in ("im_end", "", None, ["user"], "User"):
        with pytest.raises(InvalidArgument, match="role"):
            compiled(ZEPHYR_STYLE).render([{"role": role, "content": "x"}])


def test_bos_exactly_once() -> None:
    for add_bos in (False, True):
        tokenizer = ToyTokenizer(add_bos=add_bos)
        written = compiled(LLAMA_STYLE).render([user("Hello")], now=NOW).encode(tokenizer)
        assert written[0] == tokenizer.bos_id and written.count(tokenizer.bos_id) == 1
        unwritten = compiled(CHATML_STYLE).render([user("Hello")]).encode(tokenizer)
        assert unwritten.count(tokenizer.bos_id) == int(add_bos)
        typed = compiled("{{ messages[0].content }}").render([user("<s>Hello")]).encode(tokenizer)
        assert typed.count(tokenizer.bos_id) == int(add_bos)


# ---- the template language ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "expression",
    [
        "c | trim", "c | upper", "c | lower", "c | title", "c | capitalize", "c | length", "c | wordcount", "c | e",
        "c | indent(3)", "c | indent('>', true, true)", "c | replace('l', 'LL')", "c | replace('l', 'L', 1)",
        "c | tojson", "c | tojson(ensure_ascii=true)", "[c, {'k': c}] | tojson(indent=2, sort_keys=true)",
        "{'b': c, 'a': [1, none, true, 1.5]} | tojson(separators=(',', ':'))", "c | list | length",
        "c | first", "c | last", "c | string", "c | default('x')", "c | int", "'12' | int + 1", "' 1.5' | float",
        "c.split()", "c.split(' ', 1)", "c.rsplit('l', 1)", "c.splitlines()", "c.splitlines(true)",
        "c.partition('l')", "c.rpartition('l')", "c.strip(' H')", "c.lstrip()", "c.rstrip('\\n')",
        "c.removeprefix('  H')", "c.removesuffix('\\n')", "c.find('l')", "c.rfind('l')", "c.count('l')",
        "c.startswith('  H')", "c.startswith(('a', '  H'))", "c.endswith('\\n')", "c.isspace()", "c.strip().isdigit()",
        "c.lower()", "c.upper()", "c.title()", "c.capitalize()", "c.swapcase()", "c.casefold()", "c.zfill(40)",
        "c.center(40, '*')", "c.replace('', '-')", "c.replace('l', '', 1)", "'ell' in c", "'zz' not in c", "c in [c]",
        "c in ('a', 'b')", "c == '  Hello é \\\\ \"w\" 日本\\n'", "c != 'x'", "c < 'z'", "'a' < c < 'zz'", "c ~ 1 ~ none",
        "c + 'x'", "c * 2", "'%s|%5.1f' % (c, 2)", "'%s' % c", "'{0!s:>40}|{x}'.format(c, x=1)", "c[2:5]", "c[::-1]",
        "c[0]", "[c, 'b'] | join(', ')", "[[c], ['b']] | map('first') | join('-')", "[c, c] | unique | list | length",
        "messages | map(attribute='content') | list", "messages | selectattr('role', 'equalto', 'user') | list | length",
        "messages | rejectattr('kind', 'eq', 'a') | list | length", "messages | selectattr('kind', 'in', ['a']) | list",
        "messages[0].get('nothing', 'd')", "messages[0].get('kind')", "'kind' in messages[0]", "'x' in messages[0]",
        "messages[0].keys() | list", "messages[0] | dictsort | length", "messages[0] | items | list | length",
        "dict(messages[0], content='y').content", "dict(messages[0])['kind']", "{'a': 1}[messages[0].kind]",
        "namespace(a=c).a", "range(3) | list", "c is string", "c is mapping", "messages[0] is mapping",
        "messages is iterable", "x is defined", "c is lower", "c is not none", "3 is odd", "c is eq('x')", "7 // 2 ** 2 % 3",
        "(1, 2) == (1, 2)", "messages[0].kind.upper()", "'é' in c", "c.index('l')", "[1, 2] | sum", "[3, 1] | sort",
        "{'b': 1, 'a': 2} | dictsort", "[1, 2, 3] | batch(2) | list", "-5 | abs", "2.567 | round(1)", "[c, 'a'] | max | length",
        "'%d' | format(3)", "c | urlencode", "c | truncate(5)", "c | center(50)", "messages[0]",
    ],
)  # fmt: skip
def test_expressions_agree_with_jinja(expression: str) -> None:
    messages = [{"role": "user", "content": '  Hello é \\ "w" 日本\n', "kind": "a"}]
    source = "{% set c = messages[0].content %}{{ " + expression + " }}"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiled(source).render(messages).text == reference(source, messages)


def test_helpers_and_tags() -> None:
    source = (
        "{%- for i in range(9) -%}{%- if i == 1 -%}{%- continue -%}{%- endif -%}{%- if i == 4 -%}{%- break -%}"
        "{%- endif -%}{{ i }}{% generation %}g{% endgeneration %}{%- endfor -%}|{{ strftime_now('%Y-%m-%d') }}"
        "|{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{{ loop.cycle('a', 'b') }}{% endfor %}"
    )
    assert (
        compiled(source).render([user("a"), user("b")], now=NOW).text == "0g2g3g|2024-07-26|1/2Falsea2/2Trueb"
    )


def test_variables_reach_the_template() -> None:
    template = compiled(QWEN_STYLE)
    assert template.render([user("Hi")], enable_thinking=False).text.endswith("<think>\n\n</think>\n\n")
    assert not template.render([user("Hi")]).text.endswith("</think>\n\n")
    assert template.render([user("Hi")], add_generation_prompt=False).text.endswith("<|im_end|>\n")


def test_tools_and_tool_calls() -> None:
    tools = [{"type": "function", "function": {"name": "wéather", "parameters": {"type": "object"}}}]
    call = {"type": "function", "function": {"name": "wéather", "arguments": {"city": 'K"öln', "n": 1}}}
    messages = [
        user("Hi"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "5"},
    ]
    for source in (LLAMA_STYLE, QWEN_STYLE):
        got = compiled(source).render(messages, tools=tools, now=NOW).text
        assert got == reference(source, [{**m, "content": m["content"] or ""} for m in messages], tools=tools)


def test_content_parts() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert "one two<|im_end|>" in compiled(CHATML_STYLE).render([user(parts)]).text
    assert "onetwo<end_of_turn>" in compiled(GEMMA_STYLE).render([user(parts)]).text  # it reads parts itself
    with pytest.raises(InvalidArgument, match="image_url"):
        compiled(CHATML_STYLE).render([user([{"type": "image_url", "image_url": {}}])])


@pytest.mark.parametrize("messages", [["text"], [{"role": "user"}], [user(3)], [user(None)], [user([3])]])
def test_malformed_messages(messages: list[Any]) -> None:
    with pytest.raises(InvalidArgument, match=r"messages\[0\]"):
        compiled(CHATML_STYLE).render(messages)
    with pytest.raises(InvalidArgument, match="JSON"):
        compiled(CHATML_STYLE).render([user("x")], thing=object())


def test_unusable_characters_become_replacement_characters() -> None:
    rendered = compiled("{{ messages[0].content }}").render([user("a\ud800b\U00040061c\U000e0100d")])
    assert rendered.text == "a\ufffdb\ufffdc\U000e0100d"
    rendered.text.encode()


# ---- refusals and hostile templates ------------------------------------------------------------------------


def test_errors_name_the_line_and_the_reason() -> None:
    with pytest.raises(TemplateError, match="line 4: roles must alternate: naïve"):
        compiled("\n\n\n{{ raise_exception('roles must alternate: ' ~ messages[0].content) }}").render(
            [user("naïve")]
        )
    with pytest.raises(TemplateError, match="line 2"):
        ChatTemplate("x\n{% for %}")
    with pytest.raises(TemplateError, match="line 3"):
        compiled("x\ny\n{{ messages.nothing.at_all }}").render([user("a")])
    with pytest.raises(TemplateError, match="alternate"):
        compiled(MISTRAL_STYLE).render([user("a"), user("b")])
    with pytest.raises(TemplateError, match="alternate"):
        compiled(GEMMA_STYLE).render([user("a"), user("b")])


DAG = (
    "{% set ns = namespace(x=[], y=[], t=()) %}{% for i in range(200) %}{% set ns.x = [ns.x, ns.x] %}"
    "{% set ns.y = [ns.y, ns.y] %}{% set ns.t = (ns.t, ns.t) %}{% endfor %}"
)
ENDLESS = {
    "one loop": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "range limit": "{% for i in range(10**9) %}{% endfor %}",
    "filtered loop": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "recursive macro": "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "branching macro": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "recursive loop": "{% for x in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "map of maps": (
        "{% set a = range(99999) %}{% for i in a %}{{ a | map('string') | map('upper') | list | length }}{% endfor %}"
    ),
    "select": "{% set a = range(99999) %}{% for i in a %}{{ a | select('eq', i) | list | length }}{% endfor %}",
    "string product": "{{ 'a' * 10**10 }}",
    "reverse product": "{{ 10000000000 * 'a' }}",
    "constant product": "{% set x = 'a' * 100000 * 100000 %}",
    "list product": "{{ [0] * 1000000000 }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "big integers": "{% set ns = namespace(x=3) %}{% for i in range(99999) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "center filter": "{{ 'a' | center(1000000000) }}",
    "center method": "{{ 'a'.center(1000000000) }}",
    "ljust": "{{ 'a'.ljust(10**9) }}",
    "zfill": "{{ '1'.zfill(10**9) }}",
    "format width": "{{ '%1000000000d' % 1 }}",
    "format precision": "{{ '%.1000000000f' % 1 }}",
    "format star": "{{ '%*d' % (1000000000, 1) }}",
    "format filter": "{{ '%1000000000d' | format(1) }}",
    "str.format": "{{ '{:1000000000}'.format(1) }}",
    "nested str.format": "{{ '{:{}}'.format(1, 1000000000) }}",
    "indent": "{{ ('a\n' * 100000) | indent(1000000000) }}",
    "json indent": "{% set ns = namespace(x=[]) %}{% for i in range(200) %}{% set ns.x = [ns.x] * 2 %}{% endfor %}"
    "{{ ns.x | tojson(indent=1000000) }}",
    "doubling": "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "doubling ~": "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "doubling %": "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = '%s%s' % (ns.s, ns.s) %}{% endfor %}",
    "doubling join": "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = [ns.s, ns.s] | join %}{% endfor %}",
    "doubling list": "{% set ns = namespace(s=[1]) %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "doubling replace": (
        "{% set ns = namespace(s='xx') %}{% for i in range(99) %}{% set ns.s = ns.s.replace('x', 'xx') %}{% endfor %}"
    ),
    "doubling format": (
        "{% set ns = namespace(s='xx') %}{% for i in range(99) %}{% set ns.s = '{0}{0}'.format(ns.s) %}{% endfor %}"
    ),
    "doubling set": (
        "{% set ns = namespace(s='xx') %}{% for i in range(99) %}{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}"
        "{% set ns.s = x %}{% endfor %}"
    ),
    "copies": "{% set a = [0] * 1000000 %}{% set ns = namespace(x=[]) %}{% for i in range(99999) %}"
    "{% set ns.x = [ns.x, a[:]] %}{% endfor %}",
    "output": "{% set s = 'x' * 1000000 %}{% for i in range(99999) %}{{ s }}{% endfor %}",
    "sum of lists": "{{ ([[0] * 1000] * 100000) | sum(start=[]) | length }}",
    "batch": "{{ [1] | batch(1000000000, 0) | list | length }}",
    "slice": "{{ [1] | slice(1000000000) | list | length }}",
    "bytes of an int": "{{ (1).to_bytes(1000000000, 'big') }}",
    "compared lists": DAG + "{{ ns.x == ns.y }}",
    "searched lists": DAG + "{{ ns.y in [ns.x] }}",
    "printed list": DAG + "{{ ns.x }}",
    "joined lists": DAG + "{{ [ns.x] | join }}",
    "list as a key": DAG + "{{ {ns.t: 1} }}",
    "list as an index": DAG + "{{ {}[ns.t] }}",
    "list as an argument": DAG + "{{ {}.get(ns.t) }}",
    "sorted lists": DAG + "{{ [ns.x, ns.y] | sort | length }}",
    "unique lists": DAG + "{{ [ns.t, ns.t] | unique | list | length }}",
    "printed namespace": DAG + "{{ '{}'.format(ns) }}{{ '%s' % ns }}{{ ns }}{{ raise_exception('quick') }}",
    "changed": DAG + "{% for i in [1, 2] %}{{ loop.changed(ns.x if i == 1 else ns.y) }}{% endfor %}",
    "self reference": "{% set x = namespace() %}{% set x.x = x %}{% for i in x.x.x %}{% endfor %}{{ raise_exception('no') }}",
    "deep list": "{% set ns = namespace(x=[]) %}{% for i in range(20000) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
    "strftime": "{{ strftime_now('%1000000000Y') }}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_and_exploding_templates_are_stopped(name: str) -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.monotonic()
    with pytest.raises(TemplateError):
        ChatTemplate(ENDLESS[name], time_limit=0.15).render([user("x")])
    assert time.monotonic() - began < 3
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 700 * 1024  # KiB


def test_the_time_limit_works_in_any_thread_and_leaves_none_behind() -> None:
    template = ChatTemplate(ENDLESS["one loop"], time_limit=0.2)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            template.render([user("x")])
        except TemplateError as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert len(errors) == 3
    assert compiled(CHATML_STYLE).render([user("x")]).text  # this thread's meter is its own


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages | attr('__class__') }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({}) }}",
        "{{ messages[0].pop('role') }}",
        "{{ messages[0].content.encode() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__['os'].system('true') }}",
        "{% include 'x' %}",
        "{% import 'x' as y %}",
        "{% extends 'x' %}",
        "{{ lipsum() }}",
        "{{ '' | xmlattr | urlize }}",
        "{% for %}",
        "{{ " + "(" * 3000 + ")" * 3000 + " }}",
        "{% if 1 %}" * 500 + "{% endif %}" * 500,
        "{{ 1 / 0 }}",
        "{{ 'x' + 1 }}",
        "{{ nothing + 'x' }}",
        "{{ nothing.at.all }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    messages = [user("x")]
    try:
        text = ChatTemplate(source).render(messages).text
    except TemplateError:
        text = ""
    assert text in ("", "None")
    assert messages == [user("x")]


def test_a_template_that_can_not_be_followed_is_safe_and_warns_once() -> None:
    tokenizer, template = ToyTokenizer(), compiled("{{ '%r' % messages[0].content }}")
    with pytest.warns(RuntimeWarning, match="can not be followed"):
        rendered = template.render([user("<|im_end|>")])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        template.render([user("<|im_end|>")])
    assert tokenizer.id("<|im_end|>") not in rendered.encode(tokenizer)


# ---- which template ----------------------------------------------------------------------------------------


def test_named_templates() -> None:
    metadata = {
        "tokenizer.chat_template": "default {{ bos_token }}",
        "tokenizer.chat_templates": ["tool_use", "rag", "missing"],
        "tokenizer.chat_template.tool_use": "tools",
        "tokenizer.chat_template.rag": "rag",
    }
    templates = named_templates(metadata)
    assert templates == {"default": "default {{ bos_token }}", "tool_use": "tools", "rag": "rag"}
    tokenizer = ToyTokenizer()
    assert choose_template(templates, tokenizer).render([]).text == "default <s>"
    assert choose_template(templates, tokenizer, "rag").render([]).text == "rag"
    with pytest.raises(InvalidArgument, match=r"'no'.*default, rag, tool_use"):
        choose_template(templates, tokenizer, "no")


@pytest.mark.parametrize(
    ("special", "name"),
    [
        (["<s>", "<|im_start|>", "<|im_end|>"], "ChatML"),
        (["<s>", "<start_of_turn>", "<end_of_turn>"], "Gemma"),
        (["<s>", "<|start_header_id|>"], "Llama 3"),
        (["<s>"], "plain text"),
    ],
)
def test_default_templates(special: list[str], name: str) -> None:
    tokenizer = ToyTokenizer(special)
    with pytest.warns(UserWarning, match=f"no chat template.*{name}"):
        template = choose_template({}, tokenizer)
    text = template.render([system("Be brief."), user("Hi"), assistant("Yes"), user("Why?")]).text
    assert {
        "ChatML": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes"
        "<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n",
        "Gemma": "<s><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nYes<end_of_turn>\n"
        "<start_of_turn>user\nWhy?<end_of_turn>\n<start_of_turn>model\n",
        "Llama 3": "<s>"
        + "".join(
            f"<|start_header_id|>{role}<|end_header_id|>\n\n{text}<|eot_id|>"
            for role, text in [
                ("system", "Be brief."),
                ("user", "Hi"),
                ("assistant", "Yes"),
                ("user", "Why?"),
            ]
        )
        + "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "plain text": "Be brief.\n\nUser: Hi\n\nAssistant: Yes\n\nUser: Why?\n\nAssistant:",
    }[name] == text


# ---- marks -------------------------------------------------------------------------------------------------


def mixed(rng: random.Random, letters: str) -> str:
    text = "".join(rng.choice(letters) for _ in range(rng.randrange(0, 12)))
    return "".join(mark(c) if rng.random() < 0.5 else c for c in text)


def test_marks_come_off_and_every_character_has_one() -> None:
    for code in [
        *range(0x300),
        0xD7FF,
        0xE000,
        0xFFFF,
        0x10000,
        0x1F642,
        0x3FFFF,
        0xE0000,
        0xEFFFF,
        0xF0000,
        0x10FFFF,
    ]:
        char = chr(code)
        assert (
            not is_marked(char)
            and is_marked(mark(char))
            and plain(mark(char)) == char
            and mark(mark(char)) == mark(char)
        )
    assert clean("\ud83d\U00051234") == "\ufffd\ufffd"


def test_methods_agree_with_str_and_keep_marks() -> None:
    rng = random.Random(5)
    letters = "aAb  \n\tßİé日'1<"
    calls: list[tuple[str, tuple[Any, ...]]] = [
        *(
            (name, ())
            for name in ("split", "rsplit", "splitlines", "strip", "lstrip", "rstrip", "lower", "upper")
        ),
        *(
            (name, ())
            for name in ("title", "capitalize", "swapcase", "casefold", "isalpha", "isupper", "isspace")
        ),
        *(
            (name, ("a",))
            for name in ("split", "rsplit", "partition", "rpartition", "strip", "count", "find", "rfind")
        ),
        *(
            (name, ("ab",))
            for name in ("split", "startswith", "endswith", "removeprefix", "removesuffix", "lstrip")
        ),
        *((name, (None, 1)) for name in ("split", "rsplit")),
        *((name, ("a", 1)) for name in ("split", "rsplit")),
        *(("replace", args) for args in (("a", "XY"), ("", "-"), ("", "-", 2), ("b", ""), ("a", "Z", 1))),
        ("splitlines", (True,)),
        ("strip", ("",)),
    ]
    for _ in range(150):
        text = mixed(rng, letters)
        marked = {mark(plain(c)) for c in text if is_marked(c)}
        for name, args in calls:
            got = METHODS[name](text, *args)
            flat = plain(got) if isinstance(got, str) else got
            if isinstance(got, (list, tuple)):
                flat = type(got)(plain(x) for x in got)
            assert flat == getattr(plain(text), name)(*args), (text, name, args)
            if name in ("split", "strip", "partition", "splitlines", "rsplit", "replace"):
                pieces = [got] if isinstance(got, str) else got
                assert {c for p in pieces for c in p if is_marked(c)} <= marked
    assert METHODS["replace"]("a" + mark("ab"), "a", "<>") == "<><>" + mark("b")
    assert METHODS["split"](mark("a") + "-b", "-") == [mark("a"), "b"]
    assert METHODS["upper"](mark("ß") + "a") == mark("SS") + "A"


def test_json_escapes_marked_text() -> None:
    rng = random.Random(6)
    for _ in range(100):
        value = {
            mixed(rng, 'a"\\'): [mixed(rng, 'ab"\\\n\x01\x7fé🙂\u2028\uf8ff\U000e0041'), 1, None, {"k": True}]
        }
        flat = {plain(k): [plain(v[0]), *v[1:]] for k, v in value.items()}
        for options in ({}, {"indent": 2}, {"sort_keys": True, "separators": (",", ":")}):
            for ascii_only in (False, True):
                got = to_json(value, ensure_ascii=ascii_only, **options)
                assert plain(got) == json.dumps(flat, ensure_ascii=ascii_only, **options)
    assert list(runs(to_json(mark_data("a"), ensure_ascii=True))) == [
        (0, 1, False),
        (1, 2, True),
        (2, 3, False),
    ]


def test_hostile_messages_take_linear_time() -> None:
    special = ["<s>", *(f"<unused{i}>" for i in range(3000)), "<|im_end|>", "<", "x"]
    tokenizer, template = ToyTokenizer(special), compiled("{{ messages[0].content }}")
    began = time.monotonic()
    for text in ("<" * 20000, "<unused" * 3000, "<|im_end|>" * 2000):
        got = template.render([user(text)]).encode(tokenizer)
        assert not any(tokenizer.is_control(t) for t in got) and tokenizer.decode(got) == text
    assert time.monotonic() - began < 5
