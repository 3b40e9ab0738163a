"""Stop strings against a definition over the whole text, and the generation loop on a toy model."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from ringlm.errors import Cancelled, ContextOverflow, InvalidArgument, StateError
from ringlm.model import Model
from ringlm.sampling import Sampling, TokenLogprobs
from ringlm.session import Session
from ringlm.text import StopStrings, generate_text, stop_list
from toys import ToySampler, ToySession, ToyTokenizer, script_of, toy_core

__all__ = ["toy_core"]


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The first end of a stop string, and the longest of those that end there."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


def run(text: str, stops: list[str], cuts: list[int]) -> tuple[str, str | None, list[str]]:
    matcher, out = StopStrings(stops), []
    for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True):
        out.append(matcher.push(text[a:b]))
    out.append(matcher.flush())
    return "".join(out), matcher.found, out


def test_stop_strings_equal_the_definition_however_the_text_is_cut() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        alphabet = rng.choice(["ab", "abc", "ab\n日"])
        stops = ["".join(rng.choices(alphabet, k=rng.randrange(1, 6))) for _ in range(rng.randrange(0, 4))]
        text = "".join(rng.choices(alphabet, k=rng.randrange(0, 20)))
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(0, 12)))
        assert run(text, stops, cuts)[:2] == naive(text, stops), (text, stops, cuts)


@pytest.mark.parametrize(
    ("text", "stops", "kept", "found"),
    [
        ("aaab", ["aab"], "a", "aab"),
        ("aabaaab", ["aaab"], "aab", "aaab"),
        ("xabcy", ["abcd", "bc"], "xa", "bc"),
        ("xabc", ["c", "bc", "abc"], "x", "abc"),
        ("User", ["User:"], "User", None),
        ("", ["a"], "", None),
        ("stop", ["stop"], "", "stop"),
    ],
)
def test_stop_strings(text: str, stops: list[str], kept: str, found: str | None) -> None:
    assert run(text, stops, list(range(len(text))))[:2] == (kept, found)


def test_only_what_might_be_a_stop_is_held_back() -> None:
    rng = random.Random(2)
    for _ in range(300):
        stops = ["".join(rng.choices("ab", k=rng.randrange(1, 5))) for _ in range(2)]
        matcher, text, out = StopStrings(stops), "", ""
        while matcher.found is None and len(text) < 12:
            char = rng.choice("abc")
            text, out = text + char, out + matcher.push(char)
            held = text[len(out) :]
            if matcher.found is None:
                tails = [
                    text[-n:] for n in range(1, len(text) + 1) if any(s.startswith(text[-n:]) for s in stops)
                ]
                assert held == max(tails, key=len, default="")
    assert matcher.push("more") == ("" if matcher.found else matcher.push(""))


@pytest.mark.parametrize("stop", [[""], ["a", ""], [3], ""])
def test_empty_stop_strings_are_refused(stop: Any) -> None:
    with pytest.raises(InvalidArgument, match="stop"):
        stop_list(stop)
    assert stop_list(None) == [] and stop_list("a") == ["a"] and stop_list(("a", "b")) == ["a", "b"]


# ---- sessions ----------------------------------------------------------------------------------------------


@pytest.fixture
def model(toy_core: Any) -> Model:
    return Model("toy.gguf")


def test_prefill_and_decode_return_fresh_logits_or_fill_out(model: Model) -> None:
    with model.session(n_ctx=32, kv=("f16", "f32"), chunk=4) as session:
        seen: list[tuple[int, int]] = []
        first = session.prefill([1, 2, 3, 4, 5, 6], progress=lambda done, total: seen.append((done, total)))
        assert first.shape == (model.n_vocab,) and first.dtype == np.float32
        assert seen == [(4, 6), (6, 6)]
        second = session.decode(7)
        assert first is not second and session.tokens == [1, 2, 3, 4, 5, 6, 7] and session.position == 7
        every = session.prefill(np.array([8, 9]), all_logits=True)
        assert every.shape == (2, model.n_vocab)
        out = np.zeros(model.n_vocab, np.float32)
        assert session.decode(1, out=out) is out and out.any()
        assert session.stats.prefill_tokens == 8 and session.stats.decode_tokens == 2
        assert session.stats.prefill_seconds > 0 and session.stats.decode_seconds > 0
        session.rewind(4)
        assert session.position == 6 and session.chunk == 4 and session.n_ctx == 32
        assert ToySession.opened[0].kv == ("f16", "f32") and "6 of 32" in repr(session)
    assert session.closed and repr(session) == "Session(closed)"
    session.close()


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "empty.*bos_id"),
        ("text", "encode it first"),
        ([1, 10**6], r"tokens\[1\] is 1000000"),
        ([-1], r"tokens\[0\] is -1"),
        ([1.5], "integers"),
        (None, "integers"),
        ([2**70], "vocabulary"),
    ],
)
def test_tokens_are_checked(model: Model, tokens: Any, message: str) -> None:
    session = model.session()
    for call in (session.prefill, session.generate):
        with pytest.raises(InvalidArgument, match=message):
            call(tokens)
    assert session.position == 0


def test_generate_ends_at_a_stop_id_without_yielding_it(model: Model) -> None:
    answers = {3: 10, 4: 11, 5: 12, 6: model.tokenizer.id("<|im_end|>")}  # type: ignore[attr-defined]
    model.core.script = lambda ids: answers[len(ids)]
    session = model.session()
    generation = session.generate([1, 2, 3])
    assert generation.finish_reason is None and not generation.prefilled and session.position == 0
    assert list(generation) == [10, 11, 12]
    assert (
        generation.finish_reason == "stop"
        and generation.completion_tokens == 3
        and generation.prompt_tokens == 3
    )
    assert session.tokens == [1, 2, 3, 10, 11, 12]
    session.rewind(3)
    assert list(session.generate([9], stop_ids=[12], max_tokens=9)) == [11]


def test_generate_ends_at_max_tokens_and_at_the_context(model: Model) -> None:
    model.core.script = lambda ids: 50
    session = model.session(n_ctx=8)
    generation = session.generate([1, 2], max_tokens=3)
    assert list(generation) == [50] * 3 and generation.finish_reason == "length"
    assert session.position == 4  # the last token is not evaluated
    generation = session.generate([50])
    assert list(generation) == [50] * 4 and generation.finish_reason == "length" and session.position == 8
    with pytest.raises(ContextOverflow):
        list(session.generate([1]))
    with pytest.raises(InvalidArgument, match="max_tokens"):
        session.generate([1], max_tokens=0)


def test_logprobs(model: Model) -> None:
    model.core.script = lambda ids: 50
    records = list(model.session().generate([1], max_tokens=2, logprobs=2))
    row = np.zeros(model.n_vocab)
    row[50] = 10
    expected = row - np.log(np.exp(row).sum())
    for record in records:
        assert isinstance(record, TokenLogprobs)
        assert record.id == 50 and record.logprob == pytest.approx(expected[50])
        assert [i for i, _ in record.top] == [50, 0]
        assert [p for _, p in record.top] == pytest.approx([expected[50], expected[0]])
    assert next(iter(model.session().generate([1], logprobs=0))).top == ()


def test_sampling_parameters_reach_the_sampler(model: Model) -> None:
    session = model.session()
    session.prefill([7, 8, 9])
    generation = session.generate(
        [1, 2],
        sampling=Sampling(top_k=3, penalty_window=4),
        temperature=0,
        seed=5,
        max_tokens=1,
        logit_bias={3: -1},
    )
    next(generation)
    sampler = ToySampler.made[-1]
    assert sampler.params == {
        **{"temperature": 0, "top_k": 3, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.0},
        **{
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "penalty_window": 4,
            "logit_bias": {3: -1},
            "seed": 5,
        },
    }
    assert sampler.window[:4] == [8, 9, 1, 2] and generation.seed == 5
    assert session.generate([1]).seed != session.generate([1]).seed
    with pytest.raises(TypeError, match=r"tempratur.*temperature"):
        session.generate([1], tempratur=1)


def test_pickling_and_bad_arguments_are_refused(model: Model) -> None:
    for thing in (model, model.session()):
        with pytest.raises(StateError, match="pickled"):
            pickle.dumps(thing)
    with pytest.raises(InvalidArgument, match="n_ctx"):
        model.session(n_ctx=0)
    with pytest.raises(InvalidArgument, match="n_threads"):
        Model("toy.gguf", n_threads=0)
    model.close()
    with pytest.raises(StateError, match="closed"):
        model.session()
    model.close()


def test_reuse_keeps_the_common_prefix_and_leaves_one_token(model: Model) -> None:
    session = model.session(n_ctx=8)
    session.prefill([1, 2, 3, 4, 5])
    for tokens, kept in ([1, 2, 3, 4, 5, 6], 5), ([1, 2, 3, 4, 5], 4), ([1, 2, 9], 2), ([9], 0):
        assert session.reuse(tokens) == kept and session.position == kept
        session.prefill(tokens[kept:])
    with pytest.raises(ContextOverflow, match="9 tokens and the context 8"):
        session.reuse(list(range(9)))
    assert session.tokens == [9]


def test_generated_text(model: Model) -> None:
    tokenizer = ToyTokenizer()
    prompt = tokenizer.encode("<|im_start|>assistant\n", parse_special=True)

    def generate(reply: str, **options: Any) -> Any:
        model.core.script = script_of(reply, tokenizer=tokenizer)
        return generate_text(model.session(), tokenizer, prompt, **options)

    whole = generate("Grüße 🙂 日本")
    pieces = list(whole)
    assert (
        "".join(p.text for p in pieces) == "Grüße 🙂 日本"
        and whole.finish_reason == "stop"
        and whole.stop is None
    )
    assert all("\ufffd" not in p.text for p in pieces)
    assert not any(p.tokens for p in pieces)  # nobody asked for log-probabilities
    listed = generate("Grüße 🙂 日本", logprobs=0)
    assert [t.id for p in list(listed) for t in p.tokens] == listed.ids == whole.ids

    endless = generate("Grüße 🙂 日本", keep_ids=False)
    assert "".join(p.text for p in endless) == "Grüße 🙂 日本" and endless.ids == []

    stopped = generate("one, two, three", stop=["twice", "two"])
    assert (
        "".join(p.text for p in stopped) == "one, "
        and stopped.finish_reason == "stop"
        and stopped.stop == "two"
    )
    assert len(stopped.ids) == len("one, two")

    held = generate("one, tw", stop="two")
    assert "".join(p.text for p in held) == "one, tw" and held.stop is None

    cut = generate("日", max_tokens=2)
    assert "".join(p.text for p in cut) == "\ufffd" and cut.finish_reason == "length"


def test_cancel_reaches_the_caller(model: Model) -> None:
    session = model.session()
    session.cancel()
    with pytest.raises(Cancelled):
        session.prefill([1, 2])
    assert session.position == 0 and isinstance(session, Session)


def test_import_is_light() -> None:
    code = (
        "import sys, ringlm; assert ringlm.Error; heavy = {'numpy', 'jinja2', 'tokenizers', 'ringlm._core'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules);"
        "assert set(ringlm.__all__) <= set(dir(ringlm)); ringlm.Chat, ringlm.ChatTemplate, ringlm.Model;"
        "assert not {'numpy', 'jinja2'} & set(sys.modules)\n"
        "try: ringlm.nothing\nexcept AttributeError: pass\nelse: raise SystemExit(1)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
