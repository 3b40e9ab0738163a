"""Random-weight models of Hugging Face transformers and their export to GGUF.

The export follows the file format's definition (tensor names, metadata keys, rows of Q and K ordered so that
RoPE turns neighbours) and takes nothing from ringlm. torch and transformers are imported when first needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np

if TYPE_CHECKING:
    import transformers

Array = np.ndarray

LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def random_model(seed: int = 0, **config: Any) -> transformers.LlamaForCausalLM:
    """A LlamaForCausalLM whose every parameter is random, norms and biases too. The parameters are float32
    numbers; it computes in float64. `config` are the fields of LlamaConfig that differ from a small model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    small: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**small, **config})).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if name.endswith("norm.weight"):
                p.copy_(1.0 + 0.3 * noise)
            elif name.endswith("bias"):
                p.copy_(0.2 * noise)
            elif name.endswith("embed_tokens.weight"):
                p.copy_(0.3 * noise)  # small enough for the norm's epsilon to be seen
            else:
                scale = 2.0 if "q_proj" in name or "k_proj" in name else 1.0  # attention that is not flat
                p.copy_(scale * noise / p.shape[1] ** 0.5)
    return model.double()


def llama3_factors(rope: dict[str, Any], head_dim: int) -> Array:
    """`rope_freqs.weight` [head_dim / 2]: what Llama 3.1 divides each frequency by.

    By wavelength in tokens: up to the trained context over high_freq_factor nothing changes; from the context
    over low_freq_factor on it is the whole factor; in between the frequency is blended linearly in
    (context / wavelength).
    """
    wavelength = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] / wavelength
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1.0 / (kept + (1.0 - kept) / rope["factor"])


def interleaved(w: Array, n_head: int) -> Array:
    """Rows of Q or K (a matrix or a bias): element i and i + dim/2 of each head become 2i and 2i + 1."""
    halves = w.reshape(n_head, 2, -1, *w.shape[1:])
    return halves.swapaxes(1, 2).reshape(w.shape)


def halved(w: Array, n_head: int) -> Array:
    """The inverse of `interleaved`."""
    pairs = w.reshape(n_head, -1, 2, *w.shape[1:])
    return pairs.swapaxes(1, 2).reshape(w.shape)


@dataclass
class Export:
    """What a GGUF file will hold. Tests of the tests change it before it is written."""

    metadata: dict[str, Any]
    tensors: dict[str, Array]

    def layer(self, name: str) -> list[str]:
        """The names of this tensor in all layers."""
        found = [t for t in self.tensors if t.startswith("blk.") and t.split(".", 2)[2] == name]
        assert found, f"no layer has {name}"
        return found

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, "llama")
        for key, value in self.metadata.items():
            add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
            add("llama." + key, value)
        for name, array in self.tensors.items():
            writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def export(model: transformers.LlamaForCausalLM) -> Export:
    c = model.config
    rope = c.rope_parameters
    metadata = {
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "block_count": c.num_hidden_layers,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(c.rms_norm_eps),
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        "rope.dimension_count": c.head_dim,
        "rope.freq_base": float(rope["rope_theta"]),
    }
    state = {name: p.detach().numpy() for name, p in model.state_dict().items()}
    tensors = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "output_norm.weight": state["model.norm.weight"],
    }
    if not c.tie_word_embeddings:
        tensors["output.weight"] = state["lm_head.weight"]
    for i in range(c.num_hidden_layers):
        for theirs, ours in LAYER_TENSORS.items():
            for part in ("weight", "bias"):
                w = state.get(f"model.layers.{i}.{theirs}.{part}")
                if w is None:
                    continue
                if ours == "attn_q":
                    w = interleaved(w, c.num_attention_heads)
                elif ours == "attn_k":
                    w = interleaved(w, c.num_key_value_heads)
                tensors[f"blk.{i}.{ours}.{part}"] = w
    if rope["rope_type"] == "linear":
        metadata["rope.scaling.type"] = "linear"
        metadata["rope.scaling.factor"] = float(rope["factor"])
    elif rope["rope_type"] == "llama3":
        tensors["rope_freqs.weight"] = llama3_factors(rope, c.head_dim)
    else:
        assert rope["rope_type"] == "default", rope
    return Export(metadata, tensors)


def reference_logits(model: transformers.LlamaForCausalLM, tokens: list[int]) -> Array:
    """Logits [n_tokens, n_vocab] of the whole text."""
    import torch

    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].numpy()


def reference_greedy(model: transformers.LlamaForCausalLM, tokens: list[int], n: int) -> list[int]:
    """The n tokens that `generate` continues with."""
    import torch

    prompt = torch.tensor([tokens])
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=n, do_sample=False)
    return out[0, len(tokens) :].tolist()
