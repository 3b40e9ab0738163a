"""Files and options that contradict themselves, in what architectures other than a plain llama have: every
refusal has the right type and names the key or tensor, before anything large is allocated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from child_process import run_script
from family_sessions import TEXT, fed, session_of
from random_family import FAMILIES, Family, Keys, tensors, write
from random_llama import Array
from ringlm import _core, errors

NAN, INF = float("nan"), float("inf")
ONES: Callable[..., Array] = lambda *shape: np.ones(shape, np.float32)  # noqa: E731
LONGROPE = FAMILIES["phi3-longrope"]
YARN: Keys = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
}


def refused(
    path: Path, family: str | Family, error: str, words: str, keys: Keys | None = None, **weights: Any
) -> None:
    """`weights` are tensors, with `__` for a dot in their names."""
    f = FAMILIES[family] if isinstance(family, str) else family
    changed = {name.replace("__", ".") + ".weight": value for name, value in weights.items()}
    write(path / "m.gguf", f, keys, changed)
    with pytest.raises(errors.Error, match=words) as caught:
        _core.Model(str(path / "m.gguf"), 1)
    assert type(caught.value) is getattr(errors, error)


# ---- metadata ----------------------------------------------------------------------------------------------

FILE, UNSUPPORTED = "FileFormatError", "UnsupportedModelError"
BAD_KEYS: list[tuple[str, str, Any, str, str]] = [
    ("qwen2moe", "expert_count", 2**31, FILE, "expert_count' is 2147483648"),
    ("qwen2moe", "expert_count", 16385, FILE, "expert_count' is 16385 and .* expected at most 16384"),
    ("qwen2moe", "expert_count", 9, FILE, r"'blk.0.ffn_gate_inp.weight' has shape \[8, 64\].*\[9, 64\]"),
    ("qwen2moe", "expert_count", 7, FILE, "'blk.0.ffn_gate_inp.weight' has shape"),
    ("qwen2moe", "expert_count", ("int32", -8), FILE, "expert_count' is -8"),
    ("qwen2moe", "expert_count", 8.0, FILE, "expert_count' is f32"),
    ("qwen2moe", "expert_count", "8", FILE, "expert_count' is string"),
    ("qwen2moe", "expert_count", [8, 8], FILE, "expert_count' is array"),
    ("qwen2moe", "expert_count", None, UNSUPPORTED, "'blk.0.ffn_gate.weight' is missing"),
    ("qwen2", "expert_count", 4, UNSUPPORTED, "expert_count' is 4; in 'qwen2' experts are not supported"),
    ("qwen2moe", "expert_used_count", 9, FILE, "expert_used_count' is 9; there are 8 experts"),
    ("qwen2moe", "expert_used_count", 0, FILE, "expert_used_count' is 0"),
    ("qwen2moe", "expert_used_count", None, FILE, "expert_used_count' is missing"),
    ("qwen2moe", "expert_used_count", ("int32", -3), FILE, "expert_used_count' is -3"),
    ("qwen2moe", "expert_used_count", [2, 3], UNSUPPORTED, "expert_used_count' is an array of 2"),
    ("qwen2moe", "expert_feed_forward_length", 0, FILE, "expert_feed_forward_length' is 0"),
    ("qwen2moe", "expert_feed_forward_length", 33, FILE, "'blk.0.ffn_gate_exps.weight' has shape"),
    ("qwen2moe", "expert_feed_forward_length", 2**24, FILE, "expert_count' is 8 and .* wide together"),
    ("qwen2moe", "expert_shared_feed_forward_length", 65, FILE, "'blk.0.ffn_gate_shexp.weight' has shape"),
    ("qwen2moe", "expert_shared_feed_forward_length", 0, UNSUPPORTED, "shexp.weight' belongs to nothing"),
    ("qwen2moe", "expert_weights_norm", 1, FILE, "expert_weights_norm' is u32"),
    ("qwen2moe", "expert_gating_func", 2, UNSUPPORTED, "expert_gating_func' is 2"),
    ("qwen2moe", "expert_weights_scale", 2.5, UNSUPPORTED, "expert_weights_scale' is 2.5"),
    ("qwen2moe", "expert_weights_scale", NAN, UNSUPPORTED, "expert_weights_scale' is nan"),
    ("qwen2moe", "leading_dense_block_count", 1, UNSUPPORTED, "leading_dense_block_count' is 1"),
    ("mixtral", "block_count", 2**24, FILE, "block_count' is 16777216"),
    ("qwen", "feed_forward_length", 191, FILE, "feed_forward_length' is 191; expected a multiple of 2"),
    ("qwen", "feed_forward_length", 96, FILE, r"'blk.0.ffn_gate.weight' has shape \[96, 64\].*\[48, 64\]"),
    *(
        ("gemma2", "attention.sliding_window_pattern", value, FILE, "sliding_window_pattern' " + words)
        for value, words in [
            ([True], "has 1 values; the 4 layers"),
            ([True] * 5, "has 5 values; the 4 layers"),
            (["local"] * 4, r"is array\[string\]"),
            ([1.0, 0.0, 1.0, 0.0], r"is array\[f32\]"),
            ([1, 0, 2, 0], "holds 2; expected 0 or 1"),
            ([-1, 0, 1, 0], "holds -1; expected 0 or 1"),
            (True, "is bool"),
            ("local", "is string"),
            (2.0, "is f32"),
        ]
    ),
    *(
        ("gemma2", "attention.sliding_window", value, FILE, "sliding_window' is " + words)
        for value, words in [([20] * 4, "array"), (("int32", -1), "-1"), (20.0, "f32")]
    ),
    *(
        (name, "rope.freq_base_swa", value, FILE, "freq_base_swa' is")
        for name in ("llama", "gemma3")
        for value in (("float64", INF), NAN, -1.0, 0.5, 1e31, "1e4")
    ),
    *(
        ("granite", key, value, FILE, key + "' is")
        for key in (
            "attention.scale",
            "embedding_scale",
            "residual_scale",
            "logit_scale",
            "attn_logit_softcapping",
            "final_logit_softcapping",
        )
        for value in (NAN, INF, -INF, -1.0, ("float64", 1e-300), ("float64", 1e-40), 1e10, "1", [1.0], True)
    ),
    *(
        ("gemma2", key, value, FILE, key + "' is")
        for key in ("attn_logit_softcapping", "final_logit_softcapping")
        for value in (1e-4, 1e4)
    ),
    *(
        ("phi3-longrope", "rope.scaling.attn_factor", value, FILE, "attn_factor' is")
        for value in (NAN, INF, -1.0, ("float64", 1e-300), 1e30, "1", [1.0])
    ),
    *(
        ("phi3-longrope", "rope.scaling.original_context_length", value, FILE, "original_context_length' is")
        for value in (0, 1, 1.0001, -48.0, NAN, INF, 1e30, "48")
    ),
    (
        "phi3-longrope",
        "rope.scaling.type",
        "linear",
        UNSUPPORTED,
        "rope_factors_long.weight' belongs to Long",
    ),
    ("phi3-longrope", "rope.scaling.type", "yarn", UNSUPPORTED, "rope_factors_long.weight' belongs to Long"),
    ("phi3-longrope", "rope.scaling.type", "other", UNSUPPORTED, "type' is 'other'"),
    *(
        ("llama", "rope.scaling.attn_factor", value, FILE, "attn_factor' is")
        for value in (NAN, ("float64", 1e-300), "2", -1.0)
    ),
    *(
        ("phi3", "rope.dimension_count", value, FILE, f"dimension_count' is {value}")
        for value in (0, 1, 7, 15, 18, 2**24)
    ),
]


@pytest.mark.parametrize(("name", "key", "value", "error", "words"), BAD_KEYS)
def test_metadata(tmp_path: Path, name: str, key: str, value: Any, error: str, words: str) -> None:
    refused(tmp_path, name, error, words, {key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("yarn_beta_fast", x) for x in (0.0, -1.0, 0.5, 1.0, NAN, 1e30)),
        *(("yarn_beta_slow", x) for x in (0.0, -1.0, 32.0, 40.0, NAN)),
        *(("original_context_length", x) for x in (0, NAN, 1e30)),
        *(("yarn_attn_factor", x) for x in (0.0, -1.0, NAN, INF)),
        *(("factor", x) for x in (1e-3, -2.0, NAN, 1e30)),
    ],
)
def test_yarn(tmp_path: Path, key: str, value: float) -> None:
    refused(tmp_path, "llama", FILE, f"rope.scaling.{key}' is ", YARN | {f"rope.scaling.{key}": value})


@pytest.mark.parametrize(
    ("name", "keys", "words"),
    [
        ("llama", {"rope.scaling.type": "yarn"}, "rope.scaling.factor' is missing"),
        ("llama", {"rope.scaling.type": "linear"}, "rope.scaling.factor' is missing"),
        (
            "phi3-longrope",
            {"rope.scaling.original_context_length": None},
            "original_context_length' is missing",
        ),
        ("granite", {"logit_scale": None}, "granite.logit_scale' is missing"),
        ("gemma3", {"attention.sliding_window": None}, "gemma3.attention.sliding_window' is missing"),
    ],
)
def test_what_has_no_default_is_missed(tmp_path: Path, name: str, keys: Keys, words: str) -> None:
    refused(tmp_path, name, FILE, words, keys)


@pytest.mark.parametrize("name", ["qwen", "qwen2", "qwen2moe"])
def test_biases_that_an_architecture_has(tmp_path: Path, name: str) -> None:
    kinds = ["attn_qkv"] if name == "qwen" else ["attn_q", "attn_k", "attn_v"]
    for kind in kinds:
        write(tmp_path / "m.gguf", FAMILIES[name], weights={f"blk.1.{kind}.bias": None})
        with pytest.raises(errors.UnsupportedModelError, match=r"bias of Q, K or V is missing in 'blk\.1\."):
            _core.Model(str(tmp_path / "m.gguf"), 1)


# ---- tensors -----------------------------------------------------------------------------------------------

TENSORS = [
    *(("qwen2moe", f"ffn_{name}") for name in ("gate_inp", "gate_exps", "up_exps", "down_exps")),
    *(("qwen2moe", f"ffn_{name}_shexp") for name in ("gate_inp", "gate", "up", "down")),
    *((name, f"attn_{x}_norm") for name in ("qwen3", "olmo2") for x in "qk"),
    *(("gemma2", name) for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")),
    ("phi3", "attn_qkv"),
    ("phi3", "ffn_up"),
]


@pytest.mark.parametrize(("name", "tensor"), TENSORS)
def test_tensors_that_are_missing_or_of_another_shape(tmp_path: Path, name: str, tensor: str) -> None:
    full = f"blk__1__{tensor}"
    good = tensors(FAMILIES[name])[f"blk.1.{tensor}.weight"].shape
    missing = "attn_q" if tensor == "attn_qkv" else "ffn_gate" if name == "phi3" else tensor
    refused(tmp_path, name, UNSUPPORTED, f"'blk.1.{missing}.weight' is missing", **{full: None})
    shapes = [(*good[:-1], good[-1] + 1), (2, *good), (4, *good), (int(np.prod(good)) + 1,)]
    if len(good) > 1:
        shapes += [(good[0] + 1, *good[1:]), (good[0] - 1, *good[1:]), (2 * good[0], *good[1:])]
    if len(good) > 2:
        shapes += [(good[0] * good[1], good[2]), (good[1], good[0], good[2]), (2, *good)]
    for shape in shapes:
        refused(tmp_path, name, FILE, f"'blk.1.{tensor}.weight' has shape", **{full: ONES(*shape)})


@pytest.mark.parametrize(
    ("name", "tensor", "shape"),
    [
        ("mixtral", "ffn_gate", (64, 64)),  # beside experts
        ("llama", "ffn_gate_inp", (4, 64)),
        ("phi3", "attn_q", (64, 64)),  # beside attn_qkv
        ("phi3-longrope", "attn_post_norm", (64,)),
        ("olmo2", "attn_norm", (64,)),
        ("llama", "post_ffw_norm", (64,)),
        ("qwen2", "attn_q_norm", (16,)),
        ("qwen2moe", "exp_probs_b", (8,)),
    ],
)
def test_tensors_that_nothing_uses(tmp_path: Path, name: str, tensor: str, shape: tuple[int, ...]) -> None:
    words = f"'blk.1.{tensor}.weight' belongs to nothing"
    refused(tmp_path, name, UNSUPPORTED, words, **{f"blk__1__{tensor}": ONES(*shape)})


@pytest.mark.parametrize("tensor", ["rope_freqs", "rope_factors_short", "rope_factors_long"])
def test_rope_factors(tmp_path: Path, tensor: str) -> None:
    name = "llama" if tensor == "rope_freqs" else "phi3-longrope"
    for bad in (NAN, 0.0, -1.0, INF, 1e-45, 1e-38, 1e30):
        factors = np.linspace(1, 3, 8, dtype=np.float32)
        factors[3] = bad
        refused(tmp_path, name, FILE, f"'{tensor}.weight' holds a factor", **{tensor: factors})
    for shape in ((7,), (9,), (16,), (8, 1), (2, 8), (1, 2, 8), (2, 1, 8), (2, 1, 1, 8)):
        words = f"'{tensor}.weight' should hold a number for each of the 8 pairs"
        refused(tmp_path, name, FILE, words, **{tensor: ONES(*shape)})


def test_rope_tensors_that_contradict_each_other(tmp_path: Path) -> None:
    for missing in ("rope_factors_long", "rope_factors_short"):
        refused(tmp_path, LONGROPE, FILE, f"'{missing}.weight' is missing", **{missing: None})
    refused(tmp_path, LONGROPE, FILE, "'rope_freqs.weight' and .* contradict", rope_freqs=ONES(8))
    for other in ("rope_freqs_swa", "rope_factors", "rope_factor_long"):
        refused(tmp_path, "llama", UNSUPPORTED, f"'{other}.weight' belongs to nothing", **{other: ONES(8)})


def test_a_family_of_wide_heads_that_is_narrow(tmp_path: Path) -> None:
    """Scores of Gemma 2's largest are scaled by the width over the heads, which here is less than 1."""
    narrow = FAMILIES["gemma2"].with_(n_layer=46, n_embd=8, n_head=16, n_head_kv=16, head_dim=2, n_ff=8)
    path = write(tmp_path / "m.gguf", narrow)
    fed(session_of(_core.Model(path, 1)), TEXT[:30])


# ---- all values, under a limit -----------------------------------------------------------------------------

FUZZ = """
    import resource, sys
    from pathlib import Path
    from ringlm import _core, errors
    from random_family import FAMILIES, metadata, write

    # Far more than any of these small files warrants; an allocation beyond it would be a MemoryError.
    resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
    path = Path(sys.argv[1])
    opened = refused = 0
    values = [("uint32", v) for v in (0, 1, 2, 3, 2**24, 2**31 - 1, 2**32 - 1)]
    values += [("uint64", v) for v in (2**32 + 64, 2**63, 2**64 - 1)]
    values += [("float32", v) for v in (float("nan"), 3e38, 1e-30)] + [("int32", -1), ("string", "")]
    for name in ("qwen2moe", "phi3-longrope", "gemma3", "granite"):
        f = FAMILIES[name]
        for key in metadata(f):
            for value in values:
                try:
                    model = _core.Model(write(path, f, {key: value}), 1)
                    session = _core.Session(model, n_ctx=min(60, model.config.n_ctx_limit))
                    for token in range(min(50, session.n_ctx)):
                        session.decode(token)
                    opened += 1
                except (errors.FileFormatError, errors.UnsupportedModelError) as error:
                    assert "'" in str(error), (name, key, value, error)
                    refused += 1
                except Exception as error:
                    raise AssertionError((name, key, value)) from error
    print(opened, refused)
"""


def test_hostile_values_are_refused_without_large_allocations(tmp_path: Path) -> None:
    opened, refused = map(int, run_script(FUZZ, str(tmp_path / "m.gguf")).split())
    assert opened > 20 and refused > 300
