"""Every architecture: the CPU backend against the plain one, and the same bits however a text is read.

That the plain backend is right is for test_conformance_families.py; sessions are for test_family_sessions.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from family_sessions import (
    MIXED,
    PLAIN,
    TEXT,
    N,
    check_agreement,
    fed,
    path_of,
    probabilities,
    read,
    session_of,
)
from random_family import FAMILIES, Family, tensors, write
from random_llama import Array
from ringlm import _core

K_TYPES = {
    "default": "Q4_K",
    "attn_v.weight": "Q6_K",
    "ffn_down_exps.weight": "Q6_K",
    "ffn_down.weight": "Q3_K",
    "ffn_gate_shexp.weight": "Q5_K",
    "ffn_up_exps.weight": "IQ4_XS",
}
EXPERTS = [name for name, f in FAMILIES.items() if f.experts[0]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


# ---- the CPU backend ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("types", [PLAIN, MIXED], ids=["F32", "mixed"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_cpu_agrees_with_the_reference(folder: Path, name: str, types: dict[str, str]) -> None:
    path = path_of(folder, name, types)
    for kv in ("f32", "f16", "int8"):
        expected = read(path, kv, backend="reference")
        for repack in (True, False):
            exact = types is PLAIN or not repack
            check_agreement(read(path, kv, repack=repack), expected, kv, exact)


def wide(f: Family) -> Family:
    """Rows of whole blocks of 256."""
    n, used, rows, shared = f.experts
    n_head_kv = 8 if f.architecture == "qwen" else 2
    return f.with_(
        n_embd=256,
        n_ff=256,
        n_head=8,
        n_head_kv=n_head_kv,
        head_dim=32,
        experts=(n, used, rows and 256, shared and 256),
    )


@pytest.mark.parametrize("name", [*EXPERTS, "phi3", "qwen"])
def test_blocks_of_256(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "m.gguf", wide(FAMILIES[name]).with_(types=K_TYPES))
    expected = read(path, "f32", 25, backend="reference")
    for repack in (True, False):
        check_agreement(read(path, "f32", 25, repack=repack), expected, "f32", exact=not repack)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_experts_whose_rows_are_no_whole_number_of_blocks(tmp_path: Path, kind: str) -> None:
    """Of 24 inputs, beside a shared one in blocks of 32; gate and up of different types."""
    types = {"ffn_down_shexp.weight": "Q8_0", "ffn_gate_exps.weight": kind, "ffn_up_shexp.weight": kind}
    path = write(tmp_path / "m.gguf", FAMILIES["qwen2moe"].with_(experts=(8, 3, 24, 64), types=types | PLAIN))
    check_agreement(read(path, "f32"), read(path, "f32", backend="reference"), "f32", exact=False)
    assert np.array_equal(read(path, chunk=1), read(path, chunk=64))


@pytest.mark.parametrize("scaling", ["dynamic", "yarn"])
def test_centred_keys_of_scaled_angles(folder: Path, scaling: str) -> None:
    """INT8 keys of a model with biases, below and above the length where dynamic NTK changes the angles."""
    rope = {"scaling": scaling, "factor": 4.0, "original": 32.0}
    path = path_of(folder, "qwen2")
    for n in (30, N):
        expected = read(path, "int8", n, backend="reference", rope=rope)
        check_agreement(read(path, "int8", n, rope=rope), expected, "int8", exact=True)
    assert not np.array_equal(read(path, "int8", rope=rope), read(path, "int8"))


# ---- the same bits -----------------------------------------------------------------------------------------


def check_bits(path: str, text: Array, kv: str = "f16", decode_from: int = 0) -> None:
    """Whatever threads, chunks and calls, and whatever else goes through the layers in the same step.

    Tokens before `decode_from` are read in one call: where angles depend on the length of the text, those of
    a text that is read bit by bit are others until it is so long.
    """
    n = len(text)
    expected = fed(session_of(_core.Model(path, 1), kv, n), text)
    assert len(np.unique(expected)) > n
    for n_threads, chunk in [(1, 7), (2, 1), (2, 64), (3, 7), (3, 64)]:
        found = fed(session_of(_core.Model(path, n_threads), kv, chunk), text)
        assert np.array_equal(found, expected), (n_threads, chunk)
    for n_threads in (1, 2, 3):
        session = session_of(_core.Model(path, n_threads), kv, 7)
        if decode_from:
            session.prefill(text[:decode_from])
        assert np.array_equal(fed(session, text[decode_from:], (1,)), expected[decode_from:])

    # With texts of other lengths; more of them than a chunk has rows, so that a batch has two passes.
    model = _core.Model(path, 2)
    texts = [text[: n - 4], *(np.roll(text, i)[: 3 * i] for i in range(1, 20))]
    alone, batch = ([session_of(model, kv, 16) for _ in texts] for _ in range(2))
    for sessions in (alone, batch):
        for session, tokens in zip(sessions, texts, strict=True):
            session.prefill(tokens)
    for turn in range(4):
        step = [int(text[n - 4 + turn]), *(int(text[(i + turn) % n]) for i in range(1, 20))]
        assert _core.step(batch, step) == [None] * len(texts)
        for i, token in enumerate(step):
            row = np.empty(96, np.float32)
            alone[i].decode(token, row)
            assert i > 0 or np.array_equal(row, expected[n - 4 + turn])
            assert np.array_equal(probabilities(batch[i]), probabilities(alone[i])), f"session {i}"


@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_bits(folder: Path, name: str) -> None:
    kv = "int8" if name in ("qwen2", "gemma3") else "f16"
    check_bits(path_of(folder, name, MIXED), TEXT[:N], kv, decode_from=50 if name == "phi3-longrope" else 0)


def tokens_of_experts(f: Family, text: Array) -> Array:
    """How many each expert of the first layer gets, where attention adds nothing. [n_expert]"""
    w = {n: a.astype(np.float64) for n, a in tensors(f).items()}
    x = w["token_embd.weight"][text]
    h = w["blk.0.ffn_norm.weight"] * x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    scores = h @ w["blk.0.ffn_gate_inp.weight"].T
    return np.bincount(np.argsort(-scores, axis=1)[:, : f.experts[1]].ravel(), minlength=f.experts[0])


@pytest.mark.parametrize("types", [PLAIN, MIXED, {"default": "Q8_0"}], ids=["F32", "mixed", "Q8_0"])
def test_experts_with_one_token_and_with_many(tmp_path: Path, types: dict[str, str]) -> None:
    """A tile of a matrix product is 16 tokens, and one token alone is a product of another kind."""
    family = FAMILIES["qwen2moe"].with_(experts=(32, 2, 32, 64), types=types)
    text = np.where(np.arange(64) % 3 > 0, 5, TEXT[:64]).astype(np.int32)
    counts = tokens_of_experts(family, text)
    assert counts.max() > 32 and {0, 1, 2} <= set(counts.tolist())
    nothing: Array = np.zeros((64, 64), np.float32)
    path = write(tmp_path / "m.gguf", family, weights={"blk.0.attn_output.weight": nothing})
    model = _core.Model(path, 2, "reference")
    expected = fed(session_of(model, "f32", 64), text)
    found = fed(session_of(_core.Model(path, 2), "f32", 64), text)
    check_agreement(found, expected, "f32", exact=types is PLAIN)
    check_bits(path, text)
