"""AWQ and GPTQ checkpoints as Q4_1, against (q - zero) * scale in float64; the packing is the test's own."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
from ringlm import FileFormatError, UnsupportedModelError
from ringlm.convert.four_bit import FourBit, reader_for

Array = np.ndarray
AWQ: dict[str, Any] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 64,
    "zero_point": True,
    "version": "gemm",
}
GPTQ: dict[str, Any] = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 64,
    "desc_act": False,
    "sym": False,
    "checkpoint_format": "gptq",
}


def words(nibbles: list[Array]) -> Array:
    """int32 words of eight matrices, the first in the lowest four bits."""
    total = sum(n.astype(np.int64) * 16**i for i, n in enumerate(nibbles))
    return (total % 2**32).astype(np.uint32).view(np.int32)


def awq_words(values: Array) -> Array:
    return words([values[:, column::8] for column in (0, 2, 4, 6, 1, 3, 5, 7)])


class Layer:
    """A quantized matrix [n_in, n_out] as numbers, and its tensors."""

    def __init__(self, n_in: int = 192, n_out: int = 24, group: int = 64, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        groups = -(-n_in // group)
        self.q = rng.integers(0, 16, (n_in, n_out))
        self.zero = rng.integers(0, 16, (groups, n_out))
        self.scale = rng.uniform(1e-3, 2e-2, (groups, n_out)).astype(np.float16)
        self.index = (np.arange(n_in) // group).astype(np.int32)

    @property
    def m(self) -> Array:
        """float64 [n_out, n_in]: what is added to d * q."""
        return -(self.zero * self.scale.astype(np.float64))[self.index].T

    @property
    def weight(self) -> Array:
        """float64 [n_out, n_in]."""
        return ((self.q - self.zero[self.index]) * self.scale[self.index].astype(np.float64)).T

    def awq(self) -> dict[str, Array]:
        return {"x.qweight": awq_words(self.q), "x.qzeros": awq_words(self.zero), "x.scales": self.scale}

    def gptq(self, v2: bool = False, index: bool = True) -> dict[str, Array]:
        stored = self.zero if v2 else self.zero - 1
        tensors = {
            "x.qweight": words([self.q[row::8] for row in range(8)]),
            "x.qzeros": words([stored[:, column::8] for column in range(8)]),
            "x.scales": self.scale,
        }
        return tensors | ({"x.g_idx": self.index} if index else {})


def reader(config: dict[str, Any], tensors: dict[str, Array]) -> FourBit:
    return reader_for(config, tensors.__getitem__, tensors.__contains__)


def check(layer: Layer, rows: Array) -> None:
    n_in, n_out = layer.q.shape
    assert rows.shape == (n_out, n_in // 32 * 20) and rows.dtype == np.uint8
    found = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType.Q4_1).astype(np.float64)
    # Half a unit in the last place of m (float16 has 11 significant bits), and float32's d * q + m.
    bound = np.abs(layer.m) * 2.0**-11 + (np.abs(layer.m) + np.abs(layer.weight)) * 2.0**-24
    error = np.abs(found - layer.weight)
    assert (error <= bound).all()
    assert error.max() > 0  # m does round: a bound that is never used would prove nothing
    exact = np.isin(layer.zero, (0, 1, 2, 4, 8))[layer.index].T
    assert exact.any() and (error[exact] <= bound[exact] - np.abs(layer.m)[exact] * 2.0**-11).all()
    codes = rows.reshape(n_out, -1, 20)[..., 4:]
    assert (np.concatenate([codes & 15, codes >> 4], -1).reshape(n_out, n_in) == layer.q.T).all()


def test_the_packings_are_the_published_ones() -> None:
    """Eight outputs 0 to 7: AWQ interleaves them, GPTQ counts."""
    eight = np.arange(8)[None]
    assert awq_words(eight).view(np.uint32)[0, 0] == 0x75316420
    assert words([eight[:, i::8] for i in range(8)]).view(np.uint32)[0, 0] == 0x76543210


def test_awq() -> None:
    layer = Layer()
    check(layer, reader(AWQ, layer.awq()).q4_1("x"))
    old_names = {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"}
    check(layer, reader(old_names, layer.awq()).q4_1("x"))


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("index", [False, True])
def test_gptq(v2: bool, index: bool) -> None:
    """All zero points from 0 to 15 occur: in the first version a 0 borrows from the one behind it."""
    layer = Layer()
    assert set(layer.zero.ravel()) >= {0, 15}
    config = GPTQ | {"checkpoint_format": "gptq_v2" if v2 else "gptq"}
    check(layer, reader(config, layer.gptq(v2, index)).q4_1("x"))
    other = GPTQ | {"checkpoint_format": "gptq" if v2 else "gptq_v2"}
    with pytest.raises(AssertionError):
        check(layer, reader(other, layer.gptq(v2, index)).q4_1("x"))


@pytest.mark.parametrize(
    ("n_in", "group", "said"), [(96, 32, 32), (160, 128, 128), (160, 160, -1), (64, 256, 256)]
)
def test_groups(n_in: int, group: int, said: int) -> None:
    """Also a last group that is not whole, one group for all, and a group longer than the row."""
    layer = Layer(n_in, 32, group)
    check(layer, reader(AWQ | {"group_size": said}, layer.awq()).q4_1("x"))
    check(layer, reader(GPTQ | {"group_size": said}, layer.gptq()).q4_1("x"))


def test_symmetric_gptq_is_exact() -> None:
    layer = Layer()
    layer.zero[:] = 8
    rows = reader(GPTQ | {"sym": True}, layer.gptq()).q4_1("x")
    found = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType.Q4_1)
    assert (found.astype(np.float64) == layer.weight).all()


def test_float32_scales_round_to_float16_first() -> None:
    layer = Layer()
    wide = layer.scale.astype(np.float32) * np.float32(1 + 2.0**-13)  # rounds back
    rows = reader(AWQ, layer.awq() | {"x.scales": wide}).q4_1("x")
    assert (rows == reader(AWQ, layer.awq()).q4_1("x")).all()


def test_order_that_is_trivial_is_accepted() -> None:
    layer = Layer()
    check(layer, reader(GPTQ | {"desc_act": True}, layer.gptq()).q4_1("x"))
    rules = {"dynamic": {"-:.*lm_head": {}}}
    check(layer, reader(GPTQ | rules, layer.gptq()).q4_1("x"))


def test_which_modules() -> None:
    found = reader(AWQ, Layer().awq() | {"y.weight": np.zeros((2, 2))})
    assert found.has("x") and not found.has("y") and not found.has("")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "'quant_method' is 'none'"),
        (AWQ | {"quant_method": "bitsandbytes"}, "'quant_method' is 'bitsandbytes'"),
        (AWQ | {"bits": 8}, "'bits' is 8"),
        (GPTQ | {"bits": 3}, "'bits' is 3"),
        (GPTQ | {"bits": None}, "'bits' is None"),
        (AWQ | {"group_size": 16}, "'group_size' is 16"),
        (GPTQ | {"group_size": 48}, "'group_size' is 48"),
        (GPTQ | {"group_size": 0}, "'group_size' is 0"),
        (GPTQ | {"group_size": "64"}, "'group_size' is '64'"),
        (AWQ | {"version": "gemv"}, "the AWQ packing is 'gemv'"),
        (AWQ | {"version": "GEMV_FAST"}, "the AWQ packing is 'gemv_fast'"),
        (AWQ | {"version": "marlin"}, "the AWQ packing is 'marlin'"),
        (AWQ | {"zero_point": False}, "'zero_point' is false"),
        (GPTQ | {"checkpoint_format": "marlin"}, "the GPTQ packing is 'marlin'"),
        (GPTQ | {"is_marlin_format": True}, "the GPTQ packing is 'marlin'"),
        (GPTQ | {"format": "gptq_v2"}, "'checkpoint_format' is 'gptq' and 'format' is 'gptq_v2'"),
        (GPTQ | {"dynamic": {"+:.*down_proj": {"bits": 8}}}, "'dynamic' changes"),
    ],
)
def test_configurations_that_are_refused(config: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedModelError, match="supported are 4-bit AWQ") as error:
        reader(config, {})
    assert says in str(error.value)


def test_modules_that_are_refused() -> None:
    layer = Layer()
    shuffled = np.random.default_rng(1).permutation(layer.index).astype(np.int32)
    with pytest.raises(UnsupportedModelError, match=r"'x.g_idx' is not in the order of the inputs"):
        reader(GPTQ | {"desc_act": True}, layer.gptq() | {"x.g_idx": shuffled}).q4_1("x")
    with pytest.raises(UnsupportedModelError, match="'x' has no 'g_idx'"):
        reader(GPTQ | {"desc_act": True}, layer.gptq(index=False)).q4_1("x")
    with pytest.raises(UnsupportedModelError, match="'x' is AWQ and has a 'g_idx'"):
        reader(AWQ, layer.awq() | {"x.g_idx": layer.index}).q4_1("x")
    narrow = Layer(n_in=48, group=48)
    with pytest.raises(UnsupportedModelError, match="'x' has 48 inputs, not a multiple of 32"):
        reader(AWQ | {"group_size": -1}, narrow.awq()).q4_1("x")
    large = layer.awq() | {"x.scales": np.full_like(layer.scale, 60000)}
    with pytest.raises(UnsupportedModelError, match=r"'x.scales' has values that float16 cannot hold"):
        reader(AWQ, large).q4_1("x")


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("x.qweight", lambda t: t.astype(np.int64), r"'x.qweight' is int64 \[192, 3\]"),
        ("x.qweight", lambda t: t[0], r"'x.qweight' is int32 \[3\]"),
        ("x.scales", lambda t: t[:-1], r"'x.scales' is \[2, 24\]; expected \[3, 24\]"),
        ("x.qzeros", lambda t: t[:, :-1], r"'x.qzeros' is \[3, 2\]; expected \[3, 3\]"),
        ("x.qzeros", lambda t: t.astype(np.float32), r"'x.qzeros' is float32"),
    ],
)
def test_tensors_that_do_not_fit(name: str, change: Any, says: str) -> None:
    tensors = Layer().awq()
    with pytest.raises(FileFormatError, match=says):
        reader(AWQ, tensors | {name: change(tensors[name])}).q4_1("x")


def test_outputs_that_are_not_whole_words() -> None:
    tensors = Layer().gptq()
    with pytest.raises(FileFormatError, match="'x' has 20 outputs"):
        reader(GPTQ, tensors | {"x.qweight": tensors["x.qweight"][:, :20]}).q4_1("x")
