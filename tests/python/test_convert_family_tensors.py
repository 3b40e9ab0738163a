"""Tensors that are not copied as they are: the norms of Gemma, experts in one tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import (
    Array,
    gemma3_tensors,
    llama_config,
    llama_tensors,
    read_gguf,
    values,
    write_checkpoint,
)
from hf_llama import interleaved
from ringlm.convert import convert

GEMMA = {"head_dim": 32, "hidden_activation": "gelu_pytorch_tanh", "hidden_act": None, "rope_theta": 10000.0}


def test_norms_of_gemma_get_their_one(tmp_path: Path) -> None:
    config = llama_config(**GEMMA, architectures=["Gemma3ForCausalLM"])
    config["tie_word_embeddings"] = True
    tensors = gemma3_tensors(config)
    folder = write_checkpoint(tmp_path / "m", config, tensors)
    convert(folder, tmp_path / "m.gguf", tokenizer=False)
    _, found = read_gguf(tmp_path / "m.gguf")
    norms = {"output_norm.weight": "model.norm.weight"}
    for ours, theirs in (
        ("attn_norm", "input_layernorm"),
        ("post_attention_norm", "post_attention_layernorm"),
        ("ffn_norm", "pre_feedforward_layernorm"),
        ("post_ffw_norm", "post_feedforward_layernorm"),
        ("attn_q_norm", "self_attn.q_norm"),
        ("attn_k_norm", "self_attn.k_norm"),
    ):
        norms[f"blk.1.{ours}.weight"] = f"model.layers.1.{theirs}.weight"
    for ours, theirs in norms.items():
        np.testing.assert_array_equal(values(found[ours]), tensors[theirs] + np.float32(1), ours)
    q = found["blk.0.attn_q.weight"]  # rows as they are: RoPE turns halves here
    np.testing.assert_array_equal(
        values(q), tensors["model.layers.0.self_attn.q_proj.weight"].astype(np.float16)
    )


def test_norms_of_the_first_gemma_too(tmp_path: Path) -> None:
    config = llama_config(**GEMMA, architectures=["GemmaForCausalLM"], tie_word_embeddings=True)
    tensors = {name: w for name, w in llama_tensors(config).items() if name != "lm_head.weight"}
    convert(write_checkpoint(tmp_path / "m", config, tensors), tmp_path / "m.gguf", tokenizer=False)
    _, found = read_gguf(tmp_path / "m.gguf")
    for ours, theirs in (("attn_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm")):
        np.testing.assert_array_equal(
            values(found[f"blk.1.{ours}.weight"]), tensors[f"model.layers.1.{theirs}.weight"] + np.float32(1)
        )


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GraniteForCausalLM", "Qwen3ForCausalLM"])
def test_rows_of_q_and_k_are_in_the_order_that_the_architecture_turns(
    tmp_path: Path, architecture: str
) -> None:
    config = llama_config(architectures=[architecture])
    tensors = llama_tensors(config)
    if architecture == "Qwen3ForCausalLM":
        dim = tensors["model.layers.0.self_attn.k_proj.weight"].shape[0] // config["num_key_value_heads"]
        for i in range(config["num_hidden_layers"]):
            for name in ("q_norm", "k_norm"):
                tensors[f"model.layers.{i}.self_attn.{name}.weight"] = np.ones(dim, np.float32)
    convert(write_checkpoint(tmp_path / "m", config, tensors), tmp_path / "m.gguf", "f32", tokenizer=False)
    _, found = read_gguf(tmp_path / "m.gguf")
    for name, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
        w = tensors[f"model.layers.1.self_attn.{name}_proj.weight"]
        expected = w if architecture == "Qwen3ForCausalLM" else interleaved(w, config[heads])
        np.testing.assert_array_equal(values(found[f"blk.1.attn_{name}.weight"]), expected)


def mixtral(config: dict[str, Any], fused: bool) -> dict[str, Array]:
    rng = np.random.default_rng(5)
    tensors = {name: array for name, array in llama_tensors(config).items() if ".mlp." not in name}
    n, ff, embd = config["num_local_experts"], config["intermediate_size"], config["hidden_size"]
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        gate, up = rng.standard_normal((2, n, ff, embd), np.float32)
        down = rng.standard_normal((n, embd, ff), np.float32)
        router = rng.standard_normal((n, embd), np.float32)
        if fused:
            tensors[f"{at}mlp.gate.weight"] = router
            tensors[f"{at}mlp.experts.gate_up_proj"] = np.concatenate([gate, up], 1)
            tensors[f"{at}mlp.experts.down_proj"] = down
            continue
        tensors[f"{at}block_sparse_moe.gate.weight"] = router
        for e in range(n):
            for name, w in (("w1", gate), ("w3", up), ("w2", down)):
                tensors[f"{at}block_sparse_moe.experts.{e}.{name}.weight"] = w[e]
    return tensors


@pytest.mark.parametrize("type", ["f32", "q4_1"])
def test_experts_apart_or_fused_give_the_same_file(tmp_path: Path, type: str) -> None:
    config = llama_config(architectures=["MixtralForCausalLM"], num_local_experts=3, num_experts_per_tok=2)
    for name, fused in (("apart", False), ("fused", True)):
        folder = write_checkpoint(tmp_path / name / "m", config, mixtral(config, fused))
        convert(folder, tmp_path / f"{name}.gguf", type, tokenizer=False)
    assert (tmp_path / "apart.gguf").read_bytes() == (tmp_path / "fused.gguf").read_bytes()
    _, found = read_gguf(tmp_path / "fused.gguf")
    tensors = mixtral(config, fused=False)
    for gguf_name, w in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        stacked = np.stack(
            [tensors[f"model.layers.1.block_sparse_moe.experts.{e}.{w}.weight"] for e in range(3)]
        )
        got = values(found[f"blk.1.ffn_{gguf_name}_exps.weight"])
        assert got.shape == stacked.shape
        np.testing.assert_allclose(got, stacked, atol=0 if type == "f32" else 0.3)
    router = found["blk.0.ffn_gate_inp.weight"]
    assert router.tensor_type == 0  # F32 in every file
    np.testing.assert_array_equal(values(router), tensors["model.layers.0.block_sparse_moe.gate.weight"])
