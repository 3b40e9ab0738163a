"""ringlm compare against its definitions, in float64 from the logits of random_llama.py's reference."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import ringlm.perplexity as scoring
from random_llama import Array, Shape, reference_logits, write_llama
from ringlm import InvalidArgument, Model
from ringlm.compare import compare
from ringlm.perplexity import perplexity
from test_cli import Command, Models, models, ringlm
from tiny_chat_model import BOS, RANDOM, SPECIAL, byte_letters, tokenizer_metadata, write_random

__all__ = ["models", "ringlm"]  # fixtures

TEXT = bytes(np.random.default_rng(5).integers(32, 127, 150, dtype=np.uint8)).decode()
#: The same model but for its layers: logits that are near each other.
OTHER = RANDOM.with_(n_head=4, n_head_kv=2, seed=0)


def log_probabilities(s: Shape, weights: dict[str, Array], n_ctx: int, add_bos: bool, kv: str) -> Array:
    """Of the positions that are scored, [n, n_vocab]."""
    ids = [BOS] * add_bos + list(TEXT.encode())
    rows = []
    for start in range(0, len(ids) // n_ctx * n_ctx, n_ctx):
        window = ids[start : start + n_ctx]
        if add_bos:
            window = [BOS, *window[1:]]
        logits = reference_logits(s, weights, window, kv)[n_ctx // 2 : n_ctx - 1]
        rows.append(logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True))
    return np.concatenate(rows)


@pytest.mark.parametrize("n_ctx", [48, 33])
@pytest.mark.parametrize("add_bos", [False, True])
def test_equals_the_definitions(tmp_path: Path, n_ctx: int, add_bos: bool) -> None:
    a = write_random(tmp_path / "a.gguf", add_bos=add_bos)
    b = write_random(tmp_path / "b.gguf", OTHER, add_bos=add_bos)
    p = log_probabilities(RANDOM, a, n_ctx, add_bos, "f32")
    q = log_probabilities(OTHER, b, n_ctx, add_bos, "f32")
    kl = np.array([math.fsum(np.exp(x) * (x - y)) for x, y in zip(p, q, strict=True)])
    with Model(tmp_path / "a.gguf") as first, Model(tmp_path / "b.gguf") as second:
        found = compare(first, second, TEXT, n_ctx=n_ctx, kv="f32")
        alone = [perplexity(model, TEXT, n_ctx=n_ctx, kv="f32") for model in (first, second)]
        swapped = compare(second, first, TEXT, n_ctx=n_ctx, kv="f32")
    assert found.kl_mean == pytest.approx(kl.mean(), rel=1e-5)
    ordered = np.sort(kl)
    at = 0.99 * (len(kl) - 1)
    low = ordered[int(at)]
    assert found.kl_p99 == pytest.approx(low + (at - int(at)) * (ordered[int(at) + 1] - low), rel=1e-4)
    assert found.same_top == (p.argmax(-1) == q.argmax(-1)).mean()
    assert 0 < found.same_top < 1
    assert (found.tokens, found.windows, found.n_ctx) == (len(kl), alone[0].windows, n_ctx)
    for side, one in zip((found.a, found.b), alone, strict=True):
        assert (side.perplexity, side.stderr) == (one.perplexity, one.stderr)
    # The divergence has a direction.
    assert swapped.kl_mean == pytest.approx((np.exp(q) * (q - p)).sum(-1).mean(), rel=1e-5)
    assert swapped.kl_mean != pytest.approx(found.kl_mean, rel=1e-4)


def test_bytes_of_keys_and_values(tmp_path: Path) -> None:
    """f16: two bytes an element; int8: one, and two for the scale of a row. n_ctx + chunk - 1 rows."""
    write_random(tmp_path / "a.gguf")
    write_random(tmp_path / "b.gguf", OTHER)
    with Model(tmp_path / "a.gguf") as a, Model(tmp_path / "b.gguf") as b:
        found = compare(a, b, TEXT, n_ctx=50, kv="f16", kv_b="int8", chunk=16)
        assert (found.a.weight_nbytes, found.b.weight_nbytes) == (a.nbytes, b.nbytes)
    per_token = [2 * 1 * 2 * 16 * 2, 2 * 2 * 2 * (8 + 2)]  # layers, KV heads, K and V, bytes of a row
    assert [found.a.kv_nbytes_per_token, found.b.kv_nbytes_per_token] == per_token
    assert [found.a.kv_nbytes, found.b.kv_nbytes] == [n * (50 + 16 - 1) for n in per_token]
    assert (found.a.kv, found.b.kv) == (("f16", "f16"), ("int8", "int8"))


def test_a_model_and_itself(tmp_path: Path) -> None:
    write_random(tmp_path / "a.gguf")
    with Model(tmp_path / "a.gguf") as model:
        same = compare(model, model, TEXT, n_ctx=50)
        assert (same.kl_mean, same.kl_p99, same.same_top) == (0, 0, 1)
        cache = compare(model, model, TEXT, n_ctx=50, kv="f32", kv_b="int8")
    assert 0 < cache.kl_mean < 1e-3 and cache.kl_mean < cache.kl_p99


def test_pieces_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_random(tmp_path / "a.gguf")
    write_random(tmp_path / "b.gguf", OTHER)
    found, seen = [], []
    with Model(tmp_path / "a.gguf") as a, Model(tmp_path / "b.gguf") as b:
        for chunk, logits in ((128, 1 << 22), (7, 1 << 22), (128, 1)):
            monkeypatch.setattr(scoring, "_LOGITS", logits)
            result = compare(a, b, TEXT, n_ctx=40, chunk=chunk, progress=lambda *at: seen.append(at))
            found.append((result.kl_mean, result.kl_p99, result.same_top, result.b.perplexity))
    assert len(set(found)) == 1
    assert [at[:2] for at in seen] == [(1, 3), (2, 3), (3, 3)] * 3
    assert seen[2][2] == found[0][0]


# ---- vocabularies ------------------------------------------------------------------------------------------


def with_tokens(path: Path, shape: Shape = RANDOM, **changes: object) -> Path:
    more = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    write_llama(path, shape, tokenizer_metadata(more=more))
    return path


def test_vocabularies_that_differ(tmp_path: Path) -> None:
    a = with_tokens(tmp_path / "a.gguf")
    tokens = byte_letters() + SPECIAL
    renamed = [*tokens[:-1], "<|other|>"]
    longer = [*tokens, "<|more|>"]
    cases = [
        (with_tokens(tmp_path / "b", tokens=renamed), "token 258 is '<|bos|>' and '<|other|>'"),
        (
            with_tokens(
                tmp_path / "c", RANDOM.with_(n_vocab=260), tokens=longer, token_type=[1] * 256 + [3] * 4
            ),
            "the number of tokens is 259 and 260",
        ),
        (with_tokens(tmp_path / "d", RANDOM.with_(n_vocab=264)), "the number of logits is 259 and 264"),
        (with_tokens(tmp_path / "e", bos_token_id=256), "BOS is 258 and 256"),
        (with_tokens(tmp_path / "f", add_bos_token=True), "whether BOS is added is False and True"),
        (with_tokens(tmp_path / "g", add_eos_token=True), "whether EOS is added is False and True"),
    ]
    with Model(a) as first:
        for path, says in cases:
            with (
                Model(path) as second,
                pytest.raises(InvalidArgument, match="different vocabularies") as error,
            ):
                compare(first, second, TEXT, n_ctx=50)
            assert says in str(error.value) and str(path) in str(error.value)


def test_tokenizers_that_cut_otherwise(tmp_path: Path) -> None:
    """The tokens are the same; only one of the models joins two of them."""
    tokens = byte_letters() + SPECIAL
    tokens[0] = "ab"  # the byte 0 does not occur
    joined = with_tokens(tmp_path / "a.gguf", tokens=tokens, merges=["a b"])
    plain = with_tokens(tmp_path / "b.gguf", tokens=tokens)
    with Model(joined) as a, Model(plain) as b:
        with pytest.raises(InvalidArgument, match=r"first at token 3: ids \[0, 99, 120\] and \[97, 98, 99\]"):
            compare(a, b, "xyzabc" + "x" * 50, n_ctx=16)
        assert compare(a, b, "x" * 50, n_ctx=16).kl_mean == 0


def test_other_refusals(tmp_path: Path) -> None:
    with Model(with_tokens(tmp_path / "a.gguf")) as model:
        with pytest.raises(InvalidArgument, match="the text has 39 tokens and one window takes 40"):
            compare(model, model, TEXT[:39], n_ctx=40)
        with pytest.raises(InvalidArgument, match="fewer than 3"):
            compare(model, model, TEXT, n_ctx=2)
        assert math.isnan(compare(model, model, TEXT[:4], n_ctx=4).a.stderr)


# ---- the command -------------------------------------------------------------------------------------------


def test_command(ringlm: Command, models: Models, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(TEXT)
    other = str(tmp_path / "b.gguf")
    write_random(Path(other), OTHER)
    args = ("compare", models.random, other, "-f", str(tmp_path / "text"), "-c", "50", "--chunk", "16")
    with Model(models.random) as a, Model(other) as b:
        expected = compare(a, b, TEXT, n_ctx=50, kv="f16", kv_b=("int8", "f32"), chunk=16)
    done = ringlm(*args, "--kv-b", "int8,f32", "--json")
    assert (done.code, done.err, done.out.count("\n")) == (0, "", 1)
    record = json.loads(done.out)
    assert record["a"]["model"] == models.random and record["b"]["kv"] == ["int8", "f32"]
    assert record["b"]["perplexity"] == expected.b.perplexity
    for key in ("kl_mean", "kl_p99", "same_top", "tokens", "windows", "n_ctx"):
        assert record[key] == getattr(expected, key)

    done = ringlm(*args, "--kv-b", "int8,f32")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0].split() == ["A:", models.random, "B:", other, "B", "/", "A"]
    sides = (expected.a, expected.b)
    assert lines[2].split()[-3:-1] == [f"{side.kv_nbytes_per_token:,}" for side in sides]
    assert lines[3].split()[-3:-1] == [f"{side.kv_nbytes:,}" for side in sides]
    assert lines[4].split() == ["K/V", "type", "f16", "int8,f32"]
    ratio = expected.b.perplexity / expected.a.perplexity
    assert lines[5].split()[1] == f"{expected.a.perplexity:.4f}" and lines[5].split()[-1] == f"{ratio:.4f}"
    assert lines[7] == (
        f"KL divergence of B from A: mean {expected.kl_mean:.6f}, 99th percentile {expected.kl_p99:.6f}"
    )
    assert lines[8] == f"same most probable token: {100 * expected.same_top:.2f} %"
    assert lines[9].startswith(f"{expected.tokens} tokens scored in 3 windows of 50, ")


def test_command_reads_stdin_and_writes_valid_json(ringlm: Command, models: Models) -> None:
    done = ringlm("compare", models.random, models.random, "-f", "-", "-c", "4", "--json", stdin=b"abcd")
    record = json.loads(done.out)
    assert record["tokens"] == 1 and record["a"]["stderr"] is None and record["kl_mean"] == 0


def test_command_refusals(ringlm: Command, models: Models, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(TEXT)
    text = ("-f", str(tmp_path / "text"))
    renamed = str(with_tokens(tmp_path / "b.gguf", tokens=["x", *byte_letters()[1:], *SPECIAL]))
    for args, code, says in (
        ((models.random, renamed, *text), 1, "token 0 is "),
        ((models.random, models.random, *text), 1, "one window takes 512"),
        ((models.random, models.random), 2, "--file"),
        ((models.random, *text), 2, "Missing argument"),
        ((models.random, "absent.gguf", *text), 1, "absent.gguf"),
        ((models.random, models.random, *text, "-c", "40", "--kv-b", "q3"), 1, "q3"),
    ):
        done = ringlm("compare", *args)
        assert (done.code, done.out) == (code, "") and says in done.err and done.err.count("\n") == 1
