"""Models that ringlm must refuse: every refusal has the right type and names the key or tensor."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from child_process import run_script
from random_llama import Shape, random_weights, write_llama
from ringlm import Model, _core, errors
from ringlm.info import describe

SHAPE = Shape(n_ctx_train=64)
Keys = dict[str, tuple[str, Any]]  # key -> (type as GGUFWriter's add_* names it, value)
Tensors = dict[str, np.ndarray]


def good_keys(s: Shape = SHAPE) -> Keys:
    return {
        "llama.context_length": ("uint32", s.n_ctx_train),
        "llama.embedding_length": ("uint32", s.n_embd),
        "llama.block_count": ("uint32", s.n_layer),
        "llama.feed_forward_length": ("uint32", s.n_ff),
        "llama.attention.head_count": ("uint32", s.n_head),
        "llama.attention.head_count_kv": ("uint32", s.n_head_kv),
        "llama.attention.key_length": ("uint32", s.dim),
        "llama.attention.value_length": ("uint32", s.dim),
        "llama.rope.dimension_count": ("uint32", s.turning),
        "llama.rope.freq_base": ("float32", s.rope_base),
        "llama.attention.layer_norm_rms_epsilon": ("float32", s.eps),
    }


def write(
    path: Path, keys: Keys, tensors: Tensors, arch: str = "llama", types: dict[str, str] | None = None
) -> str:
    w = gguf.GGUFWriter(path, arch)
    for key, (kind, value) in keys.items():
        getattr(w, f"add_{kind}")(key, value)
    for name, array in tensors.items():
        qtype = gguf.GGMLQuantizationType[(types or {}).get(name, "F32")]
        if qtype == gguf.GGMLQuantizationType.F32:
            w.add_tensor(name, array)
        else:
            block, size = gguf.GGML_QUANT_SIZES[qtype]
            w.add_tensor(
                name, np.zeros((array.shape[0], array.shape[1] // block * size), np.uint8), raw_dtype=qtype
            )
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return str(path)


def open_with(
    tmp_path: Path, changed: Keys | None = None, without: tuple[str, ...] = (), **options: Any
) -> Any:
    """Opens a model that is right but for these changes."""
    keys = {k: v for k, v in (good_keys() | (changed or {})).items() if k not in without}
    tensors = options.pop("tensors", None) or random_weights(SHAPE)
    return _core.Model(write(tmp_path / "m.gguf", keys, tensors, **options), 1, "cpu")


def test_unchanged_it_opens(tmp_path: Path) -> None:
    model = open_with(tmp_path)
    c = model.config
    assert (c.architecture, c.n_vocab, c.n_embd, c.n_layer, c.n_ff) == ("llama", 96, 64, 2, 96)
    assert (c.n_head, c.n_head_kv, c.group, c.head_dim, c.rope_dims, c.n_ctx_train) == (4, 2, 2, 16, 16, 64)
    # In the file, and in groups of 16 rows without the vectors, which are float32 copies.
    weights = random_weights(SHAPE).values()
    path, n = str(tmp_path / "m.gguf"), sum(a.nbytes for a in weights)
    assert _core.Model(path, 1, "cpu", repack=False).nbytes == n
    assert _core.Model(path, 1, "reference").nbytes == n
    assert model.nbytes == model.packed_nbytes == sum(a.nbytes for a in weights if a.ndim == 2)


def test_keys_with_defaults(tmp_path: Path) -> None:
    dropped = ["attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base"]
    c = open_with(tmp_path, without=tuple("llama." + key for key in dropped)).config
    assert (c.head_dim, c.rope_dims, c.rope_base, c.rope_factor) == (16, 16, 10000.0, 1.0)
    for scaling in (
        {"llama.rope.scaling.factor": ("float32", 4.0)},
        {"llama.rope.scale_linear": ("float32", 4.0)},
    ):
        assert open_with(tmp_path, scaling).config.rope_factor == 4.0
    off: Keys = {"llama.rope.scaling.type": ("string", "none"), "llama.rope.scaling.factor": ("float32", 4.0)}
    assert open_with(tmp_path, off).config.rope_factor == 1.0
    neutral: Keys = {"llama.expert_count": ("uint32", 0), "llama.attention.sliding_window": ("uint32", 0)}
    neutral |= {"llama.attention.causal": ("bool", True), "llama.attention.scale": ("float32", 0.0)}
    assert open_with(tmp_path, neutral).config.windows == [0, 0]
    window: Keys = {"llama.attention.sliding_window": ("uint32", 4096)}
    assert open_with(tmp_path, window).config.windows == [4096, 4096]


@pytest.mark.parametrize(
    "key",
    [
        "context_length",
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "attention.head_count",
        "attention.layer_norm_rms_epsilon",
    ],
)
def test_missing_keys(tmp_path: Path, key: str) -> None:
    with pytest.raises(errors.FileFormatError, match=rf"'llama\.{key}' is missing"):
        open_with(tmp_path, without=("llama." + key,))


@pytest.mark.parametrize(
    ("key", "kind", "value", "error", "words"),
    [
        ("attention.head_count_kv", "uint32", 3, "FileFormatError", "head_count_kv' is 3; the query heads"),
        ("attention.head_count_kv", "uint32", 8, "FileFormatError", "head_count_kv' is 8; the query heads"),
        ("attention.key_length", "uint32", 32, "UnsupportedModelError", r"is 32 and '.*value_length' is 16"),
        ("attention.value_length", "uint32", 8, "UnsupportedModelError", r"is 16 and '.*value_length' is 8"),
        ("attention.key_length", "uint32", 2**15, "UnsupportedModelError", "is 32768; at most 16384"),
        ("rope.dimension_count", "uint32", 7, "FileFormatError", "dimension_count' is 7"),
        ("rope.dimension_count", "uint32", 18, "FileFormatError", "dimension_count' is 18"),
        ("block_count", "uint32", 3, "UnsupportedModelError", "'blk.2.attn_norm.weight' is missing"),
        ("block_count", "uint32", 1, "UnsupportedModelError", "'blk.1.* belongs to nothing"),
        ("block_count", "uint32", 2**24, "FileFormatError", "block_count' is 16777216"),
        (
            "embedding_length",
            "uint32",
            60,
            "FileFormatError",
            "'token_embd.weight' has shape .*96, 64.*96, 60",
        ),
        ("feed_forward_length", "uint32", 95, "FileFormatError", "'blk.0.ffn_gate.weight' has shape"),
        ("attention.head_count", "array", [4, 2], "UnsupportedModelError", "head_count' is an array of 2"),
        ("rope.scaling.type", "string", "other", "UnsupportedModelError", "scaling.type' is 'other'"),
        (
            "rope.scaling.type",
            "string",
            "longrope",
            "FileFormatError",
            "rope_factors_long.weight' is missing",
        ),
        ("expert_count", "uint32", 8, "FileFormatError", "expert_used_count' is missing"),
        ("attention.clamp_kqv", "float32", 8.0, "UnsupportedModelError", "clamp_kqv' is 8"),
        ("attention.causal", "bool", False, "UnsupportedModelError", "causal' is false"),
        ("attention.scale", "float32", 1e10, "FileFormatError", "attention.scale' is 1e\\+10"),
        ("attn_logit_softcapping", "float32", -50.0, "FileFormatError", "softcapping' is -50"),
        ("final_logit_softcapping", "float32", float("nan"), "FileFormatError", "softcapping' is nan"),
        ("embedding_length", "string", "64", "FileFormatError", "embedding_length"),
        ("embedding_length", "float32", 64.0, "FileFormatError", "embedding_length"),
        ("embedding_length", "int32", -64, "FileFormatError", "embedding_length"),
        ("embedding_length", "bool", True, "FileFormatError", "embedding_length"),
        ("rope.freq_base", "string", "1e4", "FileFormatError", "freq_base"),
        ("rope.scaling.type", "uint32", 1, "FileFormatError", "scaling.type"),
    ],
)
def test_contradictions_and_features(
    tmp_path: Path, key: str, kind: str, value: Any, error: str, words: str
) -> None:
    with pytest.raises(getattr(errors, error), match=words):
        open_with(tmp_path, {"llama." + key: (kind, value)})


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 1e300, 1e-300])
@pytest.mark.parametrize("key", ["rope.freq_base", "rope.scaling.factor", "attention.layer_norm_rms_epsilon"])
def test_numbers_out_of_range(tmp_path: Path, key: str, value: float) -> None:
    if key == "rope.scaling.factor" and value == 0.0:  # how some files say that there is none
        assert open_with(tmp_path, {"llama." + key: ("float64", value)}).config.rope_scaling == "none"
        return
    with pytest.raises(errors.FileFormatError, match=rf"'llama\.{key}' is .*; expected"):
        open_with(tmp_path, {"llama." + key: ("float64", value)})


def test_heads_that_do_not_divide_the_embedding(tmp_path: Path) -> None:
    with pytest.raises(errors.FileFormatError, match=r"head_count' is 3, which does not divide"):
        open_with(
            tmp_path,
            {"llama.attention.head_count": ("uint32", 3), "llama.attention.head_count_kv": ("uint32", 3)},
            without=("llama.attention.key_length",),
        )


def test_odd_heads_cannot_turn(tmp_path: Path) -> None:
    odd: Keys = {f"llama.attention.{key}_length": ("uint32", 15) for key in ("key", "value")}
    with pytest.raises(errors.FileFormatError, match="expected an even number"):
        open_with(tmp_path, odd, without=("llama.rope.dimension_count",))


@pytest.mark.parametrize("arch", ["gemma3n", "bert", "mamba"])
def test_other_architectures(tmp_path: Path, arch: str) -> None:
    words = f"architecture '{arch}' is not supported; supported are 'llama', .*'qwen2', .*'smollm3'"
    with pytest.raises(errors.UnsupportedModelError, match=words):
        open_with(tmp_path, arch=arch)


def test_no_architecture(tmp_path: Path) -> None:
    raw = Path(write(tmp_path / "m.gguf", good_keys(), random_weights(SHAPE))).read_bytes()
    (tmp_path / "m.gguf").write_bytes(raw.replace(b"general.architecture", b"general.architectuRE"))
    with pytest.raises(errors.FileFormatError, match=r"'general\.architecture' is missing"):
        _core.Model(str(tmp_path / "m.gguf"), 1, "cpu")


def test_a_vocabulary_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", good_keys(), {})
    with pytest.raises(errors.UnsupportedModelError, match="holds no tensors"):
        _core.Model(path, 1, "cpu")


REQUIRED = [n for n in random_weights(SHAPE) if not n.endswith(".bias") and n != "output.weight"]


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_tensor(tmp_path: Path, name: str) -> None:
    tensors = random_weights(SHAPE)
    del tensors[name]
    with pytest.raises(errors.UnsupportedModelError, match=f"'{name}' is missing"):
        open_with(tmp_path, tensors=tensors)


def test_wrong_shapes(tmp_path: Path) -> None:
    for name, good in random_weights(SHAPE).items():
        if name == "token_embd.weight":
            continue  # it defines n_vocab
        shapes = [(good.shape[0] + 1, *good.shape[1:]), (2, *good.shape)]
        if good.ndim == 2:
            shapes += [(good.shape[0], good.shape[1] + 1), (good.size,)]
        for shape in shapes:
            tensors = random_weights(SHAPE) | {name: np.zeros(shape, np.float32)}
            with pytest.raises(errors.FileFormatError, match=f"'{name}' has shape .*; by the file's own"):
                open_with(tmp_path, tensors=tensors)
    for shape in ((96,), (96, 63), (2, 96, 64)):
        tensors = random_weights(SHAPE) | {"token_embd.weight": np.zeros(shape, np.float32)}
        with pytest.raises(errors.FileFormatError, match=r"'token_embd\.weight'"):
            open_with(tmp_path, tensors=tensors)


@pytest.mark.parametrize("qtype", ["Q8_1", "Q8_K", "MXFP4", "IQ3_S", "IQ2_XXS", "TQ2_0"])
def test_types_without_arithmetic(tmp_path: Path, qtype: str) -> None:
    wide = Shape(n_embd=256, n_ff=256, n_ctx_train=64)
    keys = good_keys(wide)
    for name in ("token_embd.weight", "blk.1.ffn_down.weight"):
        path = write(tmp_path / "m.gguf", keys, random_weights(wide), types={name: qtype})
        with pytest.raises(
            errors.UnsupportedModelError, match=f"'{name}' has type {qtype}; supported are F32, F16"
        ):
            _core.Model(path, 1, "cpu")


def test_a_tensor_that_nothing_uses(tmp_path: Path) -> None:
    for name in ("blk.0.attn_q_norm.weight", "blk.2.attn_q.weight", "extra", "blk.0.ffn_gate_inp.weight"):
        with pytest.raises(errors.UnsupportedModelError, match=f"'{name}' belongs to nothing"):
            open_with(tmp_path, tensors=random_weights(SHAPE) | {name: np.zeros(8, np.float32)})
    tables = {f"blk.{i}.attn_rot_embd.freqs": np.zeros(8, np.float32) for i in range(2)}
    open_with(tmp_path, tensors=random_weights(SHAPE) | tables)  # of very old files


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_rope_factors_that_are_not_positive(tmp_path: Path, value: float) -> None:
    factors = np.ones(8, np.float32)
    factors[3] = value
    with pytest.raises(errors.FileFormatError, match=r"'rope_freqs\.weight' holds a factor"):
        open_with(tmp_path, tensors=random_weights(SHAPE) | {"rope_freqs.weight": factors})


def test_model_options(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", good_keys(), random_weights(SHAPE))
    for n_threads in (-1, 1025):
        with pytest.raises(errors.InvalidArgument, match=f"n_threads is {n_threads}"):
            _core.Model(path, n_threads, "cpu")
    with pytest.raises(errors.InvalidArgument, match="backend is 'tpu'"):
        _core.Model(path, 1, "tpu")
    with pytest.raises(errors.Error, match="cannot open"):
        _core.Model(str(tmp_path / "absent.gguf"), 1, "cpu")
    assert _core.Model(path).n_threads >= 1
    assert _core.Model(path, 1, "reference").backend == "reference"


FUZZ = """
    import resource, sys
    from pathlib import Path
    from ringlm import _core, errors
    from test_model_errors import SHAPE, good_keys, write
    from random_llama import random_weights

    # Far more than any of these small files warrants; an allocation beyond it would be a MemoryError.
    resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
    path = Path(sys.argv[1])
    tensors = random_weights(SHAPE)
    opened = refused = 0
    integers = [k for k, (kind, _) in good_keys().items() if kind == "uint32"]
    integers += ["llama.expert_count", "llama.attention.sliding_window", "llama.vocab_size"]
    values = [("uint32", v) for v in (0, 1, 2, 3, 2**24, 2**24 + 1, 2**31 - 1, 2**31, 2**32 - 1)]
    values += [("uint64", v) for v in (2**32, 2**32 + 64, 2**63 - 1, 2**63, 2**64 - 1)]
    values += [("int32", -1), ("int64", -(2**63)), ("int8", 2), ("uint16", 2)]
    for key in integers:
        for kind, value in values:
            keys = good_keys() | {key: (kind, value)}
            try:
                model = _core.Model(write(path, keys, tensors), 1, "cpu")
                session = _core.Session(model, n_ctx=1)
                session.decode(1)
                opened += 1
            except (errors.FileFormatError, errors.UnsupportedModelError) as error:
                assert "'" in str(error), (key, kind, value, error)
                refused += 1
    for scale in (1.0, 1024.0):
        for trained in (1, 2, 2**24):
            keys = good_keys() | {"llama.context_length": ("uint32", trained)}
            keys |= {"llama.rope.scaling.factor": ("float64", scale)}
            model = _core.Model(write(path, keys, tensors), 1, "cpu")
            for n_ctx in (1, trained, int(trained * scale)):
                try:
                    _core.Session(model, n_ctx=n_ctx).decode(1)
                except errors.OutOfMemory:
                    assert n_ctx >= 2**24
    print(opened, refused)
"""


def test_hostile_values_are_refused_without_large_allocations(tmp_path: Path) -> None:
    opened, refused = map(int, run_script(FUZZ, str(tmp_path / "m.gguf")).split())
    assert opened > 20 and refused > 100


@pytest.mark.skipif(sys.platform != "linux", reason="file names of other systems are Unicode")
def test_a_file_name_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"caf\xe9.gguf")
    write_llama(path, Shape())
    with Model(path) as model:
        assert model.core.path == str(path) and model.session().prefill([1]).shape == (96,)
    assert describe(path)["supported"]


def test_a_session_outlives_its_closed_model(tmp_path: Path) -> None:
    write_llama(tmp_path / "model.gguf", Shape())
    with Model(tmp_path / "model.gguf") as model:
        session = model.session()
        expected = [session.prefill([1, 2, 3]), session.decode(4)]
        session.rewind(4)
    assert (session.prefill([1, 2, 3]) == expected[0]).all() and (session.decode(4) == expected[1]).all()
    assert len(list(session.generate([5], max_tokens=3, stop_ids=()))) == 3
    with pytest.raises(errors.StateError, match="closed"):
        model.session()


@pytest.mark.parametrize("n_threads", [0, -1, 1.5, "2", 10**30])
def test_numbers_of_threads(tmp_path: Path, n_threads: Any) -> None:
    with pytest.raises(errors.InvalidArgument, match="n_threads"):
        Model(tmp_path / "any.gguf", n_threads=n_threads)
