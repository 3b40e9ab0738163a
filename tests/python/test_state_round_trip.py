"""Sessions saved and loaded: the same bits from there on."""

from __future__ import annotations

import errno
import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_llama import Shape, write_llama
from ringlm import Model, _core, state
from ringlm.errors import ContextOverflow, Error, FileFormatError, InvalidArgument, NumericError, StateError

# Biases, so that int8 keys are centred; 600 tokens are several wraps and epochs of the rings below.
DEEP = Shape(n_layer=3, n_head=6, n_head_kv=2, head_dim=32, n_ctx_train=1024)
TEXT = np.random.default_rng(8).integers(0, DEEP.n_vocab, 700).astype(np.int32)
WINDOWS: list[int | None] = [None, 24, 40]


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "deep.gguf"
    write_llama(path, DEEP)
    return path


def steps(session: Any, tokens: np.ndarray) -> list[np.ndarray]:
    """Logits behind decoded tokens, and behind prefills of two chunks and more."""
    rows, at = [], 0
    while at < len(tokens):
        m = 21 if at % 4 == 3 else 1
        rows.append(session.prefill(tokens[at : at + m]) if m > 1 else session.decode(int(tokens[at])))
        at += m
    return rows


def described(session: Any) -> dict[str, Any]:
    names = ("n_ctx", "chunk", "pinned", "overflow", "position", "kinds", "nbytes", "kv_nbytes")
    stats = session.stats
    return {name: getattr(session, name) for name in names} | {
        "formats": session._core.kv,
        "stats": (stats.position, stats.visible, stats.evicted, stats.slots),
    }


@pytest.mark.parametrize("kv", ["f32", "f16", "int8", ("int8", "f16"), ("f32", "int8")], ids=str)
@pytest.mark.parametrize(
    ("n", "pinned", "window", "overflow"),
    [
        (0, 0, None, "error"),
        (50, 0, None, "error"),
        (50, 7, WINDOWS, "slide"),
        (64, 0, None, "slide"),  # full, not wrapped
        (90, 37, None, "slide"),
        (600, 0, None, "slide"),
        (600, 4, None, "slide"),
        (600, 4, WINDOWS, "slide"),
        (600, 0, 24, "slide"),
    ],
)
def test_a_loaded_session_goes_on_bit_for_bit(
    deep: Path, tmp_path: Path, kv: Any, n: int, pinned: int, window: Any, overflow: Any
) -> None:
    options: dict[str, Any] = {"kv": kv, "chunk": 16, "pinned": pinned, "overflow": overflow}
    with Model(deep, n_threads=2, window=window) as a, Model(deep, n_threads=1, window=window) as b:
        session = a.session(64 if overflow == "slide" else 128, **options)
        if n:
            session.prefill(TEXT[:n])
        session.save(tmp_path / "s")
        loaded = b.load_session(tmp_path / "s")
        assert loaded is not session and described(loaded) == described(session)
        loaded.save(tmp_path / "again")
        assert (tmp_path / "again").read_bytes() == (tmp_path / "s").read_bytes()
        # The file holds what the next token will see: of a full ring one row less than the last one saw.
        seen = window if isinstance(window, int) else session.n_ctx
        assert loaded.tokens == [t for i, t in enumerate(TEXT[:n]) if i < pinned or n - i < seen - pinned]
        if n:
            for layer in range(DEEP.n_layer):
                held, seen = loaded.kv(layer, 1), session.kv(layer, 1)
                kept = np.isin(seen.positions, held.positions)
                assert kept.sum() == len(held.positions) >= len(kept) - 1
                np.testing.assert_array_equal(held.k, seen.k[kept])
                np.testing.assert_array_equal(held.v, seen.v[kept])
            assert loaded._core.top_log_probabilities(9) == session._core.top_log_probabilities(9)
        expected = steps(session, TEXT[n : n + 60])
        for x, y in zip(steps(loaded, TEXT[n : n + 60]), expected, strict=True):
            np.testing.assert_array_equal(x, y)
        assert described(loaded) == described(session) and loaded.tokens == session.tokens


def test_a_loaded_session_goes_back(deep: Path, tmp_path: Path) -> None:
    with Model(deep) as model:
        session = model.session(64, "int8", 16, pinned=3, overflow="slide")
        session.prefill(TEXT[:60])
        session.save(tmp_path / "s")
        loaded = model.load_session(tmp_path / "s")
        for one in (session, loaded):
            one.rewind(20)
        np.testing.assert_array_equal(loaded.prefill(TEXT[:90]), session.prefill(TEXT[:90]))
        session.save(tmp_path / "s")
        loaded = model.load_session(tmp_path / "s")
        with pytest.raises(InvalidArgument, match="at most 0"):
            loaded.rewind(1)  # the row that the token before saw first is not in the file
        assert loaded.reuse([*loaded.tokens[:3], 5]) == 3
        session.rewind(130 - 3)
        np.testing.assert_array_equal(loaded.prefill(TEXT[:50]), session.prefill(TEXT[:50]))


def test_saving_changes_nothing(deep: Path, tmp_path: Path) -> None:
    with Model(deep) as model:
        a, b = (model.session(64, "int8", 16, pinned=3, overflow="slide") for _ in range(2))
        for session in (a, b):
            session.prefill(TEXT[:100])
        for i in range(100, 200):
            if i % 10 == 0:
                a.save(tmp_path / "s")
            np.testing.assert_array_equal(a.decode(int(TEXT[i])), b.decode(int(TEXT[i])))


def test_a_save_that_fails_leaves_the_session_alone(deep: Path, tmp_path: Path) -> None:
    with Model(deep) as model:
        session = model.session(64, "int8", 16, pinned=3, overflow="slide")
        session.prefill(TEXT[:100])
        session.save(tmp_path / "s")
        before, pieces = (tmp_path / "s").read_bytes(), []

        def full(piece: bytes) -> None:
            pieces.append(piece)
            if len(pieces) > 5:
                raise OSError(errno.ENOSPC, "no room")

        def reads(n: int) -> bytes:
            raise OSError(errno.EIO, "a bad disk")

        with pytest.raises(OSError, match="no room"):
            session._core.save(full)
        with pytest.raises(StateError, match="busy"):
            session._core.save(lambda piece: session.decode(1))
        with pytest.raises(OSError, match="a bad disk"):
            _core.Session.load(model.core, reads)
        session.save(tmp_path / "s")
        assert (tmp_path / "s").read_bytes() == before


def test_another_window_is_another_model(deep: Path, tmp_path: Path) -> None:
    with Model(deep) as full, Model(deep, window=24) as windowed:
        full.session(64).save(tmp_path / "s")
        with pytest.raises((FileFormatError, InvalidArgument), match="window"):
            windowed.load_session(tmp_path / "s")


def test_closed_and_wrapped_sessions(deep: Path, tmp_path: Path) -> None:
    model = Model(deep)
    session = model.session(64)
    session.prefill(TEXT[:10])
    model.close()
    session.save(tmp_path / "s")  # a session outlives its model
    session.close()
    with pytest.raises(StateError, match="closed"):
        session.save(tmp_path / "t")
    with pytest.raises(StateError, match="closed"):
        model.load_session(tmp_path / "s")
    assert os.listdir(tmp_path) == ["s"]


def test_damage_in_the_state_under_a_good_checksum(deep: Path, tmp_path: Path) -> None:
    """Whoever can write a file can write its checksum: the core refuses it or goes on with odd numbers."""
    path, rng = tmp_path / "s", np.random.default_rng(2)
    with Model(deep, n_threads=1, window=WINDOWS) as model:
        session = model.session(64, "int8", 16, pinned=3, overflow="slide")
        session.prefill(TEXT[:150])
        session.save(path)
        raw = path.read_bytes()
        refused = 0
        body = raw[state.HEADER_NBYTES :]
        places = [*range(128), *rng.integers(128, len(body), 100).tolist()]
        for at in places:
            damaged = bytearray(body)
            damaged[at] ^= 1 << int(rng.integers(8))
            fields = state._FIELDS.pack(
                *state._FIELDS.unpack(raw[: state._FIELDS.size])[:4], hashlib.sha256(damaged).digest()
            )
            path.write_bytes(fields + hashlib.sha256(fields).digest() + damaged)
            try:
                loaded = model.load_session(path)
            except Error:
                refused += 1
                continue
            with suppress(NumericError, ContextOverflow):
                steps(loaded, TEXT[:25])
            loaded.close()
        assert refused >= 32
