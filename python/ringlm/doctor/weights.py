"""Checks of shapes, RoPE and tensors."""

from __future__ import annotations

import re
from typing import Any

from ringlm.doctor.facts import CONVERT, SET, Facts, Finding, Findings
from ringlm.errors import Error, UnsupportedModelError

__all__ = [
    "check_alignment",
    "check_context",
    "check_heads",
    "check_projections",
    "check_rope",
    "check_rope_base",
    "check_rope_factors",
    "check_values",
    "check_vocabulary_size",
]

_SCALINGS = ("none", "linear", "yarn", "longrope")
#: Architecture -> the least base of RoPE of its published models (rope_theta in their config.json).
_LEAST_BASE = {"gemma3": 1e6, "olmo2": 5e5, "qwen3": 1e6, "qwen3moe": 1e6, "smollm3": 1e6}
_SAMPLE = 1 << 16  # bytes of each of the places that are read of a tensor


def check_alignment(f: Facts) -> Findings:
    if f.file.alignment != 32:
        yield Finding(
            "note",
            "general.alignment",
            f"{f.file.alignment}; nearly all files have 32",
            "ringlm reads it, but some programs assume 32 and find the tensors in the wrong places",
            "nothing here; for those programs write the file again with the default",
        )


# ---- the context -------------------------------------------------------------------------------------------


def check_context(f: Facts) -> Findings:
    key = f.key("context_length")
    n_ctx = f.number(key)
    if not n_ctx:
        what = "missing" if n_ctx is None else "0"
        yield Finding("error", key, what, "nothing says how long a text the model can follow", CONVERT)
        return
    original = f.number(f.key("rope.scaling.original_context_length"))
    factor = f.number(f.key("rope.scaling.factor"))
    if not original:
        return
    if original > n_ctx:
        yield Finding(
            "error",
            f.key("rope.scaling.original_context_length"),
            f"{original}, more than {key}, which is {n_ctx}",
            "one of them is not what the model was trained with, and RoPE is scaled for the wrong length",
            CONVERT,
        )
    elif factor and n_ctx > round(original * factor):
        yield Finding(
            "error",
            key,
            f"{n_ctx}, but RoPE's scaling reaches to {original} x {factor:g} = {original * factor:.0f}",
            "text beyond that is out of the model's range and the answers fall apart",
            SET.format(key=key, value=round(original * factor)),
        )
    elif factor and n_ctx < round(original * factor):
        yield Finding(
            "note",
            key,
            f"{n_ctx}, although RoPE's scaling reaches to {original} x {factor:g} = {original * factor:.0f}",
            "ringlm goes by the scaling; programs that go by this key keep texts shorter than need be",
            SET.format(key=key, value=round(original * factor)),
        )


# ---- heads and shapes --------------------------------------------------------------------------------------


def check_heads(f: Facts) -> Findings:
    n_head, n_head_kv = f.size("attention.head_count"), f.size("attention.head_count_kv")
    if n_head and n_head_kv is not None and (n_head_kv == 0 or n_head % n_head_kv):
        yield Finding(
            "error",
            f.key("attention.head_count_kv"),
            f"{n_head_kv} KV heads do not divide {n_head} query heads evenly",
            "no query head has its keys",
            CONVERT,
        )
    n_embd = f.size("embedding_length")
    if n_embd and n_head and n_embd % n_head and f.size("attention.key_length") is None:
        yield Finding(
            "error",
            f.key("attention.head_count"),
            f"{n_head} heads do not divide the width {n_embd}",
            f"the size of a head is not known, since {f.key('attention.key_length')} is missing",
            CONVERT,
        )


def check_projections(f: Facts) -> Findings:
    """Q, K and V against the heads, one finding for each kind. Unknown architectures may have other
    projections."""
    n_embd, n_head, dim = f.size("embedding_length"), f.size("attention.head_count"), f.head_dim
    n_head_kv = f.size("attention.head_count_kv") or n_head
    unknown = isinstance(f.refusal, UnsupportedModelError) and "architecture '" in str(f.refusal)
    if unknown or not (n_embd and n_head and n_head_kv and dim) or n_head % n_head_kv:
        return
    value_dim = f.size("attention.value_length") or dim
    for name, rows, heads in (
        ("attn_q", n_head * dim, f"{n_head} heads of {dim}"),
        ("attn_k", n_head_kv * dim, f"{n_head_kv} KV heads of {dim}"),
        ("attn_v", n_head_kv * value_dim, f"{n_head_kv} KV heads of {value_dim}"),
    ):
        found = [t for t in f.tensors.values() if re.fullmatch(rf"blk\.\d+\.{name}\.weight", t.name)]
        wrong = [t for t in found if tuple(t.shape) != (rows, n_embd)]
        if wrong:
            shape = " x ".join(str(n) for n in wrong[0].shape)
            yield Finding(
                "error",
                wrong[0].name,
                f"{shape}; {heads} and the width {n_embd} make {rows} x {n_embd}"
                + (f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""),
                "the counts of heads or the width are not those of these weights",
                CONVERT,
            )


def check_vocabulary_size(f: Facts) -> Findings:
    n = len(f.tokens)
    tensors = [f.tensors[name] for name in ("token_embd.weight", "output.weight") if name in f.tensors]
    wrong = [tensor for tensor in tensors if n and tensor.shape[0] != n]
    if wrong:
        rows = [tensor.shape[0] for tensor in wrong]
        other = f", and {wrong[1].name} {rows[1]}," if len(wrong) > 1 else ""
        yield Finding(
            "error",
            wrong[0].name,
            f"{rows[0]} rows{other} for the {n} tokens of tokenizer.ggml.tokens",
            "the last tokens have no weights"
            if rows[0] < n
            else "the last rows may be sampled, and are no text",
            "take the tokenizer and the weights of the same model, and convert it again",
        )
    said = f.size("vocab_size")
    if said is not None and n and said != n:
        yield Finding(
            "note",
            f.key("vocab_size"),
            f"{said}, but there are {n} tokens",
            "ringlm does not use it; other programs may take it for the size of the vocabulary",
            SET.format(key=f.key("vocab_size"), value=n),
        )


# ---- RoPE --------------------------------------------------------------------------------------------------


def check_rope(f: Facts) -> Findings:
    key = f.key("rope.dimension_count")
    dims, dim = f.size("rope.dimension_count"), f.head_dim
    if dims is not None and (dims % 2 or dims < 1 or (dim and dims > dim)):
        yield Finding(
            "error",
            key,
            f"{dims}; expected an even number up to the head's size, {dim}",
            "the positions of tokens cannot be told apart as the model was taught",
            SET.format(key=key, value=dim),
        )
    key = f.key("rope.scaling.type")
    scaling = f.text(key)
    if scaling is not None and scaling not in _SCALINGS:
        yield Finding(
            "error",
            key,
            f"{scaling!r} is not a kind of scaling that GGUF knows: {', '.join(_SCALINGS)}",
            "a program that ignores it answers nonsense beyond the first few thousand tokens",
            CONVERT,
        )


def check_rope_base(f: Facts) -> Findings:
    key = f.key("rope.freq_base")
    base = f.number(key)
    found, taken = ("missing, so that it is 10000", 10000.0) if base is None else (f"{base:g}", base)
    least = 5e5 if f.is_llama_3 else _LEAST_BASE.get(f.arch)
    consequence = (
        "positions are turned too fast: the answers are bad from the start, or fall apart in long texts"
    )
    if least and taken < least:
        family = "Llama 3" if f.is_llama_3 else f.arch
        yield Finding(
            "error", key, f"{found}; models of {family} have {least:g} or more", consequence, CONVERT
        )
    elif f.arch in ("qwen2", "qwen2moe") and taken <= 10000 and not re.search("math|distill|r1", f.names):
        # Qwen2.5-Math and what was distilled into it do have 10000.
        yield Finding(
            "note" if base is not None else "error",
            key,
            f"{found}; nearly all models of {f.arch} have 1000000",
            f"if this one has too, {consequence}",
            "compare with rope_theta in the original's config.json; if that differs, convert the model again",
        )


def check_rope_factors(f: Facts) -> Findings:
    says = re.search(r"llama[-_ ]?3\.[123]", f.names)
    if f.is_llama_3 and says and "rope_freqs.weight" not in f.tensors and f.tensors:
        yield Finding(
            "error",
            "rope_freqs.weight",
            f"missing, and the model calls itself {says[0]!r}, which has these factors",
            "beyond some thousand tokens the answers become worse and then fall apart",
            CONVERT,
        )


# ---- values ------------------------------------------------------------------------------------------------


def check_values(f: Facts) -> Findings:
    """All of the vectors, and the beginning, the middle and the end of every matrix. One finding for each
    kind of damage."""
    import numpy as np

    broken, empty = [], []
    for tensor in f.tensors.values():
        values = _sampled(f, tensor)
        if values is None:
            continue
        if not np.isfinite(values).all():
            broken.append(tensor.name)
        elif not values.any() and tensor.name.endswith(".weight"):
            empty.append(tensor.name)
    for names, what, consequence in (
        (broken, "NaN or infinity", "every answer is an error or nonsense"),
        (
            empty,
            "nothing but zeros",
            "nothing comes out of it; a download that was not completed looks like this",
        ),
    ):
        if names:
            more = f" (and in {len(names) - 1} more)" if len(names) > 1 else ""
            remedy = "fetch the file again, and if it is the same, quantize the model again"
            yield Finding("error", names[0], what + more, consequence, remedy)


def _sampled(f: Facts, tensor: Any) -> Any:
    """float32 values of some blocks of a tensor, None for a type that cannot be read."""
    import numpy as np

    import ringlm._core as core

    number, _, block = core.gguf_type_sizes()[tensor.type]
    data = f.file.tensor_data(tensor.name)
    n_blocks = len(data) // block
    each = max(_SAMPLE // block, 1)
    if n_blocks > 3 * each:
        starts = (0, (n_blocks - each) // 2, n_blocks - each)
        data = np.concatenate([data[at * block : (at + each) * block] for at in starts])
    try:
        with np.errstate(all="ignore"):
            return core.dequantize(number, np.ascontiguousarray(data))
    except Error:
        return None
