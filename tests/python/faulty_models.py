"""A small chat model as a GGUF file, with one fault in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from random_llama import Array, random_weights, stored_as, writer_of
from tiny_chat_model import RANDOM, SPECIAL, TEMPLATE, byte_letters, tokenizer_metadata

__all__ = ["Fault", "plus_tokens", "types_with", "write_faulty", "write_vocabulary"]


@dataclass(frozen=True)
class Fault:
    """What is changed: keys set (None: left out), the weights, the types of tensors; and the Q8_0 tensor of
    which one scale is infinite."""

    keys: dict[str, Any] = field(default_factory=dict)
    weights: Callable[[dict[str, Array]], None] = lambda weights: None
    types: dict[str, str] = field(default_factory=lambda: {"default": "F32"})
    infinite: str = ""


def write_faulty(path: Path, fault: Fault) -> None:
    keys = {"general.architecture": "llama", **tokenizer_metadata(), **fault.keys}
    shape = RANDOM.with_(types=fault.types)
    alignment = keys.pop("general.alignment", None)
    writer = writer_of(path, shape)
    for key in fault.keys.keys() & writer.kv_data[0].keys():
        del writer.kv_data[0][key]
    _add(writer, {key: v for key, v in keys.items() if key not in writer.kv_data[0]})
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    weights = random_weights(shape)
    fault.weights(weights)
    rng = np.random.default_rng(0)
    for name, array in weights.items():
        if array.dtype == np.uint8:  # bytes that are no numbers anybody meant
            writer.add_tensor(name, array, raw_dtype=gguf.GGMLQuantizationType.TQ2_0)
            continue
        raw, qtype, _ = stored_as(name, array, fault.types, rng)
        if name == fault.infinite:
            raw[3, :2] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
        writer.add_tensor(name, raw, raw_dtype=qtype)
    _finish(writer)


def _add(writer: gguf.GGUFWriter, metadata: dict[str, Any]) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in metadata.items():
        if value is not None:
            (add | {list: writer.add_array})[type(value)](key, value)


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def plus_tokens(*texts: str, kind: int = 3) -> dict[str, Any]:
    """The vocabulary with more tokens behind."""
    return {
        "tokenizer.ggml.tokens": [*byte_letters(), *SPECIAL, *texts],
        "tokenizer.ggml.token_type": [1] * 256 + [3] * len(SPECIAL) + [kind] * len(texts),
    }


def types_with(token: int, kind: int) -> dict[str, Any]:
    types = [1] * 256 + [3] * len(SPECIAL)
    types[token] = kind
    return {"tokenizer.ggml.token_type": types}


def write_vocabulary(path: Path, arch: str, n: int = 0, keys: dict[str, Any] | None = None) -> None:
    """Of another architecture: metadata, n ordinary tokens before Llama 3's, and no more than a norm of
    weights."""
    special = ["<|begin_of_text|>", "<|start_header_id|>", "<|im_start|>", "<|im_end|>"]
    writer = gguf.GGUFWriter(path, arch)
    metadata: dict[str, Any] = {
        f"{arch}.context_length": 4096,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": [*(f"t{i}" for i in range(n)), *special],
        "tokenizer.ggml.token_type": [1] * n + [3] * len(special),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": n,
        "tokenizer.ggml.eos_token_id": n + 3,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
        **(keys or {}),
    }
    _add(writer, metadata)
    writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
    _finish(writer)
