"""Small models that between them meet every kernel of the CUDA backend, and how a device's logits compare
with those of the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from kv_divergence import kl_divergence, log_softmax
from random_family import Family, tensors, write
from random_llama import Array
from ringlm import Model

#: Of the mean over a text, in nats.
MOST_KL = 1e-3
#: Greedy texts may part where the CPU's logits of the two tokens differ by no more than this part of its
#: largest one. More in models with experts: where two are nearly as probable, another one may answer.
MOST_GAP, MOST_GAP_OF_EXPERTS = 5e-2, 2e-1


@dataclass(frozen=True)
class Case:
    """A model, and the session that reads a text. `window` is for Model(window=...); `slow_bias` makes the
    biases of keys what those of Qwen2 are: so large that INT8 rows are centred."""

    name: str
    family: Family
    kv: str | tuple[str, str] = "int8"
    session: dict[str, Any] = field(default_factory=dict)
    window: int | None = None
    slow_bias: bool = False

    @property
    def most_gap(self) -> float:
        return MOST_GAP_OF_EXPERTS if self.family.experts[0] else MOST_GAP

    @property
    def options(self) -> dict[str, Any]:
        return {"n_ctx": 192, "kv": self.kv, "chunk": 40, **self.session}


def _family(architecture: str, **changes: Any) -> Family:
    """Rows are multiples of 256, so that every type fits."""
    return Family(architecture, n_vocab=512, n_embd=256, n_ff=512, **changes)


def _types(default: str, **others: str) -> dict[str, str]:
    return {f"{name}.weight": kind for name, kind in others.items()} | {"default": default}


_SLIDE = {"n_ctx": 72, "pinned": 9, "overflow": "slide"}

CASES = {
    case.name: case
    for case in (
        # Head size 64. Groups of 4, 7 with centred keys, 16, 1.
        Case(
            "llama, Q4_0",
            _family("llama", n_head=8, n_head_kv=2, head_dim=64, types=_types("Q4_0", output="Q6_K")),
            session=_SLIDE,
        ),
        Case(
            "qwen2, Q4_K and Q5_0",
            _family(
                "qwen2",
                n_head=7,
                n_head_kv=1,
                head_dim=64,
                qkv_bias=True,
                types=_types("Q4_K", attn_output="Q5_0", output="Q6_K", attn_v="Q6_K"),
            ),
            session=_SLIDE,
            slow_bias=True,
        ),
        Case(
            "llama, F16, groups of 16",
            _family("llama", n_head=16, n_head_kv=1, head_dim=64, types=_types("F16", token_embd="BF16")),
            kv="f16",
        ),
        Case(
            "mixtral, Q4_0 and Q5_1",
            _family(
                "llama",
                n_head=4,
                n_head_kv=4,
                head_dim=64,
                experts=(6, 2, 256, 0),
                types=_types("Q4_0", ffn_gate_exps="Q5_1", ffn_up_exps="Q5_1", ffn_down_exps="Q5_K"),
            ),
        ),
        Case(
            "qwen2moe, Q8_0",
            _family(
                "qwen2moe",
                n_head=4,
                n_head_kv=2,
                head_dim=64,
                qkv_bias=True,
                experts=(8, 3, 64, 128),
                types=_types("Q8_0", ffn_gate_inp="F32"),
            ),
            kv=("int8", "f16"),
        ),
        # 80 and 96, which the rotation of INT8 rows cuts into 20 and 12.
        Case(
            "llama, Q4_1, heads of 80",
            _family("llama", n_head=4, n_head_kv=4, head_dim=80, types=_types("Q4_1", ffn_down="Q5_1")),
        ),
        Case(
            "phi3, Q8_0, heads of 96, window",
            _family(
                "phi3",
                fused=True,
                n_head=2,
                n_head_kv=2,
                head_dim=96,
                keys={"attention.sliding_window": 24},
                types=_types("Q8_0"),
            ),
            kv=("f16", "int8"),
        ),
        # 128. Groups of 4 and 8.
        Case(
            "mistral, Q5_K and Q6_K, heads of 128, window",
            _family("llama", n_head=4, n_head_kv=1, head_dim=128, types=_types("Q5_K", ffn_down="Q6_K")),
            session={"n_ctx": 72, "overflow": "slide"},
            window=48,
        ),
        Case(
            "qwen3moe, Q4_K, heads of 128",
            _family(
                "qwen3moe",
                qk_norm="head",
                n_head=8,
                n_head_kv=1,
                head_dim=128,
                experts=(8, 3, 256, 0),
                types=_types("Q4_K", ffn_gate_inp="F32"),
            ),
        ),
        Case(
            "olmo2, BF16, a norm over all heads",
            _family(
                "olmo2",
                norms="after",
                qk_norm="full",
                n_head=4,
                n_head_kv=4,
                head_dim=128,
                types=_types("BF16"),
            ),
            kv="f16",
        ),
        # 256. Soft caps, windows in some layers, embeddings as the head.
        Case(
            "gemma2, Q4_K, heads of 256, soft caps",
            _family(
                "gemma2",
                tied=True,
                norms="both",
                n_layer=4,
                n_head=8,
                n_head_kv=1,
                head_dim=256,
                keys={
                    "attention.sliding_window": 20,
                    "attn_logit_softcapping": 5.0,
                    "final_logit_softcapping": 8.0,
                },
                types=_types("Q4_K", token_embd="Q6_K"),
            ),
        ),
        Case(
            "gemma3, F32, heads of 256",
            _family(
                "gemma3",
                tied=True,
                norms="both",
                qk_norm="head",
                n_layer=4,
                n_head=4,
                n_head_kv=1,
                head_dim=256,
                keys={
                    "attention.sliding_window": 20,
                    "attention.sliding_window_pattern": [True, True, False, True],
                    "rope.freq_base": 100000.0,
                },
                types=_types("F32"),
            ),
            kv="f16",
        ),
        # Deep enough for what one layer rounds to reach others: 17 MB.
        Case(
            "llama, Q4_K, 8 layers",
            Family(
                "llama",
                n_vocab=4096,
                n_embd=512,
                n_layer=8,
                n_head=8,
                n_head_kv=2,
                head_dim=64,
                n_ff=1536,
                n_ctx_train=1024,
                types=_types("Q4_K", ffn_down="Q6_K", output="Q6_K"),
            ),
        ),
    )
}


def path_of(folder: Path, case: Case) -> Path:
    """The case's file, written once."""
    path = folder / f"{''.join(c if c.isalnum() else '-' for c in case.name)}.gguf"
    if not path.exists():
        part = path.with_suffix(".part")
        write(part, case.family, weights=_slow_biases(case.family) if case.slow_bias else None)
        part.rename(path)
    return path


def _slow_biases(f: Family) -> dict[str, Array | None]:
    """Of norm 500 in every head, on the ten pairs that turn most slowly, which are d / 2 apart."""
    found: dict[str, Array | None] = {}
    for name, bias in tensors(f).items():
        if name.endswith("attn_k.bias"):
            halves = bias.reshape(f.n_head_kv, 2, f.head_dim // 2)
            halves[..., -10:] *= 500.0 / np.linalg.norm(halves[..., -10:], axis=(1, 2), keepdims=True)
            found[name] = bias
    return found


def open_model(path: Path | str, device: str, **options: Any) -> Model:
    """`device` may also be "reference", the plain code on the CPU: a device that computes otherwise."""
    if device == "reference":
        return Model(path, backend="reference", **options)
    return Model(path, device=device, **options)


def text_of(model: Model, n: int) -> Array:
    return np.random.default_rng(7).integers(0, model.n_vocab, n).astype(np.int32)


def pieces(n: int, n_prefill: int) -> Iterator[int]:
    """Lengths of calls that read a text: a prefill of several chunks, one of as few rows as decode's kernels
    take, then single tokens."""
    few = min(5, n - n_prefill)
    yield from (n_prefill, few) if few else (n_prefill,)
    yield from [1] * (n - n_prefill - few)


def read(model: Model, ids: Array, options: dict[str, Any], n_prefill: int) -> Array:
    """Logits [n, n_vocab] behind every token of the text."""
    found, at = [], 0
    with model.session(**options) as session:
        for n in pieces(len(ids), n_prefill):
            part = ids[at : at + n]
            found.append(
                session.decode(int(part[0]))[None] if n == 1 else session.prefill(part, all_logits=True)
            )
            at += n
    return np.concatenate(found)


@dataclass(frozen=True)
class Comparison:
    kl_mean: float
    kl_max: float
    worst: float  # the largest difference over the largest logit

    @property
    def met(self) -> bool:
        return self.kl_mean < MOST_KL  # false for NaN


def compare(expected: Array, found: Array) -> Comparison:
    kl = kl_divergence(log_softmax(expected), log_softmax(found))
    worst = np.abs(found - expected).max() / np.abs(expected).max()
    return Comparison(float(kl.mean()), float(kl.max()), float(worst))


@dataclass(frozen=True)
class Parting:
    """Where two greedy texts part: the number of tokens that they share, and the gap there between the
    expected text's logits of both tokens, in parts of the largest logit."""

    n: int
    gap: float


def greedy(model: Model, prompt: Array, n: int, options: dict[str, Any]) -> tuple[list[int], Array]:
    """n tokens, and the logits that each is the largest of."""
    tokens, rows = [], []
    with model.session(**options) as session:
        logits = session.prefill(prompt)
        for _ in range(n):
            tokens.append(int(logits.argmax()))
            rows.append(logits)
            logits = session.decode(tokens[-1])
    return tokens, np.array(rows)


def parting(expected: Sequence[int], rows: Array, found: Sequence[int]) -> Parting:
    for i, (a, b) in enumerate(zip(expected, found, strict=True)):
        if a != b:
            return Parting(i, float((rows[i, a] - rows[i, b]) / np.abs(rows[i]).max()))
    return Parting(len(expected), 0.0)
