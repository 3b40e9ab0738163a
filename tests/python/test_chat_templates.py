"""Conversations with the templates of published models: the cache holds what the template renders."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable

import pytest
from chat_data import TOOLS, called
from chat_templates import CONTROL_TEXTS, PUBLISHED, WITHOUT_SYSTEM
from ringlm.chat import Chat
from ringlm.errors import TemplateError, TemplateWarning
from ringlm.model import Model
from ringlm.template import ChatTemplate
from toys import ToySession, ToyTokenizer, toy_core

__all__ = ["toy_core"]

SYSTEM = "Be brief."
#: What ends an answer; the others say </s>.
ENDS = {
    "deepseek-r1-distill": "<｜end▁of▁sentence｜>",  # noqa: RUF001
    "gemma-2": "<end_of_turn>",
    "gemma-3": "<end_of_turn>",
    "granite-3": "<|end_of_text|>",
    "llama-3.1": "<|eot_id|>",
    "llama-3.2": "<|eot_id|>",
    "phi-3": "<|end|>",
    "phi-4-mini": "<|end|>",
    "qwen2.5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "smollm2": "<|im_end|>",
    "smollm3": "<|im_end|>",
}
#: They take what was thought out of earlier answers.
FORGET_THOUGHTS = {"deepseek-r1-distill", "qwen3"}

pytestmark = pytest.mark.usefixtures("toy_core")


def template_of(name: str) -> ChatTemplate:
    return ChatTemplate(PUBLISHED[name], bos_token="<s>", eos_token="</s>")


def model_of(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Model, ToyTokenizer]:
    tokenizer = ToyTokenizer(CONTROL_TEXTS, eog=ENDS.get(name, "</s>"))
    monkeypatch.setattr(sys.modules["ringlm.tokenizer"], "Tokenizer", lambda path: tokenizer)
    model = Model("toy.gguf", n_ctx=2048)
    model.core.config.n_vocab = tokenizer.n_vocab  # type: ignore[misc]
    return model, tokenizer


def chat_of(
    name: str, monkeypatch: pytest.MonkeyPatch, system: str | None = None, **options: object
) -> tuple[Chat, ToySession, ToyTokenizer]:
    model, tokenizer = model_of(name, monkeypatch)
    chat = model.chat(system, template_of(name), **options)  # type: ignore[arg-type]
    return chat, ToySession.opened[-1], tokenizer


def answering(text: str, tokenizer: ToyTokenizer) -> Callable[[list[int]], int]:
    """A model that says ``text``, byte by byte, behind the first prompt that it sees."""
    end = max(tokenizer.eog_ids)
    ids = [*(len(CONTROL_TEXTS) + b for b in text.encode()), end]
    start: list[int] = []

    def script(seen: list[int]) -> int:
        start[:] = start if start and start[0] <= len(seen) else [len(seen)]
        return ids[min(len(seen) - start[0], len(ids) - 1)]

    return script


def text_of(ids: list[int], tokenizer: ToyTokenizer) -> str:
    return b"".join(tokenizer.token_bytes(i) for i in ids).decode()


TURNS = [
    ("Hi", "<think>\nhm, hm\n</think>\n\nHello!"),
    ("What is 1 + 1?", "<think>\n\n</think>\n\n2"),
    (" And\n2 + 2? ", "  4  "),
    ("<think>", "</think>\n\n<think> what"),
    ("Bye", "Bye."),
]


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_cache_holds_what_the_template_renders(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    system = None if name in WITHOUT_SYSTEM else SYSTEM
    chat, core, tokenizer = chat_of(name, monkeypatch, system, n_ctx=4096, overflow="error")
    for question, answer in TURNS:
        before = list(core.history)
        chat.session.model.core.script = answering(answer, tokenizer)  # type: ignore[attr-defined]
        assert chat.ask(question) == answer and chat.finish_reason == "stop"
        rendered = template_of(name).render(chat.messages[:-1])
        assert text_of(core.history, tokenizer) == rendered.text + answer
        controls = [i for i in core.history if tokenizer.is_control(i)]
        assert controls == [i for i in rendered.encode(tokenizer) if tokenizer.is_control(i)]
        same = next((i for i, (a, b) in enumerate(zip(before, core.history, strict=False)) if a != b), None)
        assert chat.last_usage is not None
        assert chat.last_usage.cached_tokens == (len(before) if same is None else same)
    assert [m["content"] for m in chat.messages if m["role"] == "assistant"] == [a for _, a in TURNS]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_conversation_of_thoughts_that_slides(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However it wraps: the newest turn is there as the template renders it, behind the system message."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TemplateWarning)
        chat, core, tokenizer = chat_of(name, monkeypatch, SYSTEM, n_ctx=320, chunk=8)
        for n in range(25):
            answer = f"<think>\nthought {n}\n</think>\n\nanswer {n}"
            chat.session.model.core.script = answering(answer, tokenizer)  # type: ignore[attr-defined]
            assert chat.ask(f"question {n}") == answer
            whole = template_of(name).render_noted(chat.messages[:-1]).text + answer
            held = text_of(core.tokens, tokenizer)
            turn = whole[whole.rindex(f"question {n}") :]
            assert held.endswith(turn) and held.count(f"question {n}") == 1 and SYSTEM in held
            if name in FORGET_THOUGHTS:
                assert held.count("thought") == 1
    assert chat.forgetful and core.evaluated > 4 * core.n_ctx
    assert core.pinned > 0


# ---- a system message that the template does not take ------------------------------------------------------


@pytest.mark.parametrize("name", sorted(WITHOUT_SYSTEM))
def test_a_merged_system_message_is_said_once_for_each_chat(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = model_of(name, monkeypatch)
    template = template_of(name)
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            chat = model.chat(SYSTEM, template, n_ctx=320, chunk=8)
            core = ToySession.opened[-1]
            for n in range(20):
                model.core.script = answering(f"answer {n}", tokenizer)  # type: ignore[attr-defined]
                chat.ask(f"question {n}")
            chat.reset()
            model.core.script = answering("yes", tokenizer)  # type: ignore[attr-defined]
            chat.ask("again")
        (warning,) = caught
        assert warning.category is TemplateWarning and "does not take a system message" in str(
            warning.message
        )
        assert SYSTEM in text_of(core.tokens[: core.pinned], tokenizer)
        assert chat.messages[0] == {"role": "system", "content": SYSTEM}


def test_no_warning_without_a_system_message(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chat, _, tokenizer = chat_of("gemma-2", monkeypatch)
        chat.session.model.core.script = answering("yes", tokenizer)  # type: ignore[attr-defined]
        assert chat.ask("Hi") == "yes"


# ---- tools -------------------------------------------------------------------------------------------------


def test_tools_of_a_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    chat, core, tokenizer = chat_of("qwen3", monkeypatch, n_ctx=2048, variables={"tools": TOOLS})
    chat.session.model.core.script = answering("ok", tokenizer)  # type: ignore[attr-defined]
    assert chat.ask("Hi") == "ok" and '"get_weather"' in text_of(core.history, tokenizer)
    with pytest.raises(TemplateError, match="does not know the tools"):
        chat_of("phi-3", monkeypatch, n_ctx=2048, variables={"tools": TOOLS})


def test_completions_give_the_template_arguments_as_data(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = model_of("qwen2.5", monkeypatch)
    model.core.script = answering("ok", tokenizer)  # type: ignore[attr-defined]
    calls = [called("f", '{"city": "Köln"}', "1"), called("g", "not JSON", "2"), called("h", {"n": 1}, "3")]
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "3.5", "tool_call_id": "1"},
    ]
    made = model.create_chat_completion(messages, template=template_of("qwen2.5"), tools=TOOLS, max_tokens=5)
    assert made["choices"][0]["message"]["content"] == "ok"
    text = text_of(ToySession.opened[-1].history, tokenizer)
    for arguments in ('{"city": "Köln"}', '"not JSON"', '{"n": 1}'):
        assert f'"arguments": {arguments}}}\n</tool_call>' in text
    assert calls[0]["function"]["arguments"] == '{"city": "Köln"}'  # the caller's are as they were
    with pytest.warns(TemplateWarning, match="system"):
        model.create_chat_completion(
            [{"role": "system", "content": SYSTEM}, *messages[:1]],
            template=template_of("gemma-2"),
            max_tokens=1,
        )
    with pytest.raises(TemplateError, match="the tools"):
        model.create_chat_completion(messages[:1], template=template_of("gemma-2"), tools=TOOLS)
