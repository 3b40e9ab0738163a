"""Sessions, chats and batches over the real ring of small random models, against tokens fed by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ringlm import BatchError, Model, Sampling
from tiny_chat_model import END, RANDOM, START, write_random

SYSTEM = "You are brief."
N_CTX, CHUNK = 96, 8
HEAD = [START, *f"system\n{SYSTEM}".encode(), END, *b"\n", START, *b"user\n"]


def opening(text: str) -> list[int]:
    return [*HEAD, *text.encode(), END, *b"\n", START, *b"assistant\n"]


def going_on(text: str) -> list[int]:
    return [END, *b"\n", START, *f"user\n{text}".encode(), END, *b"\n", START, *b"assistant\n"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "m.gguf"
    write_random(path)
    return path


@pytest.fixture
def model(path: Path) -> Iterator[Model]:
    with Model(path, n_threads=2) as model:
        yield model


class ByHand:
    """Greedy answers over a session that is fed one token at a time."""

    def __init__(self, model: Model, kv: Any, pinned: int) -> None:
        self.session = model.session(N_CTX, kv, 1, pinned=pinned, overflow="slide")
        self.left: list[int] = []  # generated, but not fed yet

    def ask(self, prompt: list[int], n: int) -> list[int]:
        for token in [*self.left, *prompt]:
            self.logits = self.session.decode(token)
        answer: list[int] = []
        while True:
            token = int(np.argmax(self.logits))
            if token == END:
                self.left = []
                return answer
            answer.append(token)
            if len(answer) == n:
                self.left = [token]
                return answer
            self.logits = self.session.decode(token)


@pytest.mark.parametrize(
    ("kv", "window"), [("f32", None), ("f16", (32, 0)), ("f16", 24), ("int8", None), ("int8", (32, 0))]
)
def test_a_chat_of_many_turns_equals_its_tokens_fed_by_hand(path: Path, kv: str, window: Any) -> None:
    with Model(path, window=window) as model:
        chat = model.chat(SYSTEM, n_ctx=N_CTX, kv=kv, chunk=CHUNK, temperature=0, max_tokens=9)
        pinned = 0 if window == 24 else len(HEAD)
        assert chat.session.pinned == pinned
        hand = ByHand(model, kv, pinned)
        answers = set()
        for n in range(20):
            text = f"Message {n}?"
            answer = chat.ask(text)
            ids = hand.ask(opening(text) if n == 0 else going_on(text), 9)
            assert answer == model.tokenizer.decode(ids)
            answers.add(answer)
            assert chat.last_usage is not None and chat.last_usage.completion_tokens == len(ids)
            assert chat.session.position == hand.session.position
            assert chat.session.tokens == hand.session.tokens
        assert chat.session.position > 6 * N_CTX and len(answers) > 15
        found, expected = (s.fork().decode(65) for s in (chat.session, hand.session))
        np.testing.assert_array_equal(found, expected)
        if pinned:
            assert chat.session.tokens[:pinned] == HEAD


def test_a_new_conversation_begins_behind_the_pinned_rows(model: Model) -> None:
    chat = model.chat(SYSTEM, n_ctx=N_CTX, chunk=CHUNK, temperature=0, max_tokens=9)
    for n in range(10):
        chat.ask(f"Message {n}?")
    rows = chat.session.kv(1, 0)
    chat.reset()
    answer = chat.ask("Hello?")
    assert chat.last_usage is not None and chat.last_usage.cached_tokens == len(HEAD)
    hand = ByHand(model, "f16", len(HEAD))
    assert answer == model.tokenizer.decode(hand.ask(opening("Hello?"), 9))
    for a, b in zip(rows[1:], chat.session.kv(1, 0)[1:], strict=True):
        np.testing.assert_array_equal(a[: len(HEAD)], b[: len(HEAD)])


def test_a_chat_that_was_disturbed_goes_on(model: Model) -> None:
    """Read again: the newest turns, behind the pinned rows that are there still."""
    chat = model.chat(SYSTEM, n_ctx=N_CTX, chunk=CHUNK, temperature=0, max_tokens=3)
    for n in range(10):
        chat.ask(f"m{n}")
    assert list(chat.session.generate([65, 66, 67], max_tokens=2))
    chat.ask("and now")
    assert chat.session.stats.evicted == 0
    hand = ByHand(model, "f16", len(HEAD))
    fed = chat.session.tokens
    hand.session.prefill(fed)
    assert fed[: len(HEAD)] == HEAD and bytes(t for t in fed if t < 256).count(b"and now") == 1
    np.testing.assert_array_equal(chat.session.decode(65), hand.session.decode(65))


# ---- generation and batches --------------------------------------------------------------------------------

WAYS = [
    Sampling(temperature=1.0, top_k=0, seed=1),
    Sampling(temperature=0.0),
    Sampling(temperature=2.0, repetition_penalty=1.3, penalty_window=5, seed=3),
    Sampling(temperature=0.7, presence_penalty=0.5, penalty_window=200, seed=4),
]
OPTIONS: list[dict[str, Any]] = [
    {"n_ctx": 64, "overflow": "slide", "pinned": 5, "chunk": 7},
    {"n_ctx": 48, "overflow": "slide", "kv": "int8", "chunk": 16},
    {"n_ctx": 256, "kv": "f32"},
    {"n_ctx": 100, "overflow": "slide", "kv": ("int8", "f16"), "pinned": 37, "chunk": 5},
]


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(8)
    return [rng.integers(0, 256, n).tolist() for n in (70, 3, 100, 41)]


def test_a_batch_equals_generation_alone(model: Model) -> None:
    """Of sessions of different lengths, caches and samplers; past wraps of some of them."""
    n = 90
    alone = []
    for prompt, how, options in zip(prompts(), WAYS, OPTIONS, strict=True):
        session = model.session(**options)
        tokens = list(session.generate(prompt, sampling=how, max_tokens=n, stop_ids=()))
        alone.append((tokens, session.decode(tokens[-1])))
    sessions = []
    for prompt, how, options in zip(prompts(), WAYS, OPTIONS, strict=True):
        sessions.append(model.session(sampling=how, **options))
        sessions[-1].prefill(prompt)
    steps = [model.step(sessions) for _ in range(n)]
    for i, (tokens, logits) in enumerate(alone):
        assert [step[i] for step in steps] == tokens
        twin = sessions[i].fork()
        twin.rewind(1)
        np.testing.assert_array_equal(twin.decode(tokens[-1]), logits)


def test_one_session_of_a_batch_fails(model: Model) -> None:
    sessions = [model.session(n_ctx=20 if i == 1 else 64, sampling=WAYS[i], pinned=0) for i in range(3)]
    for session in sessions:
        session.prefill(range(19))
    twins = [session.fork() for session in sessions]
    model.step(sessions)
    before = sessions[1].fork()
    with pytest.raises(BatchError, match="1 of 3") as caught:
        model.step(sessions)
    assert list(caught.value.errors) == [1] and caught.value.tokens[1] is None
    expected = [model.step([twin]) + model.step([twin]) for twin in (twins[0], twins[2])]
    assert [s.tokens[19:] for s in (sessions[0], sessions[2])] == expected
    # Its sampler has drawn, in vain, what it draws again.
    assert sessions[1].tokens == before.tokens
    sessions[1].rewind(0)
    again = [session._draw()[0] for session in (sessions[1], before)]
    assert again[0] == again[1]


def test_generation_past_the_context_equals_single_steps(model: Model) -> None:
    session = model.session(40, chunk=16, pinned=6, overflow="slide")
    tokens = list(session.generate(list(range(65, 90)), temperature=0, max_tokens=150, stop_ids=()))
    other = model.session(40, chunk=1, pinned=6, overflow="slide")
    for token in [*range(65, 90), *tokens[:-1]]:
        logits = other.decode(token)
    assert int(np.argmax(logits)) == tokens[-1] and other.stats.evicted == 25 + 149 - 40


# ---- what can be seen --------------------------------------------------------------------------------------


def test_stats_rows_and_reuse(model: Model) -> None:
    text = np.random.default_rng(2).integers(0, 256, 300)
    session = model.session(40, chunk=16, pinned=6, overflow="slide")
    session.prefill(text)
    stats = session.stats
    assert (stats.position, stats.visible, stats.evicted, stats.slots) == (300, 40, 260, 55)
    assert stats.prefill_tokens == 300
    rows = session.kv(0, 0)
    assert rows.positions.tolist() == [*range(6), *range(300 - 34, 300)]
    assert rows.k.shape == rows.v.shape == (40, RANDOM.dim) and rows.k.dtype == np.float32
    assert session.tokens == text[rows.positions].tolist()
    (kind,) = session.kinds
    assert (kind.window, kind.n_layer, kind.capacity, kind.visible, kind.pinned) == (0, 2, 55, 40, 6)
    assert kind.nbytes == session.kv_nbytes == 2 * 2 * 55 * 16 * 2
    assert session.reuse([*text[:6], 1, 2]) == 6 and session.stats.evicted == 0
    session.close()
    assert session.stats.prefill_tokens == 300 and repr(session) == "Session(closed)"


def test_a_trace_of_a_wrap(path: Path) -> None:
    with Model(path, window=(20, 0)) as model:
        session = model.session(40, chunk=16, pinned=6, overflow="slide")
        with session.trace() as trace:
            session.prefill(range(50))
            for token in range(20):
                session.decode(token)
        windows = [kind.window for kind in trace.kinds]
        text, records = str(trace), list(trace)
    assert sorted(windows) == [0, 20]
    steps = [("prefill", at, min(16, 50 - at)) for at in range(0, 50, 16)] + [
        ("decode", at, 1) for at in range(50, 70)
    ]
    assert [(r.kind, r.position, r.n_tokens) for r in records] == steps
    for r in records:
        assert r.slot == (r.position if r.position < 6 else 6 + (r.position - 6) % (55 - 6))
        assert r.visible == tuple(min(r.position + r.n_tokens, 20 if w else 40) for w in windows)
        assert 0 < sum(r.operations.values()) <= r.seconds * 1.01
        assert r.weight_bytes > 0 and r.kv_bytes > 0 and r.allocations == 0
    # Two kinds, a line of headings, the steps, an empty line, headings, prefill and decode
    assert len(text.splitlines()) == 2 + 1 + len(records) + 1 + 3
