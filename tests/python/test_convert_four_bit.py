"""Checkpoints of four bits: quantized layers keep their codes, the others get the type that was asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from checkpoints import Array, llama_config, llama_tensors, read_gguf, values, write_checkpoint
from hf_llama import interleaved
from ringlm import FileFormatError
from ringlm.convert import convert
from test_four_bit import AWQ, GPTQ, Layer

FOUR_BIT, Q8, F32 = (
    gguf.GGMLQuantizationType.Q4_1,
    gguf.GGMLQuantizationType.Q8_0,
    gguf.GGMLQuantizationType.F32,
)


def checkpoint(method: str) -> tuple[dict[str, Any], dict[str, Array], dict[str, Layer]]:
    """A llama whose every linear layer is quantized, and these layers by name."""
    config = llama_config(
        intermediate_size=128, num_hidden_layers=1, quantization_config=AWQ if method == "awq" else GPTQ
    )
    tensors, layers = {}, {}
    for name, array in llama_tensors(config).items():
        if "_proj" not in name:
            tensors[name] = array
            continue
        prefix = name.removesuffix(".weight")
        n_out, n_in = array.shape
        layer = layers[prefix] = Layer(n_in, n_out, 64, seed=len(layers))
        packed = layer.awq() if method == "awq" else layer.gptq()
        tensors |= {prefix + part.removeprefix("x"): w for part, w in packed.items()}
    return config, tensors, layers


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_codes_are_kept(tmp_path: Path, method: str) -> None:
    config, tensors, layers = checkpoint(method)
    # Tools write biases of zeros for layers that have none.
    for prefix, layer in layers.items():
        tensors[f"{prefix}.bias"] = np.zeros(layer.q.shape[1], np.float16)
    folder = write_checkpoint(tmp_path / "m", config, tensors)
    convert(folder, tmp_path / "m.gguf", "q8_0", tokenizer=False)
    _, found = read_gguf(tmp_path / "m.gguf")
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    assert {f"model.layers.0.{name}" for name in names} == layers.keys()
    for theirs, ours in names.items():
        weight = layers[f"model.layers.0.{theirs}"].weight
        heads = {"attn_q": 4, "attn_k": 2}.get(ours)
        expected = interleaved(weight, heads) if heads else weight
        tensor = found[f"blk.0.{ours}.weight"]
        assert tensor.tensor_type == FOUR_BIT
        # m = -zero * scale is rounded to float16: at most 15 * 0.02 * 2**-11
        np.testing.assert_allclose(values(tensor), expected, atol=1.6e-4)
    assert not [name for name in found if name.endswith("bias")]
    assert found["token_embd.weight"].tensor_type == Q8
    assert found["blk.0.attn_norm.weight"].tensor_type == F32


def test_a_layer_of_another_size_is_an_error(tmp_path: Path) -> None:
    config, tensors, _ = checkpoint("awq")
    config["intermediate_size"] = 64
    folder = write_checkpoint(tmp_path / "m", config, tensors)
    with pytest.raises(FileFormatError, match=r"mlp\.gate_proj has 128 rows of 64 columns; config.json says"):
        convert(folder, tmp_path / "m.gguf", tokenizer=False)
    assert not (tmp_path / "m.gguf").exists()


def test_a_bias_that_is_not_zero_is_an_error(tmp_path: Path) -> None:
    config, tensors, _ = checkpoint("gptq")
    config["architectures"] = ["MistralForCausalLM"]
    tensors["model.layers.0.mlp.up_proj.bias"] = np.ones(128, np.float16)
    folder = write_checkpoint(tmp_path / "m", config, tensors)
    with pytest.raises(FileFormatError, match=r"no place for model\.layers\.0\.mlp\.up_proj\.bias"):
        convert(folder, tmp_path / "m.gguf", tokenizer=False)
    tensors["model.layers.0.mlp.up_proj.bias"] *= 0
    convert(write_checkpoint(folder, config, tensors), tmp_path / "m.gguf", tokenizer=False)
    assert "blk.0.ffn_up.bias" not in read_gguf(tmp_path / "m.gguf")[1]
