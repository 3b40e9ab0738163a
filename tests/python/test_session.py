"""The core's session: bit-equality, atomic steps, threads, processes, memory."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import re
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_llama import Shape, random_weights, write_llama
from ringlm import _core, errors

N = 131  # tokens: past two borders of attention's tiles of 64
TEXT = np.random.default_rng(3).integers(0, 96, N).astype(np.int32)
SMALL = Shape(n_ctx_train=200)
QUANTIZED = Shape(
    n_embd=256,
    n_ff=256,
    n_head=8,
    n_ctx_train=200,
    types={"default": "Q4_1", "attn_q.weight": "Q5_K", "attn_v.weight": "Q6_K", "ffn_up.weight": "Q8_0"},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def path(folder: Path) -> str:
    write_llama(folder / "small.gguf", SMALL)
    return str(folder / "small.gguf")


@pytest.fixture(scope="module")
def long_path(folder: Path) -> str:
    """A model whose prefill of 4096 tokens takes about a second."""
    write_llama(folder / "long.gguf", Shape(n_layer=4, n_head=8, n_head_kv=1, n_ctx_train=4096))
    return str(folder / "long.gguf")


@pytest.fixture(scope="module")
def model(path: str) -> Any:
    return _core.Model(path, 2, "cpu")


def last(session: Any, n_vocab: int = 96) -> np.ndarray:
    """The logits behind the last token, seen through the log-probabilities of all tokens."""
    top = dict(session.top_log_probabilities(n_vocab))
    return np.array([top[i] for i in range(n_vocab)], np.float32)


def fresh(model: Any, tokens: Any, **options: Any) -> np.ndarray:
    session = _core.Session(model, **options)
    session.prefill(tokens)
    return last(session)


def in_subprocess(code: str, *args: str, timeout: float = 60) -> str:
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *args],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


# ---- the same bits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", [("f32", "f32"), ("f16", "f16"), ("f16", "f32")], ids="-".join)
@pytest.mark.parametrize("shape", [SMALL, QUANTIZED], ids=["F32", "quantized"])
def test_the_same_bits_in_every_chunk_and_on_every_number_of_threads(
    tmp_path: Path, shape: Shape, kv: tuple[str, str]
) -> None:
    write_llama(tmp_path / "m.gguf", shape)

    def everything(n_threads: int, chunk: int) -> np.ndarray:
        session = _core.Session(_core.Model(str(tmp_path / "m.gguf"), n_threads, "cpu"), 0, *kv, chunk)
        out = np.empty((N, shape.n_vocab), np.float32)
        session.prefill(TEXT, out, all_logits=True)
        return out

    expected = everything(1, N)
    assert np.isfinite(expected).all() and len(np.unique(expected)) > N
    for n_threads, chunk in [
        (1, 1),
        (1, 3),
        (2, 2),
        (2, 5),
        (2, 64),
        (2, N),
        (3, 128),
        (5, 3),
        (5, 65),
        (5, N),
    ]:
        np.testing.assert_array_equal(everything(n_threads, chunk), expected)
    for n_threads in (1, 2, 3):
        session = _core.Session(_core.Model(str(tmp_path / "m.gguf"), n_threads, "cpu"), 0, *kv)
        row = np.empty(shape.n_vocab, np.float32)
        for i, token in enumerate(TEXT):
            session.decode(token, row)
            np.testing.assert_array_equal(row, expected[i])


@pytest.mark.parametrize("n", [1, 63, 64, 65, 127, 128, 129])
def test_the_last_logits_are_the_last_row_of_all(model: Any, n: int) -> None:
    everything, row = np.empty((n, 96), np.float32), np.empty(96, np.float32)
    _core.Session(model, chunk=50).prefill(TEXT[:n], everything, all_logits=True)
    _core.Session(model, chunk=17).prefill(TEXT[:n], row)
    np.testing.assert_array_equal(row, everything[-1])


def test_sessions_interleaved_and_in_threads_equal_sessions_alone(model: Any) -> None:
    texts = [np.roll(TEXT, i)[:100] for i in range(4)]
    alone = [fresh(model, text) for text in texts]

    sessions = [_core.Session(model, chunk=7 + i) for i in range(4)]
    for start in range(0, 100, 10):
        for session, text in zip(sessions, texts, strict=True):
            session.prefill(text[start : start + 9])
            session.decode(text[start + 9])
    for session, expected in zip(sessions, alone, strict=True):
        np.testing.assert_array_equal(last(session), expected)

    found: dict[int, np.ndarray] = {}

    def work(i: int) -> None:
        session = _core.Session(model, chunk=10)
        session.prefill(texts[i][:60])
        for token in texts[i][60:]:
            session.decode(token)
        found[i] = last(session)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(4):
        np.testing.assert_array_equal(found[i], alone[i])


# ---- options and limits ----------------------------------------------------------------------------------


def test_defaults_and_the_trained_length(folder: Path) -> None:
    def opened(trained: int, factor: float | None = None, **options: int) -> Any:
        write_llama(folder / "n.gguf", Shape(n_ctx_train=trained, rope_factor=factor))
        return _core.Session(_core.Model(str(folder / "n.gguf"), 1, "cpu"), **options)

    assert (opened(8192).n_ctx, opened(8192).chunk) == (4096, 128)
    assert opened(200).n_ctx == 200
    assert opened(200, n_ctx=50).chunk == 50
    assert opened(8192, n_ctx=8192).n_ctx == 8192
    with pytest.raises(
        errors.InvalidArgument, match="201; expected 1 to 200, the length that the model was trained"
    ):
        opened(200, n_ctx=201)
    assert opened(200, 4.0, n_ctx=800).n_ctx == 800
    with pytest.raises(errors.InvalidArgument, match=r"801; expected 1 to 800.*RoPE scaling"):
        opened(200, 4.0, n_ctx=801)
    for options in (
        {"n_ctx": -1},
        {"chunk": 0},
        {"chunk": -5},
        {"chunk": 65537},
        {"kv_k": "int3"},
        {"kv_v": ""},
    ):
        with pytest.raises(errors.InvalidArgument):
            opened(200, **options)


def test_a_full_context_works_and_one_more_token_changes_nothing(model: Any) -> None:
    session = _core.Session(model, n_ctx=70, chunk=32)
    session.prefill(TEXT[:69])
    before = last(session)
    with pytest.raises(
        errors.ContextOverflow, match="2 tokens do not fit: 69 of n_ctx = 70 are in use, 1 are left"
    ):
        session.prefill(TEXT[:2])
    assert (session.position, session.tokens) == (69, TEXT[:69].tolist())
    np.testing.assert_array_equal(last(session), before)
    session.decode(TEXT[69])
    np.testing.assert_array_equal(last(session), fresh(model, TEXT[:70]))
    with pytest.raises(errors.ContextOverflow):
        session.decode(1)
    np.testing.assert_array_equal(last(session), fresh(model, TEXT[:70]))


def test_rewind(model: Any) -> None:
    session = _core.Session(model, chunk=16)
    session.prefill(TEXT[:100])
    session.rewind(0)
    assert last(session).shape == (96,)
    for wrong in (-1, 101):
        with pytest.raises(errors.InvalidArgument, match="expected 0 to 100"):
            session.rewind(wrong)
    session.rewind(36)
    assert (session.position, session.tokens) == (64, TEXT[:64].tolist())
    with pytest.raises(errors.StateError, match="no logits"):
        session.log_probability(1)
    with pytest.raises(errors.StateError, match="no logits"):
        session.sample(_core.Sampler(96))
    other = np.concatenate([TEXT[:64], TEXT[10:30]])
    session.prefill(other[64:])
    np.testing.assert_array_equal(last(session), fresh(model, other))
    session.rewind(session.position)
    session.decode(TEXT[0])
    np.testing.assert_array_equal(last(session), fresh(model, TEXT[:1]))


# ---- arguments -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [[], (), np.zeros(0, np.int32)], ids=repr)
def test_no_tokens(model: Any, tokens: Any) -> None:
    with pytest.raises(errors.InvalidArgument, match="no tokens"):
        _core.Session(model).prefill(tokens)


@pytest.mark.parametrize("bad", [-1, 96, 2**31 - 1, 2**31, -(2**31) - 1, 2**33 + 5, 2**64, 2**100])
def test_ids_outside_the_vocabulary(model: Any, bad: int) -> None:
    session = _core.Session(model)
    session.prefill([1, 2])
    for step in (
        lambda: session.prefill([1, bad]),
        lambda: session.decode(bad),
        lambda: session.log_probability(bad),
    ):
        with pytest.raises(errors.InvalidArgument):
            step()
    if abs(bad) < 2**63:
        with pytest.raises(errors.InvalidArgument):
            session.prefill(np.array([1, bad], np.int64))
    assert session.tokens == [1, 2]


@pytest.mark.parametrize(
    "tokens",
    [
        [1.5],
        [1.0],
        ["1"],
        "12",
        b"12",
        5,
        None,
        [[1, 2]],
        np.array([1.0]),
        np.array(["a"]),
        np.array([True]),
        {1: 2},
        {1, 2},
    ],
    ids=repr,
)
def test_tokens_that_are_no_integers(model: Any, tokens: Any) -> None:
    with pytest.raises(TypeError):
        _core.Session(model).prefill(tokens)


def test_tokens_of_other_shapes_and_integer_types(model: Any) -> None:
    session = _core.Session(model)
    for shape in ((2, 2), ()):
        with pytest.raises(errors.InvalidArgument, match="dimensions; expected one"):
            session.prefill(np.ones(shape, np.int32))
    same: list[Any] = [[5, 6, 7], (5, 6, 7), range(5, 8), np.array([5, 6, 7]), np.array([5, 6, 7], np.uint8)]
    same += [np.array([5, 6, 7], ">i4"), np.array([5, 0, 6, 0, 7], np.int32)[::2]]
    for tokens in same:
        session.prefill(tokens)
        assert session.tokens == [5, 6, 7]
        session.rewind(3)
    for token in (1.5, "1", None, [1]):
        with pytest.raises(TypeError):
            session.decode(token)


def wrong_outputs(shape: tuple[int, ...]) -> dict[str, Any]:
    read_only = np.zeros(shape, np.float32)
    read_only.setflags(write=False)
    size = int(np.prod(shape))
    return {
        "float64": np.zeros(shape),
        "big-endian": np.zeros(shape, ">f4"),
        "empty": np.zeros(0, np.float32),
        "one less": np.zeros((*shape[:-1], shape[-1] - 1), np.float32),
        "another dimension": np.zeros((1, *shape), np.float32),
        "flat or folded": np.zeros(size if len(shape) > 1 else (2, size // 2), np.float32),
        "strided": np.zeros((*shape[:-1], 2 * shape[-1]), np.float32)[..., ::2],
        "read-only": read_only,
        "unaligned": np.zeros(4 * size + 1, np.uint8)[1:].view(np.float32).reshape(shape),
    }


def test_out_is_filled_or_refused_but_never_copied(model: Any) -> None:
    session = _core.Session(model)
    for name, out in wrong_outputs((96,)).items():
        for step in (lambda o=out: session.prefill([1], o), lambda o=out: session.decode(1, o)):
            with pytest.raises(
                errors.InvalidArgument, match=r"expected a writable C-contiguous array of float32 \(96,\)"
            ):
                step()
        assert session.position == 0, name
    for name, out in wrong_outputs((3, 96)).items():
        with pytest.raises(errors.InvalidArgument, match=r"float32 \(3, 96\)"):
            session.prefill([1, 2, 3], out, all_logits=True)
        assert session.position == 0, name
    for out in ([0.0] * 96, "x", 3):
        with pytest.raises(TypeError, match="numpy array"):
            session.prefill([1], out)
    with pytest.raises(errors.InvalidArgument, match="needs an array"):
        session.prefill([1], all_logits=True)

    memory = np.full((5, 96), 7, np.float32)
    session.prefill(TEXT[:3], memory[1:4], all_logits=True)  # a view is filled where it lies
    assert (memory[0] == 7).all() and (memory[4] == 7).all() and (memory[1:4] != 7).all()


def test_progress_is_told_about_every_chunk(model: Any) -> None:
    calls: list[tuple[int, int]] = []
    _core.Session(model, chunk=50).prefill(TEXT, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(50, N), (100, N), (N, N)]


def test_log_probabilities_and_sampling(model: Any) -> None:
    session = _core.Session(model)
    logits = np.empty(96, np.float32)
    session.prefill(TEXT[:20], logits)
    exact = logits.astype(np.float64)
    exact -= exact.max()
    exact -= np.log(np.exp(exact).sum())
    np.testing.assert_allclose([session.log_probability(i) for i in range(96)], exact, atol=2e-6)
    order = np.argsort(-exact, kind="stable")
    top = session.top_log_probabilities(5)
    assert [i for i, _ in top] == order[:5].tolist()
    np.testing.assert_allclose([p for _, p in top], exact[order[:5]], atol=2e-6)
    assert session.top_log_probabilities(0) == []
    assert len(session.top_log_probabilities(1000)) == 96
    with pytest.raises(errors.InvalidArgument):
        session.top_log_probabilities(-1)

    assert session.sample(_core.Sampler(96, temperature=0.0)) == order[0]
    sampler = _core.Sampler(96, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=5)
    n = 20000
    drawn = np.bincount([session.sample(sampler) for _ in range(n)], minlength=96)
    p = np.exp(exact)
    expected = n * p
    common = expected >= 5
    chi = (((drawn - expected) ** 2 / expected)[common]).sum()
    assert chi < common.sum() + 5 * np.sqrt(2 * common.sum())


# ---- atomic steps ----------------------------------------------------------------------------------------


def test_an_exception_in_progress_keeps_the_finished_chunks(model: Any) -> None:
    session = _core.Session(model, chunk=16)

    def stop(done: int, total: int) -> None:
        assert session.position == done and session.tokens == TEXT[:done].tolist()
        with pytest.raises(errors.StateError, match="busy"):
            session.decode(1)
        if done == 48:
            raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        session.prefill(TEXT, progress=stop)
    assert (session.position, session.tokens) == (48, TEXT[:48].tolist())
    with pytest.raises(errors.StateError, match="no logits"):
        session.log_probability(1)
    session.prefill(TEXT[48:])
    np.testing.assert_array_equal(last(session), fresh(model, TEXT))


def test_cancel_waits_for_one_step(model: Any) -> None:
    for step in (lambda s: s.decode(TEXT[20]), lambda s: s.prefill(TEXT[20:21])):
        session = _core.Session(model)
        session.prefill(TEXT[:20])
        before = last(session)
        session.cancel()
        session.cancel()
        with pytest.raises(errors.Cancelled) as caught:
            step(session)
        assert caught.value.consumed == 0
        assert (session.position, session.tokens) == (20, TEXT[:20].tolist())
        np.testing.assert_array_equal(last(session), before)
        step(session)
        np.testing.assert_array_equal(last(session), fresh(model, TEXT[:21]))


def test_cancel_can_be_taken_back(model: Any) -> None:
    session = _core.Session(model)
    session.cancel()
    session.cancel(False)
    session.prefill(TEXT[:20])
    np.testing.assert_array_equal(last(session), fresh(model, TEXT[:20]))


def test_a_prefill_cancelled_between_chunks(model: Any) -> None:
    session = _core.Session(model, chunk=16)
    with pytest.raises(errors.Cancelled, match=f"32 of {N}") as caught:
        session.prefill(TEXT, progress=lambda done, _: session.cancel() if done == 32 else None)
    assert caught.value.consumed == session.position == 32
    session.prefill(TEXT[32:])
    np.testing.assert_array_equal(last(session), fresh(model, TEXT))


def test_cancel_from_another_thread_in_the_middle_of_a_chunk(long_path: str) -> None:
    model = _core.Model(long_path, 2, "cpu")
    text = np.random.default_rng(4).integers(0, 96, 4096).astype(np.int32)
    session = _core.Session(model, chunk=4096)
    session.prefill(text[:10])
    timer = threading.Timer(0.05, session.cancel)
    timer.start()
    with pytest.raises(errors.Cancelled) as caught:
        session.prefill(text[10:])
    timer.join()
    assert (caught.value.consumed, session.position) == (0, 10)
    session.prefill(text[10:20])
    np.testing.assert_array_equal(last(session), fresh(model, text[:20]))

    # Decoding, over and over.
    session.rewind(20)
    timer = threading.Timer(0.05, session.cancel)
    timer.start()
    with pytest.raises(errors.Cancelled):
        while True:
            if session.position == 100:
                session.rewind(100)
            session.decode(text[session.position])
    timer.join()
    at = session.position
    session.decode(text[at])
    np.testing.assert_array_equal(last(session), fresh(model, text[: at + 1]))


def test_a_busy_session_refuses_and_the_interpreter_is_free(long_path: str) -> None:
    session = _core.Session(_core.Model(long_path, 1, "cpu"), chunk=4096)
    worker = threading.Thread(target=lambda: session.prefill(np.ones(2500, np.int32)))
    worker.start()
    rounds = refused = 0
    while worker.is_alive():
        rounds += 1
        try:
            session.decode(1) if rounds % 2 else session.rewind(1)
        except errors.StateError as error:
            assert "busy" in str(error)
            refused += 1
        except errors.InvalidArgument:  # rewind, before the worker had begun
            pass
        assert session.position in (0, 1, 2500, 2501) and session.n_ctx == 4096
        time.sleep(0.001)
    worker.join()
    assert refused > 20  # the prefill takes some tenths of a second; this thread ran all the while


def damage(folder: Path, name: str, change: Any) -> Any:
    """A model with one tensor changed in place."""
    shape = Shape(n_ctx_train=200, n_layer=2)
    write_llama(folder / "d.gguf", shape)
    raw = bytearray((folder / "d.gguf").read_bytes())
    old = random_weights(shape)[name]
    at = raw.find(old.tobytes())
    assert at > 0
    new = change(old.copy())
    raw[at : at + new.nbytes] = new.tobytes()
    (folder / "d.gguf").write_bytes(raw)
    return _core.Model(str(folder / "d.gguf"), 2, "cpu")


def poison(value: float) -> Any:
    def change(x: np.ndarray) -> np.ndarray:
        x.reshape(-1)[x.size // 2] = value
        return x

    return change


KINDS = ["attn_norm.weight", "attn_output.weight", "ffn_norm.weight", "ffn_gate.weight", "ffn_up.weight"]
KINDS += ["ffn_down.weight", "attn_output.bias", "ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"]
KINDS += [f"attn_{x}.{y}" for x in "qkv" for y in ("weight", "bias")]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_damaged_weights_name_their_layer(tmp_path: Path, value: float) -> None:
    for layer in (0, 1):
        for kind in KINDS:
            session = _core.Session(damage(tmp_path, f"blk.{layer}.{kind}", poison(value)), chunk=10)
            with pytest.raises(errors.NumericError, match=rf"layer {layer} "):
                session.prefill(TEXT[:30])
            assert (session.position, session.tokens) == (0, [])
            with pytest.raises(errors.NumericError, match=rf"layer {layer} "):
                session.decode(TEXT[0])
    for name in ("output_norm.weight", "output.weight"):
        session = _core.Session(damage(tmp_path, name, poison(value)), chunk=10)
        with pytest.raises(errors.NumericError, match="logits"):
            session.prefill(TEXT[:30])
        assert session.position == 20  # logits are computed behind the last chunk alone


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_step_that_failed_leaves_no_trace(tmp_path: Path, value: float) -> None:
    def bad_token(x: np.ndarray) -> np.ndarray:
        x[95, 3] = value
        return x

    model = damage(tmp_path, "token_embd.weight", bad_token)
    text = TEXT[:70].copy()
    text[text == 95] = 1
    expected = fresh(model, text)
    session = _core.Session(model, chunk=16)
    session.prefill(text[:40])
    before = last(session)
    with pytest.raises(errors.NumericError, match="embedding"):
        session.decode(95)
    with pytest.raises(errors.NumericError, match="embedding"):
        session.prefill([3, 4, 95, 5])
    assert (session.position, session.tokens) == (40, text[:40].tolist())
    np.testing.assert_array_equal(last(session), before)
    session.prefill(text[40:])
    np.testing.assert_array_equal(last(session), expected)


@pytest.mark.parametrize("kind", ["attn_k.weight", "attn_v.weight"])
def test_keys_and_values_beyond_f16(tmp_path: Path, kind: str) -> None:
    model = damage(tmp_path, f"blk.1.{kind}", lambda x: x * np.float32(1e6))
    session = _core.Session(model)
    with pytest.raises(errors.NumericError, match=r'layer 1 exceeds the range of .*kv="f32"'):
        session.prefill(TEXT[:30])
    assert session.position == 0
    _core.Session(model, kv_k="f32", kv_v="f32").prefill(TEXT[:30])


# ---- life, processes, signals ----------------------------------------------------------------------------


def test_closing(path: str) -> None:
    model = _core.Model(path, 2, "cpu")
    session = _core.Session(model)
    session.prefill(TEXT[:10])
    model.close()
    model.close()
    assert model.closed
    with pytest.raises(errors.StateError, match="model is closed"):
        _core.Session(model)
    with pytest.raises(errors.StateError, match="model is closed"):
        _ = model.config
    session.decode(TEXT[10])  # open sessions keep the model
    np.testing.assert_array_equal(last(session), fresh(_core.Model(path, 2, "cpu"), TEXT[:11]))
    slots = 200 + 128 - 1
    assert session.kv_nbytes == 2 * 2 * slots * 16 * 2 * 2 and session.nbytes > session.kv_nbytes
    session.close()
    session.close()
    assert session.closed and session.nbytes == session.kv_nbytes == 0
    sampler = _core.Sampler(96)
    uses: list[Any] = [lambda: session.decode(1), lambda: session.prefill([1]), lambda: session.rewind(1)]
    uses += [lambda: session.sample(sampler), lambda: session.log_probability(1)]
    uses += [lambda: session.top_log_probabilities(1)]
    for use in uses:
        with pytest.raises(errors.StateError, match="session is closed"):
            use()
    session.cancel()


def test_nothing_of_the_core_is_pickled_or_copied(model: Any) -> None:
    for thing in (model, _core.Session(model), model.config):
        for duplicate in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="cannot pickle"):
                duplicate(thing)


def test_after_fork(path: str) -> None:
    code = """
        import gc, os, signal, sys, threading
        import numpy as np
        from ringlm import _core, errors

        def refused(use):
            try:
                use()
            except errors.StateError as error:
                assert "fork" in str(error), error
            else:
                raise AssertionError("not refused")

        model = _core.Model(sys.argv[1], 3, "cpu")
        session, other = _core.Session(model), _core.Session(model)
        session.prefill([1, 2, 3])
        if sys.argv[2] == "busy":  # fork while a thread is in the middle of steps on the same model
            stop = False
            def work():
                while not stop:
                    other.decode(1)
                    other.rewind(1)
            worker = threading.Thread(target=work)
            worker.start()
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            sampler = _core.Sampler(96)
            for s in (session, other):
                refused(lambda: s.decode(1))
                refused(lambda: s.prefill([1]))
                refused(lambda: s.rewind(1))
                refused(lambda: s.tokens)
                refused(lambda: s.sample(sampler))
                refused(lambda: s.top_log_probabilities(1))
            refused(lambda: _core.Session(model))
            own = _core.Session(_core.Model(sys.argv[1], 2, "cpu"))  # its own model works
            own.prefill([1, 2, 3])
            session.close()
            assert session.closed
            del s, session, other, model
            gc.collect()
            sys.exit(0)
        if sys.argv[2] == "busy":
            stop = True
            worker.join()
        _, status = os.waitpid(child, 0)
        assert status == 0, status
        row, expected = np.empty(96, np.float32), np.empty(96, np.float32)
        session.decode(4, row)
        _core.Session(model).prefill([1, 2, 3, 4], expected)
        assert (row == expected).all()
    """
    for how in ("idle", "busy"):
        in_subprocess(code, path, how)


def test_threads_that_still_work_when_the_interpreter_ends(path: str) -> None:
    code = """
        import sys, threading, time
        import numpy as np
        from ringlm import _core

        class Late:  # its end holds the interpreter up while it is being finalized
            def __del__(self, sleep=time.sleep):
                sleep(0.4)

        late = Late()
        model = _core.Model(sys.argv[1], 1, "cpu")
        sampler = _core.Sampler(96)
        def forever(step):
            while True:
                step()
        def prefill(session=_core.Session(model)):
            session.prefill([1] * 50, progress=lambda done, total: None)
            session.rewind(50)
        def decode(session=_core.Session(model)):
            session.decode(1)
            session.top_log_probabilities(3)
            session.rewind(1)
        steps = prefill, decode, lambda: _core.Model(sys.argv[1], 1, "cpu"), sampler.reset
        for step in steps:
            threading.Thread(target=forever, args=(step,), daemon=True).start()
        time.sleep(0.2)
    """
    in_subprocess(code, path)


def test_ctrl_c_in_the_middle_of_a_chunk(long_path: str) -> None:
    code = """
        import os, signal, sys, threading, time
        import numpy as np
        from ringlm import _core
        session = _core.Session(_core.Model(sys.argv[1], 1, "cpu"), chunk=4096)
        session.prefill([1])
        sent = []
        def interrupt():
            sent.append(time.perf_counter())
            os.kill(os.getpid(), signal.SIGINT)
        threading.Timer(0.1, interrupt).start()
        try:
            session.prefill(np.ones(4000, np.int32))
            print("finished")
        except KeyboardInterrupt:
            print(session.position, time.perf_counter() - sent[0])
        session.decode(1)
        assert session.tokens == [1, 1]
    """
    position, seconds = in_subprocess(code, long_path).split()
    assert position == "1"
    assert float(seconds) < 5.0


# ---- memory ----------------------------------------------------------------------------------------------


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def available() -> int:
    match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    assert match
    return int(match[1]) * 1024


def test_a_session_that_cannot_fit_says_what_would(folder: Path) -> None:
    write_llama(folder / "huge.gguf", Shape(n_ctx_train=2**24, rope_factor=1024.0))
    model = _core.Model(str(folder / "huge.gguf"), 1, "cpu")
    before = resident()
    with pytest.raises(errors.OutOfMemory) as caught:
        _core.Session(model, n_ctx=2**34)
    assert isinstance(caught.value, MemoryError)
    match = re.fullmatch(
        r"a session of n_ctx = 17179869184 needs (\S+) TiB, (\S+) TiB of it for keys and values, "
        r"but only \S+ [GM]iB is available; n_ctx = (\d+) would fit",
        str(caught.value),
    )
    assert match, str(caught.value)
    per_token = 2 * 2 * 16 * 2 * 2  # layers, heads, head_dim, K and V, f16
    assert float(match[2]) == pytest.approx(2**34 * per_token / 2**40, rel=0.01)
    assert float(match[1]) > float(match[2])
    # What would fit is within the memory of the machine, and nothing was taken to find out.
    assert 0 < int(match[3]) * per_token < available() * 1.2
    assert resident() - before < 2**24


def test_a_session_is_present_in_memory_from_the_start(folder: Path) -> None:
    write_llama(folder / "wide.gguf", Shape(n_ctx_train=2**17))
    model = _core.Model(str(folder / "wide.gguf"), 1, "cpu")
    before = resident()
    session = _core.Session(model, n_ctx=2**17)  # 32 MiB of keys and values
    grown = resident() - before
    assert session.kv_nbytes == (2**17 + 127) * 256
    assert grown > 0.97 * session.nbytes  # the rest may come from pages that the heap had already
    session.prefill(TEXT)
    assert resident() - before - grown < 2**20
    session.close()
    assert resident() - before < 2**22


def test_nothing_leaks(path: str) -> None:
    def use() -> None:
        model = _core.Model(path, 3, "cpu")
        for _ in range(2):
            session = _core.Session(model, n_ctx=100)
            session.prefill(TEXT[:5])
            with pytest.raises(errors.ContextOverflow):
                session.prefill(TEXT)
            session.close()
        _core.Session(model).decode(1)

    def state() -> tuple[int, int]:
        gc.collect()
        threads = re.search(r"Threads:\s+(\d+)", Path("/proc/self/status").read_text())
        assert threads
        return int(threads[1]), len(os.listdir("/proc/self/fd"))

    for _ in range(10):
        use()
    before, memory = state(), resident()
    for _ in range(70):
        use()  # 210 sessions
    assert state() == before
    assert resident() - memory < 2**21
