"""A model file with its matrices in another type."""

from __future__ import annotations

import os
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ringlm.errors import InvalidArgument
from ringlm.rewrite import FLOAT_TYPES, NewTensor, Progress, Source, packed, quantized, rewrite

if TYPE_CHECKING:
    import numpy.typing as npt

    import ringlm._core as core

__all__ = ["TYPES", "Quantized", "quantize"]

# Name to (type of the tensors, general.file_type), see LlamaFileType of the gguf package.
_FILE_TYPES = {"q4_0": ("Q4_0", 2), "q4_1": ("Q4_1", 3), "q8_0": ("Q8_0", 7), "f16": ("F16", 1)}
TYPES = tuple(_FILE_TYPES)
_BLOCK = 32  # of the types with blocks
_QUANTIZATION_VERSION = 2  # of the block formats, GGML_QUANT_VERSION

_EMBEDDINGS = ("token_embd.weight", "output.weight")
# Matrices that steer more than they weigh: routers of experts, position tables, convolutions.
_KEPT = ("_norm", "ffn_gate_inp", "position_embd", "token_types", "conv1d")


@dataclass(frozen=True)
class Quantized:
    """What was written. ``types`` counts tensors by type, ``changed`` those that have another type than
    before; ``uneven`` names those that are F16 because their columns are no multiple of a block."""

    nbytes: int
    source_nbytes: int
    types: dict[str, int]
    changed: int
    uneven: tuple[str, ...]
    seconds: float


def quantize(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    type: str = "q4_1",
    *,
    embedding_type: str | None = None,
    progress: Progress | None = None,
) -> Quantized:
    """Writes ``source`` (one GGUF file or the first of a split model) to the one file ``target``, with its
    weight matrices, those of experts included, in ``type``: q4_0, q4_1, q8_0 or f16.

    Norms, biases, routers and all vectors are copied as they are, as are tensors that have the type already.
    ``token_embd.weight`` and ``output.weight`` get ``embedding_type``, by default q8_0 beside the types of 4
    bits and ``type`` otherwise. A matrix whose columns are no multiple of 32 becomes f16. Rows are rounded as
    ``gguf.quants.quantize`` does. All metadata is copied; ``general.file_type`` and
    ``general.quantization_version`` are set.

    Quantizing what is quantized already loses more than quantizing the float original would: UserWarning.
    The target appears when it is complete. Raises InvalidArgument, FileFormatError, UnsupportedModelError,
    NumericError for weights that are no numbers, OSError.
    """
    began = time.perf_counter()
    embedding_type = embedding_type or ("q8_0" if type in ("q4_0", "q4_1") else type)
    for name, value in (("type", type), ("embedding type", embedding_type)):
        if value not in _FILE_TYPES:
            raise InvalidArgument(f"{name} is {value!r:.40}; supported are {', '.join(TYPES)}")
    opened = Source(source)
    plan: list[NewTensor] = []
    again: list[core.GGUFTensor] = []
    uneven: list[str] = []
    for t in opened.tensors:
        wanted = _FILE_TYPES[embedding_type if t.name in _EMBEDDINGS else type][0]
        if not _is_matrix(t):
            wanted = t.type
        elif wanted != "F16" and t.shape[-1] % _BLOCK:
            wanted = "F16"
            uneven.append(t.name)
        if wanted == t.type:
            plan.append(opened.copied(t))
            continue
        if t.type not in FLOAT_TYPES and wanted not in FLOAT_TYPES:
            again.append(t)
        plan.append(_converted(opened, t, wanted))
    if again:
        _warn(again)
    changes = {"general.file_type": packed("u32", _FILE_TYPES[type][1])}
    if any(t.type not in FLOAT_TYPES for t in plan):
        changes["general.quantization_version"] = packed("u32", _QUANTIZATION_VERSION)
    nbytes = rewrite(opened, target, plan, changes, progress)
    return Quantized(
        nbytes,
        opened.file.file_bytes,
        dict(Counter(t.type for t in plan)),
        sum(new.type != old.type for new, old in zip(plan, opened.tensors, strict=True)),
        tuple(uneven),
        time.perf_counter() - began,
    )


def _is_matrix(t: core.GGUFTensor) -> bool:
    return len(t.shape) > 1 and t.name.endswith(".weight") and not any(part in t.name for part in _KEPT)


def _converted(source: Source, t: core.GGUFTensor, type: str) -> NewTensor:
    def pieces() -> Iterator[npt.NDArray[Any]]:
        for slab in source.slabs(t):
            yield quantized(slab, type, t.name)

    return NewTensor(t.name, t.shape, type, pieces)


def _warn(tensors: Iterable[core.GGUFTensor]) -> None:
    types = Counter(t.type for t in tensors)
    found = ", ".join(f"{n} {name}" for name, n in types.items())
    warnings.warn(
        f"{found} tensors are quantized already, and quantizing them again adds its error to theirs: take "
        "the float original if there is one",
        stacklevel=3,
    )
