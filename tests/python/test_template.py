"""Chat templates: the text against plain Jinja2, the ids against the whole string, typed control tokens."""

# ruff: noqa: E501 (templates read better in their own lines)
from __future__ import annotations

import random
import time
import warnings
from typing import Any

import pytest
from chat_data import NOW, assistant, compiled, reference, system, user
from chat_templates import CHATML_STYLE, GEMMA_3, LLAMA_3_2, PUBLISHED, QWEN_3, WITHOUT_SYSTEM, ZEPHYR_STYLE
from ringlm.errors import InvalidArgument
from ringlm.template import CHATML, GEMMA, LLAMA3, PLAIN, choose_template, named_templates
from toys import SPECIAL, ToyTokenizer

STYLES = {
    **PUBLISHED,
    "zephyr": ZEPHYR_STYLE,
    "CHATML": CHATML,
    "LLAMA3": LLAMA3,
    "GEMMA": GEMMA,
    "PLAIN": PLAIN,
}

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


def conversation(rng: random.Random, words: list[str], style: str = "") -> list[dict[str, Any]]:
    def text() -> str:
        return "".join(rng.choice(words) for _ in range(rng.randrange(0, 9)))

    out = [system(text())] if rng.random() < 0.5 and style not in WITHOUT_SYSTEM else []
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
            messages = conversation(rng, WORDS + SPECIAL, style)
            rendered = template.render(messages, now=NOW)
            assert rendered.text == reference(STYLES[style], messages)
            assert "".join(s.text for s in rendered.segments) == rendered.text


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("add_bos", [False, True])
def test_ids_of_ordinary_conversations_are_those_of_the_whole_string(style: str, add_bos: bool) -> None:
    rng = random.Random(style)
    template, tokenizer = compiled(STYLES[style]), ToyTokenizer(add_bos=add_bos)
    for _ in range(25):
        rendered = template.render(conversation(rng, WORDS, style), now=NOW)
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
        messages = conversation(rng, parts, style)
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
        written = compiled(LLAMA_3_2).render([user("Hello")], now=NOW).encode(tokenizer)
        assert written[0] == tokenizer.bos_id and written.count(tokenizer.bos_id) == 1
        unwritten = compiled(CHATML_STYLE).render([user("Hello")]).encode(tokenizer)
        assert unwritten.count(tokenizer.bos_id) == int(add_bos)
        typed = compiled("{{ messages[0].content }}").render([user("<s>Hello")]).encode(tokenizer)
        assert typed.count(tokenizer.bos_id) == int(add_bos)


# ---- messages ----------------------------------------------------------------------------------------------


def test_variables_reach_the_template() -> None:
    template = compiled(QWEN_3)
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
    for source in (LLAMA_3_2, QWEN_3):
        got = compiled(source).render(messages, tools=tools, now=NOW).text
        assert got == reference(source, [{**m, "content": m["content"] or ""} for m in messages], tools=tools)


def test_content_parts() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert "one two<|im_end|>" in compiled(CHATML_STYLE).render([user(parts)]).text
    assert "onetwo<end_of_turn>" in compiled(GEMMA_3).render([user(parts)]).text  # it reads parts itself
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


def test_hostile_messages_take_linear_time() -> None:
    special = ["<s>", *(f"<unused{i}>" for i in range(3000)), "<|im_end|>", "<", "x"]
    tokenizer, template = ToyTokenizer(special), compiled("{{ messages[0].content }}")
    began = time.monotonic()
    for text in ("<" * 20000, "<unused" * 3000, "<|im_end|>" * 2000):
        got = template.render([user(text)]).encode(tokenizer)
        assert not any(tokenizer.is_control(t) for t in got) and tokenizer.decode(got) == text
    assert time.monotonic() - began < 5


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
