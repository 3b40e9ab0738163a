"""Sessions of the models of random_family.py, as tests feed and compare them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from random_family import FAMILIES, write
from random_llama import Array
from ringlm import _core

#: For a text past one border of attention's tiles of 64, the windows of 20 and 24, and LongRoPE's switch.
N = 70
TEXT = np.random.default_rng(7).integers(0, 96, 200).astype(np.int32)

PLAIN = {"default": "F32"}
MIXED = {
    "default": "Q4_1",
    "attn_k.weight": "Q4_0",
    "ffn_up.weight": "Q5_0",
    "ffn_gate_exps.weight": "F32",
    "ffn_up_exps.weight": "Q8_0",
    "ffn_down_shexp.weight": "F16",
    "ffn_down.weight": "Q8_0",
    "token_embd.weight": "F16",
}


def path_of(folder: Path, name: str, types: dict[str, str] = PLAIN) -> str:
    """The file of one of FAMILIES, made once."""
    path = folder / f"{name}-{'-'.join(sorted(set(types.values())))}.gguf"
    return str(path) if path.exists() else write(path, FAMILIES[name].with_(types=types))


def session_of(model: Any, kv: str = "f16", chunk: int = 17, **options: Any) -> Any:
    return _core.Session(model, kv_k=kv, kv_v=kv, chunk=chunk, **options)


def fed(session: Any, tokens: Array, pieces: Sequence[int] = ()) -> Array:
    """Logits [n_tokens, 96] of tokens in calls of so many in turn; 1 is a decode. All at once by default."""
    out = np.full((len(tokens), 96), np.nan, np.float32)
    at = turn = 0
    while at < len(tokens):
        n = min(pieces[turn % len(pieces)] if pieces else len(tokens), len(tokens) - at)
        if n == 1 and pieces:
            session.decode(int(tokens[at]), out[at])
        else:
            session.prefill(tokens[at : at + n], out[at : at + n], all_logits=True)
        at, turn = at + n, turn + 1
    assert np.isfinite(out).all()
    return out


def read(path: str, kv: str = "f16", n: int = N, chunk: int = 17, **options: Any) -> Array:
    """Logits of the first n tokens of TEXT, at once."""
    return fed(session_of(_core.Model(path, 2, **options), kv, chunk), TEXT[:n])


def probabilities(session: Any) -> Array:
    """Behind the last token."""
    top = dict(session.top_log_probabilities(96))
    return np.array([top[i] for i in range(96)], np.float32)


def reloaded(session: Any, model: Any) -> Any:
    data = bytearray()
    session.save(data.extend)
    at = 0

    def read(n: int) -> bytes:
        nonlocal at
        at += n
        return bytes(data[at - n : at])

    loaded = _core.Session.load(model, read)
    assert at == len(data)
    return loaded


def check_agreement(found: Array, expected: Array, kv: str, exact: bool) -> None:
    """`exact`: activations are not rounded. The bounds are those of test_logits.py and test_int8.py: a key or
    value on an edge may be rounded either way."""
    off = np.abs(found - expected) / np.abs(expected).max()
    if kv == "f32":
        assert off.max() < (2e-5 if exact else 5e-4)
    elif kv == "f16":
        assert off.max() < 1e-3
    else:
        assert off.max() < 2e-2 and np.sqrt((off * off).mean()) < 1.5e-3
