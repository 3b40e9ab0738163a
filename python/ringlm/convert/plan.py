"""From a checkpoint to the list of tensors of a GGUF file: names, shapes, types, and where the rows come from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type

from ringlm.errors import FileFormatError, NumericError, UnsupportedModelError

from .checkpoint import Array, Checkpoint
from .config import Config
from .families import FUSED_DOWN, FUSED_GATE_UP, Experts, Family, Sizes, Tensor, is_sparse

_BLOCK = 8 << 20  # numbers that are converted together
_SKIPPED = (".rotary_emb.inv_freq", ".attn.masked_bias", ".attn.bias")  # constants that old files carry
_SKIPPED_PREFIXES = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)
_TEXT_PREFIXES = ("language_model.", "model.language_model.")


class FourBit(Protocol):
    """Linear layers that a checkpoint has in four bits."""

    def has(self, prefix: str) -> bool: ...

    def q4_1(self, prefix: str) -> npt.NDArray[np.uint8]: ...


@dataclass(frozen=True)
class Part:
    """Rows of one checkpoint tensor, in the order they have in the output."""

    name: str
    n_rows: int
    read: Callable[[slice | Array], Array]  # float32 [n, n_columns], or bytes of Q4_1 rows
    order: Array | None = None
    begin: int = 0

    def block(self, start: int, stop: int) -> Array:
        if self.order is not None:
            return self.read(self.order[start:stop])
        return self.read(slice(self.begin + start, self.begin + stop))


@dataclass(frozen=True)
class Output:
    """A tensor of the file. `shape` has the fastest dimension last, as numpy does."""

    name: str
    shape: tuple[int, ...]
    type: Type
    parts: tuple[Part, ...]
    offset: float = 0.0
    encoded: bool = False  # the parts give the bytes of the type

    @property
    def nbytes(self) -> int:
        block, size = gguf.GGML_QUANT_SIZES[self.type]
        return math.prod(self.shape) // block * size

    def blocks(self) -> Iterator[Array]:
        """The rows as bytes of the type, some at a time. Raises NumericError where a number does not survive."""
        step = max(1, _BLOCK // self.shape[-1])
        for part in self.parts:
            for start in range(0, part.n_rows, step):
                block = part.block(start, min(start + step, part.n_rows))
                yield block if self.encoded else self._encode(part.name, block)

    def _encode(self, source: str, block: Array) -> Array:
        if self.offset:
            block = block + np.float32(self.offset)
        if not np.isfinite(block).all():
            raise NumericError(f"{source} holds NaN or infinity; the checkpoint is broken")
        if self.type == Type.F32:
            return block
        with np.errstate(over="ignore"):
            out: Array = (
                block.astype(np.float16) if self.type == Type.F16 else gguf.quantize(block, self.type)
            )
        if self.type == Type.F16 and not np.isfinite(out).all():
            raise NumericError(
                f"{source}: its largest value {np.abs(block).max():g} is beyond float16 (65504); "
                "convert with --type f32 or q8_0"
            )
        return out


def tensor_type(kind: str, shape: tuple[int, ...], exact: bool, is_table: bool) -> Type:
    """The type of a tensor in a file of this kind: vectors and routers are F32, matrices the kind's.

    Embeddings and head of a four-bit file are Q8_0. Rows that blocks of 32 do not divide are F16.
    """
    if len(shape) == 1 or exact:
        return Type.F32
    wanted = Type[kind.upper()]
    if is_table and wanted in (Type.Q4_0, Type.Q4_1):
        wanted = Type.Q8_0
    return Type.F16 if shape[-1] % gguf.GGML_QUANT_SIZES[wanted][0] else wanted


def neighbours(n_rows: int, n_head: int) -> Array:
    """For each row of Q or K in GGUF's order the row it comes from: i and i + dim/2 of a head become neighbours."""
    return np.arange(n_rows).reshape(n_head, 2, -1).swapaxes(1, 2).reshape(-1)


class Planner:
    """Takes the tensors of a checkpoint one by one; what nobody took is an error."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        family: Family,
        sizes: Sizes,
        kind: str,
        four_bit: FourBit | None = None,
    ) -> None:
        self.checkpoint, self.family, self.sizes, self.kind, self.four_bit = (
            checkpoint,
            family,
            sizes,
            kind,
            four_bit,
        )
        self.prefix = next((p for p in _TEXT_PREFIXES if any(n.startswith(p) for n in checkpoint)), "")
        self.taken: set[str] = set()
        self.outputs: list[Output] = []

    def plan(self, config: Config, factors: dict[str, npt.NDArray[np.float32]]) -> list[Output]:
        """All tensors in the order of the file.

        Raises FileFormatError for missing, misshapen and left-over tensors."""
        tied = config.flag("tie_word_embeddings")
        self._matrix(Tensor(self.family.embedding, "token_embd", ("vocab", "embd")), "", "", is_table=True)
        for name, values in factors.items():
            part = Part(name, 1, lambda rows, v=values: v[None])  # type: ignore[misc]
            self.outputs.append(Output(name, values.shape, Type.F32, (part,)))
        for i in range(self.sizes["layers"]):
            self._layer(config, i)
        self._matrix(Tensor(self.family.norm, "output_norm", ("embd",)), "", "")
        if tied:
            self.taken.add(self._full(self.family.head + ".weight"))
        else:
            self._matrix(Tensor(self.family.head, "output", ("vocab", "embd")), "", "", is_table=True)
        self._check_leftovers()
        return self.outputs

    def _layer(self, config: Config, i: int) -> None:
        theirs, ours = self.family.layer_prefix.format(i), f"blk.{i}."
        for tensor in self.family.layer:
            self._matrix(tensor, theirs, ours)
        mlp = self.family.mlp
        if not isinstance(mlp, Experts):
            for tensor in mlp:
                self._matrix(tensor, theirs, ours)
        elif not is_sparse(config, i):
            for tensor in mlp.dense:
                self._matrix(tensor, theirs, ours)
        else:
            for tensor in (mlp.router, *mlp.shared):
                self._matrix(tensor, theirs, ours)
            self._experts(mlp, theirs, ours)

    def _full(self, name: str) -> str:
        """With the prefix of a text model that is a part of another model."""
        if not self.prefix:
            return name
        if self.prefix == "model.language_model.":  # model.language_model.layers.0…, but lm_head at the top
            return self.prefix + name.removeprefix("model.") if name.startswith("model.") else name
        return self.prefix + name

    def _matrix(self, tensor: Tensor, theirs: str, ours: str, is_table: bool = False) -> None:
        shape = tuple(self.sizes[s] for s in tensor.shape)
        name = self._find([theirs + hf for hf in tensor.hf_names])
        n_head = self.sizes[tensor.heads] if tensor.heads and self.family.turned else 0
        order = neighbours(shape[0], n_head) if n_head else None
        part, encoded = self._part(name, shape, order)
        # One row is a vector in GGUF.
        out_shape = shape[1:] if tensor.shape[0] == "one" else shape
        kind = Type.Q4_1 if encoded else tensor_type(self.kind, out_shape, tensor.exact, is_table)
        offset = self.family.norm_offset if tensor.gguf.endswith("norm") else 0.0
        self.outputs.append(Output(f"{ours}{tensor.gguf}.weight", out_shape, kind, (part,), offset, encoded))
        bias = self._full(name + ".bias")
        if tensor.bias == "required" or (tensor.bias == "optional" and bias in self.checkpoint):
            self._check(bias, shape[:1])
            matrix = self.checkpoint.matrix(bias)

            def read(rows: slice | Array) -> Array:
                row = matrix.read(slice(0, 1))
                return row if order is None else row[:, order]

            part = Part(bias, 1, read)
            self.outputs.append(Output(f"{ours}{tensor.gguf}.bias", shape[:1], Type.F32, (part,)))

    def _find(self, names: list[str]) -> str:
        """The name that the checkpoint has, without .weight; the first one where it has none."""
        for name in names:
            if self._full(name + ".weight") in self.checkpoint or (self.four_bit and self.four_bit.has(name)):
                return name
        return names[0]

    def _part(self, name: str, shape: tuple[int, ...], order: Array | None = None) -> tuple[Part, bool]:
        """The rows of ``name.weight``, and whether they are Q4_1 already."""
        if self.four_bit is not None and self.four_bit.has(name):
            four_bit = self.four_bit
            return Part(name, shape[0], lambda rows: four_bit.q4_1(name)[rows], order), True
        full = self._full(name + ".weight")
        self._check(full, shape)
        matrix = self.checkpoint.matrix(full)
        return Part(full, 1 if len(shape) == 1 else shape[0], matrix.read, order), False

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self.checkpoint:
            raise FileFormatError(
                f"{self.checkpoint.folder}: there is no tensor {name}; expected one of shape {shape}"
            )
        found = self.checkpoint[name]
        if found != shape:
            raise FileFormatError(
                f"{self.checkpoint.file(name)}: {name} has shape {found}; config.json says {shape}"
            )
        self.taken.add(name)

    def _experts(self, mlp: Experts, theirs: str, ours: str) -> None:
        n, ff, embd = self.sizes["experts"], self.sizes["expert_ff"], self.sizes["embd"]
        shapes = {"ffn_gate_exps": (ff, embd), "ffn_up_exps": (ff, embd), "ffn_down_exps": (embd, ff)}
        fused = theirs + FUSED_GATE_UP
        parts: dict[str, list[Part]]
        encoded = False
        if self._full(fused) in self.checkpoint:
            parts = self._fused(theirs, n, ff, embd)
        else:
            parts = {}
            for gguf_name, hf in mlp.names:
                found = [self._part(theirs + hf.format(e), shapes[gguf_name]) for e in range(n)]
                parts[gguf_name] = [part for part, _ in found]
                encoded = all(is_encoded for _, is_encoded in found)
                if encoded != any(is_encoded for _, is_encoded in found):
                    raise UnsupportedModelError(
                        f"{theirs}{hf}: only some experts have four bits; expected all"
                    )
        for gguf_name, shape in shapes.items():
            kind = Type.Q4_1 if encoded else tensor_type(self.kind, shape, False, False)
            name = f"{ours}{gguf_name}.weight"
            self.outputs.append(Output(name, (n, *shape), kind, tuple(parts[gguf_name]), 0.0, encoded))

    def _fused(self, theirs: str, n: int, ff: int, embd: int) -> dict[str, list[Part]]:
        """Experts in two tensors: gate_up_proj [n, 2 ff, embd] and down_proj [n, embd, ff]."""
        gate_up, down = self._full(theirs + FUSED_GATE_UP), self._full(theirs + FUSED_DOWN)
        self._check(gate_up, (n, 2 * ff, embd))
        self._check(down, (n, embd, ff))
        read, read_down = self.checkpoint.matrix(gate_up).read, self.checkpoint.matrix(down).read
        return {
            "ffn_gate_exps": [Part(gate_up, ff, read, None, e * 2 * ff) for e in range(n)],
            "ffn_up_exps": [Part(gate_up, ff, read, None, e * 2 * ff + ff) for e in range(n)],
            "ffn_down_exps": [Part(down, n * embd, read_down)],
        }

    def _check_leftovers(self) -> None:
        if self.four_bit is not None:  # its tensors have names of their own
            packed = (".qweight", ".qzeros", ".scales", ".g_idx")
            self.taken |= {name for name in self.checkpoint if name.endswith(packed)}
        left = sorted(
            name
            for name in self.checkpoint.keys() - self.taken
            if not name.endswith(_SKIPPED) and not name.startswith(_SKIPPED_PREFIXES)
        )
        if left:
            more = f" and {len(left) - 4} more" if len(left) > 4 else ""
            raise FileFormatError(
                f"{self.checkpoint.folder}: {self.family.arch} has no place for {', '.join(left[:4])}{more}; "
                "is config.json of this checkpoint?"
            )


def describe(config: Config, family: Family, sizes: Sizes) -> dict[str, Any]:
    """The metadata that all families share, without the architecture's name and RoPE."""
    activation = config.get("hidden_activation") or config.get("hidden_act")
    if activation not in family.activations:
        raise UnsupportedModelError(
            f"{config.file}: hidden_act is {activation!r}; {family.arch} computes {family.activations[0]}"
        )
    return {
        "vocab_size": sizes["vocab"],
        "context_length": sizes["ctx"],
        "embedding_length": sizes["embd"],
        "block_count": sizes["layers"],
        "feed_forward_length": sizes["ff"],
        "attention.head_count": sizes["n_head"],
        "attention.head_count_kv": sizes["n_head_kv"],
        "attention.key_length": sizes["head_dim"],
        "attention.value_length": sizes["head_dim"],
        "attention.layer_norm_rms_epsilon": config.number("rms_norm_eps"),
    }
