"""Sessions of every architecture: copies, cancelling, sliding, LongRoPE's switch, damage, memory."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_sessions import (
    MIXED,
    TEXT,
    N,
    check_agreement,
    fed,
    path_of,
    probabilities,
    reloaded,
    session_of,
)
from random_family import FAMILIES, tensors, write
from random_llama import Array
from ringlm import _core, errors

SWITCH = 48  # of "phi3-longrope": the longest text of the first angles
LONGROPE = FAMILIES["phi3-longrope"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.mark.parametrize("name", FAMILIES)
def test_copies_rewinding_and_cancelling(folder: Path, name: str) -> None:
    model = _core.Model(path_of(folder, name, MIXED), 2)
    expected = fed(session_of(model, chunk=7), TEXT[:N])[-10:]

    def check(session: Any) -> None:
        assert np.array_equal(fed(session, TEXT[session.position : N], (11, 1))[-10:], expected)

    session = session_of(model, chunk=7)
    session.prefill(TEXT[: N - 20])
    copies = [session.fork(), reloaded(session, model)]
    for copy in copies:
        assert copy.nbytes == session.nbytes and copy.position == session.position
        assert copy.tokens == session.tokens[-len(copy.tokens) :]  # a saved one has what the next token sees
        assert np.array_equal(probabilities(copy), probabilities(session))
    session.prefill(TEXT[100:104])  # no matter to the copies
    session.rewind(4)
    for s in (reloaded(copies[0], model), session.fork(), session, *copies):
        check(s)
    session.rewind(N)
    assert session.tokens == []
    check(session)

    session = session_of(model, chunk=7)
    with pytest.raises(errors.Cancelled) as caught:
        session.prefill(TEXT[:N], progress=lambda done, _: session.cancel() if done == 21 else None)
    assert caught.value.consumed == session.position == 21
    check(session)


@pytest.mark.parametrize(("name", "pinned"), [("gemma2", 6), ("gemma3", 6), ("smollm3", 6), ("qwen3moe", 3)])
def test_sliding(folder: Path, name: str, pinned: int) -> None:
    """Layers with a window beside layers that pin; layers that do not turn their keys."""
    path, n_ctx, n = path_of(folder, name), 40, len(TEXT)
    options: dict[str, Any] = {"n_ctx": n_ctx, "pinned": pinned, "overflow": "slide"}
    model, plain = _core.Model(path, 2), _core.Model(path, 2, "reference")
    for kv in ("f32", "int8"):
        session = session_of(model, kv, **options)
        found = fed(session, TEXT, (23, 1, 1))
        check_agreement(found, fed(session_of(plain, kv, **options), TEXT), kv, exact=True)
        assert np.array_equal(fed(session_of(_core.Model(path, 3), kv, 5, **options), TEXT), found)
        for layer, window in enumerate(model.config.windows):
            seen = [*range(n - window, n)] if window else [*range(pinned), *range(n - n_ctx + pinned, n)]
            assert session.kv_rows(layer, 0)[0].tolist() == seen
        copies = [session.fork(), reloaded(session, model)]
        more = [fed(s, TEXT[:30], (1, 7)) for s in (session, *copies)]
        assert np.array_equal(more[0], more[1]) and np.array_equal(more[0], more[2])
    assert len(set(model.config.windows)) == (2 if name.startswith("gemma") else 1)


# ---- LongRoPE's switch -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long(folder: Path) -> Any:
    return _core.Model(path_of(folder, "phi3-longrope", MIXED), 2)


def alone(model: Any, n: int, **options: Any) -> Array:
    """The logits behind the first n tokens, which a new session reads at once."""
    return fed(session_of(model, **options), TEXT[:n])[-1]


@pytest.mark.parametrize("window", [0, 24])
def test_crossing_the_switch_and_coming_back(folder: Path, window: int) -> None:
    """By decoding, by a prefill and in a batch; the rows of a layer's window are computed again too."""
    model = _core.Model(path_of(folder, "phi3-longrope", MIXED), 2, window=[window, 0])
    expected = {n: alone(model, n) for n in (40, SWITCH, SWITCH + 1, N)}
    row = np.empty(96, np.float32)

    session = session_of(model, chunk=7)
    session.prefill(TEXT[:40])
    for n in range(41, N + 1):
        session.decode(TEXT[n - 1], row)
        assert n not in expected or np.array_equal(row, expected[n]), n
    if not window:  # rows that a window left behind are gone
        session.rewind(N - SWITCH + 1)
        session.decode(TEXT[SWITCH - 1], row)
        assert np.array_equal(row, expected[SWITCH])
        session.prefill(TEXT[SWITCH:N], row)
        assert np.array_equal(row, expected[N])
    session.rewind(session.position)
    session.prefill(TEXT[:40], row)
    assert np.array_equal(row, expected[40])
    session.prefill(TEXT[40:N], row)
    assert np.array_equal(row, expected[N])

    lengths = [20, SWITCH - 1, SWITCH, SWITCH + 1, SWITCH, N - 2]
    batch = [session_of(model, chunk=4) for _ in lengths]
    for s, n in zip(batch, lengths, strict=True):
        s.prefill(TEXT[:n])
    for turn in (0, 1):
        assert _core.step(batch, [int(TEXT[n + turn]) for n in lengths]) == [None] * len(lengths)
        for s, n in zip(batch, lengths, strict=True):
            one = session_of(model)
            one.prefill(TEXT[: n + turn + 1])
            assert np.array_equal(probabilities(s), probabilities(one)), (n, turn)


def test_the_trace_tells_what_was_computed_again(long: Any) -> None:
    session = session_of(long, chunk=10)
    session.start_trace(100)
    session.prefill(TEXT[: SWITCH - 2])
    for token in TEXT[SWITCH - 2 : SWITCH + 2]:
        session.decode(token)
    steps = [(r["kind"], r["position"], r["n_tokens"]) for r in session.take_trace()]
    again = [("rebuild", p, min(10, SWITCH - p)) for p in range(0, SWITCH, 10)]
    decodes = [("decode", p, 1) for p in range(SWITCH - 2, SWITCH + 2)]
    assert steps[5:] == [*decodes[:2], *again, *decodes[2:]]


def test_cancelled_before_the_first_row_is_computed_again(long: Any) -> None:
    session = session_of(long, chunk=10)
    session.prefill(TEXT[:SWITCH])
    before = probabilities(session)
    session.cancel()
    with pytest.raises(errors.Cancelled):
        session.decode(TEXT[SWITCH])
    assert (session.position, session.tokens) == (SWITCH, TEXT[:SWITCH].tolist())
    assert np.array_equal(probabilities(session), before)
    with pytest.raises(errors.StateError, match="computed again, which was broken off"):
        session.kv_rows(0, 0)
    batch = [session.fork(), session_of(long), session.fork()]
    batch[0].cancel()
    batch[1].prefill(TEXT[:5])
    first, second, third = _core.step(batch, [int(TEXT[SWITCH]), 3, int(TEXT[SWITCH])])
    assert isinstance(first, errors.Cancelled) and second is None and third is None
    for s in (reloaded(session, long), session.fork(), session, batch[0]):
        s.decode(TEXT[SWITCH])
    expected = alone(long, SWITCH + 1)
    for s in (session, batch[0], batch[2]):
        row = np.empty(96, np.float32)
        s.rewind(1)
        s.decode(TEXT[SWITCH], row)
        assert np.array_equal(row, expected)


def test_cancelled_in_the_middle_of_computing_again(tmp_path: Path) -> None:
    """From another thread. What is left is neither of the old angles nor of the new ones."""
    switch, chunk = 1000, 10
    keys = LONGROPE.keys | {"rope.scaling.original_context_length": switch}
    model = _core.Model(write(tmp_path / "m.gguf", LONGROPE.with_(keys=keys, n_ctx_train=2048, n_layer=4)), 1)
    text = np.random.default_rng(9).integers(0, 96, switch + 1).astype(np.int32)
    ready = session_of(model, chunk=chunk)
    ready.prefill(text[:switch])
    began, row = time.perf_counter(), np.empty(96, np.float32)
    ready.fork().decode(text[switch], row)
    whole = time.perf_counter() - began

    for attempt in range(50):
        session = ready.fork()
        session.start_trace(1000)
        timer = threading.Timer(whole * (0.2 + 0.6 * (attempt % 5) / 5), session.cancel)
        timer.start()
        try:
            session.decode(text[switch])
        except errors.Cancelled:
            again = [r for r in session.take_trace() if r["kind"] == "rebuild"]
            if 0 < len(again) < switch // chunk:
                break
        finally:
            timer.join()
    else:
        pytest.fail("never cancelled in the middle")
    assert session.position == switch and np.array_equal(session.tokens, text[:switch])
    for s in (reloaded(session, model), session.fork(), session):
        found = np.empty(96, np.float32)
        s.decode(text[switch], found)
        assert np.array_equal(found, row)
    session = reloaded(ready, model)
    session.cancel()
    with pytest.raises(errors.Cancelled):
        session.decode(text[switch])
    session.rewind(900)  # back where the angles that its rows had once are right
    session.decode(text[100], found)
    assert np.array_equal(found, fed(session_of(model), text[:101])[-1])


def test_a_text_with_a_switch_cannot_slide_across(long: Any) -> None:
    with pytest.raises(errors.InvalidArgument, match=f"longer than {SWITCH} tokens"):
        session_of(long, n_ctx=SWITCH + 1, overflow="slide")
    session = session_of(long, n_ctx=SWITCH, overflow="slide", pinned=3, chunk=7)
    fed(session, TEXT, (9, 1))
    assert session.position == len(TEXT)
    assert np.array_equal(probabilities(reloaded(session, long)), probabilities(session))


# ---- damage ------------------------------------------------------------------------------------------------

DAMAGE = [
    ("qwen2moe", "ffn_gate_inp", "route"),
    ("qwen2moe", "ffn_gate_inp_shexp", "route"),
    ("qwen2moe", "ffn_norm", "route"),
    ("qwen2moe", "ffn_gate_exps", "norm_gate_up"),
    ("qwen2moe", "ffn_up_exps", "norm_gate_up"),
    ("qwen2moe", "ffn_down_exps", "down_residual"),
    ("qwen2moe", "ffn_gate_shexp", "norm_gate_up"),
    ("qwen2moe", "ffn_down_shexp", "down_residual"),
    ("qwen3", "attn_q_norm", "rope_append"),
    ("qwen3", "attn_k_norm", "rope_append"),
    ("olmo2", "attn_q_norm", "rope_append"),
    ("olmo2", "attn_k_norm", "rope_append"),
    ("olmo2", "post_attention_norm", "out_residual"),
    ("gemma3", "post_ffw_norm", "down_residual"),
    ("phi3", "attn_qkv", "norm_qkv"),
    ("phi3", "ffn_up", "norm_gate_up"),
]


@pytest.mark.parametrize(("name", "tensor", "operation"), DAMAGE)
def test_damage_names_the_layer_and_the_operation(
    tmp_path: Path, name: str, tensor: str, operation: str
) -> None:
    for value in (np.nan, np.inf):
        full = f"blk.1.{tensor}.weight"
        damaged = tensors(FAMILIES[name])[full]
        damaged[..., 3] = value
        path = write(tmp_path / "m.gguf", FAMILIES[name], weights={full: damaged})
        for backend in ("cpu", "reference"):
            session = session_of(_core.Model(path, 2, backend), "f32")
            with pytest.raises(errors.NumericError, match=rf"in layer 1 \({operation}\): the weights"):
                session.prefill(TEXT[:20])
            assert session.position == 0


@pytest.mark.parametrize("kv", ["f16", "int8"])
def test_keys_beyond_the_cache_are_no_damage(tmp_path: Path, kv: str) -> None:
    weights = {"blk.1.attn_k_norm.weight": np.full(32, 1e9, np.float32)}
    path = write(tmp_path / "m.gguf", FAMILIES["qwen3"], weights=weights)
    with pytest.raises(errors.NumericError, match=r'layer 1 exceeds the range of .*kv="f32"'):
        session_of(_core.Model(path, 2), kv).prefill(TEXT[:20])


# ---- memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_memory_is_planned_and_nothing_is_allocated_in_a_step(folder: Path, name: str) -> None:
    family, chunk, n_ctx = FAMILIES[name], 9, 100
    model = _core.Model(path_of(folder, name, MIXED), 2)
    for kv, row in (("f16", 2 * family.head_dim), ("int8", family.head_dim + 2)):
        plan = _core.plan(model, n_ctx, kv, kv, chunk)
        session = session_of(model, kv, chunk, n_ctx=n_ctx)
        capacities = [(w or n_ctx) + chunk - 1 for w in model.config.windows]
        assert session.kv_nbytes == plan["kv_nbytes"] == 2 * family.n_head_kv * row * sum(capacities)
        assert session.nbytes == plan["nbytes"]
        assert sum(k["nbytes"] for k in session.kinds) == session.kv_nbytes
        session.start_trace(200)
        session.prefill(TEXT[:30])
        for token in TEXT[30:N]:
            session.decode(token)
        steps = session.take_trace()
        assert {r["kind"] for r in steps} >= {"prefill", "decode"}
        assert [r["allocations"] for r in steps] == [0] * len(steps)


def test_a_width_that_no_tensor_has_takes_no_memory(tmp_path: Path) -> None:
    """`feed_forward_length` of a model whose layers all have experts."""
    family = FAMILIES["qwen2moe"]
    sizes = []
    for n_ff in (family.n_ff, 2**24):
        model = _core.Model(write(tmp_path / "m.gguf", family, {"feed_forward_length": n_ff}), 2)
        sizes.append((session_of(model).nbytes, model.shared_nbytes))
    assert sizes[0] == sizes[1]
