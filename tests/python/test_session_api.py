"""What Session and Model add to the core, over a toy core: arguments, figures, forks, batches, traces."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
from ringlm import BatchError, ContextOverflow, Error, InvalidArgument, Model, Sampling, StateError
from toys import ToySampler, ToySession, toy_core

__all__ = ["toy_core"]

pytestmark = pytest.mark.filterwarnings("ignore:the model has no chat template")


@pytest.fixture
def model(toy_core: Any) -> Model:
    return Model("toy.gguf")


# ---- options -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kv": "f8"}, "kv is 'f8'; expected 'f16', 'int8' or 'f32', or a pair"),
        ({"kv": ("f16", "int4")}, "expected 'f16', 'int8' or 'f32'"),
        ({"kv": ("f16",)}, "pair"),
        ({"kv": ["f16", "f16"]}, "pair"),
        ({"kv": None}, "kv is None"),
        ({"pinned": -1}, "pinned is -1; expected how many"),
        ({"pinned": 1.5}, "pinned is 1.5"),
        ({"pinned": None}, "pinned is None"),
        ({"chunk": 0}, "chunk is 0; expected a positive number"),
        ({"n_ctx": "8"}, "n_ctx is '8'"),
        ({"n_ctx": 2**31}, "n_ctx is 2147483648"),
        ({"overflow": "wrap"}, "overflow is 'wrap'; expected 'error', or 'slide'"),
        ({"overflow": True}, "overflow is True"),
    ],
)
def test_options_that_are_refused(model: Model, options: dict[str, Any], says: str) -> None:
    for call in (model.session, lambda **o: model.chat("Be kind.", **o)):
        if options == {"pinned": None} and call != model.session:
            continue  # a chat finds out by itself
        with pytest.raises(InvalidArgument, match=says):
            call(**options)
    assert not ToySession.opened


def test_options_reach_the_core(model: Model) -> None:
    session = model.session(32, ("int8", "f16"), 4, pinned=3, overflow="slide")
    native = ToySession.opened[-1]
    assert (native.n_ctx, native.kv, native.chunk) == (32, ("int8", "f16"), 4)
    assert (session.pinned, session.overflow) == (native.pinned, native.overflow) == (3, "slide")
    assert session.sampling == Sampling()
    how = Sampling(temperature=0.0)
    assert model.session(sampling=how).sampling is how
    assert model.chat(temperature=0.5).session.sampling.temperature == 0.5


@pytest.mark.parametrize(
    ("window", "core"),
    [(None, []), (0, [0]), (64, [64]), ([64], [64]), ((64, None, 0), [64, 0, 0])],
)
def test_windows_reach_the_core(toy_core: Any, window: Any, core: list[int]) -> None:
    assert Model("toy.gguf", window=window).core.window == core  # type: ignore[attr-defined]


@pytest.mark.parametrize("window", [-1, 2**31, "64", [], [1, -1], [1.5], 1.5, {64}])
def test_windows_that_are_refused(toy_core: Any, window: Any) -> None:
    with pytest.raises(InvalidArgument, match="window is"):
        Model("toy.gguf", window=window)


# ---- figures -----------------------------------------------------------------------------------------------


def test_stats_are_a_snapshot(model: Model) -> None:
    session = model.session(16, chunk=4, pinned=2, overflow="slide")
    session.prefill(range(10, 30))
    stats = session.stats
    session.decode(5)
    assert (stats.prefill_tokens, stats.decode_tokens) == (20, 0)
    assert (stats.position, stats.visible, stats.evicted, stats.slots) == (20, 16, 4, 19)
    later = session.stats
    assert (later.prefill_tokens, later.decode_tokens, later.position, later.evicted) == (20, 1, 21, 5)
    assert later.decode_seconds > 0 and later.prefill_seconds == stats.prefill_seconds > 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.position = 3  # type: ignore[misc]
    assert session.tokens == [10, 11, *range(17, 30), 5]
    assert repr(session) == "Session(16 of 16 tokens and 5 evicted, 0.0 MiB of K/V)"


def test_kinds_and_rows(model: Model) -> None:
    session = model.session(16, chunk=4, pinned=2, overflow="slide")
    (kind,) = session.kinds
    assert (kind.window, kind.n_layer, kind.capacity, kind.visible, kind.pinned) == (0, 2, 19, 16, 2)
    assert str(kind) == "2 layers, 2 pinned: 19 slots, 16 visible, 3.0 MiB"
    assert str(dataclasses.replace(kind, window=8, n_layer=1)).startswith("1 layer, window 8: ")
    session.prefill([1, 2, 3])
    rows = session.kv(1, 0)
    assert rows.positions.tolist() == [0, 1, 2] and rows.k.shape == rows.v.shape == (3, 2)
    assert session.kv(layer=1, head=0).k is not rows.k


# ---- sliding -----------------------------------------------------------------------------------------------


def test_generation_goes_on_behind_the_context(model: Model) -> None:
    model.core.script = lambda ids: 50  # type: ignore[attr-defined]
    session = model.session(8, overflow="slide")
    generation = session.generate([1, 2], max_tokens=100)
    assert list(generation) == [50] * 100 and generation.finish_reason == "length"
    assert session.position == 101 and not session.full
    session.prefill(range(20))
    for n, _ in enumerate(session.generate([3])):
        if n == 1000:
            break
    assert session.position == 101 + 20 + 1001
    bounded = model.session(8)
    assert len(list(bounded.generate([1, 2]))) == 7 and bounded.full


def test_reuse_of_prompts_longer_than_the_context(model: Model) -> None:
    session = model.session(8, chunk=2, pinned=3, overflow="slide")
    long = list(range(100, 130))
    assert session.reuse(long) == 0
    session.prefill(long)
    assert session.reuse([*long[:3], 7, 8]) == 3 and session.tokens == long[:3]
    with pytest.raises(InvalidArgument, match="empty"):
        session.reuse([])
    with pytest.raises(ContextOverflow, match="9 tokens and the context 8"):
        model.session(8).reuse(list(range(9)))


# ---- forks -------------------------------------------------------------------------------------------------


def test_a_fork_goes_on_by_itself(model: Model) -> None:
    session = model.session(16, chunk=4, pinned=2, overflow="slide", sampling=Sampling(seed=3))
    session.prefill(range(10, 30))
    model.step([session])
    twin = session.fork()
    assert twin.stats == session.stats and twin.tokens == session.tokens and twin.model is model
    assert (twin.pinned, twin.overflow, twin.sampling) == (2, "slide", Sampling(seed=3))
    position = session.position
    twin.decode(9)
    assert (session.position, twin.position) == (position, position + 1)
    assert session.stats.decode_tokens + 1 == twin.stats.decode_tokens
    # The sampler too: the window of one is not that of the other.
    model.step([twin])
    model.step([session])
    one, other = (s._steps._sampler.window[-4:] for s in (session, twin))  # type: ignore[union-attr]
    assert (one, other) == (session.tokens[-4:], twin.tokens[-4:]) and one != other


# ---- batches -----------------------------------------------------------------------------------------------


def test_a_step_draws_with_each_sessions_own_sampler(model: Model) -> None:
    ways = [Sampling(temperature=t, penalty_window=4, seed=n) for n, t in enumerate((0.5, 0.25, 2.0))]
    sessions = [model.session(sampling=how) for how in ways]
    for n, session in enumerate(sessions):
        session.prefill(range(30, 36 + n))
    expected = [model.core.script(session.tokens) for session in sessions]  # type: ignore[attr-defined]
    assert model.step(sessions) == expected
    assert [(s.params["temperature"], s.params["seed"]) for s in ToySampler.made[-3:]] == [
        (0.5, 0),
        (0.25, 1),
        (2.0, 2),
    ]
    assert [s.window for s in ToySampler.made[-3:]] == [[*s.tokens[-5:-1], s.tokens[-1]] for s in sessions]
    assert [s.stats.decode_tokens for s in sessions] == [1, 1, 1]
    assert all(s.stats.decode_seconds > 0 for s in sessions)
    assert model.step([]) == []


def test_given_tokens(model: Model) -> None:
    sessions = [model.session() for _ in range(3)]
    assert model.step(sessions, [7, np.int64(8), 9]) == [7, 8, 9]
    drawn = model.core.script([8])  # type: ignore[attr-defined]
    assert model.step(sessions, [1, None, 2]) == [1, drawn, 2]
    assert [s.tokens for s in sessions] == [[7, 1], [8, drawn], [9, 2]]


def test_the_window_knows_what_was_fed_between_two_steps(model: Model) -> None:
    session = model.session(sampling=Sampling(penalty_window=3, seed=1))

    def window() -> list[int]:
        sampler: Any = session._steps._sampler
        return list(sampler.window)

    session.prefill([40, 41, 42, 43])
    (first,) = model.step([session])
    assert window() == [41, 42, 43, first]
    session.decode(50)
    model.step([session], [51])
    (second,) = model.step([session])
    assert window() == [41, 42, 43, first, 50, 51, second]
    session.rewind(2)  # what is taken back is not in it, so it begins anew
    session.decode(60)
    (third,) = model.step([session])
    assert window() == [first, 50, 60, third]
    session.sampling = Sampling(penalty_window=0)
    (fourth,) = model.step([session])
    assert window() == [fourth] and session.sampling.penalty_window == 0


def test_a_session_that_fails_is_as_before_and_the_others_advance(model: Model) -> None:
    sessions = [model.session(n_ctx=6 if n == 2 else 32, sampling=Sampling(seed=n)) for n in range(5)]
    for n, session in enumerate(sessions):
        if n != 1:
            session.prefill(range(30, 35))
    model.step(sessions, [1, 2, 3, 4, 5])
    model.step([sessions[3]])
    sessions[1].rewind(1)  # nothing to draw from
    sessions[3].cancel()
    sampler = sessions[3]._steps._sampler
    before = [(s.tokens, s.stats.decode_tokens) for s in sessions]
    expected = [model.core.script(s.tokens) if n in (0, 4) else None for n, s in enumerate(sessions)]  # type: ignore[attr-defined]
    with pytest.raises(
        BatchError, match=r"3 of 5 sessions failed .* session 1: there are no logits"
    ) as caught:
        model.step(sessions)
    error = caught.value
    assert isinstance(error, Error) and error.tokens == expected
    assert {i: type(e).__name__ for i, e in error.errors.items()} == {
        1: "StateError",
        2: "ContextOverflow",
        3: "Cancelled",
    }
    for n, session in enumerate(sessions):
        tokens, decoded = before[n]
        if n in error.errors:
            assert (session.tokens, session.stats.decode_tokens) == before[n]
        else:
            assert (session.tokens, session.stats.decode_tokens) == ([*tokens, expected[n]], decoded + 1)
    assert sessions[3]._steps._sampler is sampler and sessions[2]._steps._sampler is None
    with pytest.raises(BatchError) as alone:
        model.step([sessions[1]])
    assert alone.value.tokens == [None] and isinstance(alone.value.__cause__, StateError)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and again.tokens == error.tokens


def test_batches_that_are_refused(model: Model) -> None:
    one, two = model.session(), model.session()
    other = Model("other.gguf").session()
    for sessions, tokens, says in (
        ([one, one], None, r"sessions\[1\] is there twice"),
        ([one, other], None, r"sessions\[1\] is one of another model"),
        ([one, 3], None, r"sessions\[1\] is of type int"),
        ([one, two], [1], "1 tokens for 2 sessions"),
        ([one, two], [1, 10**6], r"tokens\[1\] is 1000000; the vocabulary"),
        ([one, two], [1, -1], r"tokens\[1\] is -1"),
        ([one, two], [1, 1.5], r"tokens\[1\] is 1.5; expected a token id"),
    ):
        with pytest.raises(InvalidArgument, match=says):
            model.step(sessions, tokens)  # type: ignore[arg-type]
    assert one.position == two.position == 0


# ---- traces ------------------------------------------------------------------------------------------------


def test_a_trace_tells_of_each_step(model: Model) -> None:
    session = model.session(16, chunk=4)
    session.prefill([1])
    trace = session.trace()
    assert list(trace) == []
    session.prefill(range(1, 7))
    session.decode(7)
    steps = [(r.kind, r.position, r.n_tokens, r.slot) for r in trace]
    assert steps == [("prefill", 1, 4, 1), ("prefill", 5, 2, 5), ("decode", 7, 1, 7)]
    assert list(trace) == []
    session.decode(8)
    record = next(trace)
    assert (record.position, record.visible, record.allocations) == (8, (8,), 0)
    assert record.operations == {"embed": 0.125, "attend": 0.25}
    assert record.operation_bytes == {"embed": 8, "attend": 16}
    assert [kind.capacity for kind in trace.kinds] == [19]


TABLE = [
    "step     position  tokens  slot  visible  weight_bytes  kv_bytes      ms  allocations",
    "prefill         0       4     0        0         1,000     2,048  500.00            0",
]


def test_the_text_of_a_trace(model: Model) -> None:
    session = model.session(16, chunk=4)
    with session.trace() as trace:
        session.prefill(range(1, 7))
        session.decode(7)
    session.decode(8)  # not traced any more
    text = str(trace).splitlines()
    assert text[:2] == TABLE
    assert text[2].split()[:5] == ["prefill", "4", "2", "4", "4"]
    assert text[3].split()[:5] == ["decode", "6", "1", "6", "6"]
    assert text[4:] == [
        "",
        "ms by step   embed  attend",
        *(f"{k:10s}  125.00  250.00" for k in ("prefill", "decode")),
    ]
    assert str(trace).splitlines() == text  # printing takes nothing away
    first = next(trace)
    assert [line.split() for line in str(first).splitlines()[:2]] == [line.split() for line in TABLE]
    assert len(list(trace)) == 2
    assert str(trace) == " ".join(TABLE[0].split()).replace(" ", "  ")


def test_traces_end(model: Model) -> None:
    session = model.session()
    native = ToySession.opened[-1]
    first = session.trace(n=2)
    session.decode(1)
    second = session.trace()
    session.decode(2)
    assert [r.position for r in first] == [0] and [r.position for r in second] == [1]
    for k in range(5):
        session.decode(k)
    session.close()
    second.close()
    second.close()
    session = model.session()
    trace = session.trace(n=2)
    native = ToySession.opened[-1]
    for k in range(5):
        session.decode(k)
        str(trace)
    trace.close()
    assert native._trace is None and [r.position for r in trace] == [3, 4]
    for wrong in (0, -1, 1.5, "5", 2**31):
        with pytest.raises(InvalidArgument, match="n is"):
            session.trace(wrong)  # type: ignore[arg-type]
