"""Logits and greedy text of random float32 llama models against Hugging Face transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hf_llama import (
    Export,
    export,
    halved,
    llama3_factors,
    random_model,
    reference_greedy,
    reference_logits,
)
from random_llama import worst
from ringlm import Model, _core

NEEDS = "conformance with transformers needs: pip install 'ringlm[conformance]'"
torch = pytest.importorskip("torch", reason=NEEDS)
pytest.importorskip("transformers", reason=NEEDS)
pytestmark = pytest.mark.conformance

LIMIT = 1e-4  # largest difference over largest logit
TOKENS = [int(t) for t in np.random.default_rng(11).integers(0, 96, 150)]

# Query heads and K/V heads: groups of 1, 2, 3, 4, 7, 8 and all in one.
HEADS = {
    "group-1": (3, 3),
    "group-2": (4, 2),
    "group-3": (9, 3),
    "group-4": (8, 2),
    "group-7": (14, 2),
    "group-8": (16, 2),
    "all-in-one": (5, 1),
}
HEAD_DIMS = [16, 24, 64, 80, 96, 128]

BIASES = {"attention_bias": True, "mlp_bias": True}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "attention-bias": {"attention_bias": True},
    "mlp-bias": {"mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "tied-with-biases": {"tie_word_embeddings": True, **BIASES},
    "head-dim-not-derived": {"head_dim": 40, **BIASES},
    "rope-theta-500000": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "llama-3": {"rope_parameters": LLAMA3, "head_dim": 64, "attention_bias": True},
    "linear-rope": {"rope_parameters": LINEAR},
    "large-eps": {"rms_norm_eps": 1e-2},
    "small-eps": {"rms_norm_eps": 1e-8},
    "one-layer": {"num_hidden_layers": 1},
    "six-layers": {"num_hidden_layers": 6, **BIASES},
    "odd-widths": {"hidden_size": 52, "head_dim": 10, "intermediate_size": 37, "vocab_size": 101},
}


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are tiny
    yield
    torch.set_num_threads(before)


def head_config(heads: str, head_dim: int) -> dict[str, Any]:
    n_head, n_head_kv = HEADS[heads]
    return {
        "num_attention_heads": n_head,
        "num_key_value_heads": n_head_kv,
        "head_dim": head_dim,
        "hidden_size": {3: 48, 9: 72, 14: 56, 5: 60}.get(n_head, 64),
        **BIASES,
    }


def all_logits(path: Path, backend: str = "cpu", chunk: int = 64, tokens: list[int] = TOKENS) -> np.ndarray:
    model = _core.Model(str(path), 2, backend)
    session = _core.Session(model, kv_k="f32", kv_v="f32", chunk=chunk)
    out = np.full((len(tokens), model.config.n_vocab), np.nan, np.float32)
    session.prefill(np.array(tokens, np.int32), out, all_logits=True)
    return out


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("heads", HEADS)
def test_heads(tmp_path: Path, record_property: Callable[..., None], heads: str, head_dim: int) -> None:
    model = random_model(seed=head_dim, **head_config(heads, head_dim))
    found = all_logits(export(model).write(tmp_path / "m.gguf"))
    error = worst(found, reference_logits(model, TOKENS))
    record_property("worst_relative_error", error)
    assert error < LIMIT


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", FEATURES)
def test_features(tmp_path: Path, record_property: Callable[..., None], name: str, backend: str) -> None:
    model = random_model(seed=1, **FEATURES[name])
    found = all_logits(export(model).write(tmp_path / "m.gguf"), backend)
    error = worst(found, reference_logits(model, TOKENS))
    record_property("worst_relative_error", error)
    assert error < LIMIT


@pytest.mark.parametrize("chunk", [1, 7, 33, 128, 256])
def test_every_chunk_size(tmp_path: Path, record_property: Callable[..., None], chunk: int) -> None:
    model = random_model(seed=2, **FEATURES["llama-3"])
    found = all_logits(export(model).write(tmp_path / "m.gguf"), chunk=chunk)
    error = worst(found, reference_logits(model, TOKENS))
    record_property("worst_relative_error", error)
    assert error < LIMIT


def test_token_by_token(tmp_path: Path, record_property: Callable[..., None]) -> None:
    model = random_model(seed=2, **FEATURES["llama-3"])
    session = _core.Session(
        _core.Model(str(export(model).write(tmp_path / "m.gguf")), 2), kv_k="f32", kv_v="f32"
    )
    found = np.full((len(TOKENS), 96), np.nan, np.float32)
    session.prefill(np.array(TOKENS[:1], np.int32), found[0])
    for i, token in enumerate(TOKENS[1:], 1):
        session.decode(token, found[i])
    error = worst(found, reference_logits(model, TOKENS))
    record_property("worst_relative_error", error)
    assert error < LIMIT


@pytest.mark.parametrize("name", ["plain", "llama-3", "linear-rope"])
def test_long_text(tmp_path: Path, record_property: Callable[..., None], name: str) -> None:
    tokens = [int(t) for t in np.random.default_rng(12).integers(0, 96, 512)]
    model = random_model(seed=4, **FEATURES[name])
    found = all_logits(export(model).write(tmp_path / "m.gguf"), chunk=128, tokens=tokens)
    error = worst(found, reference_logits(model, tokens))
    record_property("worst_relative_error", error)
    assert error < LIMIT


@pytest.mark.parametrize("chunk", [5, 128])
@pytest.mark.parametrize("name", ["plain", "tied-with-biases", "llama-3", "linear-rope", *HEADS])
def test_greedy_text_equals_generate(tmp_path: Path, name: str, chunk: int) -> None:
    config = FEATURES[name] if name in FEATURES else head_config(name, 24)
    model = random_model(seed=5, **{**config, "vocab_size": 500})
    prompt = TOKENS[:23]
    with Model(export(model).write(tmp_path / "m.gguf"), n_threads=2) as ours:
        session = ours.session(kv="f32", chunk=chunk)
        found = list(session.generate(prompt, max_tokens=32, stop_ids=(), temperature=0.0))
    assert found == reference_greedy(model, prompt, 32)
    assert len(set(found)) > 8  # a model that repeats itself would prove little


def test_llama_3_factors_have_all_three_parts() -> None:
    factors = llama3_factors(LLAMA3, 64)
    kept, whole = factors == 1.0, factors == 8.0
    assert kept.sum() > 1 and whole.sum() > 1 and (~kept & ~whole).sum() > 1


# What an export can get wrong. Each must be seen, or the tests above could not fail.


def without(name: str) -> Callable[[Export], None]:
    def change(e: Export) -> None:
        for tensor in [name] if name in e.tensors else e.layer(name):
            del e.tensors[tensor]

    return change


def flat(name: str) -> Callable[[Export], None]:
    """A norm without its weight."""

    def change(e: Export) -> None:
        for tensor in [name] if name in e.tensors else e.layer(name):
            e.tensors[tensor] = np.ones_like(e.tensors[tensor])

    return change


def not_permuted(name: str) -> Callable[[Export], None]:
    def change(e: Export) -> None:
        heads = e.metadata["attention.head_count" if "_q" in name else "attention.head_count_kv"]
        for tensor in e.layer(name):
            e.tensors[tensor] = halved(e.tensors[tensor], heads)

    return change


def heads_turned(name: str) -> Callable[[Export], None]:
    """K/V heads in another order: query heads would read a wrong one."""

    def change(e: Export) -> None:
        for tensor in e.layer(name):
            heads = e.tensors[tensor].reshape(e.metadata["attention.head_count_kv"], -1)
            e.tensors[tensor] = np.roll(heads, 1, 0).reshape(e.tensors[tensor].shape)

    return change


def swapped(one: str, other: str) -> Callable[[Export], None]:
    def change(e: Export) -> None:
        for a, b in zip(e.layer(one), e.layer(other), strict=True):
            e.tensors[a], e.tensors[b] = e.tensors[b], e.tensors[a]

    return change


def not_blended(e: Export) -> None:
    factors = e.tensors["rope_freqs.weight"]
    e.tensors["rope_freqs.weight"] = np.where(factors > 1.0, factors.max(), 1.0)


def says(key: str, value: Any) -> Callable[[Export], None]:
    def change(e: Export) -> None:
        assert e.metadata[key] != value
        e.metadata[key] = value

    return change


def both(*changes: Callable[[Export], None]) -> Callable[[Export], None]:
    def change(e: Export) -> None:
        for c in changes:
            c(e)

    return change


ALL = {**BIASES, "head_dim": 24}
FAULTS: dict[str, tuple[dict[str, Any], Callable[[Export], None]]] = {
    **{f"no-{n}-bias": (ALL, without(f"attn_{n}.bias")) for n in ("q", "k", "v", "output")},
    **{f"no-{n}-bias": (ALL, without(f"ffn_{n}.bias")) for n in ("gate", "up", "down")},
    "flat-attention-norm": (ALL, flat("attn_norm.weight")),
    "flat-ffn-norm": (ALL, flat("ffn_norm.weight")),
    "flat-output-norm": (ALL, flat("output_norm.weight")),
    "q-not-permuted": (ALL, not_permuted("attn_q.weight")),
    "k-not-permuted": (ALL, not_permuted("attn_k.weight")),
    "q-and-k-not-permuted": (
        ALL,
        both(*(not_permuted(f"attn_{n}.{part}") for n in "qk" for part in ("weight", "bias"))),
    ),
    "q-bias-not-permuted": (ALL, not_permuted("attn_q.bias")),
    "k-bias-not-permuted": (ALL, not_permuted("attn_k.bias")),
    "k-heads-in-another-order": (ALL, heads_turned("attn_k.weight")),
    "v-heads-in-another-order": (ALL, heads_turned("attn_v.weight")),
    "gate-and-up-swapped": (ALL, swapped("ffn_gate.weight", "ffn_up.weight")),
    "head-tied": ({}, without("output.weight")),
    "another-eps": (FEATURES["large-eps"], says("attention.layer_norm_rms_epsilon", 1e-5)),
    "another-theta": (FEATURES["rope-theta-500000"], says("rope.freq_base", 10000.0)),
    "no-llama-3-factors": (FEATURES["llama-3"], without("rope_freqs.weight")),
    "llama-3-factors-not-blended": (FEATURES["llama-3"], not_blended),
    "no-linear-factor": (FEATURES["linear-rope"], says("rope.scaling.factor", 1.0)),
    "half-of-the-head-turned": (ALL, says("rope.dimension_count", 12)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_export_is_seen(tmp_path: Path, record_property: Callable[..., None], name: str) -> None:
    config, fault = FAULTS[name]
    model = random_model(seed=3, **config)
    expected = reference_logits(model, TOKENS)
    exported = export(model)
    right = worst(all_logits(exported.write(tmp_path / "right.gguf")), expected)
    fault(exported)
    wrong = worst(all_logits(exported.write(tmp_path / "wrong.gguf")), expected)
    record_property("worst_relative_error", right)
    record_property("with_the_fault", wrong)
    assert right < LIMIT < wrong
    assert wrong > 100 * right
