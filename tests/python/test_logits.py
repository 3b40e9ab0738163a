"""Logits of random llama models against the float64 oracle of random_llama.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from random_blocks import READABLE
from random_llama import Shape, reference_logits, worst, write_llama
from ringlm import _core

TOKENS = [
    int(t) for t in np.random.default_rng(7).integers(0, 96, 150)
]  # three tiles of attention, the last one cut

SHAPES = {
    "mha": Shape(n_head=4, n_head_kv=4),
    "group-2": Shape(),
    "group-3-tied": Shape(n_head=9, n_head_kv=3, n_embd=72, tied=True),
    "group-4": Shape(n_head=8, n_head_kv=2),
    "group-7": Shape(n_head=7, n_head_kv=1, n_embd=56, head_dim=16),
    "group-8": Shape(n_head=16, n_head_kv=2, n_embd=64, head_dim=8),
    "mqa": Shape(n_head=5, n_head_kv=1, n_embd=60, head_dim=12),
    "head-dim-24": Shape(head_dim=24, rope_dims=16),
    "no-bias": Shape(biases=False),
    "llama-3-factors": Shape(freq_factors=True, rope_base=500000.0),
    "linear-rope": Shape(rope_factor=4.0),
    "one-layer-eps": Shape(n_layer=1, eps=1e-2),
    "odd-widths": Shape(n_embd=50, head_dim=10, n_ff=37, n_vocab=97),
}


def all_logits(
    path: Path, kv: str, backend: str = "cpu", chunk: int = 64, n_threads: int = 2, repack: bool = True
) -> np.ndarray:
    model = _core.Model(str(path), n_threads, backend, repack=repack)
    session = _core.Session(model, kv_k=kv, kv_v=kv, chunk=chunk)
    out = np.zeros((len(TOKENS), model.config.n_vocab), np.float32)
    session.prefill(np.array(TOKENS, np.int32), out, all_logits=True)
    return out


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", SHAPES)
def test_float32(tmp_path: Path, name: str, backend: str) -> None:
    shape = SHAPES[name]
    weights = write_llama(tmp_path / "m.gguf", shape)
    assert (
        worst(all_logits(tmp_path / "m.gguf", "f32", backend), reference_logits(shape, weights, TOKENS))
        < 2e-5
    )


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_f16_cache_rounds_like_the_reference(tmp_path: Path, backend: str) -> None:
    weights = write_llama(tmp_path / "m.gguf", Shape())
    found = all_logits(tmp_path / "m.gguf", "f16", backend)
    rounding = reference_logits(Shape(), weights, TOKENS, kv="f16")
    # A value on the edge of two halves may fall either way; without rounding in the reference it is far off.
    assert worst(found, rounding) < 2e-4
    assert worst(found, reference_logits(Shape(), weights, TOKENS)) > worst(found, rounding)


@pytest.mark.parametrize("qtype", READABLE[1:])
def test_quantized_weights(tmp_path: Path, qtype: str) -> None:
    shape = Shape(n_embd=256, n_ff=256, types={"default": qtype})
    weights = write_llama(tmp_path / "m.gguf", shape)
    expected = reference_logits(shape, weights, TOKENS)
    # Packed weights of a type with blocks meet activations of 16 bits.
    assert worst(all_logits(tmp_path / "m.gguf", "f32"), expected) < (
        2e-5 if qtype in ("F16", "BF16") else 5e-4
    )
    assert worst(all_logits(tmp_path / "m.gguf", "f32", repack=False), expected) < 2e-5


@pytest.mark.parametrize("isa", ["generic", "avx2", "avxvnni", "avx512", "amx", "neon", "dotprod", "i8mm"])
def test_every_instruction_set(tmp_path: Path, isa: str) -> None:
    import os
    import subprocess
    import sys

    every_type = {
        "token_embd.weight": "BF16",
        "blk.0.attn_q.weight": "Q2_K",
        "blk.0.attn_k.weight": "Q3_K",
        "blk.0.ffn_gate.weight": "IQ4_NL",
        "blk.0.attn_output.weight": "IQ4_XS",
        "attn_q.weight": "Q5_K",
        "attn_k.weight": "Q6_K",
        "attn_v.weight": "Q8_0",
        "attn_output.weight": "Q4_K",
        "ffn_gate.weight": "Q4_0",
        "ffn_up.weight": "Q5_0",
        "ffn_down.weight": "Q5_1",
        "default": "Q4_1",
    }
    shape = Shape(n_embd=256, n_ff=96, n_layer=3, types=every_type)
    weights = write_llama(tmp_path / "m.gguf", shape)
    code = (
        "import sys, numpy as np, test_logits as t; from pathlib import Path\n"
        "np.save(sys.argv[2], t.all_logits(Path(sys.argv[1]), 'f32'))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "m.gguf"), str(tmp_path / "out.npy")],
        env={**os.environ, "RINGLM_ISA": isa, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    if "this processor runs" in run.stderr:
        pytest.skip(f"this processor does not run {isa}")
    assert run.returncode == 0, run.stderr
    assert worst(np.load(tmp_path / "out.npy"), reference_logits(shape, weights, TOKENS)) < 5e-4
