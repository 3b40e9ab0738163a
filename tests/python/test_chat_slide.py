"""Conversations that outgrow their context: what is fed, what stays, what is read again."""

from __future__ import annotations

from typing import Any

import pytest
from chat_templates import CHATML_STYLE
from ringlm.chat import Chat
from ringlm.errors import Cancelled, ContextOverflow
from ringlm.model import Model
from ringlm.template import ChatTemplate
from tiny_chat_model import TEMPLATE
from toys import ToySession, ToyTokenizer, toy_core

__all__ = ["toy_core"]

TOKENIZER = ToyTokenizer()
BYTE = TOKENIZER._n_special  # the id of byte 0
SYSTEM = "Be kind."
TRIMMING = CHATML_STYLE.replace("message['content'] +", "(message['content'] | trim) +")

pytestmark = pytest.mark.usefixtures("toy_core")


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, parse_special=True)


def letters(text: str) -> list[int]:
    """How the model below spells: byte by byte, never as the tokenizer would."""
    return [BYTE + b for b in text.encode()]


def echo(seen: list[int]) -> int:
    """A model that answers a message with the message itself."""
    opening, user, end = ids("<|im_start|>assistant\n"), ids("<|im_start|>user\n"), ids("<|im_end|>")

    def last(part: list[int], upto: int) -> int:
        return max(i for i in range(upto) if seen[i : i + len(part)] == part)

    start = last(opening, len(seen))
    message = seen[last(user, start) + len(user) : start - len(ids("<|im_end|>\n"))]
    reply, done = letters(TOKENIZER.decode(message)), len(seen) - start - len(opening)
    return reply[done] if done < len(reply) else end[0]


def chat_with(
    source: str = CHATML_STYLE, system: str | None = SYSTEM, **options: Any
) -> tuple[Chat, ToySession]:
    model = Model("toy.gguf")
    model.core.script = echo  # type: ignore[attr-defined]
    chat = model.chat(system, ChatTemplate(source), **{"n_ctx": 192, "chunk": 8, **options})
    return chat, ToySession.opened[-1]


HEAD = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"


def opening(text: str) -> list[int]:
    return ids(f"{HEAD}{text}<|im_end|>\n<|im_start|>assistant\n")


def going_on(text: str) -> list[int]:
    return ids(f"<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")


def message(n: int) -> str:
    return f"message {n} hello"


def wrapped(**options: Any) -> tuple[Chat, ToySession, int]:
    """A chat whose ring has wrapped, after so many turns."""
    chat, core = chat_with(**options)
    for n in range(13):
        chat.ask(message(n))
    assert core.evicted > 2 * core.n_ctx
    return chat, core, 13


def test_every_turn_feeds_only_what_is_new() -> None:
    chat, core = chat_with()
    pinned = len(ids(HEAD))
    assert core.pinned == pinned and chat.session.overflow == "slide"
    stream = opening(message(0))
    for n in range(30):
        assert chat.ask(message(n)) == message(n) and chat.finish_reason == "stop"
        if n:
            stream += going_on(message(n))
        usage, new = chat.last_usage, len(going_on(message(n)) if n else stream)
        assert usage is not None
        known = min(len(stream) - new, core.n_ctx)
        assert (usage.cached_tokens, usage.prefill_tokens) == (known, new)
        assert (usage.prompt_tokens, usage.completion_tokens) == (known + new, len(message(n)))
        stream += letters(message(n))
        assert core.history == stream
        assert chat.forgetful == (len(stream) > core.n_ctx)
    assert core.evaluated == len(stream) > 7 * core.n_ctx
    assert core.tokens[:pinned] == ids(HEAD)
    assert len(chat.messages) == 61


def test_the_template_decides_what_is_pinned() -> None:
    assert chat_with(system=None)[1].pinned == len(ids(HEAD))  # this one has a system message of its own
    assert chat_with(TEMPLATE, system=None)[1].pinned == len(ids("<|im_start|>user\n"))
    assert chat_with(pinned=3)[1].pinned == 3
    assert chat_with(pinned=0)[1].pinned == 0
    assert chat_with(overflow="error")[1].pinned == 0
    model = Model("toy.gguf", window=32)
    model.chat(SYSTEM, ChatTemplate(CHATML_STYLE), n_ctx=192)
    assert ToySession.opened[-1].pinned == 0


def test_a_system_message_that_leaves_no_room() -> None:
    long = SYSTEM * 12
    n = len(ids(HEAD.replace(SYSTEM, long)))
    opened = len(ToySession.opened)
    with pytest.raises(
        ContextOverflow, match=rf"{n} tokens, more than half of the context of 192.*n_ctx={2 * n}"
    ):
        chat_with(system=long)
    assert len(ToySession.opened) == opened
    assert chat_with(system=long, n_ctx=2 * n)[0].ask("say") == "say"
    assert chat_with(system=long, pinned=10)[1].pinned == 10


def test_a_message_that_would_be_forgotten_before_it_is_answered() -> None:
    chat, core = chat_with()
    room = core.n_ctx - core.pinned
    fits = core.n_ctx - len(opening(""))
    for _ in range(2):
        before, messages = list(core.history), chat.messages
        with pytest.raises(ContextOverflow, match=f"{room + 1} tokens .* room for {room} beside"):
            chat.ask("x" * (fits + 1))
        assert (core.history, chat.messages) == (before, messages)
        list(zip(range(3), chat.send("x" * fits), strict=False))
        assert core.history[: core.n_ctx] == opening("x" * fits)
        chat.ask("say")


def test_an_answer_ends_before_nothing_is_left_of_the_question() -> None:
    chat, core = chat_with()
    chat.session.model.core.script = lambda seen: BYTE + ord("x")
    assert chat.ask("say") == "x" * (core.n_ctx - core.pinned) and chat.finish_reason == "length"
    assert chat.ask("say", max_tokens=300) == "x" * 300
    # The last token of each was never evaluated; the next turn does that.
    assert core.history.count(BYTE + ord("x")) == core.n_ctx - core.pinned + 299
    assert chat.last_usage is not None and chat.last_usage.prefill_tokens == 1 + len(going_on("say"))


def test_clear_after_a_wrap_keeps_the_pinned_rows() -> None:
    chat, core, _ = wrapped()
    evaluated = core.evaluated
    chat.reset()
    assert not chat.forgetful
    assert chat.ask("say") == "say"
    assert core.history == opening("say") + letters("say")
    assert core.evaluated - evaluated == len(core.history) - core.pinned
    assert chat.last_usage is not None and chat.last_usage.cached_tokens == core.pinned


@pytest.mark.parametrize(
    ("second", "consumed"), [("a long message to be cancelled", 24), ("another", 16), ("another", 24)]
)
def test_a_cancelled_prefill(second: str, consumed: int) -> None:
    """The same message goes on from the finished chunks, another one from where it begins to differ, if the
    ring can go back so far."""
    chat, core, n = wrapped()
    first, stream = "a long message to be cancelled", list(core.history)
    with pytest.raises(Cancelled):
        list(chat.send(first, progress=lambda done, _: chat.cancel() if done == consumed else None))
    assert core.history == stream + going_on(first)[:consumed]
    evaluated = core.evaluated
    assert chat.ask(second) == second
    same = next(
        (i for i, (a, b) in enumerate(zip(going_on(first), going_on(second), strict=False)) if a != b),
        consumed,
    )
    if consumed - same <= core.chunk:
        assert core.history == stream + going_on(second) + letters(second)
        assert core.evaluated - evaluated == len(going_on(second)) - same + len(second)
        return
    # The newest turns that fit half of the context, after the system message that was there already.
    room = (core.n_ctx - core.pinned) // 2
    kept = core.history[core.pinned : -len(second)]
    assert 0 < len(kept) <= room < len(kept) + len(going_on(message(0))) + len(message(0))
    text = TOKENIZER.decode(kept)
    assert message(n - 1) in text and message(n - 3) not in text and text.count(second) == 1
    assert core.evaluated - evaluated == len(kept) + len(second)
    held = list(core.history)
    chat.ask("and on")
    assert core.history == held + going_on("and on") + letters("and on")


def test_leaving_an_answer_after_a_wrap() -> None:
    """The partial answer is tokenized anew; where that differs only the end is taken back."""
    chat, core, _ = wrapped()
    stream = list(core.history)
    for k, _piece in enumerate(chat.send("so hello and")):
        if k == 5:
            break
    assert chat.messages[-1]["content"] == "so hel"
    chat.ask("Go on")
    assert core.history == stream + going_on("so hello and") + ids(
        "so hel<|im_end|>\n<|im_start|>user\n"
    ) + ids("Go on<|im_end|>\n<|im_start|>assistant\n") + letters("Go on")


def test_a_stop_string_after_a_wrap() -> None:
    chat, core, _ = wrapped()
    stream = list(core.history)
    assert chat.ask("xy. zend", stop=". z") == "xy"
    chat.ask("Go on")
    assert core.history[: len(stream)] == stream
    text = "xy. zend<|im_end|>\n<|im_start|>assistant\nxy<|im_end|>\n<|im_start|>user\nGo on"
    rest = core.history[len(stream) :]
    assert rest[: -len("Go on")] == ids(
        f"<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_session_that_somebody_else_has_used() -> None:
    chat, core, n = wrapped()
    chat.session.prefill(letters("something else"))
    assert chat.ask("say") == "say"
    text = TOKENIZER.decode(core.history)
    assert "something else" not in text and message(n - 1) in text and message(0) not in text
    assert core.history[: core.pinned] == ids(HEAD) and core.evicted == 0
    assert chat.forgetful and len(chat.messages) == 1 + 2 * (n + 1)
    # Taken back exactly, with the same position: the tokens are others.
    for k in range(8):
        chat.ask(message(k))
    chat.session.rewind(3)
    chat.session.prefill(letters("abc"))
    chat.ask("say")
    assert "abc" not in TOKENIZER.decode(core.history)


def test_a_template_that_rewrites_the_answers() -> None:
    """The next turn says that something else was said: after a wrap half of the context is read again."""
    chat, core = chat_with(TRIMMING)
    for n in range(20):
        assert chat.ask(f" {message(n)} ") == message(n)
    chat.session.model.core.script = lambda seen: (
        ids(" ")[0] if seen[-1] != ids(" ")[0] else ids("<|im_end|>")[0]
    )
    assert chat.ask("say") == " "
    for _ in range(10):
        assert chat.ask("say") == " "
        assert core.position <= core.n_ctx + 4
        assert core.history[: core.pinned] == ids(HEAD)
    assert len(chat.messages) == 63


def test_no_failure_of_a_long_turn_changes_what_is_forgotten() -> None:
    chat, core, _ = wrapped()
    chat.session.prefill(letters("?"))
    before = list(core.history)
    with pytest.raises(ContextOverflow):
        chat.ask("x" * 300)
    assert core.history == before
    core.fail = MemoryError()
    with pytest.raises(MemoryError):
        chat.ask("say")
    core.fail = None
    assert chat.ask("say") == "say" and len(chat.messages) == 1 + 2 * 14


def test_the_text_that_is_rendered_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    chat, core = chat_with(n_ctx=96)
    rendered: list[int] = []
    render = chat.template.render_noted

    def counted(messages: Any, **how: Any) -> Any:
        made = render(messages, **how)
        rendered.append(len(made.text))
        return made

    monkeypatch.setattr(chat.template, "render_noted", counted)
    stream = opening(message(0)) + letters(message(0))
    chat.ask(message(0))
    for n in range(1, 50):
        if n % 7 == 0:
            with pytest.raises(Cancelled):
                list(chat.send(message(n), progress=lambda done, _: chat.cancel() if done == 16 else None))
        chat.ask(message(n))
        stream += going_on(message(n)) + letters(message(n))
    assert core.history == stream and core.evaluated == len(stream)
    assert max(rendered) < 16 * 96 + 200 and len(chat.messages) == 101


def test_a_long_answer_that_was_left_is_no_part_of_the_next_message() -> None:
    chat, core = chat_with(max_tokens=1000)
    chat.session.model.core.script = lambda seen: BYTE + ord("x")
    room = core.n_ctx - core.pinned
    chat.ask("say", max_tokens=2)
    for length in (room - 30, room + 30):  # some of the question is held still, or none
        for k, _piece in enumerate(chat.send("say")):
            if k == length:
                break
        position = core.position
        chat.ask("and", max_tokens=2)
        if length < room:
            assert core.position == position + 1 + len(going_on("and")) + 1
        else:
            assert core.position <= core.n_ctx
