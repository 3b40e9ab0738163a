"""ringlm regroup: pooled heads against float64, and models whose heads were equal before."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from plain_gguf import Stored, random_stored, read, stored, write
from random_family import FAMILIES, tensors
from random_family import write as write_family
from random_llama import Shape, random_weights, reference_logits, worst
from ringlm import InvalidArgument, Model, UnsupportedModelError
from ringlm.regroup import regroup
from test_cli import Command, Models, models, ringlm

__all__ = ["models", "ringlm"]  # fixtures

Array = np.ndarray
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35]


def pooled(values: Array, heads: int, now: int) -> Array:
    """float32 rows (or a vector) of ``now`` heads, each the float64 mean of those that it replaces."""
    dim, group = len(values) // heads, heads // now
    out = np.zeros((now * dim, *values.shape[1:]))
    for head in range(heads):
        into = head // group * dim
        out[into : into + dim] += values[head * dim : (head + 1) * dim].astype(np.float64) / group
    return out.astype(np.float32)


def metadata(s: Shape, arch: str = "llama", **more: object) -> dict[str, object]:
    keys: dict[str, object] = {
        "context_length": s.n_ctx_train,
        "embedding_length": s.n_embd,
        "block_count": s.n_layer,
        "feed_forward_length": s.n_ff,
        "attention.head_count": s.n_head,
        "attention.head_count_kv": s.n_head_kv,
        "attention.layer_norm_rms_epsilon": s.eps,
        "rope.freq_base": s.rope_base,
        "rope.dimension_count": s.turning,
    }
    keys |= {key.replace("__", "."): value for key, value in more.items()}
    return {f"{arch}.{key}": value for key, value in keys.items() if value is not None}


def close(found: Stored, expected: Array, type: str = "F32") -> None:
    """Equal but for the order in which float64 sums a mean."""
    assert (found.type, found.shape) == (type, expected.shape)
    if type == "F32":
        np.testing.assert_allclose(found.values, expected, rtol=2e-7, atol=1e-9)
    else:
        assert found == stored(expected, type)


@pytest.mark.parametrize(("heads", "now"), [(8, 4), (8, 2), (8, 1), (4, 2), (2, 1)])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma2"])
def test_pools_weights_and_biases(tmp_path: Path, heads: int, now: int, arch: str) -> None:
    s = Shape(n_head=8, n_head_kv=heads, n_embd=64)
    weights = {name: stored(w) for name, w in random_weights(s).items()}
    weights["blk.0.attn_k_norm.weight"] = random_stored(1, (8,))
    weights["blk.0.attn_q_norm.weight"] = random_stored(2, (8,))
    write(tmp_path / "in.gguf", weights, metadata(s, arch) | {"other": "kept"}, arch)
    done = regroup(tmp_path / "in.gguf", tmp_path / "out.gguf", now)
    after, keys = read(tmp_path / "out.gguf")
    assert list(after) == list(weights)
    for name, before in weights.items():
        if ".attn_k." in name or ".attn_v." in name:
            close(after[name], pooled(before.values, heads, now))
        else:
            assert after[name] == before, name
    _, old_keys = read(tmp_path / "in.gguf")
    assert keys == old_keys | {f"{arch}.attention.head_count_kv": now}
    assert (done.n_head, done.n_head_kv, done.n_head_kv_now, done.retyped) == (8, heads, now, {})
    assert done.nbytes == (tmp_path / "out.gguf").stat().st_size < done.source_nbytes


def test_the_result_runs(tmp_path: Path) -> None:
    """Its logits are those of the pooled weights by the definitions, in float64."""
    s = Shape(n_head=8, n_head_kv=8)
    weights = random_weights(s)
    write(tmp_path / "in.gguf", {name: stored(w) for name, w in weights.items()}, metadata(s))
    regroup(tmp_path / "in.gguf", tmp_path / "out.gguf", 2)
    for name in weights:
        if ".attn_k." in name or ".attn_v." in name:
            weights[name] = pooled(weights[name], 8, 2)
    expected = reference_logits(s.with_(n_head_kv=2), weights, IDS)
    with Model(tmp_path / "out.gguf") as model, model.session(kv="f32") as session:
        assert model.config.n_head_kv == 2
        assert worst(session.prefill(IDS, all_logits=True), expected) < 1e-5


def test_equal_heads_give_equal_logits(tmp_path: Path) -> None:
    s = Shape(n_head=8, n_head_kv=8)
    weights = random_weights(s)
    for name, w in weights.items():
        if ".attn_k." in name or ".attn_v." in name:
            first = w.reshape(2, 4, s.dim, -1)[:, :1]
            weights[name] = np.broadcast_to(first, (2, 4, *first.shape[2:])).reshape(w.shape).copy()
    write(tmp_path / "in.gguf", {name: stored(w) for name, w in weights.items()}, metadata(s))
    regroup(tmp_path / "in.gguf", tmp_path / "out.gguf", 2)
    found = []
    for name in ("in.gguf", "out.gguf"):
        with Model(tmp_path / name) as model, model.session(kv="f32") as session:
            found.append((session.prefill(IDS, all_logits=True), session.kinds[0].nbytes))
    assert worst(found[1][0], found[0][0]) < 1e-6
    assert found[0][1] == 4 * found[1][1]
    # Other groups would not: heads 0 and 1 of the result are not equal.
    regroup(tmp_path / "in.gguf", tmp_path / "one.gguf", 1)
    with Model(tmp_path / "one.gguf") as model, model.session(kv="f32") as session:
        assert worst(session.prefill(IDS, all_logits=True), found[0][0]) > 1e-2


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "olmo2"])
def test_equal_heads_of_every_family_give_equal_logits(tmp_path: Path, name: str) -> None:
    f = FAMILIES[name].with_(n_head=4, n_head_kv=4)
    q, kv = f.n_head * f.head_dim, f.n_head_kv * f.head_dim
    changed: dict[str, Array | None] = {}
    for tensor, w in tensors(f).items():
        rows = {"attn_k": [0], "attn_v": [0], "attn_qkv": [q, q + kv]}
        for first in rows.get(tensor.split(".")[-2], []):
            pairs = changed.setdefault(tensor, w.copy())[first : first + kv].reshape(2, 2, f.head_dim, -1)
            pairs[:, 1] = pairs[:, 0]
    assert changed
    write_family(tmp_path / "in.gguf", f, weights=changed)
    regroup(tmp_path / "in.gguf", tmp_path / "out.gguf", 2)
    found = []
    for file in ("in.gguf", "out.gguf"):
        with Model(tmp_path / file) as model, model.session(kv="f32") as session:
            found.append((session.prefill(IDS * 3, all_logits=True), session.kv_nbytes))
    assert worst(found[1][0], found[0][0]) < 1e-5
    assert found[0][1] == 2 * found[1][1]


# ---- types -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "type", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K", "IQ4_NL"]
)
def test_types(tmp_path: Path, type: str) -> None:
    """A type that cannot be written becomes Q8_0; all else of the layer stays."""
    s = Shape(n_embd=256, n_head=4, n_head_kv=4, n_layer=1)
    weights = {
        f"blk.0.attn_{part}.weight": random_stored(i, (256, 256), type) for i, part in enumerate("qkv")
    }
    write(tmp_path / "in.gguf", weights, metadata(s))
    done = regroup(tmp_path / "in.gguf", tmp_path / "out.gguf", 2)
    after, _ = read(tmp_path / "out.gguf")
    unwritable = type in ("Q4_K", "Q6_K", "IQ4_NL")
    now = "Q8_0" if unwritable else type
    assert after["blk.0.attn_q.weight"] == weights["blk.0.attn_q.weight"]
    for name in ("blk.0.attn_k.weight", "blk.0.attn_v.weight"):
        close(after[name], pooled(weights[name].values, 4, 2), now)
        assert done.retyped.get(name) == ((type, "Q8_0") if unwritable else None)
    assert len(done.retyped) == 2 * unwritable


@pytest.mark.parametrize("type", ["F32", "Q8_0", "Q4_K"])
def test_fused_projection(tmp_path: Path, type: str) -> None:
    """The Q rows keep their bytes where the type does, and are rounded once where it does not."""
    s = Shape(n_embd=256, n_head=8, n_head_kv=4, n_layer=1)  # heads of 32
    fused = random_stored(1, (256 + 2 * 128, 256), type)
    bias = random_stored(2, (256 + 2 * 128,))
    write(
        tmp_path / "in.gguf",
        {"blk.0.attn_qkv.weight": fused, "blk.0.attn_qkv.bias": bias},
        metadata(s, "phi3"),
        "phi3",
    )
    done = regroup(tmp_path / "in.gguf", tmp_path / "out.gguf", 2)
    after, _ = read(tmp_path / "out.gguf")
    now = "Q8_0" if type == "Q4_K" else type
    for name, before, kind in (("weight", fused, now), ("bias", bias, "F32")):
        found = after[f"blk.0.attn_qkv.{name}"]
        assert (found.type, found.shape) == (kind, (384, *before.shape[1:]))
        q, k, v = np.split(before.values, [256, 384])
        n = len(found.data) * 2 // 3  # bytes of the Q rows
        assert found.data[:n] == (before.data[:n] if kind == before.type else stored(q, kind).data)
        tail = Stored(kind, (128, *before.shape[1:]), found.data[n:])
        close(tail, np.concatenate([pooled(k, 4, 2), pooled(v, 4, 2)]), kind)
    assert done.retyped == ({} if now == type else {"blk.0.attn_qkv.weight": ("Q4_K", "Q8_0")})


# ---- shapes ------------------------------------------------------------------------------------------------


def test_layers_that_differ(tmp_path: Path) -> None:
    """Layers with 4, no and 2 KV heads."""
    s = Shape(n_embd=32, n_head=4, n_layer=3)
    weights = {
        f"blk.{i}.attn_{part}.weight": random_stored(10 * i + j, (n * 8, 32))
        for i, n in ((0, 4), (2, 2))
        for j, part in enumerate("kv")
    }
    keys = metadata(s) | {"llama.attention.head_count_kv": [4, 0, 2]}
    write(tmp_path / "in.gguf", weights, keys)
    done = regroup(tmp_path / "in.gguf", tmp_path / "out.gguf", 2)
    after, found = read(tmp_path / "out.gguf")
    assert found["llama.attention.head_count_kv"] == [2, 0, 2]
    assert done.n_head_kv == 4
    close(after["blk.0.attn_k.weight"], pooled(weights["blk.0.attn_k.weight"].values, 4, 2))
    assert after["blk.2.attn_k.weight"] == weights["blk.2.attn_k.weight"]


def test_no_key_is_as_many_as_query_heads(tmp_path: Path) -> None:
    s = Shape(n_embd=32, n_head=4, n_layer=1)
    weights = {f"blk.0.attn_{part}.weight": random_stored(j, (32, 32)) for j, part in enumerate("kv")}
    write(tmp_path / "in.gguf", weights, metadata(s, attention__head_count_kv=None))
    regroup(tmp_path / "in.gguf", tmp_path / "out.gguf", 1)
    after, found = read(tmp_path / "out.gguf")
    assert found["llama.attention.head_count_kv"] == 1
    close(after["blk.0.attn_v.weight"], pooled(weights["blk.0.attn_v.weight"].values, 4, 1))


def test_key_and_value_of_other_sizes(tmp_path: Path) -> None:
    s = Shape(n_embd=32, n_head=4, n_head_kv=2, n_layer=1)
    weights = {
        "blk.0.attn_k.weight": random_stored(0, (2 * 24, 32)),
        "blk.0.attn_v.weight": random_stored(1, (2 * 16, 32)),
        "blk.0.attn_k_norm.weight": random_stored(2, (24,)),
    }
    write(
        tmp_path / "in.gguf",
        weights,
        metadata(s, attention__key_length=24, attention__value_length=16),
    )
    regroup(tmp_path / "in.gguf", tmp_path / "out.gguf", 1)
    after, _ = read(tmp_path / "out.gguf")
    close(after["blk.0.attn_k.weight"], pooled(weights["blk.0.attn_k.weight"].values, 2, 1))
    close(after["blk.0.attn_v.weight"], pooled(weights["blk.0.attn_v.weight"].values, 2, 1))
    assert after["blk.0.attn_k_norm.weight"] == weights["blk.0.attn_k_norm.weight"]


# ---- refusals ----------------------------------------------------------------------------------------------

SMALL = Shape(n_embd=32, n_head=4, n_head_kv=4, n_layer=1)
KV = {f"blk.0.attn_{part}.weight": random_stored(j, (32, 32)) for j, part in enumerate("kv")}


@pytest.mark.parametrize(
    ("now", "says"),
    [
        (3, r"4 KV heads cannot be pooled to 3: expected a divisor of 4 \(1, 2\)"),
        (8, "cannot be pooled to 8"),
        (0, "cannot be pooled to 0"),
        (4, "has 4 KV heads already"),
    ],
)
def test_numbers_that_are_refused(tmp_path: Path, now: int, says: str) -> None:
    write(tmp_path / "in.gguf", KV, metadata(SMALL))
    with pytest.raises(InvalidArgument, match=says):
        regroup(tmp_path / "in.gguf", tmp_path / "out.gguf", now)
    assert os.listdir(tmp_path) == ["in.gguf"]


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        (KV | {"blk.0.attn_k_norm.weight": random_stored(1, (32,))}, "normalizes all 4 K heads together"),
        (KV | {"blk.0.attn_k_norm.weight": random_stored(1, (4, 8))}, "normalizes all 4 K heads together"),
        (KV | {"blk.0.attn_k.scale": random_stored(1, (1,))}, "'blk.0.attn_k.scale' depends on the KV heads"),
        (KV | {"blk.0.attn_kv_b.weight": random_stored(1, (8, 32))}, "'blk.0.attn_kv_b.weight' depends"),
        ({"blk.0.attn_k.weight": KV["blk.0.attn_k.weight"]}, "layer 0 has neither"),
        ({"blk.0.attn_kv_a_mqa.weight": random_stored(1, (8, 32))}, "layer 0 has neither"),
        (KV | {"blk.0.attn_v.weight": random_stored(1, (16, 32))}, r"is \[16, 32\]; expected 32 rows"),
        ({"blk.0.attn_qkv.weight": random_stored(1, (95, 32))}, r"is \[95, 32\]; expected 96 rows"),
    ],
)
def test_models_that_are_refused(tmp_path: Path, tensors: dict[str, Stored], says: str) -> None:
    write(tmp_path / "in.gguf", tensors, metadata(SMALL))
    with pytest.raises(UnsupportedModelError, match=says):
        regroup(tmp_path / "in.gguf", tmp_path / "out.gguf", 2)
    assert os.listdir(tmp_path) == ["in.gguf"]


def test_the_output_is_not_the_input_and_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    write(tmp_path / "in.gguf", KV, metadata(SMALL))
    before = (tmp_path / "in.gguf").read_bytes()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(InvalidArgument, match="is the input as well"):
        regroup(tmp_path / "in.gguf", tmp_path / "in.gguf", 2)
    with pytest.raises(KeyboardInterrupt):
        regroup(tmp_path / "in.gguf", tmp_path / "out.gguf", 2, progress=interrupt)
    assert os.listdir(tmp_path) == ["in.gguf"] and (tmp_path / "in.gguf").read_bytes() == before


# ---- the command -------------------------------------------------------------------------------------------


def test_command(ringlm: Command, tmp_path: Path) -> None:
    source, target = str(tmp_path / "in.gguf"), str(tmp_path / "out.gguf")
    weights = {
        f"blk.0.attn_{part}.weight": random_stored(j, (256, 256), "Q4_K") for j, part in enumerate("kv")
    }
    write(tmp_path / "in.gguf", weights, metadata(Shape(n_embd=256, n_head=4, n_layer=1, n_head_kv=4)))
    done = ringlm("regroup", source, target, "--kv-heads", "2")
    assert (done.code, done.err) == (0, "regrouping out.gguf\n")
    first, types, warning = done.out.splitlines()
    assert first == f"{target}: 2 KV heads of 4, for 4 query heads; {os.path.getsize(target):,} bytes"
    assert types == (
        "Q4_K cannot be written, so these are Q8_0 now: blk.0.attn_k.weight, blk.0.attn_v.weight"
    )
    assert warning.startswith("It needs up-training before use")


def test_command_refusals(ringlm: Command, models: Models, tmp_path: Path) -> None:
    target = str(tmp_path / "out.gguf")
    for args, code, says in (
        ((models.random, models.random, "--kv-heads", "1"), 1, "has 1 KV heads already"),
        ((models.random, target, "--kv-heads", "3"), 1, "cannot be pooled to 3"),
        ((models.random, target, "--kv-heads", "0"), 2, "--kv-heads"),
        ((models.random, target), 2, "--kv-heads"),
        (("absent.gguf", target, "--kv-heads", "1"), 1, "absent.gguf"),
    ):
        done = ringlm("regroup", *args)
        assert (done.code, done.out) == (code, "") and says in done.err and done.err.count("\n") == 1
    assert not os.path.exists(target)
