"""A small chat model as a GGUF file, with one fault in it, and a table of faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from random_llama import Array, random_weights, stored_as, writer_of
from tiny_chat_model import (
    END,
    N_VOCAB,
    RANDOM,
    SPECIAL,
    START,
    TEMPLATE,
    byte_letters,
    tokenizer_metadata,
)

__all__ = ["FAULTS", "Fault", "G", "grown", "plus_tokens", "write_faulty", "write_vocabulary"]

G = "tokenizer.ggml."


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


# ---- the faults --------------------------------------------------------------------------------------------


def grown(weights: dict[str, Array]) -> None:
    """A row more for each token."""
    for name in ("token_embd.weight", "output.weight"):
        weights[name] = np.concatenate([weights[name], weights[name][:1]])


def broken(name: str, value: float) -> Any:
    def change(weights: dict[str, Array]) -> None:
        weights[name].flat[5] = value

    return change


def without(name: str) -> Any:
    return lambda weights: weights.pop(name)


def with_tensor(name: str, array: Array) -> Any:
    return lambda weights: weights.update({name: array})


def zeroed(weights: dict[str, Array]) -> None:
    weights["blk.1.ffn_norm.weight"][:] = 0


def short_output(weights: dict[str, Array]) -> None:
    weights["output.weight"] = weights["output.weight"][:-1]


ENDING = TEMPLATE.replace("<|im_end|>", "<|stop|>")

#: name -> (fault, severity, where, words of the finding). Nothing else is an error.
FAULTS: dict[str, tuple[Fault, str, str, list[str]]] = {
    # special tokens
    "eos-outside": (
        Fault({G + "eos_token_id": 5000}),
        "error",
        G + "eos_token_id",
        ["5000", f"{N_VOCAB} tokens", "nothing ends an answer", "--special-token eos"],
    ),
    "bos-outside": (Fault({G + "bos_token_id": 259}), "error", G + "bos_token_id", ["259", "begun"]),
    "eot-outside": (Fault({G + "eot_token_id": 999}), "error", G + "eot_token_id", ["999", "ends"]),
    "padding-outside": (Fault({G + "padding_token_id": 999}), "error", G + "padding_token_id", ["999"]),
    "eos-is-a-word": (Fault({G + "eos_token_id": 65}), "error", G + "eos_token_id", ["ordinary token 'A'"]),
    "bos-is-a-word": (Fault({G + "bos_token_id": 66}), "error", G + "bos_token_id", ["ordinary token 'B'"]),
    "eos-is-a-beginning": (
        Fault({G + "eos_token_id": START}),
        "error",
        G + "eos_token_id",
        ["'<|im_start|>'", "answers do not end"],
    ),
    "eos-is-padding": (
        Fault(plus_tokens("<pad>") | {G + "eos_token_id": N_VOCAB}, grown),
        "error",
        G + "eos_token_id",
        ["'<pad>'"],
    ),
    "bos-is-an-end": (
        Fault({G + "bos_token_id": END, G + "add_bos_token": True}),
        "error",
        G + "bos_token_id",
        ["'<|im_end|>'", "begins with a token that ends"],
    ),
    # how conversations end and begin
    "end-of-turn-does-not-end": (
        Fault(plus_tokens("<|stop|>") | {"tokenizer.chat_template": ENDING}, grown),
        "error",
        "tokenizer.chat_template",
        ["'<|stop|>' (token 259, control)", "do not stop", "--special-token eot '<|stop|>'"],
    ),
    "end-of-turn-is-no-token": (
        Fault({"tokenizer.chat_template": TEMPLATE.replace("<|im_end|>", "<|eot_id|>")}),
        "error",
        "tokenizer.chat_template",
        ["'<|eot_id|>'", "the vocabulary does not have", "do not stop"],
    ),
    "end-of-turn-is-a-word": (
        Fault(
            plus_tokens("</s>") | {G + "token_type": [1] * 256 + [3, 1, 3, 3], G + "eos_token_id": N_VOCAB},
            grown,
        ),
        "error",
        "tokenizer.chat_template",
        ["'<|im_end|>' (token 257, normal)", "ends no generation"],
    ),
    "a-marker-is-text": (
        Fault(types_with(START, 4)),
        "note",
        G + "token_type",
        ["'<|im_start|>' is no control token", "types it"],
    ),
    "double-bos": (
        Fault({G + "add_bos_token": True, "tokenizer.chat_template": "{{ bos_token }}" + TEMPLATE}),
        "note",
        G + "add_bos_token",
        ["writes it too", "twice"],
    ),
    "another-bos": (
        Fault(
            plus_tokens("<s>") | {G + "add_bos_token": True, "tokenizer.chat_template": "<s>" + TEMPLATE},
            grown,
        ),
        "error",
        "tokenizer.chat_template",
        ["'<s>'", "'<|bos|>'", "two different beginnings"],
    ),
    "bos-without-id": (
        Fault({G + "add_bos_token": True, G + "bos_token_id": None}),
        "error",
        G + "add_bos_token",
        ["bos_token_id is missing"],
    ),
    "add-bos-missing": (
        Fault({G + "add_bos_token": None}),
        "note",
        G + "add_bos_token",
        ["missing", "no BOS"],
    ),
    "template-missing": (
        Fault({"tokenizer.chat_template": None}),
        "note",
        "tokenizer.chat_template",
        ["missing", "--chat-template-file"],
    ),
    "template-broken": (
        Fault({"tokenizer.chat_template": "a\n{% if %}"}),
        "error",
        "tokenizer.chat_template",
        ["line 2", "no conversation"],
    ),
    # the vocabulary
    "vocabulary-missing": (Fault({G + "model": None}), "error", G + "model", ["missing", "token ids"]),
    "vocabulary-unknown": (Fault({G + "model": "t5"}), "error", "the vocabulary", ["'t5'"]),
    "pre-missing": (
        Fault({G + "pre": None}),
        "error",
        G + "pre",
        ["missing", "is guessed"],
    ),
    "pre-default": (Fault({G + "pre": "default"}), "error", G + "pre", ["'default'", "--pre-tokenizer"]),
    "pre-unknown": (Fault({G + "pre": "mine"}), "error", "the vocabulary", ["'mine'", "gpt-2"]),
    "types-too-few": (
        Fault({G + "token_type": [1] * 256}),
        "error",
        G + "token_type",
        [f"256 entries for {N_VOCAB} tokens"],
    ),
    "scores-too-many": (
        Fault({G + "scores": [0.0] * 300}),
        "error",
        G + "scores",
        [f"300 entries for {N_VOCAB} tokens"],
    ),
    "tokens-without-rows": (
        Fault(plus_tokens("<|x|>")),
        "error",
        "token_embd.weight",
        [f"{N_VOCAB} rows, and output.weight {N_VOCAB}, for the {N_VOCAB + 1} tokens", "no weights"],
    ),
    "output-too-short": (
        Fault(weights=short_output),
        "error",
        "output.weight",
        [f"{N_VOCAB - 1} rows for the {N_VOCAB} tokens"],
    ),
    "vocab-size": (Fault({"llama.vocab_size": 300}), "note", "llama.vocab_size", ["300", f"{N_VOCAB}"]),
    # context and RoPE
    "context-missing": (Fault({"llama.context_length": None}), "error", "llama.context_length", ["missing"]),
    "context-zero": (Fault({"llama.context_length": 0}), "error", "llama.context_length", ["0", "how long"]),
    "context-beyond-scaling": (
        Fault(
            {
                "llama.rope.scaling.type": "linear",
                "llama.rope.scaling.factor": 2.0,
                "llama.rope.scaling.original_context_length": 64,
            }
        ),
        "error",
        "llama.context_length",
        ["256", "64 x 2 = 128", "llama.context_length 128"],
    ),
    "context-within-scaling": (
        Fault(
            {
                "llama.rope.scaling.type": "linear",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 256,
            }
        ),
        "note",
        "llama.context_length",
        ["256 x 4 = 1024", "goes by the scaling"],
    ),
    "context-below-original": (
        Fault(
            {
                "llama.rope.scaling.type": "linear",
                "llama.rope.scaling.factor": 1.0,
                "llama.rope.scaling.original_context_length": 512,
            }
        ),
        "error",
        "llama.rope.scaling.original_context_length",
        ["512", "256"],
    ),
    "rope-odd": (
        Fault({"llama.rope.dimension_count": 15}),
        "error",
        "llama.rope.dimension_count",
        ["15", "even number up to the head's size, 16"],
    ),
    "rope-too-wide": (
        Fault({"llama.rope.dimension_count": 32}),
        "error",
        "llama.rope.dimension_count",
        ["32", "16"],
    ),
    "rope-scaling-unknown": (
        Fault({"llama.rope.scaling.type": "dynamic"}),
        "error",
        "llama.rope.scaling.type",
        ["'dynamic'", "yarn"],
    ),
    # heads, tensors, values
    "kv-heads": (
        Fault({"llama.attention.head_count_kv": 3}),
        "error",
        "llama.attention.head_count_kv",
        ["3 KV heads do not divide 2"],
    ),
    "heads": (
        Fault({"llama.attention.head_count": 3, "llama.attention.head_count_kv": 1}),
        "error",
        "llama.attention.head_count",
        ["3 heads do not divide the width 32"],
    ),
    "q-shape": (
        Fault(weights=with_tensor("blk.1.attn_q.weight", np.ones((16, 32), np.float32))),
        "error",
        "blk.1.attn_q.weight",
        ["16 x 32; 2 heads of 16 and the width 32 make 32 x 32"],
    ),
    "nan": (
        Fault(weights=broken("blk.1.attn_norm.weight", np.nan)),
        "error",
        "blk.1.attn_norm.weight",
        ["NaN or infinity"],
    ),
    "infinite-scale": (
        Fault(types={"ffn_up.weight": "Q8_0", "default": "F32"}, infinite="blk.0.ffn_up.weight"),
        "error",
        "blk.0.ffn_up.weight",
        ["NaN or infinity"],
    ),
    "zeros": (
        Fault(weights=zeroed),
        "error",
        "blk.1.ffn_norm.weight",
        ["nothing but zeros", "download"],
    ),
    "tensor-missing": (
        Fault(weights=without("blk.0.ffn_gate.weight")),
        "error",
        "the model",
        ["'blk.0.ffn_gate.weight' is missing"],
    ),
    "tensor-unused": (
        Fault(weights=with_tensor("blk.0.extra.weight", np.ones(32, np.float32))),
        "error",
        "the model",
        ["'blk.0.extra.weight' belongs to nothing"],
    ),
    "tensor-type": (
        Fault(weights=with_tensor("output.weight", np.zeros((N_VOCAB, 66), np.uint8))),
        "error",
        "the model",
        ["TQ2_0"],
    ),
    "alignment": (Fault({"general.alignment": 64}), "note", "general.alignment", ["64"]),
}
