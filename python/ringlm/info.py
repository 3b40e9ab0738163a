"""What a GGUF file says about its model; also where ringlm cannot run it."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

from ringlm.errors import Error

__all__ = ["describe"]

# Bytes of a K or V row of one token and KV head: of each element, and besides (the scale).
_KV_ROW = {"f16": (2, 0), "int8": (1, 2), "f32": (4, 0)}


def describe(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A model file as JSON-like data. What the file does not say is None.

    ``supported`` tells whether ringlm can run it, and ``reason`` why not. ``kv_bytes_per_token`` is for keys
    and values of all layers together, by storage type, and so is ``kv_bytes``: of a session with the default
    options and ``n_ctx_default`` tokens where the model runs, else of so many tokens. ``fast`` tells of a
    tensor type whether its matrix products have a fast CPU kernel. Sizes are bytes. Raises FileFormatError
    and UnsupportedModelError where the file cannot be read at all.
    """
    import ringlm._core as core

    file = core.GGUF(os.fspath(path))
    arch = _text(file, "general.architecture")
    reason, opened = _opened(path)
    shape = _shape(file, arch)
    shape["rope"] |= opened.pop("rope", {})
    shape |= opened
    record = {
        "path": os.fspath(path),
        "file_bytes": file.file_bytes,
        "files": len(file.paths),
        "gguf_version": file.version,
        "architecture": arch,
        "name": _text(file, "general.name"),
        "licence": _text(file, "general.license"),
        "supported": reason is None,
        "reason": reason,
        "parameters": sum(t.n_elements for t in file.tensors()),
        **shape,
        "quantization": _quantization(file, core.fast_types()),
        "tokens": _tokens(file),
        "chat_templates": _templates(file),
    }
    plain: dict[str, Any] = _plain(record)
    return plain


def _text(file: Any, key: str) -> str | None:
    value = file.get(key)
    return value if isinstance(value, str) else None


def _number(file: Any, key: str) -> Any:
    """A number, or the list that an array of them is."""
    value = file.get(key)
    if hasattr(value, "tolist"):
        return value.tolist() or None
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _opened(path: str | os.PathLike[str]) -> tuple[str | None, dict[str, Any]]:
    """Why the model cannot be run, or None; and what only the opened model knows: the bytes of a default
    session's cache by storage type, its n_ctx, and the RoPE that tensors belong to."""
    import ringlm._core as core

    try:
        model = core.Model(os.fspath(path), 1, "cpu", repack=False)
    except Error as e:
        return str(e), {}
    try:
        c = model.config
        return None, {
            "n_ctx_default": min(4096, c.n_ctx_limit),
            "kv_bytes": {name: core.plan(model, kv_k=name, kv_v=name)["kv_nbytes"] for name in _KV_ROW},
            "rope": {
                "base": c.rope_base,
                "dims": c.rope_dims,
                "scaling": c.rope_scaling,
                "factor": None if c.rope_scaling == "none" else c.rope_factor,
            },
        }
    finally:
        model.close()


def _shape(file: Any, arch: Any) -> dict[str, Any]:
    """The architecture's own keys, with the defaults of the GGUF specification."""

    def get(key: str, default: Any = None) -> Any:
        value = _number(file, f"{arch}.{key}")
        return default if value is None else value

    n_layer, n_embd, n_head = get("block_count"), get("embedding_length"), get("attention.head_count")
    n_head_kv = get("attention.head_count_kv", n_head)
    whole = isinstance(n_embd, int) and isinstance(n_head, int) and n_head > 0
    head_dim = get("attention.key_length", n_embd // n_head if whole else None)
    value_dim = get("attention.value_length", head_dim)
    n_ctx_train = get("context_length")
    factor = get("rope.scaling.factor", get("rope.scale_linear"))
    scaling = _text(file, f"{arch}.rope.scaling.type") or ("none" if factor in (None, 1.0) else "linear")
    n_ctx = None
    if isinstance(n_ctx_train, int):
        n_ctx = min(4096, int(n_ctx_train * factor) if scaling == "linear" and factor else n_ctx_train)
    kv = _kv_bytes_per_token(n_layer, n_head_kv, head_dim, value_dim)
    return {
        "n_layer": n_layer,
        "n_embd": n_embd,
        "n_ff": get("feed_forward_length"),
        "n_head": n_head,
        "n_head_kv": n_head_kv,
        "group": _group(n_head, n_head_kv),
        "head_dim": head_dim,
        "n_ctx_train": n_ctx_train,
        "n_ctx_default": n_ctx,
        "sliding_window": get("attention.sliding_window") or None,
        "experts": get("expert_count") or None,
        "rope": {
            "base": get("rope.freq_base", 10000.0),
            "dims": get("rope.dimension_count", head_dim),
            "scaling": scaling,
            "factor": factor,
            "frequency_factors": any(t.name == "rope_freqs.weight" for t in file.tensors()),
        },
        "kv_bytes_per_token": kv,
        "kv_bytes": None if kv is None or n_ctx is None else {name: n * n_ctx for name, n in kv.items()},
    }


def _group(n_head: Any, n_head_kv: Any) -> Any:
    """Query heads per KV head: a number, or one for each layer."""
    if n_head is None:
        return None
    if not isinstance(n_head, list) and not isinstance(n_head_kv, list):
        return n_head // n_head_kv if n_head_kv else None
    n = max(len(x) for x in (n_head, n_head_kv) if isinstance(x, list))
    heads, kv = (x if isinstance(x, list) else [x] * n for x in (n_head, n_head_kv))
    return [a // b if b else None for a, b in zip(heads, kv, strict=False)]


def _kv_bytes_per_token(n_layer: Any, n_head_kv: Any, head_dim: Any, value_dim: Any) -> dict[str, int] | None:
    """Bytes of K and V that one token takes in all layers, by storage type."""
    if n_head_kv is None or not all(isinstance(n, int) for n in (n_layer, head_dim, value_dim)):
        return None
    n_heads = sum(n_head_kv) if isinstance(n_head_kv, list) else n_layer * n_head_kv
    return {
        name: int(n_heads * ((head_dim + value_dim) * element + 2 * scale))
        for name, (element, scale) in _KV_ROW.items()
    }


def _quantization(file: Any, fast_types: Collection[str]) -> list[dict[str, Any]]:
    """Tensors, elements and bytes by type, the largest share first; ``share`` is of the bytes.

    ``fast`` is false for a type of matrices that is not among ``fast_types``; vectors are float32 in memory.
    """
    types: dict[str, list[int]] = {}
    matrices: set[str] = set()
    for t in file.tensors():
        entry = types.setdefault(t.type, [0, 0, 0])
        entry[0] += 1
        entry[1] += t.n_elements
        entry[2] += t.nbytes
        if len(t.shape) > 1:
            matrices.add(t.type)
    total = sum(entry[2] for entry in types.values())
    slow = matrices.difference(fast_types)
    ordered = sorted(types.items(), key=lambda item: -item[1][2])
    return [
        {
            "type": name,
            "tensors": n,
            "elements": elements,
            "bytes": size,
            "share": size / total if total else 0,
            "fast": name not in slow,
        }
        for name, (n, elements, size) in ordered
    ]


def _tokens(file: Any) -> dict[str, Any] | None:
    """The vocabulary, or as much of it as can be read, with the ``reason`` why no more."""
    model = _text(file, "tokenizer.ggml.model")
    if model is None:
        return None
    record: dict[str, Any] = {"model": model, "pre": _text(file, "tokenizer.ggml.pre"), "reason": None}
    from ringlm.tokenizer import Tokenizer

    try:
        t = Tokenizer(file)
    except Error as e:
        texts = file.get("tokenizer.ggml.tokens")
        return record | {"reason": str(e), "n_vocab": len(texts) if isinstance(texts, list) else None}

    def token(i: int | None) -> dict[str, Any] | None:
        return None if i is None else {"id": i, "text": t.token_text(i)}

    return record | {
        "n_vocab": t.n_vocab,
        "bos": token(t.bos_id),
        "eos": token(t.eos_id),
        "eog": [token(i) for i in sorted(t.eog_ids)],
        "add_bos": t.add_bos,
        "add_eos": t.add_eos,
    }


def _templates(file: Any) -> list[str]:
    from ringlm.template import named_templates

    return list(named_templates(file))


def _printable(text: str) -> str:
    """Bytes that are no UTF-8 (lone surrogates) as U+FFFD: a record goes to JSON and to terminals."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _plain(value: Any) -> Any:
    """Text that may be printed, at any depth."""
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return _printable(value) if isinstance(value, str) else value
