"""Completions in the shapes of the OpenAI API, on a toy model."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from chat_templates import CHATML_STYLE
from ringlm.errors import ContextOverflow, InvalidArgument
from ringlm.model import Model
from toys import ToySampler, ToySession, ToyTokenizer, script_of, toy_core

__all__ = ["toy_core"]

TOKENIZER = ToyTokenizer()
OPENING = "<|im_start|>assistant\n"
HELLO = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def model(toy_core: Any) -> Model:
    toy_core.GGUF = lambda path: {
        "tokenizer.chat_template": CHATML_STYLE,
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "{{ tools | tojson + '<|im_start|>assistant\n' }}",
    }
    return Model("toy.gguf")


def answering(model: Model, *replies: str) -> Model:
    model.core.script = script_of(*replies, tokenizer=TOKENIZER)
    return model


def text_prompt() -> list[int]:
    return TOKENIZER.encode(OPENING, parse_special=True)


def test_completion(model: Model) -> None:
    out = answering(model, "Paris 🙂").create_completion(text_prompt(), max_tokens=None)
    assert out["object"] == "text_completion" and out["id"].startswith("cmpl-") and out["model"] == "toy.gguf"
    assert abs(out["created"] - time.time()) < 60
    assert out["choices"] == [{"index": 0, "text": "Paris 🙂", "logprobs": None, "finish_reason": "stop"}]
    n = len(text_prompt())
    tokens = len("Paris 🙂".encode())
    assert out["usage"] == {
        "prompt_tokens": n,
        "completion_tokens": tokens,
        "total_tokens": n + tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_completion_of_text_with_echo_limit_and_alias(model: Model) -> None:
    model.core.script = lambda ids: TOKENIZER.id("the")
    out = model("Say <|im_end|>: ", max_tokens=2, echo=True, repeat_penalty=1.1, seed=3, temperature=0)
    assert (
        out["choices"][0]["text"] == "Say <|im_end|>: thethe"
        and out["choices"][0]["finish_reason"] == "length"
    )
    assert out["usage"]["prompt_tokens"] == len(TOKENIZER.encode("Say <|im_end|>: "))
    params = ToySampler.made[-1].params
    assert params["repetition_penalty"] == 1.1 and params["seed"] == 3 and params["temperature"] == 0
    assert len(model.create_completion("x")["choices"][0]["text"]) == 16 * 3
    assert model.create_completion("x", max_tokens=-1)["usage"]["total_tokens"] == 256 + 1
    model.create_completion("x", logit_bias={"7": -100}, max_tokens=1)
    assert ToySampler.made[-1].params["logit_bias"] == {7: -100.0}


def test_streamed_completion_equals_the_whole_one(model: Model) -> None:
    whole = answering(model, "one two. three").create_completion(
        text_prompt(), stop=["three"], max_tokens=-1, logprobs=2
    )
    chunks = list(
        answering(model, "one two. three").create_completion(
            text_prompt(),
            stop="three",
            max_tokens=-1,
            logprobs=2,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert len({c["id"] for c in chunks}) == 1 and all(c["object"] == "text_completion" for c in chunks)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert not any("usage" in c for c in chunks[:-1])
    choices = [c["choices"][0] for c in chunks[:-1]]
    assert "".join(c["text"] for c in choices) == whole["choices"][0]["text"] == "one two. "
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["stop"]
    logprobs = whole["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == "one two. three" and len(logprobs["token_logprobs"]) == 14
    assert logprobs["text_offset"] == list(range(14))
    assert all(
        len(top) == 2 and max(top.values()) == p
        for top, p in zip(logprobs["top_logprobs"], logprobs["token_logprobs"], strict=True)
    )


def test_chat_completion(model: Model) -> None:
    out = answering(model, "Hello").create_chat_completion(HELLO)
    assert out["object"] == "chat.completion" and out["id"].startswith("chatcmpl-")
    assert out["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello"},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    prompt = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n" + OPENING
    assert out["usage"]["prompt_tokens"] == len(TOKENIZER.encode(prompt, parse_special=True))
    assert out["usage"]["completion_tokens"] == 5


def test_streamed_chat_completion(model: Model) -> None:
    chunks = list(
        answering(model, "Hé 🙂").create_chat_completion(
            HELLO, stream=True, stream_options={"include_usage": True}
        )
    )
    assert all(c["object"] == "chat.completion.chunk" for c in chunks)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant"}
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1]) == "Hé 🙂"
    assert chunks[-2]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == len("Hé 🙂".encode())


def test_chat_logprobs(model: Model) -> None:
    out = answering(model, "é").create_chat_completion(HELLO, logprobs=True, top_logprobs=1)
    content = out["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9]]
    assert all(
        entry["top_logprobs"][0]["bytes"] == entry["bytes"] and entry["logprob"] < 0 for entry in content
    )
    with pytest.raises(InvalidArgument, match="logprobs=True"):
        model.create_chat_completion(HELLO, top_logprobs=1)


def test_tools_choose_their_template(model: Model) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    out = answering(model, "ok").create_chat_completion(HELLO, tools=tools)
    assert out["usage"]["prompt_tokens"] < 80 and ToySession.opened[-1].tokens[-3] == text_prompt()[-1]


def test_a_longer_conversation_finds_its_prefix_in_the_cache(model: Model) -> None:
    first = answering(model, "Hello", "Fine").create_chat_completion(HELLO)
    messages = [*HELLO, first["choices"][0]["message"], {"role": "user", "content": "And?"}]
    second = model.create_chat_completion(messages)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"]
    assert len(ToySession.opened) == 1


def test_streams_at_once_have_sessions_of_their_own(model: Model) -> None:
    model.core.script = lambda ids: TOKENIZER.id("the")
    one = model.create_completion("a", stream=True, max_tokens=5)
    two = model.create_completion("b", stream=True, max_tokens=5)
    texts = [[c["choices"][0]["text"] for c in pair] for pair in zip(one, two, strict=True)]
    assert ["".join(t) for t in zip(*texts, strict=True)] == ["the" * 5] * 2
    assert len(ToySession.opened) == 2 and [s.closed for s in ToySession.opened].count(False) == 1
    abandoned = model.create_completion("a", stream=True)
    next(abandoned)
    abandoned.close()  # type: ignore[attr-defined]
    model.close()
    assert all(s.closed for s in ToySession.opened)


@pytest.mark.parametrize("call", ["create_completion", "create_chat_completion"])
def test_options_that_are_unknown_unsupported_or_ask_for_nothing(model: Model, call: str) -> None:
    model.core.script = lambda ids: TOKENIZER.id("the")
    complete = getattr(model, call)
    prompt: Any = "a" if call == "create_completion" else HELLO
    complete(
        prompt,
        max_tokens=1,
        n=1,
        model="x",
        user="y",
        typical_p=1.0,
        grammar=None,
        response_format=None,
        top_k=None,
    )
    with pytest.raises(TypeError, match="temprature, topk"):
        complete(prompt, topk=1, temprature=1)
    with pytest.raises(InvalidArgument, match="n=2"):
        complete(prompt, n=2)
    with pytest.raises(InvalidArgument, match="grammar"):
        complete(prompt, grammar="root ::= x")
    with pytest.raises(InvalidArgument, match="max_tokens"):
        complete(prompt, max_tokens="5")
    with pytest.raises(InvalidArgument, match="stop"):
        complete(prompt, stop=[""])
    with pytest.raises(ContextOverflow, match="256"):
        complete("a" * 300 if isinstance(prompt, str) else [{"role": "user", "content": "x" * 300}])


def test_completions_refuse_what_they_can_not_do(model: Model) -> None:
    with pytest.raises(InvalidArgument, match="empty"):
        model.create_completion("")
    with pytest.raises(InvalidArgument, match="echo"):
        model.create_completion("a", echo=True, logprobs=1)
    with pytest.raises(InvalidArgument, match="logprobs"):
        model.create_completion("a", logprobs=99)
    for prompt in (b"bytes", 5, None):
        with pytest.raises(InvalidArgument, match="expected text or token ids"):
            model.create_completion(prompt)  # type: ignore[call-overload]
    for bias in ({"the": 1}, {1: "much"}, [1]):
        with pytest.raises(InvalidArgument, match="logit_bias"):
            model.create_completion("a", logit_bias=bias)


def test_a_stream_may_be_collected_while_the_model_is_busy_with_itself(model: Model) -> None:
    """The collector may run anywhere, also where the same thread holds the model's lock."""
    model.core.script = lambda ids: TOKENIZER.id("the")
    stream = [model.create_completion("a", stream=True, max_tokens=5)]
    next(stream[0])

    def drop() -> None:
        with model._lock:
            stream.clear()

    thread = threading.Thread(target=drop, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert model.create_completion("a", max_tokens=1)["choices"][0]["text"] == "the"
    assert len(ToySession.opened) == 1


def test_pull_opens_what_the_hub_returns(toy_core: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from ringlm import hub

    monkeypatch.setattr(hub, "pull", lambda name: f"/models/{name}.gguf")
    model = Model.pull("tiny", n_threads=3)
    assert str(model.path) == "/models/tiny.gguf" and model.n_threads == 3
    assert model.backend == "cpu" and model.nbytes == 1000 and "tiny" in repr(model)


def test_a_llama_cpp_script_runs(toy_core: Any) -> None:
    from ringlm.llama_cpp import Llama

    llm = Llama(model_path="toy.gguf", n_ctx=64, n_threads=2, seed=7, verbose=False, n_gpu_layers=0)
    llm.core.script = lambda ids: TOKENIZER.id("the")
    out = llm("Q: Name it. A: ", max_tokens=4, stop=["Q:", "\n"], echo=True)
    assert out["choices"][0]["text"] == "Q: Name it. A: " + "the" * 4
    assert ToySampler.made[-1].params["seed"] == 7 and ToySession.opened[-1].n_ctx == 64
    streamed = llm.create_completion("a", stream=True, max_tokens=2, seed=8)
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == "thethe"
    assert ToySampler.made[-1].params["seed"] == 8
    ids = llm.tokenize("né</s>".encode(), special=True)
    assert ids[-1] == llm.token_eos() and llm.token_bos() == 1
    assert llm.detokenize(ids) == "né".encode() and llm.detokenize(ids, special=True) == "né</s>".encode()
    assert llm.detokenize([1, *llm.tokenize(b" a")]) == b"a" and llm.detokenize(llm.tokenize(b" a")) == b" a"
    assert llm.backend == "cpu"
    assert all(Llama("toy.gguf", n_gpu_layers=n).backend == "cuda" for n in (-1, 3, 99))
    with pytest.raises(InvalidArgument, match="n_gpu_layers is 2, and the model has 3 layers"):
        Llama("toy.gguf", n_gpu_layers=2)
    with pytest.raises(TypeError, match="n_layers"):
        Llama("toy.gguf", n_layers=1)
