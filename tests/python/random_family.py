"""Random-weight models of every architecture, written with the `gguf` package.

A family is its GGUF metadata and tensors, both open to change, so that tests can also write what no converter
would. What the numbers should be, tests get from ringlm's reference backend, which agrees with transformers
(test_conformance_families.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from random_blocks import random_blocks
from random_llama import Array, type_of

Keys = dict[str, Any]  # without the architecture's name


@dataclass(frozen=True)
class Family:
    """A small model. `keys` are extra metadata; `types` map the last parts of a tensor name (or "default") to
    a GGUF type. `experts` is (all, used for a token, rows of each, rows of the shared one or 0); layers of
    `dense` have none all the same.
    """

    architecture: str
    n_vocab: int = 96
    n_embd: int = 64
    n_layer: int = 2
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 16
    n_ff: int = 96
    n_ctx_train: int = 256
    norms: str = "before"  # before, after or both
    qk_norm: str = ""  # head or full
    qkv_bias: bool = False
    fused: bool = False  # attn_qkv, and gate and up in ffn_up
    fused_qkv: bool = False
    ff_matrices: int = 1  # feed_forward_length by the rows of a matrix
    experts: tuple[int, int, int, int] = (0, 0, 0, 0)
    dense: tuple[int, ...] = ()
    factors: tuple[str, ...] = ()  # RoPE's tensors
    tied: bool = False
    keys: Keys = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=lambda: {"default": "F32"})
    seed: int = 0

    def with_(self, **changes: Any) -> Family:
        return replace(self, **changes)

    def with_keys(self, **keys: Any) -> Family:
        """`__` in a name stands for a dot."""
        return replace(self, keys=self.keys | {k.replace("__", "."): v for k, v in keys.items()})


def metadata(f: Family) -> Keys:
    n_expert, used, n_ff_expert, n_ff_shared = f.experts
    found: Keys = {
        "context_length": f.n_ctx_train,
        "embedding_length": f.n_embd,
        "block_count": f.n_layer,
        "feed_forward_length": f.n_ff * f.ff_matrices,
        "attention.head_count": f.n_head,
        "attention.head_count_kv": f.n_head_kv,
        "attention.key_length": f.head_dim,
        "attention.value_length": f.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    if n_expert:
        found |= {"expert_count": n_expert, "expert_used_count": used}
        found |= {"expert_feed_forward_length": n_ff_expert}
    if n_ff_shared:
        found["expert_shared_feed_forward_length"] = n_ff_shared
    return found | f.keys


def tensors(f: Family) -> dict[str, Array]:
    """float32 by GGUF name: vectors, matrices [outputs, inputs], experts [n, outputs, inputs]."""
    rng = np.random.default_rng(f.seed)
    w: dict[str, Array] = {}

    def matrix(name: str, *shape: int, scale: float = 1.0) -> None:
        w[name + ".weight"] = (scale * rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    def norm(name: str, n: int) -> None:
        w[name + ".weight"] = (1.0 + 0.3 * rng.standard_normal(n)).astype(np.float32)

    q, kv, n_embd = f.n_head * f.head_dim, f.n_head_kv * f.head_dim, f.n_embd
    matrix("token_embd", f.n_vocab, n_embd, scale=1.0 if f.tied else np.sqrt(n_embd))
    for layer in range(f.n_layer):
        p = f"blk.{layer}."
        if f.norms != "after":
            norm(p + "attn_norm", n_embd)
            norm(p + "ffn_norm", n_embd)
        if f.norms != "before":
            norm(p + "post_attention_norm", n_embd)
            norm(p + "post_ffw_norm", n_embd)
        heads = {"attn_q": q, "attn_k": kv, "attn_v": kv}
        if f.fused or f.fused_qkv:
            heads = {"attn_qkv": q + 2 * kv}
        for name, rows in heads.items():
            matrix(p + name, rows, n_embd, scale=1.5)
            if f.qkv_bias:
                w[f"{p}{name}.bias"] = (0.2 * rng.standard_normal(rows)).astype(np.float32)
        if f.qk_norm:
            norm(p + "attn_q_norm", q if f.qk_norm == "full" else f.head_dim)
            norm(p + "attn_k_norm", kv if f.qk_norm == "full" else f.head_dim)
        matrix(p + "attn_output", n_embd, q)
        if f.experts[0] and layer not in f.dense:
            n, _, rows, shared = f.experts
            matrix(p + "ffn_gate_inp", n, n_embd, scale=2.0)
            matrix(p + "ffn_gate_exps", n, rows, n_embd)
            matrix(p + "ffn_up_exps", n, rows, n_embd)
            matrix(p + "ffn_down_exps", n, n_embd, rows)
            if shared:
                norm(p + "ffn_gate_inp_shexp", n_embd)
                for name in ("gate", "up"):
                    matrix(f"{p}ffn_{name}_shexp", shared, n_embd)
                matrix(p + "ffn_down_shexp", n_embd, shared)
            continue
        if f.fused:
            matrix(p + "ffn_up", 2 * f.n_ff, n_embd)
        else:
            matrix(p + "ffn_gate", f.n_ff, n_embd)
            matrix(p + "ffn_up", f.n_ff, n_embd)
        matrix(p + "ffn_down", n_embd, f.n_ff)
    norm("output_norm", n_embd)
    if not f.tied:
        matrix("output", f.n_vocab, n_embd)
    for i, name in enumerate(f.factors):
        w[f"rope_{name}.weight"] = np.linspace(1.0, 2.0 + 6.0 * i, f.head_dim // 2).astype(np.float32)
    return w


def put(w: gguf.GGUFWriter, key: str, value: Any) -> None:
    """A key of the type of its value; (type, value) names another, as the writer's add_* do."""
    if isinstance(value, tuple):
        kind, value = value
        getattr(w, f"add_{kind}")(key, value)
        return
    kinds: dict[type, Any] = {bool: w.add_bool, int: w.add_uint32, float: w.add_float32, str: w.add_string}
    (kinds | {list: w.add_array})[type(value)](key, value)


def write(
    path: Path, f: Family, keys: Keys | None = None, weights: dict[str, Array | None] | None = None
) -> str:
    """Writes the model with keys and tensors changed, or left out where they are None. Returns the path."""
    rng = np.random.default_rng(f.seed + 1)
    w = gguf.GGUFWriter(path, f.architecture)
    for key, value in (metadata(f) | (keys or {})).items():
        if value is not None:
            put(w, f"{f.architecture}.{key}", value)
    for name, array in (tensors(f) | (weights or {})).items():
        if array is None:
            continue
        wanted = "F32" if array.ndim == 1 else type_of(name, f.types)
        kind = gguf.GGMLQuantizationType[wanted]
        if wanted == "F32":
            raw = array
        elif "_K" in wanted or "IQ" in wanted:
            rows = int(np.prod(array.shape[:-1]))
            raw = random_blocks(rng, kind, rows, array.shape[-1], rms=float(array.std()))
            raw = raw.reshape(*array.shape[:-1], -1)
        else:
            raw = gguf.quants.quantize(array, kind)
        w.add_tensor(name, raw, raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return str(path)


_GEMMA: dict[str, Any] = {"tied": True, "norms": "both"}
_LONG: Keys = {"rope.scaling.original_context_length": 48, "rope.scaling.attn_factor": 1.2}

#: One of every architecture, two where a feature excludes another.
FAMILIES: dict[str, Family] = {
    "llama": Family("llama"),
    "mixtral": Family("llama", experts=(6, 2, 64, 0), n_ff=64),
    "qwen": Family("qwen", fused_qkv=True, qkv_bias=True, n_head_kv=4, ff_matrices=2),
    "qwen2": Family("qwen2", qkv_bias=True),
    "qwen2moe": Family("qwen2moe", qkv_bias=True, experts=(8, 3, 32, 64)),
    "qwen3": Family("qwen3", qk_norm="head", head_dim=32),
    "qwen3moe": Family("qwen3moe", qk_norm="head", experts=(8, 2, 64, 0), n_layer=3, dense=(0,)),
    "phi3": Family("phi3", fused=True, keys={"attention.sliding_window": 24}),
    "phi3-longrope": Family("phi3", fused=True, factors=("factors_short", "factors_long"), keys=_LONG),
    "gemma": Family("gemma", tied=True, head_dim=32),
    "gemma2": Family(
        "gemma2",
        **_GEMMA,
        n_layer=4,
        keys={
            "attention.sliding_window": 20,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 8.0,
        },
    ),
    "gemma3": Family(
        "gemma3",
        **_GEMMA,
        n_layer=4,
        qk_norm="head",
        keys={
            "attention.sliding_window": 20,
            "attention.sliding_window_pattern": [True, True, False, True],
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 4.0,
            "rope.freq_base": 100000.0,
        },
    ),
    "granite": Family(
        "granite",
        keys={
            "attention.scale": 0.3,
            "embedding_scale": 0.5,
            "residual_scale": 0.4,
            "logit_scale": 4.0,
        },
    ),
    "olmo2": Family("olmo2", norms="after", qk_norm="full"),
    "smollm3": Family("smollm3", n_layer=4),
}
