"""Small models with random weights of every family, built with transformers from models/recipes.toml.

torch and transformers are imported when first needed; nothing is taken from ringlm.
"""

from __future__ import annotations

import copy
import json
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = Path(__file__).resolve().parents[2] / "models" / "recipes.toml"


def _recipes() -> dict[str, dict[str, Any]]:
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def names() -> list[str]:
    return [name for name in _recipes() if name != "defaults"]


def build(name: str, seed: int = 0) -> Any:
    """The recipe's model of transformers, every parameter random, norms, biases and routers too.

    The parameters are float32 numbers; it computes in float64 where transformers does not ask for float32."""
    import torch
    import transformers

    recipe = _recipes()[name]
    kind = getattr(transformers, recipe["class"])
    fields = copy.deepcopy({**_recipes()["defaults"], **recipe["config"]})
    config = kind.config_class(**fields, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = kind(config).eval()
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
    with torch.no_grad():
        for parameter_name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(_scaled(parameter_name, noise, offset_norms="Gemma" in recipe["class"]))
    return model.double()


def _scaled(name: str, noise: Any, offset_norms: bool) -> Any:
    """Weights that show every part of a model: norms away from 1, attention and routing away from uniform."""
    if name.endswith("norm.weight"):
        mean = 1.4 if "q_norm" in name or "k_norm" in name else 1.0
        return (mean - 1.0 if offset_norms else mean) + 0.3 * noise
    if name.endswith("bias"):
        return 0.2 * noise
    if name.endswith("embed_tokens.weight"):
        return 0.3 * noise  # small enough for the norm's epsilon to be seen
    sharp = any(part in name for part in ("q_proj", "k_proj", "qkv_proj"))
    return (2.0 if sharp else 1.0) * noise / noise.shape[-1] ** 0.5


def reference_logits(model: Any, tokens: list[int]) -> np.ndarray:
    """Logits [n_tokens, n_vocab] of the whole text, read at once."""
    import torch

    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()


def save(model: Any, name: str, folder: Path) -> Path:
    """The checkpoint as its authors would publish it: config.json and safetensors in float32."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    copy.deepcopy(model).float().save_pretrained(folder)
    for unwanted in folder.glob("generation_config.json"):
        unwanted.unlink()
    layout = _recipes()[name].get("layout")
    if layout is not None:
        from safetensors.numpy import load_file, save_file

        file = folder / "model.safetensors"
        config = json.loads((folder / "config.json").read_text())
        config, tensors = _LAYOUTS[layout](config, load_file(file))
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, file)
    return folder


Tensors = dict[str, np.ndarray]


def _as_qwen(config: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    """The folder of the first Qwen: fused Q, K and V, an intermediate_size of twice the matrices' width."""
    published = {
        "architectures": ["QWenLMHeadModel"],
        "model_type": "qwen",
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "num_hidden_layers": config["num_hidden_layers"],
        "num_attention_heads": config["num_attention_heads"],
        "kv_channels": config["hidden_size"] // config["num_attention_heads"],
        "intermediate_size": 2 * config["intermediate_size"],
        "layer_norm_epsilon": config["rms_norm_eps"],
        "max_position_embeddings": config["max_position_embeddings"],
        "seq_length": config["max_position_embeddings"],
        "rotary_emb_base": config["rope_parameters"]["rope_theta"],
        "rotary_pct": 1.0,
        "no_bias": True,
        "use_dynamic_ntk": True,
        "use_logn_attn": True,
        "tie_word_embeddings": False,
    }
    one_to_one = {
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
        "self_attn.o_proj": "attn.c_proj",
        "mlp.gate_proj": "mlp.w2",
        "mlp.up_proj": "mlp.w1",
        "mlp.down_proj": "mlp.c_proj",
    }
    renamed = {
        "transformer.wte.weight": tensors["model.embed_tokens.weight"],
        "transformer.ln_f.weight": tensors["model.norm.weight"],
        "lm_head.weight": tensors["lm_head.weight"],
    }
    for i in range(config["num_hidden_layers"]):
        theirs, ours = f"transformer.h.{i}.", f"model.layers.{i}."
        for a, b in one_to_one.items():
            renamed[f"{theirs}{b}.weight"] = tensors[f"{ours}{a}.weight"]
        for part in ("weight", "bias"):
            qkv = [tensors[f"{ours}self_attn.{x}_proj.{part}"] for x in "qkv"]
            renamed[f"{theirs}attn.c_attn.{part}"] = np.concatenate(qkv)
    return published, renamed


def _as_gemma3_conditional(config: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    config.pop("architectures")
    published = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": config,
        "vision_config": {"hidden_size": 32},
        "mm_tokens_per_image": 4,
    }
    renamed = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    renamed["vision_tower.vision_model.post_layernorm.weight"] = np.ones(32, np.float32)
    renamed["multi_modal_projector.mm_input_projection_weight"] = np.ones((32, 96), np.float32)
    return published, renamed


_LAYOUTS = {"qwen": _as_qwen, "gemma3-conditional": _as_gemma3_conditional}
