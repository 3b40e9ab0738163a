"""A model file with fewer KV heads: keys and values mean-pooled over groups (GQA, arXiv:2305.13245)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ringlm.errors import FileFormatError, InvalidArgument, UnsupportedModelError
from ringlm.rewrite import WRITABLE_TYPES, NewTensor, Progress, Source, packed, quantized, rewrite

if TYPE_CHECKING:
    import numpy.typing as npt

    import ringlm._core as core

__all__ = ["Regrouped", "regroup"]

_PROJECTION = re.compile(r"attn_(?:k|v|qkv)\.(?:weight|bias)")
# Names that speak of keys or values and are none of the above: latent attention, scales of ternary weights.
_OTHERS = re.compile(r"attn_(?:k|v|kv|qkv)(?:_\w+)?\.")


@dataclass(frozen=True)
class Regrouped:
    """What was written. ``n_head_kv`` is the number of KV heads before (the most that a layer has),
    ``retyped`` the type before and now of the tensors that could not keep theirs, by name."""

    nbytes: int
    source_nbytes: int
    n_head: int
    n_head_kv: int
    n_head_kv_now: int
    retyped: dict[str, tuple[str, str]]


@dataclass(frozen=True)
class _Heads:
    """What the metadata says: heads of each layer, elements of a head."""

    key: str  # of the number of KV heads
    query: list[int]
    kv: list[int]
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class _Part:
    """Rows of a projection that belong together: ``group`` heads of ``dim`` rows become one."""

    first: int
    heads: int
    dim: int
    group: int


def regroup(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    n_head_kv: int,
    *,
    progress: Progress | None = None,
) -> Regrouped:
    """Writes ``source`` to ``target`` with ``n_head_kv`` KV heads in every layer that has any.

    With g times fewer heads, head j is the mean, in float64, of the heads j * g to j * g + g - 1 of K and of
    V (weights and biases): the query heads that read these now read it. Everything else is copied, norms of
    single heads included; ``{arch}.attention.head_count_kv`` is set. A pooled tensor keeps its type where the
    ``gguf`` package can write it; others become Q8_0, with the Q rows of a fused ``attn_qkv``.

    The result computes something else than the source does, unless the heads of a group were equal: it is
    where up-training begins, which in the paper takes 5 % of the pre-training steps.

    Raises InvalidArgument for a number that does not divide the present one, UnsupportedModelError for models
    whose keys and values cannot be pooled by heads, FileFormatError, NumericError, OSError.
    """
    opened = Source(source)
    heads = _read_heads(opened)
    present = _check_number(opened, heads, n_head_kv)
    layers = {i for i, kv in enumerate(heads.kv) if kv not in (0, n_head_kv)}
    for i in sorted(layers):
        _check_layer(opened, i)
    plan: list[NewTensor] = []
    for t in opened.tensors:
        i, name = _place(t.name)
        if i not in layers:
            plan.append(opened.copied(t))
        elif _PROJECTION.fullmatch(name):
            plan.append(_pooled(opened, t, _parts(opened, t, name, heads, i, n_head_kv)))
        else:
            _check_independent(opened, t, name, heads, i)
            plan.append(opened.copied(t))
    nbytes = rewrite(opened, target, plan, {heads.key: _changed(opened, heads, n_head_kv)}, progress)
    retyped = {
        new.name: (old.type, new.type)
        for new, old in zip(plan, opened.tensors, strict=True)
        if new.type != old.type
    }
    return Regrouped(nbytes, opened.file.file_bytes, max(heads.query), present, n_head_kv, retyped)


# ---- what there is -----------------------------------------------------------------------------------------


def _read_heads(source: Source) -> _Heads:
    file = source.file
    arch = file.get("general.architecture")

    def number(key: str, default: int | None = None) -> int:
        value = file.get(f"{arch}.{key}", default)
        if type(value) is not int or value < 1:
            raise FileFormatError(
                f"{source.path}: '{arch}.{key}' is {value!r:.40}; expected a number above 0"
            )
        return value

    n_layer = number("block_count")

    def by_layer(key: str, default: list[int] | None = None) -> list[int]:
        value = file.get(f"{arch}.{key}")
        if hasattr(value, "tolist"):
            value = value.tolist()
        elif value is not None or default is None:
            value = [number(key)] * n_layer
        else:
            value = default
        if len(value) != n_layer or not all(type(n) is int and n >= 0 for n in value):
            raise FileFormatError(f"{source.path}: '{arch}.{key}' does not have a number for each layer")
        return list(value)

    query = by_layer("attention.head_count")
    width = number("embedding_length") // max(*query, 1)
    return _Heads(
        key=f"{arch}.attention.head_count_kv",
        query=query,
        kv=by_layer("attention.head_count_kv", query),
        key_dim=number("attention.key_length", width),
        value_dim=number("attention.value_length", width),
    )


def _check_number(source: Source, heads: _Heads, wanted: int) -> int:
    """The present number of KV heads, the most that a layer has."""
    present = sorted({kv for kv in heads.kv if kv})
    if not present:
        raise UnsupportedModelError(f"{source.path}: no layer has KV heads; there is nothing to group")
    for kv in present:
        if wanted < 1 or kv % wanted:
            divisors = ", ".join(str(d) for d in range(1, kv) if kv % d == 0) or "there is none"
            raise InvalidArgument(
                f"{kv} KV heads cannot be pooled to {wanted}: expected a divisor of {kv} ({divisors})"
            )
    if present == [wanted]:
        raise InvalidArgument(f"{source.path} has {wanted} KV heads already")
    return present[-1]


def _check_layer(source: Source, i: int) -> None:
    p = f"blk.{i}.attn_"
    separate = source.tensor(f"{p}k.weight") and source.tensor(f"{p}v.weight")
    if not separate and not source.tensor(f"{p}qkv.weight"):
        raise UnsupportedModelError(
            f"{source.path}: layer {i} has neither '{p}k.weight' and '{p}v.weight' nor '{p}qkv.weight'; only "
            "layers whose keys and values are projected head by head can be grouped"
        )


def _check_independent(source: Source, t: core.GGUFTensor, name: str, heads: _Heads, i: int) -> None:
    """UnsupportedModelError for a tensor that would have to change with the heads."""
    if name == "attn_k_norm.weight":
        if t.shape != (heads.key_dim,):
            raise UnsupportedModelError(
                f"{source.path}: '{t.name}' is {list(t.shape)}: it normalizes all {heads.kv[i]} K heads "
                f"together, not each of {heads.key_dim} elements alike, so their mean has no norm of its own"
            )
    elif _OTHERS.match(name):
        raise UnsupportedModelError(
            f"{source.path}: '{t.name}' depends on the KV heads in a way that has no mean; supported are "
            "attn_k and attn_v, or attn_qkv, with weights and biases, and norms of single heads"
        )


def _place(name: str) -> tuple[int, str]:
    """Layer and the rest of the name; -1 for what belongs to no layer."""
    found = re.fullmatch(r"blk\.(\d{1,9})\.(.+)", name)
    return (int(found[1]), found[2]) if found else (-1, name)


# ---- what becomes of it ------------------------------------------------------------------------------------


def _parts(source: Source, t: core.GGUFTensor, name: str, heads: _Heads, i: int, wanted: int) -> list[_Part]:
    q = _Part(0, heads.query[i], heads.key_dim, 1)
    k = _Part(0, heads.kv[i], heads.key_dim, heads.kv[i] // wanted)
    v = _Part(0, heads.kv[i], heads.value_dim, heads.kv[i] // wanted)
    parts: list[_Part] = []
    first = 0
    for part in {"attn_k": [k], "attn_v": [v], "attn_qkv": [q, k, v]}[name.partition(".")[0]]:
        parts.append(_Part(first, part.heads, part.dim, part.group))
        first += part.heads * part.dim
    if t.shape[0] != first or len(t.shape) > 2:
        raise UnsupportedModelError(
            f"{source.path}: '{t.name}' is {list(t.shape)}; expected {first} rows by the number of heads and "
            "their size"
        )
    return parts


def _pooled(source: Source, t: core.GGUFTensor, parts: list[_Part]) -> NewTensor:
    type = t.type if t.type in WRITABLE_TYPES else "Q8_0"
    n_rows = sum(part.heads // part.group * part.dim for part in parts)

    def pieces() -> Iterator[npt.NDArray[Any]]:
        import numpy as np

        for part in parts:
            step = part.group * part.dim
            for first in range(part.first, part.first + part.heads * part.dim, step):
                if part.group == 1 and type == t.type:
                    yield source.raw_rows(t, first, step)
                    continue
                rows = source.rows(t, first, step).reshape(part.group, part.dim, -1)
                mean = rows.mean(axis=0, dtype=np.float64).astype(np.float32)
                yield quantized(mean, type, t.name)

    return NewTensor(t.name, (n_rows, *t.shape[1:]), type, pieces)


def _changed(source: Source, heads: _Heads, wanted: int) -> bytes:
    """The number of KV heads, as one value or an array of the type that the file has."""
    file, key = source.file, heads.key
    kind = file.value_type(key) if key in file else "u32"
    return packed(kind, [wanted if kv else 0 for kv in heads.kv] if kind.startswith("array") else wanted)
