"""A session over the ring as a state machine: overflow, what is visible, going back, forks."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_llama import Array, Shape, worst
from ring_reference import Ring, ring_logits
from ring_sessions import Slots, cached, fed, open_model, open_session, text, write
from ringlm import Model, Sampling, _core, errors

TOLERANCE = 2e-5
FULL = Shape(n_embd=48, n_ff=64, head_dim=16, n_ctx_train=512)
MIXED = FULL.with_(n_layer=3, windows=(16, 0, 24))
WINDOWED = FULL.with_(windows=(16, 24))
SHAPES = {"full": FULL, "mixed": MIXED, "windowed": WINDOWED}


@pytest.fixture(scope="module")
def weights() -> dict[str, dict[str, Array]]:
    """By the name of the shape; `models` fills it."""
    return {}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, weights: dict[str, dict[str, Array]]) -> dict[str, Any]:
    folder, out = tmp_path_factory.mktemp("models"), {}
    for name, shape in SHAPES.items():
        weights[name] = write(folder / f"{name}.gguf", shape)
        out[name] = open_model(folder / f"{name}.gguf", shape)
    return out


def saved(session: Any) -> bytes:
    pieces: list[bytes] = []
    session.save(pieces.append)
    return b"".join(pieces)


def state(session: Any, shape: Shape) -> tuple[Any, ...]:
    """What a step that failed has to leave alone."""
    rows = [a.tobytes() for layer in cached(session, shape) for head in layer for a in head]
    return (session.position, session.tokens, session.visible, session.top_log_probabilities(96), rows)


# ---- overflow --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["full", "mixed"])
def test_overflow_is_an_error_before_anything_is_computed(models: dict[str, Any], name: str) -> None:
    session = open_session(models[name], Ring(40, 4), 8, overflow="error")
    tokens = text(60)
    fed(session, tokens[:38])
    before = state(session, SHAPES[name])
    for n in (3, 9, 22):
        with pytest.raises(errors.ContextOverflow, match=f"{n} tokens do not fit.*38.*40.*2"):
            session.prefill(tokens[38 : 38 + n])
        assert state(session, SHAPES[name]) == before
    session.prefill(tokens[38:40])
    full = state(session, SHAPES[name])
    with pytest.raises(errors.ContextOverflow):
        session.decode(1)
    assert state(session, SHAPES[name]) == full
    assert (session.overflow, session.position, session.evicted) == ("error", 40, 0)


def test_sliding_is_a_choice(models: dict[str, Any]) -> None:
    assert _core.Session(models["full"], 40).overflow == "error"
    assert _core.Session(models["full"], 40).pinned == 0
    session = open_session(models["full"], Ring(40, 4), 8)
    assert (session.overflow, session.pinned) == ("slide", 4)
    session.prefill(text(500))
    session.decode(1)
    assert session.position == 501
    with pytest.raises(errors.InvalidArgument, match=r"overflow.*'error'.*'slide'"):
        open_session(models["full"], Ring(40), overflow="wrap")


@pytest.mark.parametrize("pinned", [-1, 40, 41, 1000])
def test_pinned_out_of_range(models: dict[str, Any], pinned: int) -> None:
    for overflow in ("slide", "error"):
        with pytest.raises(errors.InvalidArgument, match=f"pinned is {pinned}; expected 0 to 39"):
            open_session(models["full"], Ring(40, pinned), overflow=overflow)
    open_session(models["full"], Ring(40, 39))


def test_nothing_can_be_pinned_where_every_layer_has_a_window(models: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidArgument, match=r"pinned.*window"):
        open_session(models["windowed"], Ring(40, 1))
    open_session(models["windowed"], Ring(40, 0))
    open_session(models["windowed"], Ring(40, 4), overflow="error")  # nothing leaves: nothing to be pinned
    open_session(models["windowed"], Ring(24, 4))  # a window of n_ctx is a ring, which pins
    open_session(models["mixed"], Ring(40, 4))


def test_windows_of_a_model(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", MIXED)

    def opened(window: list[int]) -> list[int]:
        return list(_core.Model(str(tmp_path / "m.gguf"), 1, "cpu", window).config.windows)

    assert opened([]) == [0, 0, 0]
    assert opened([8]) == [8, 8, 8]
    assert opened([8, 0, 3]) == [8, 0, 3]
    for wrong in ([8, 0], [1, 2, 3, 4], [-1], [0, 0, -5]):
        with pytest.raises(errors.InvalidArgument, match="window"):
            opened(wrong)


# ---- what is visible -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "pinned", "widest"), [("full", 0, 40), ("full", 7, 40), ("mixed", 7, 40), ("windowed", 0, 24)]
)
def test_the_state_says_what_is_there(models: dict[str, Any], name: str, pinned: int, widest: int) -> None:
    session, tokens = open_session(models[name], Ring(40, pinned), 8), text(200).tolist()
    assert (session.position, session.visible, session.evicted, session.tokens) == (0, 0, 0, [])
    for n in [1, 6, 7, 8, 23, 24, 25, 39, 40, 41, 47, 48, 100, 200]:
        while session.position < n:
            session.decode(tokens[session.position])
        seen = min(n, widest)
        assert (session.position, session.visible, session.evicted) == (n, seen, n - seen)
        kept = min(n, pinned)
        assert session.tokens == tokens[:kept] + tokens[n - (seen - kept) : n]
        assert session.slots == widest + 8 - 1


# ---- going back ------------------------------------------------------------------------------------------


class Book:
    """The rings of all layers by hand, to know how far a session can go back."""

    def __init__(self, shape: Shape, ring: Ring, chunk: int) -> None:
        windows = shape.windows or (0,) * shape.n_layer
        self.layers = [Slots(ring.n_ctx, chunk, ring.pinned, w) for w in windows]

    def write(self, start: int, end: int) -> None:
        for position in range(start, end):
            for layer in self.layers:
                layer.write(position)

    def can(self, position: int, n: int) -> bool:
        return all(layer.can_continue_at(position - n) for layer in self.layers)

    def most(self, position: int) -> int:
        """The largest step back below which every step is possible."""
        return next(n for n in range(position + 1) if n == position or not self.can(position, n + 1))


@pytest.mark.parametrize("chunk", [1, 6, 40])
@pytest.mark.parametrize(
    ("name", "pinned"), [("full", 0), ("full", 7), ("mixed", 7), ("windowed", 0)], ids=str
)
def test_rewind(
    models: dict[str, Any], weights: dict[str, dict[str, Array]], name: str, pinned: int, chunk: int
) -> None:
    shape, ring = SHAPES[name], Ring(40, pinned)
    tokens, other = text(130), text(50, seed=8)
    for length in (10, 16 + chunk - 1, 16 + chunk, 40 + chunk - 1, 40 + chunk, 130):
        book = Book(shape, ring, chunk)
        book.write(0, length)
        most = book.most(length)
        if length > 40 + chunk - 1:
            assert most == chunk  # so many slots more than a query sees
        steps = sorted({0, most, most + 1, length - pinned - 1, length - pinned, length})
        for n in steps:
            if not 0 <= n <= length:
                continue
            session = open_session(models[name], ring, chunk)
            session.prefill(tokens[:length])
            if not book.can(length, n):
                before = state(session, shape)
                whole = saved(session)
                with pytest.raises(errors.InvalidArgument, match=rf"\b{most}\b"):
                    session.rewind(n)
                assert state(session, shape) == before and saved(session) == whole
                continue
            session.rewind(n)
            assert session.position == length - n
            if n:
                with pytest.raises(errors.StateError):
                    session.log_probability(1)
            changed = np.concatenate([tokens[: length - n], other])
            found = fed(session, other, [1, 9])
            expected = ring_logits(shape, weights[name], changed.tolist(), ring)[length - n :]
            assert worst(found, expected) < TOLERANCE, f"{n} of {length} back"


def test_rewound_results_are_those_of_a_fresh_session_bit_by_bit(models: dict[str, Any]) -> None:
    tokens, other = text(200), text(60, seed=9)
    for name, pinned in [("full", 5), ("mixed", 5), ("windowed", 0)]:
        for length, n in [(30, 11), (30, 30), (150, 6), (150, 3), (150, 150)]:
            if (name, length, n) == ("windowed", 30, 11) or (name, length, n) == ("mixed", 30, 11):
                continue  # a window of 16 has wrapped
            session = open_session(models[name], Ring(40, pinned, "f16"), 6)
            session.prefill(tokens[:length])
            session.rewind(n)
            fresh = open_session(models[name], Ring(40, pinned, "f16"), 6)
            if length > n:
                fresh.prefill(tokens[: length - n])
            np.testing.assert_array_equal(fed(session, other), fed(fresh, other))


@pytest.mark.parametrize("name", ["full", "mixed", "windowed"])
def test_rows_written_over_stay_gone_after_a_rewind(models: dict[str, Any], name: str) -> None:
    """Going back does not bring back what the tokens that were given up had overwritten."""
    pinned, chunk = (0 if name == "windowed" else 4), 6
    shape, ring = SHAPES[name], Ring(40, pinned)
    session, book = open_session(models[name], ring, chunk), Book(shape, ring, chunk)
    rng, tokens = np.random.default_rng(4), text(3000)
    position, refused = 0, 0
    for _ in range(120):
        n = int(rng.integers(1, 13))
        session.prefill(tokens[position : position + n])
        book.write(position, position + n)
        position += n
        back = min(int(rng.integers(0, 10)), position)
        if book.can(position, back):
            session.rewind(back)
            position -= back
        else:
            refused += 1
            with pytest.raises(errors.InvalidArgument, match=rf"\b{book.most(position)}\b"):
                session.rewind(back)
        assert session.position == position
    assert refused > 10 and position > 100


# ---- prefixes --------------------------------------------------------------------------------------------


def test_reuse_before_the_wrap(models: dict[str, Any]) -> None:
    tokens = text(38)
    other = (tokens + 1) % 96
    for prompt, expected in [
        (tokens, 37),  # all of it is there; one is left to be evaluated
        (tokens[:20], 19),
        (np.concatenate([tokens, other[:2]]), 38),
        (np.concatenate([tokens[:11], other]), 11),
        (other, 0),
        (tokens[:1], 0),
    ]:
        session = open_session(models["full"], Ring(60, 4), 8)
        session.prefill(tokens)
        assert session.reuse(prompt) == expected == session.position
        fresh = open_session(models["full"], Ring(60, 4), 8)
        expected_logits = fed(fresh, prompt)[expected:]
        np.testing.assert_array_equal(fed(session, prompt[expected:]), expected_logits)
    assert open_session(models["full"], Ring(60, 4)).reuse(tokens) == 0


@pytest.mark.parametrize(("name", "pinned", "left"), [("full", 7, 7), ("mixed", 7, 0), ("windowed", 0, 0)])
def test_reuse_after_the_wrap_keeps_what_is_pinned(
    models: dict[str, Any], name: str, pinned: int, left: int
) -> None:
    tokens = text(200)
    other = (tokens + 1) % 96
    for prompt, expected in [
        (tokens[:60], left),
        (np.concatenate([tokens[:7], other[:20]]), left),
        (np.concatenate([tokens[:3], other[:20]]), min(left, 3)),
        (tokens[:7], min(left, 6)),
        (other[:20], 0),
    ]:
        session = open_session(models[name], Ring(40, pinned), 8)
        session.prefill(tokens)
        assert session.reuse(prompt) == expected == session.position
        fresh = open_session(models[name], Ring(40, pinned), 8)
        np.testing.assert_array_equal(fed(session, prompt[expected:]), fed(fresh, prompt)[expected:])
    # The ids that are still held, in the places where they are held, are not a prefix of anything.
    session = open_session(models[name], Ring(40, pinned), 8)
    session.prefill(tokens)
    assert session.reuse(np.array([*session.tokens, 1], np.int32)) == left


# ---- forks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", ["f32", "int8"])
@pytest.mark.parametrize("name", ["full", "mixed", "windowed"])
@pytest.mark.parametrize("length", [0, 20, 150])
def test_a_fork_and_its_origin_go_on_alone(models: dict[str, Any], name: str, kv: str, length: int) -> None:
    ring = Ring(40, 0 if name == "windowed" else 4, kv)
    before, one, two = text(150)[:length], text(90, seed=1), text(90, seed=2)

    def alone(tokens: Array) -> Array:
        return fed(open_session(models[name], ring, 8), np.concatenate([before, tokens]), [9])[length:]

    origin = open_session(models[name], ring, 8)
    if length:
        origin.prefill(before)
    fork = origin.fork()
    for session in (origin, fork):
        assert (session.position, session.tokens) == (length, origin.tokens)
        assert (session.nbytes, session.slots, session.overflow) == (origin.nbytes, origin.slots, "slide")
    if length:
        assert state(fork, SHAPES[name]) == state(origin, SHAPES[name])
    assert saved(fork) == saved(origin)
    found: tuple[list[Array], list[Array]] = ([], [])
    for start in range(0, 90, 10):  # interleaved
        found[0].append(fed(origin, one[start : start + 10], [3, 1]))
        found[1].append(fed(fork, two[start : start + 10], [10]))
    np.testing.assert_array_equal(np.concatenate(found[0]), alone(one))
    np.testing.assert_array_equal(np.concatenate(found[1]), alone(two))
    # A fork lives on without its origin, and can go back as far.
    third = fork.fork()
    fork.close()
    third.rewind(5)
    expected = alone(np.concatenate([two[:85], one]))[85:]
    np.testing.assert_array_equal(fed(third, one), expected)


def test_a_fork_draws_what_its_origin_draws(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", FULL)
    with Model(tmp_path / "m.gguf", n_threads=1) as model:
        a = model.session(64, sampling=Sampling(temperature=1.5, top_k=0))  # no seed
        a.prefill([1, 2, 3])
        for _ in range(3):
            b = a.fork()  # the first time before the first draw
            assert [model.step([a]) for _ in range(5)] == [model.step([b]) for _ in range(5)]
        first = [model.step([a])[0] for _ in range(20)]
        a.rewind(20)
        a.decode(first[-1])
        assert [model.step([a])[0] for _ in range(20)] != first  # another seed


def test_two_threads_get_errors_not_each_others_logits(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", FULL)
    with Model(tmp_path / "m.gguf", n_threads=1) as model:
        native = model.session(64, overflow="slide")._core
        returned = [0, 0]

        def work(i: int) -> None:
            out = np.empty(model.n_vocab, np.float32)
            for _ in range(2000):
                try:
                    native.decode(7, out)
                except errors.StateError:
                    continue
                returned[i] += 1

        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(returned) == native.position  # who advanced got logits; who got none did not advance


def test_a_batch_leaves_a_cancel_to_the_step_that_hears_it(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", FULL)
    with Model(tmp_path / "m.gguf", n_threads=1) as model:
        session = model.session(4)
        session.prefill([1, 2, 3, 4])
        session.cancel()
        with pytest.raises(errors.BatchError) as caught:
            model.step([session], [1])
        assert isinstance(caught.value.errors[0], errors.ContextOverflow)
        session.rewind(2)
        with pytest.raises(errors.Cancelled):
            session.decode(1)
        session.decode(1)


@pytest.mark.parametrize("windows", [None, 12])
def test_a_full_session_that_never_slid_is_saved_whole(tmp_path: Path, windows: int | None) -> None:
    write(tmp_path / "m.gguf", FULL)
    with Model(tmp_path / "m.gguf", n_threads=1, window=windows) as model:
        session = model.session(16, chunk=4, pinned=10)
        session.prefill(list(range(40, 56)))
        session.save(tmp_path / "s")
        loaded = model.load_session(tmp_path / "s")
        if windows is None:
            assert loaded.tokens == session.tokens == list(range(40, 56))
            loaded.rewind(1)
            assert loaded.reuse([*range(40, 46), 9]) == 6
        else:  # the windowed rings have wrapped: of what is seen, the oldest may be gone
            assert session.tokens == list(range(44, 56))
            assert loaded.tokens == session.tokens[-len(loaded.tokens) :]


def test_a_wrong_trace_leaves_the_one_that_runs(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", FULL)
    with Model(tmp_path / "m.gguf", n_threads=1) as model:
        session = model.session(16)
        trace = session.trace()
        session.decode(1)
        for wrong in (0, -1, 2**31, 2**21, 1.5, True):
            with pytest.raises(errors.InvalidArgument):
                session.trace(wrong)  # type: ignore[arg-type]
        session.decode(2)
        assert [record.position for record in trace] == [0, 1]
