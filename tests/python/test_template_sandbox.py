"""The language of chat templates: expressions against plain Jinja2, errors, limits, and what the sandbox keeps away."""

# ruff: noqa: E501 (templates read better in their own lines)
from __future__ import annotations

import threading
import time
import warnings

import pytest
from chat_data import NOW, compiled, reference, user
from chat_templates import CHATML_STYLE, GEMMA_3, MISTRAL_V0_3
from ringlm.errors import TemplateError
from ringlm.template import ChatTemplate
from toys import ToyTokenizer


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
        compiled(MISTRAL_V0_3).render([user("a"), user("b")])
    with pytest.raises(TemplateError, match="alternate"):
        compiled(GEMMA_3).render([user("a"), user("b")])


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
