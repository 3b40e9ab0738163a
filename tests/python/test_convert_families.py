"""What config.json of each family becomes in GGUF's metadata, and which configs are refused.

Expected are the keys of the GGUF specification with the values that the config's definition in transformers
gives them. test_conformance_convert.py compares what the files compute."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import (
    gemma3_tensors,
    llama_config,
    llama_tensors,
    read_gguf,
    value_types,
    values,
    write_checkpoint,
)
from hf_llama import llama3_factors
from ringlm import FileFormatError, UnsupportedModelError
from ringlm.convert import convert, describe
from ringlm.convert.families import FAMILIES

BASE = llama_config()
GEMMA = {"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_act": None, "rope_theta": 10000.0}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
QWEN = {
    "architectures": ["QWenLMHeadModel"],
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "layer_norm_epsilon": 1e-6,
    "rotary_emb_base": 20000.0,
    "max_position_embeddings": 8192,
    "seq_length": 2048,
    "no_bias": True,
}
MOE = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
FULL, SLIDING = "full_attention", "sliding_attention"


def described(folder: Path, architecture: str, changes: dict[str, Any]) -> dict[str, Any]:
    config = QWEN if architecture == "QWenLMHeadModel" else {**BASE, "architectures": [architecture]}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return describe(folder).metadata


# architecture, changed fields, keys that must be there with these values, keys that must not
EXPECTED: dict[str, tuple[str, dict[str, Any], dict[str, Any], list[str]]] = {
    "llama": ("LlamaForCausalLM", {}, {}, ["attention.sliding_window", "rope.scaling.type"]),
    "llama-no-head-dim": (
        "LlamaForCausalLM",
        {"head_dim": None, "num_key_value_heads": None},
        {"attention.key_length": 16, "attention.head_count_kv": 4, "rope.dimension_count": 16},
        [],
    ),
    "mistral": (
        "MistralForCausalLM",
        {"sliding_window": 128},
        {"attention.sliding_window": 128},
        ["attention.sliding_window_pattern"],
    ),
    "mistral-no-window": ("MistralForCausalLM", {"sliding_window": None}, {}, ["attention.sliding_window"]),
    "mixtral": (
        "MixtralForCausalLM",
        {"num_local_experts": 6, "num_experts_per_tok": 3},
        {"expert_count": 6, "expert_used_count": 3, "feed_forward_length": 96},
        ["expert_feed_forward_length", "expert_weights_norm"],
    ),
    "qwen": (
        "QWenLMHeadModel",
        {},
        {
            "feed_forward_length": 192,  # twice the width of the matrices
            "context_length": 2048,  # longer needs scaling that the format has no key for
            "rope.freq_base": 20000.0,
            "attention.layer_norm_rms_epsilon": 1e-6,
        },
        [],
    ),
    "qwen2-window-that-is-off": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": False, "sliding_window": 128, "max_window_layers": 1},
        {},
        ["attention.sliding_window"],
    ),
    "qwen3-head-dim-by-default": (
        "Qwen3ForCausalLM",
        {"head_dim": None},
        {"attention.key_length": 128, "rope.dimension_count": 128},
        [],
    ),
    "phi3": (
        "Phi3ForCausalLM",
        {"head_dim": None, "sliding_window": 64, "partial_rotary_factor": 0.75},
        {"attention.sliding_window": 64, "rope.dimension_count": 12, "attention.key_length": 16},
        [],
    ),
    "gemma": (
        "GemmaForCausalLM",
        {**GEMMA, "tie_word_embeddings": None, "num_key_value_heads": 1},
        {"attention.head_count_kv": 1, "attention.key_length": 256},
        ["attention.scale"],
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        {
            **GEMMA,
            "query_pre_attn_scalar": 256,
            "sliding_window": 64,
            "attn_logit_softcapping": 40.0,
            "final_logit_softcapping": 20.0,
        },
        {
            "attention.sliding_window": 64,
            "attn_logit_softcapping": 40.0,
            "final_logit_softcapping": 20.0,
        },
        ["attention.scale", "attention.sliding_window_pattern"],
    ),
    "gemma2-query-scale": (
        "Gemma2ForCausalLM",
        {**GEMMA, "query_pre_attn_scalar": 144},
        {"attention.scale": 1 / 12, "attention.sliding_window": 4096, "attn_logit_softcapping": 50.0},
        [],
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        {
            **GEMMA,
            "num_hidden_layers": 8,
            "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL, SLIDING, SLIDING],
            "sliding_window": 32,
            "query_pre_attn_scalar": 256,
            "rope_parameters": GEMMA3_ROPE,
        },
        {
            "attention.sliding_window": 32,
            "attention.sliding_window_pattern": 3,
            "rope.freq_base": 1000000.0,
            "rope.freq_base_swa": 10000.0,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
        ["attention.scale", "final_logit_softcapping", "attn_logit_softcapping"],
    ),
    "gemma3-older-fields": (
        "Gemma3ForCausalLM",
        {
            **GEMMA,
            "num_hidden_layers": 7,
            "sliding_window": 32,
            "sliding_window_pattern": 4,
            "query_pre_attn_scalar": 64,
            "rope_theta": 500000.0,
            "rope_local_base_freq": 20000.0,
            "rope_scaling": {"factor": 4.0, "rope_type": "linear"},
            "final_logit_softcapping": 25.0,
        },
        {
            "attention.sliding_window_pattern": 4,
            "attention.scale": 0.125,
            "rope.freq_base": 500000.0,
            "rope.freq_base_swa": 20000.0,
            "rope.scaling.factor": 4.0,
            "final_logit_softcapping": 25.0,
        },
        [],
    ),
    # What the first checkpoints leave to the defaults of transformers.
    "gemma3-4b": (
        "Gemma3ForConditionalGeneration",
        {
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            }
        },
        {
            "vocab_size": 262208,
            "context_length": 131072,
            "attention.head_count": 8,
            "attention.head_count_kv": 4,
            "attention.key_length": 256,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "attention.sliding_window": 1024,
            "attention.sliding_window_pattern": 6,
            "rope.freq_base": 1000000.0,
            "rope.freq_base_swa": 10000.0,
            "rope.scaling.factor": 8.0,
        },
        ["attention.scale"],
    ),
    "gemma3-irregular": (
        "Gemma3ForCausalLM",
        {**GEMMA, "num_hidden_layers": 4, "layer_types": [SLIDING, FULL, FULL, SLIDING]},
        {"attention.sliding_window_pattern": [True, False, False, True]},
        [],
    ),
    "granite": (
        "GraniteForCausalLM",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.0625,
            "logits_scaling": 8.0,
        },
        {"embedding_scale": 12.0, "residual_scale": 0.22, "attention.scale": 0.0625, "logit_scale": 8.0},
        [],
    ),
    "smollm3": ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 1]}, {}, []),
    "qwen2moe": (
        "Qwen2MoeForCausalLM",
        {**MOE, "norm_topk_prob": False},
        {
            "expert_count": 8,
            "expert_used_count": 2,
            "expert_feed_forward_length": 32,
            "expert_shared_feed_forward_length": 48,
            "expert_weights_norm": False,
        },
        [],
    ),
    "qwen3moe": (
        "Qwen3MoeForCausalLM",
        {**MOE, "shared_expert_intermediate_size": None, "norm_topk_prob": True},
        {"expert_feed_forward_length": 32, "expert_weights_norm": True},
        ["expert_shared_feed_forward_length"],
    ),
    "linear": (
        "LlamaForCausalLM",
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0, "rope.freq_base": 500000.0},
        [],
    ),
    "yarn": (
        "Qwen2ForCausalLM",
        {
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 24,
            }
        },
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
            "rope.scaling.yarn_beta_fast": 24.0,
        },
        ["rope.scaling.yarn_beta_slow", "rope.scaling.attn_factor"],
    ),
    "yarn-by-the-lengths": (
        "Qwen3ForCausalLM",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 7.0, "original_max_position_embeddings": 32}},
        {"rope.scaling.factor": 8.0, "rope.freq_base": 7.0},
        [],
    ),
    # GGUF's attn_factor multiplies 0.1 ln(factor) + 1, transformers' attention_factor stands for all of it.
    "yarn-attention-factor": (
        "LlamaForCausalLM",
        {"rope_scaling": {"rope_type": "yarn", "factor": math.e**2, "attention_factor": 1.8}},
        {"rope.scaling.attn_factor": pytest.approx(1.5), "rope.scaling.original_context_length": 256},
        [],
    ),
    "yarn-mscale": (
        "LlamaForCausalLM",
        {"rope_scaling": {"rope_type": "yarn", "factor": math.e**2, "mscale": 2.0, "mscale_all_dim": 1.0}},
        {"rope.scaling.attn_factor": pytest.approx(1.4 / 1.2 / 1.2)},
        [],
    ),
    "phi3-calls-longrope-yarn": (
        "Phi3ForCausalLM",
        {
            "head_dim": None,
            "original_max_position_embeddings": 64,
            "rope_scaling": {"type": "yarn", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
        },
        {
            "rope.scaling.type": "longrope",
            "rope.scaling.original_context_length": 64,
            "rope.scaling.attn_factor": pytest.approx(math.sqrt(1 + math.log(4) / math.log(64))),
        },
        ["rope.scaling.factor"],
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_metadata_of_families(tmp_path: Path, name: str) -> None:
    architecture, changes, expected, absent = EXPECTED[name]
    found = described(tmp_path, architecture, changes)
    assert {key: found.get(key) for key in expected} == expected
    assert not found.keys() & {*absent}
    for key, value in expected.items():
        kind = type(value)
        if kind in (int, bool, str, list):
            assert type(found[key]) is kind, key


REFUSED: dict[str, tuple[str, dict[str, Any], type[Exception], str]] = {
    "qwen2-window": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 64, "layer_types": [FULL, SLIDING]},
        UnsupportedModelError,
        "use_sliding_window = true cannot be converted",
    ),
    "qwen-bias": ("QWenLMHeadModel", {"no_bias": False}, UnsupportedModelError, "no_bias = false"),
    "qwen-partial": ("QWenLMHeadModel", {"rotary_pct": 0.25}, UnsupportedModelError, "rotary_pct = 0.25"),
    "gemma-bidirectional": (
        "GemmaForCausalLM",
        {**GEMMA, "use_bidirectional_attention": True},
        UnsupportedModelError,
        "use_bidirectional_attention",
    ),
    "gemma2-order": (
        "Gemma2ForCausalLM",
        {**GEMMA, "layer_types": [FULL, SLIDING]},
        UnsupportedModelError,
        "another order of layers",
    ),
    "gemma3-attention-cap": (
        "Gemma3ForCausalLM",
        {**GEMMA, "attn_logit_softcapping": 50.0},
        UnsupportedModelError,
        "attn_logit_softcapping",
    ),
    "gemma3-layer-type": (
        "Gemma3ForCausalLM",
        {**GEMMA, "layer_types": [FULL, "chunked_attention"]},
        UnsupportedModelError,
        "layers of type chunked_attention",
    ),
    "gemma3-layer-count": (
        "Gemma3ForCausalLM",
        {**GEMMA, "layer_types": [FULL]},
        FileFormatError,
        "expected a list of 2 strings",
    ),
    "gemma3-yarn": (
        "Gemma3ForCausalLM",
        {**GEMMA, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        UnsupportedModelError,
        "of type .yarn.; this family has linear, or none",
    ),
    "smollm3-pattern": (
        "SmolLM3ForCausalLM",
        {"no_rope_layers": [1, 0]},
        UnsupportedModelError,
        r"RoPE in layers \[0\]",
    ),
    "longrope-factors": (
        "Phi3ForCausalLM",
        {"head_dim": None, "rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0] * 8}},
        FileFormatError,
        "short_factor has 1 elements; expected 8|long_factor",
    ),
    "negative-factor": (
        "LlamaForCausalLM",
        {"rope_scaling": {"type": "linear", "factor": -2.0}},
        FileFormatError,
        "factor is -2.0; expected a positive number",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_gguf_cannot_say_is_refused(tmp_path: Path, name: str) -> None:
    architecture, changes, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        described(tmp_path, architecture, changes)


def test_dynamic_scaling_is_left_out_with_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="dynamic RoPE scaling depends on the length"):
        found = described(tmp_path, "LlamaForCausalLM", {"rope_scaling": {"type": "dynamic", "factor": 2.0}})
    assert "rope.scaling.type" not in found


def test_llama_3_factors(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    config = llama_config(rope_scaling=rope)
    folder = write_checkpoint(tmp_path / "m", config, llama_tensors(config))
    convert(folder, tmp_path / "m.gguf", "q4_0", tokenizer=False)
    metadata, tensors = read_gguf(tmp_path / "m.gguf")
    np.testing.assert_allclose(values(tensors["rope_freqs.weight"]), llama3_factors(rope, 32), 1e-6)
    assert "llama.rope.scaling.type" not in metadata


def test_pattern_of_windows_is_stored_as_readers_expect(tmp_path: Path) -> None:
    """A period is a uint32, a list has booleans."""
    for types, stored in (([SLIDING, FULL], ["UINT32"]), ([FULL, SLIDING], ["ARRAY", "BOOL"])):
        config = llama_config(
            **{**GEMMA, "head_dim": 32}, architectures=["Gemma3ForCausalLM"], layer_types=types
        )
        config["tie_word_embeddings"] = True
        folder = write_checkpoint(tmp_path / "m", config, gemma3_tensors(config))
        convert(folder, tmp_path / "m.gguf", "f16", tokenizer=False)
        assert value_types(tmp_path / "m.gguf")["gemma3.attention.sliding_window_pattern"] == stored


@pytest.mark.filterwarnings("ignore:.*dynamic RoPE scaling")
def test_no_config_is_an_accident(tmp_path: Path) -> None:
    """Odd values of one or two fields, in every family: a typed error, or metadata."""
    fields = {
        **BASE,
        **QWEN,
        **MOE,
        **GEMMA,
        "num_local_experts": 4,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
        "use_sliding_window": False,
        "layer_types": None,
        "query_pre_attn_scalar": 16,
        "no_rope_layers": None,
        "mlp_only_layers": None,
        "decoder_sparse_step": 1,
        "rope_local_base_freq": 1e4,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "partial_rotary_factor": None,
        "text_config": None,
    }
    rope = {
        "rope_theta": 1e4,
        "factor": 2.0,
        "original_max_position_embeddings": 32,
        "attention_factor": None,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "long_factor": None,
        "short_factor": None,
        "beta_fast": None,
        "mscale": None,
        "mscale_all_dim": 1.0,
        "full_attention": None,
        "sliding_attention": None,
    }
    odd: list[Any] = [None, True, 0, 2**70, 1e-200, -0.5, "x", [[]], {"a": 1}]
    rng = random.Random(0)
    n_failed = n_described = 0
    for _ in range(2000):
        config = {**fields, "architectures": [rng.choice([*FAMILIES])]}
        config["hidden_act" if "Gemma" in config["architectures"][0] else "hidden_activation"] = None
        for key in rng.sample([*fields], rng.randrange(3)):
            config[key] = rng.choice(odd)
        if rng.random() < 0.5:
            kinds = ["linear", "yarn", "llama3", "longrope", "dynamic", 3, ["x"]]
            config["rope_parameters"] = {
                **rope,
                "rope_type": rng.choice(kinds),
                rng.choice([*rope]): rng.choice(odd),
            }
        (tmp_path / "config.json").write_text(json.dumps(config))
        try:
            describe(tmp_path)
            n_described += 1
        except (FileFormatError, UnsupportedModelError):
            n_failed += 1
    assert n_failed > 500 and n_described > 500
