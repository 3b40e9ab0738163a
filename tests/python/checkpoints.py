"""Checkpoints of transformers written with numpy alone: config.json, safetensors, any of the families."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Array = np.ndarray
Tensors = dict[str, Array]

_NAMES = {"f4": "F32", "f2": "F16", "f8": "F64", "i4": "I32", "u4": "U32", "i8": "I64"}


def as_bf16(values: Array) -> Array:
    """float32 cut to its upper half, as uint16; write_safetensors calls uint16 BF16."""
    return (np.ascontiguousarray(values, "<f4").view("<u4") >> 16).astype("<u2")


def from_bf16(raw: Array) -> Array:
    return (raw.astype("<u4") << 16).view("<f4")


def safetensors(tensors: Mapping[str, Array]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in tensors.items():
        dtype = "BF16" if array.dtype == np.uint16 else _NAMES[array.dtype.str[1:]]
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def write_checkpoint(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Array]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(safetensors(tensors))
    return folder


def write_shards(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Array], n: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weight_map = {}
    for i in range(n):
        file = f"model-{i + 1:05}-of-{n:05}.safetensors"
        part = dict(list(tensors.items())[i::n])
        (folder / file).write_bytes(safetensors(part))
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def llama_config(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 40,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        **changes,
    }


def llama_tensors(config: Mapping[str, Any], seed: int = 0) -> Tensors:
    """Random tensors of a llama (or of a family with the same names), float32."""
    rng = np.random.default_rng(seed)
    embd, ff, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], embd)}
    for i in range(config["num_hidden_layers"]):
        shapes |= {
            f"model.layers.{i}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (embd,),
                "self_attn.q_proj": (q, embd),
                "self_attn.k_proj": (kv, embd),
                "self_attn.v_proj": (kv, embd),
                "self_attn.o_proj": (embd, q),
                "post_attention_layernorm": (embd,),
                "mlp.gate_proj": (ff, embd),
                "mlp.up_proj": (ff, embd),
                "mlp.down_proj": (embd, ff),
            }.items()
        }
    shapes["model.norm.weight"] = (embd,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], embd)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, gguf.ReaderTensor]]:
    """Metadata and tensors as the gguf package reads them."""
    reader = gguf.GGUFReader(path)
    metadata = {key: f.contents() for key, f in reader.fields.items() if not key.startswith("GGUF.")}
    return metadata, {t.name: t for t in reader.tensors}


def value_types(path: Path) -> dict[str, list[str]]:
    """How each key is stored: ["UINT32"], ["ARRAY", "BOOL"]."""
    reader = gguf.GGUFReader(path)
    return {k: [t.name for t in f.types] for k, f in reader.fields.items() if not k.startswith("GGUF.")}


def values(tensor: gguf.ReaderTensor) -> Array:
    """float32, dequantized by the gguf package, in numpy's order of dimensions."""
    found = gguf.dequantize(tensor.data, tensor.tensor_type)
    return found.reshape([int(n) for n in reversed(tensor.shape)])


def gemma3_tensors(config: dict[str, Any]) -> dict[str, Array]:
    """llama_tensors and the norms that Gemma 3 has besides, all zero: 1 is added to them."""
    tensors = llama_tensors(config)
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
            tensors[f"{at}{name}.weight"] = np.zeros(config["hidden_size"], np.float32)
        for name in ("q_norm", "k_norm"):
            tensors[f"{at}self_attn.{name}.weight"] = np.zeros(config["head_dim"], np.float32)
    return tensors
