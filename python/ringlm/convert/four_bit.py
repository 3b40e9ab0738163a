"""AWQ and GPTQ checkpoints of 4 bits as Q4_1: their codes and scales move, nothing is quantized again.

Both store a weight as ``(q - zero) * scale`` with a code ``q`` and a zero point of 4 bits and a scale for
each output and group of inputs (AWQ: arXiv:2306.00978, GPTQ: arXiv:2210.17323); Q4_1 is ``d * q + m`` for
blocks of 32 inputs. So ``d = scale`` and ``m = -zero * scale``, and the codes are the checkpoint's own.

What rounds: ``m``, once, to float16. ``zero * scale`` has up to 15 significant bits where float16 has 11, so
``m`` is off by at most 2**-11 of itself; it is exact where the zero point is 0 or a power of two (symmetric
GPTQ: 8). ``d`` is exact where the checkpoint's scales are float16, which is what both tools write; other
scales are rounded to float16 first, and ``m`` is made of the rounded ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ringlm.errors import FileFormatError, UnsupportedModelError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[Any]
    Bytes = npt.NDArray[np.uint8]

__all__ = ["FourBit", "reader_for"]

_BLOCK, _BLOCK_BYTES = 32, 20  # of Q4_1: d and m as float16, then 32 codes
_PER_WORD = 8
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word is the output _AWQ_ORDER[i] of its eight
_SUPPORTED = (
    "supported are 4-bit AWQ in the 'gemm' packing with zero points and 4-bit GPTQ ('gptq' and 'gptq_v2') "
    "without act-order, both with groups of a multiple of 32 or whole rows (-1)"
)


def reader_for(
    quantization_config: Mapping[str, Any],
    tensor: Callable[[str], Array],
    has: Callable[[str], bool],
) -> FourBit:
    """The reader of a checkpoint, by the ``quantization_config`` of its ``config.json``.

    ``tensor(name)`` is a tensor of the checkpoint, integers as int32 and scales as float16 or float32, and
    ``has(name)`` whether there is one. Raises UnsupportedModelError for what Q4_1 cannot hold without a
    second quantization.
    """
    config = dict(quantization_config)
    method = str(config.get("quant_method", "none")).lower()
    if method not in ("awq", "gptq"):
        raise _unsupported(f"'quant_method' is {method!r:.40}")
    bits = config.get("bits", config.get("w_bit"))
    if bits != 4:
        raise _unsupported(f"'bits' is {bits!r:.40}")
    group = config.get("group_size", config.get("q_group_size"))
    if type(group) is not int or (group != -1 and (group < 1 or group % _BLOCK)):
        raise _unsupported(f"'group_size' is {group!r:.40}")
    return _awq(config, group, tensor, has) if method == "awq" else _gptq(config, group, tensor, has)


def _awq(
    config: Mapping[str, Any], group: int, tensor: Callable[[str], Array], has: Callable[[str], bool]
) -> FourBit:
    packing = _packing(config, ("version", "checkpoint_format", "format"), "gemm")
    if packing != "gemm":
        raise _unsupported(f"the AWQ packing is {packing!r:.40}")
    if not config.get("zero_point", True):
        raise _unsupported("'zero_point' is false (a symmetric format)")
    return _Awq(group, tensor, has)


def _gptq(
    config: Mapping[str, Any], group: int, tensor: Callable[[str], Array], has: Callable[[str], bool]
) -> FourBit:
    packing = _packing(config, ("checkpoint_format", "format"), "gptq")
    if config.get("is_marlin_format"):
        packing = "marlin"
    if packing not in ("gptq", "gptq_v2"):
        raise _unsupported(f"the GPTQ packing is {packing!r:.40}")
    # Rules for single modules. Those that begin with "-:" say what was left as it is.
    changed = next((rule for rule in config.get("dynamic") or {} if not rule.startswith("-:")), None)
    if changed is not None:
        raise _unsupported(f"'dynamic' changes the quantization of modules like {changed!r:.80}")
    reordered = bool(config.get("desc_act", False))
    return _Gptq(group, tensor, has, zero_offset=0 if packing == "gptq_v2" else 1, reordered=reordered)


def _packing(config: Mapping[str, Any], keys: tuple[str, ...], default: str) -> str:
    """What the keys call the packing; tools differ in the key, one file should not contradict itself."""
    names = {str(config[key]).lower(): key for key in keys if config.get(key)}
    if len(names) > 1:
        said = " and ".join(f"{key!r} is {name!r:.40}" for name, key in names.items())
        raise _unsupported(f"the packing is contradictory: {said}")
    return next(iter(names), default)


def _unsupported(found: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"quantized checkpoint: {found}; {_SUPPORTED}. Convert the original float checkpoint instead"
    )


class FourBit(ABC):
    """The quantized matrices of a checkpoint, by the names of their modules (model.layers.0.mlp.up_proj)."""

    def __init__(self, group: int, tensor: Callable[[str], Array], has: Callable[[str], bool]) -> None:
        self._group, self._tensor, self._has = group, tensor, has

    def has(self, prefix: str) -> bool:
        """Whether that module is quantized; the others are ordinary weights."""
        return self._has(f"{prefix}.qweight")

    def q4_1(self, prefix: str) -> Bytes:
        """The matrix as Q4_1 rows, uint8 ``[n_out, n_in // 32 * 20]``.

        Raises UnsupportedModelError for a module that Q4_1 cannot hold, FileFormatError for tensors that do
        not fit together.
        """
        import numpy as np

        codes = self._codes(prefix)
        n_in, n_out = codes.shape
        if n_in % _BLOCK:
            raise _unsupported(f"'{prefix}' has {n_in} inputs, not a multiple of {_BLOCK}")
        if n_out % _PER_WORD:
            raise FileFormatError(
                f"'{prefix}' has {n_out} outputs; zero points are packed for a multiple of 8"
            )
        group = n_in if self._group == -1 else self._group
        n_groups = -(-n_in // group)
        self._check_order(prefix, n_in, group)
        d = self._shaped(f"{prefix}.scales", (n_groups, n_out)).astype(np.float16)
        zeros = self._zeros(prefix, n_groups, n_out)
        with np.errstate(over="ignore"):
            m = (-(zeros * d.astype(np.float32))).astype(np.float16)  # the product is exact: one rounding
        if not (np.isfinite(d).all() and np.isfinite(m).all()):
            raise _unsupported(f"'{prefix}.scales' has values that float16 cannot hold")

        n_blocks, per_group = n_in // _BLOCK, group // _BLOCK
        rows = np.empty((n_out, n_blocks, _BLOCK_BYTES), np.uint8)
        for at, plane in ((0, d), (2, m)):
            by_block = np.repeat(plane.T, per_group, axis=1)[:, :n_blocks, None]
            rows[..., at : at + 2] = np.ascontiguousarray(by_block).astype("<f2").view(np.uint8)
        halves = codes.T.reshape(n_out, n_blocks, 2, _BLOCK // 2)
        np.bitwise_or(halves[:, :, 0], halves[:, :, 1] << 4, out=rows[..., 4:])
        return rows.reshape(n_out, n_blocks * _BLOCK_BYTES)

    @abstractmethod
    def _codes(self, prefix: str) -> Bytes:
        """uint8 ``[n_in, n_out]`` of 0 to 15."""

    @abstractmethod
    def _zeros(self, prefix: str, n_groups: int, n_out: int) -> Bytes:
        """uint8 ``[n_groups, n_out]`` of 0 to 15."""

    @abstractmethod
    def _check_order(self, prefix: str, n_in: int, group: int) -> None:
        """UnsupportedModelError unless input i belongs to group i // group."""

    def _words(self, name: str, shape: tuple[int, ...] | None = None) -> Array:
        """A matrix of packed words as uint32."""
        import numpy as np

        words = self._tensor(name) if shape is None else self._shaped(name, shape)
        if words.dtype not in (np.int32, np.uint32) or words.ndim != 2:
            raise FileFormatError(
                f"'{name}' is {words.dtype} {list(words.shape)}; expected a matrix of int32, eight codes each"
            )
        return np.ascontiguousarray(words).view(np.uint32)

    def _shaped(self, name: str, shape: tuple[int, ...]) -> Array:
        found = self._tensor(name)
        if found.shape != shape:
            raise FileFormatError(
                f"'{name}' is {list(found.shape)}; expected {list(shape)} by the matrix and 'group_size'"
            )
        return found


class _Awq(FourBit):
    """``qweight`` [n_in, n_out / 8], ``qzeros`` [n_groups, n_out / 8], ``scales`` [n_groups, n_out]."""

    def _codes(self, prefix: str) -> Bytes:
        return _along_outputs(self._words(f"{prefix}.qweight"), _AWQ_ORDER)

    def _zeros(self, prefix: str, n_groups: int, n_out: int) -> Bytes:
        return _along_outputs(self._words(f"{prefix}.qzeros", (n_groups, n_out // _PER_WORD)), _AWQ_ORDER)

    def _check_order(self, prefix: str, n_in: int, group: int) -> None:
        if self._has(f"{prefix}.g_idx"):
            raise _unsupported(f"'{prefix}' is AWQ and has a 'g_idx'")


class _Gptq(FourBit):
    """``qweight`` [n_in / 8, n_out], ``qzeros`` [n_groups, n_out / 8], ``scales`` [n_groups, n_out], and
    ``g_idx`` [n_in], the group of each input.

    The first version of the format stores every zero point less one. Its writers subtract from the whole
    word, so a zero point of 0 borrows from the next one; adding to the whole word gives both back.
    """

    def __init__(
        self,
        group: int,
        tensor: Callable[[str], Array],
        has: Callable[[str], bool],
        *,
        zero_offset: int,
        reordered: bool,
    ) -> None:
        super().__init__(group, tensor, has)
        self._zero_offset, self._reordered = zero_offset, reordered

    def _codes(self, prefix: str) -> Bytes:
        import numpy as np

        words = self._words(f"{prefix}.qweight")
        codes = np.empty((words.shape[0], _PER_WORD, words.shape[1]), np.uint8)
        for i in range(_PER_WORD):
            codes[:, i] = words >> (4 * i) & 15
        return codes.reshape(-1, words.shape[1])

    def _zeros(self, prefix: str, n_groups: int, n_out: int) -> Bytes:
        import numpy as np

        stored = self._words(f"{prefix}.qzeros", (n_groups, n_out // _PER_WORD))
        return _along_outputs(stored + np.uint32(0x11111111 * self._zero_offset), range(_PER_WORD))

    def _check_order(self, prefix: str, n_in: int, group: int) -> None:
        import numpy as np

        name = f"{prefix}.g_idx"
        if not self._has(name):
            if self._reordered:
                raise _unsupported(f"'desc_act' is true and '{prefix}' has no 'g_idx'")
            return
        if not np.array_equal(self._shaped(name, (n_in,)), np.arange(n_in) // group):
            raise _unsupported(f"'{name}' is not in the order of the inputs (act-order, 'desc_act')")


def _along_outputs(words: Array, order: Any) -> Bytes:
    """uint8 [n, 8 * words]: nibble i of a word is the output ``order[i]`` of its eight."""
    import numpy as np

    codes = np.empty((*words.shape, _PER_WORD), np.uint8)
    for i, output in enumerate(order):
        codes[..., output] = words >> (4 * i) & 15
    return codes.reshape(words.shape[0], -1)
