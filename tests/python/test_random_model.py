"""benchmarks/random_model.py: what it writes is what was asked for, and runs."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import ringlm

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "random_model.py"
SIZES = {
    "n-vocab": 300,
    "n-embd": 256,
    "n-layer": 2,
    "n-head": 8,
    "n-head-kv": 2,
    "head-dim": 32,
    "n-ff": 512,
}
SMALL = [f"--{name}={n}" for name, n in SIZES.items()]


def run(*args: object) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(SCRIPT), *map(str, args)]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)


def test_a_mixed_model(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    types = ["--type", "Q4_K", "--head-type", "Q6_K", "--tensor", "ffn_down.weight=Q3_K"]
    done = run(path, *SMALL, *types)
    assert done.returncode == 0, done.stderr
    found = {t.name: (t.tensor_type.name, [*map(int, t.shape)]) for t in gguf.GGUFReader(path).tensors}
    assert len(found) == 2 * 9 + 3
    assert found["output.weight"] == ("Q6_K", [256, 300])
    assert found["token_embd.weight"] == ("Q4_K", [256, 300])
    assert found["blk.0.ffn_down.weight"] == found["blk.1.ffn_down.weight"] == ("Q3_K", [512, 256])
    assert found["blk.1.attn_output.weight"] == ("Q4_K", [256, 256])
    assert found["blk.1.attn_v.weight"] == ("Q4_K", [256, 64])
    assert found["blk.1.attn_norm.weight"] == ("F32", [256])
    assert f"{300 * 210 / 1e6:.1f} MB in Q6_K" in done.stdout

    with ringlm.Model(path) as model, model.session() as session:
        tokens = model.tokenizer.encode("a few words")
        assert model.tokenizer.decode(tokens) == "a few words"
        logits = session.prefill(tokens)
        assert np.isfinite(logits).all() and 0.5 < logits.std() < 2.0


def test_the_arguments_decide_every_byte(tmp_path: Path) -> None:
    hashes = []
    for seed in (0, 0, 1):
        assert run(tmp_path / "m.gguf", *SMALL, "--type", "IQ4_NL", "--seed", seed).returncode == 0
        hashes.append(hashlib.sha256((tmp_path / "m.gguf").read_bytes()).hexdigest())
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--n-embd", 320], "rows of 320, no multiple of the 256 of a Q4_K block"),
        (["--n-head-kv", 3], "8 heads are no multiple of 3 KV heads"),
        (["--n-vocab", 100], "100 tokens do not hold"),
        (["--tensor", "ffn_up.weight=Q9"], "--tensor ffn_up.weight=Q9: expected END=TYPE"),
        (["--type", "TQ2_0"], "invalid choice: 'TQ2_0'"),
    ],
)
def test_what_cannot_be_written(tmp_path: Path, args: list[object], message: str) -> None:
    done = run(tmp_path / "m.gguf", *SMALL, *args)
    assert done.returncode == 2 and message in done.stderr
    assert not (tmp_path / "m.gguf").exists()
