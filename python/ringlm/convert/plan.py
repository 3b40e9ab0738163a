"""From a checkpoint to the tensors of a GGUF file: names, shapes, types, and where the rows come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ringlm.errors import FileFormatError, NumericError, UnsupportedModelError
from ringlm.rewrite import NewTensor, quantized

from .checkpoint import Array, Checkpoint
from .config import Config
from .families import FUSED_DOWN, FUSED_GATE_UP, Experts, Family, Tensor
from .four_bit import FourBit
from .hyperparameters import Sizes, is_sparse

_BLOCK = 1 << 21  # numbers that are converted together
_SKIPPED = (".rotary_emb.inv_freq", ".attn.masked_bias", ".attn.bias")  # constants that old files carry
_VISION = ("vision_tower.", "multi_modal_projector.")
_SKIPPED_PREFIXES = (*_VISION, *(f"model.{name}" for name in _VISION))
_PACKED = (".qweight", ".qzeros", ".scales", ".g_idx")  # of four-bit layers
# Where a model that also sees has its text model: name there -> name in the file.
_LAYOUTS = ("language_model.", "model.language_model.")


@dataclass(frozen=True)
class Part:
    """Rows of one checkpoint tensor, in the order they have in the output."""

    name: str
    n_rows: int
    read: Callable[[slice | Array], Array]  # float32 [n, n_columns], or bytes of Q4_1 rows
    order: Array | None = None
    begin: int = 0
    whole: bool = False  # can only be read at once

    def block(self, start: int, stop: int) -> Array:
        if self.order is not None:
            return self.read(self.order[start:stop])
        return self.read(slice(self.begin + start, self.begin + stop))


def _tensor(
    name: str,
    shape: tuple[int, ...],
    type: str,
    parts: Sequence[Part],
    offset: float,
    release: Callable[[], None],
) -> NewTensor:
    """A tensor of the file, its rows read and converted some at a time, `offset` added to each number.

    `release` is called when rows were read and are no longer needed."""

    def pieces() -> Iterator[Array]:
        for part in parts:
            step = part.n_rows if part.whole else max(1, _BLOCK // shape[-1])
            for start in range(0, part.n_rows, step):
                block = part.block(start, min(start + step, part.n_rows))
                release()
                if block.dtype == np.uint8:  # four bits already
                    yield np.ascontiguousarray(block)
                    continue
                if not np.isfinite(block).all():
                    raise NumericError(f"tensor '{part.name}' has NaN or infinity: the checkpoint is damaged")
                yield quantized(block + np.float32(offset) if offset else block, type, part.name)

    return NewTensor(name, shape, type, pieces)


def tensor_type(kind: str, shape: tuple[int, ...], exact: bool = False, is_table: bool = False) -> str:
    """The type of a tensor in a file of this kind: vectors and routers are F32, matrices the kind's.

    Embeddings and head of a four-bit file are Q8_0. Rows that blocks of 32 do not divide are F16.
    """
    if len(shape) == 1 or exact:
        return "F32"
    if kind in ("f32", "f16"):
        return kind.upper()
    if shape[-1] % 32:
        return "F16"
    return "Q8_0" if is_table else kind.upper()


def _vector(name: str, values: npt.NDArray[np.float32]) -> Part:
    return Part(name, 1, lambda rows: values[None], None)


def neighbours(n_rows: int, n_head: int) -> Array:
    """For each row of Q or K in the order where RoPE turns neighbours, the row it comes from.

    Checkpoints have the pairs half a head apart: rows i and i + head_dim / 2 become 2i and 2i + 1."""
    order: Array = np.arange(n_rows).reshape(n_head, 2, -1).swapaxes(1, 2).reshape(-1)
    return order


class Planner:
    """Takes the tensors of a checkpoint one by one; what nobody took is an error."""

    def __init__(
        self, checkpoint: Checkpoint, family: Family, sizes: Sizes, kind: str, four_bit: FourBit | None = None
    ) -> None:
        self._checkpoint, self._family, self._sizes = checkpoint, family, sizes
        self._kind, self._four_bit = kind, four_bit
        self._prefix = next((p for p in _LAYOUTS if any(name.startswith(p) for name in checkpoint)), "")
        self._taken: set[str] = set()
        self._tensors: list[NewTensor] = []

    def plan(self, config: Config, factors: dict[str, npt.NDArray[np.float32]]) -> list[NewTensor]:
        """All tensors in the order of the file; `factors` are those of RoPE, by name.

        Raises FileFormatError for missing, misshapen and left-over tensors."""
        family = self._family
        self._matrix(Tensor(family.embedding, "token_embd", ("vocab", "embd")), is_table=True)
        for name, values in factors.items():
            self._add(name, values.shape, "F32", [_vector(name, values)])
        for i in range(self._sizes["layers"]):
            self._layer(config, i)
        self._matrix(Tensor(family.norm, "output_norm", ("embd",)))
        if config.flag("tie_word_embeddings"):
            self._taken.add(self._full(family.head) + ".weight")
        else:
            self._matrix(Tensor(family.head, "output", ("vocab", "embd")), is_table=True)
        self._check_leftovers()
        return self._tensors

    def _layer(self, config: Config, i: int) -> None:
        theirs, ours = self._family.layer_prefix.format(i), f"blk.{i}."
        mlp = self._family.mlp
        tensors = self._family.layer
        if not isinstance(mlp, Experts):
            tensors += mlp
        elif not is_sparse(config, i):
            tensors += mlp.dense
        else:
            tensors += (mlp.router, *mlp.shared)
            self._experts(mlp, theirs, ours)
        for tensor in tensors:
            self._matrix(tensor, theirs, ours)

    def _add(
        self, name: str, shape: tuple[int, ...], type: str, parts: Sequence[Part], offset: float = 0.0
    ) -> None:
        release = self._checkpoint.release
        self._tensors.append(_tensor(name, shape, type, parts, offset, release))

    def _full(self, name: str) -> str:
        """The name that the file has: a text model may be a part of another one."""
        if self._prefix != "model.language_model.":
            return self._prefix + name
        return self._prefix + name.removeprefix("model.") if name.startswith("model.") else name

    def _matrix(self, tensor: Tensor, theirs: str = "", ours: str = "", is_table: bool = False) -> None:
        shape = tuple(self._sizes[s] for s in tensor.shape)
        name = self._find([self._full(theirs + hf) for hf in tensor.hf_names])
        n_head = self._sizes[tensor.heads] if tensor.heads and self._family.turned else 0
        order = neighbours(shape[0], n_head) if n_head else None
        part = self._part(name, shape, order)
        if tensor.shape[0] == "one":  # one row is a vector in GGUF
            shape = shape[1:]
        type = "Q4_1" if self._has_four_bits(name) else tensor_type(self._kind, shape, tensor.exact, is_table)
        offset = self._family.norm_offset if tensor.gguf.endswith("norm") else 0.0
        self._add(f"{ours}{tensor.gguf}.weight", shape, type, [part], offset)
        bias = name + ".bias"
        is_there = tensor.bias == "optional" and bias in self._checkpoint and not self._is_idle(bias)
        if is_there or tensor.bias == "required":
            self._check(bias, shape[:1])
            values = self._checkpoint.matrix(bias).read(slice(None))[0]
            values = values if order is None else values[order]
            self._add(f"{ours}{tensor.gguf}.bias", shape[:1], "F32", [_vector(bias, values)])

    def _find(self, names: list[str]) -> str:
        """The one that the checkpoint has; the first one where it has none."""
        for name in names:
            if self._has_four_bits(name) or f"{name}.weight" in self._checkpoint:
                return name
        return names[0]

    def _has_four_bits(self, name: str) -> bool:
        return self._four_bit is not None and self._four_bit.has(name)

    def _part(self, name: str, shape: tuple[int, ...], order: Array | None = None) -> Part:
        """The rows of ``name.weight``."""
        if self._four_bit is not None and self._four_bit.has(name):
            return self._packed(self._four_bit, name, shape, order)
        self._check(f"{name}.weight", shape)
        n_rows = 1 if len(shape) == 1 else shape[0]
        return Part(f"{name}.weight", n_rows, self._checkpoint.matrix(f"{name}.weight").read, order)

    def _packed(self, four_bit: FourBit, name: str, shape: tuple[int, ...], order: Array | None) -> Part:
        """All rows are made at once, when the first is read: they fit into memory several times over."""
        if shape[-1] % 32:
            raise UnsupportedModelError(f"{name} has {shape[-1]} columns; blocks of Q4_1 have 32")
        expected = (shape[0], shape[1] // 32 * 20)

        def read(rows: slice | Array) -> Array:
            found = four_bit.q4_1(name)
            if found.shape != expected:
                raise FileFormatError(
                    f"{self._checkpoint.folder}: {name} has {len(found)} rows of {found.shape[1] // 20 * 32} "
                    f"columns; config.json says {shape}"
                )
            return found if order is None else found[order]

        # one block: the whole matrix
        return Part(name, shape[0], read, None, whole=True)

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self._checkpoint:
            raise FileFormatError(
                f"{self._checkpoint.folder}: there is no tensor {name}; expected one of shape {shape}"
            )
        found = self._checkpoint[name]
        if found != shape:
            file = self._checkpoint.file(name)
            raise FileFormatError(f"{file}: {name} has shape {found}; config.json says {shape}")
        self._taken.add(name)

    def _experts(self, mlp: Experts, theirs: str, ours: str) -> None:
        n, ff, embd = self._sizes["experts"], self._sizes["expert_ff"], self._sizes["embd"]
        shapes = {"ffn_gate_exps": (ff, embd), "ffn_up_exps": (ff, embd), "ffn_down_exps": (embd, ff)}
        if self._full(theirs + FUSED_GATE_UP) in self._checkpoint:
            fused = self._fused(theirs, n, ff, embd)
            for name, shape in shapes.items():
                type = tensor_type(self._kind, shape)
                self._add(f"{ours}{name}.weight", (n, *shape), type, fused[name])
            return
        for name, hf in mlp.names:
            shape = shapes[name]
            experts = [self._full(theirs + hf.format(e)) for e in range(n)]
            packed = [self._has_four_bits(expert) for expert in experts]
            if any(packed) and not all(packed):
                raise UnsupportedModelError(
                    f"{self._checkpoint.folder}: only {sum(packed)} of {n} experts like {experts[0]} "
                    "have four bits; expected all or none"
                )
            type = "Q4_1" if packed[0] else tensor_type(self._kind, shape)
            parts = [self._part(expert, shape) for expert in experts]
            self._add(f"{ours}{name}.weight", (n, *shape), type, parts)

    def _fused(self, theirs: str, n: int, ff: int, embd: int) -> dict[str, list[Part]]:
        """Experts in two tensors: gate_up_proj [n, 2 ff, embd] and down_proj [n, embd, ff]."""
        gate_up, down = self._full(theirs + FUSED_GATE_UP), self._full(theirs + FUSED_DOWN)
        self._check(gate_up, (n, 2 * ff, embd))
        self._check(down, (n, embd, ff))
        read, read_down = self._checkpoint.matrix(gate_up).read, self._checkpoint.matrix(down).read
        return {
            "ffn_gate_exps": [Part(gate_up, ff, read, begin=e * 2 * ff) for e in range(n)],
            "ffn_up_exps": [Part(gate_up, ff, read, begin=e * 2 * ff + ff) for e in range(n)],
            "ffn_down_exps": [Part(down, n * embd, read_down)],
        }

    def _check_leftovers(self) -> None:
        left = sorted(name for name in self._checkpoint.keys() - self._taken if not self._is_idle(name))
        if left:
            more = f" and {len(left) - 4} more" if len(left) > 4 else ""
            raise FileFormatError(
                f"{self._checkpoint.folder}: {self._family.arch} has no place for {', '.join(left[:4])}"
                f"{more}; is config.json that of another checkpoint?"
            )

    def _is_idle(self, name: str) -> bool:
        """Whether the model computes the same without this tensor."""
        if name.endswith(_SKIPPED) or name.startswith(_SKIPPED_PREFIXES):
            return True
        if self._four_bit is None:
            return False
        # Tools that quantize write a bias of zeros for layers that have none.
        is_zero_bias = name.endswith(".bias") and not self._checkpoint.array(name).any()
        return name.endswith(_PACKED) or is_zero_bias
