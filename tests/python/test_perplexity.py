"""Perplexity against its definition, computed in float64 from the logits of random_llama.py's reference."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import ringlm.perplexity
from random_llama import Array, reference_logits
from ringlm import InvalidArgument, Model
from ringlm.perplexity import negative_log_likelihoods, perplexity
from tiny_chat_model import BOS, RANDOM, write_random

TEXT = bytes(np.random.default_rng(5).integers(32, 127, 150, dtype=np.uint8)).decode()


def by_definition(weights: dict[str, Array], ids: list[int], n_ctx: int, add_bos: bool, kv: str) -> Array:
    """-log p of each scored token, by the words of llama.cpp's tool."""
    scores = []
    for start in range(0, len(ids) // n_ctx * n_ctx, n_ctx):
        window = ids[start : start + n_ctx]
        if add_bos:
            window = [BOS, *window[1:]]
        logits = reference_logits(RANDOM, weights, window, kv)
        probabilities = np.exp(logits - logits.max(-1, keepdims=True))
        probabilities /= probabilities.sum(-1, keepdims=True)
        for position in range(n_ctx // 2, n_ctx - 1):
            scores.append(-math.log(probabilities[position, window[position + 1]]))
    return np.array(scores)


@pytest.mark.parametrize("n_ctx", [48, 33, 3, 150])
@pytest.mark.parametrize("add_bos", [False, True])
def test_equals_the_definition(tmp_path: Path, n_ctx: int, add_bos: bool) -> None:
    weights = write_random(tmp_path / "m.gguf", add_bos=add_bos)
    nll = by_definition(weights, [BOS] * add_bos + list(TEXT.encode()), n_ctx, add_bos, "f32")
    with Model(tmp_path / "m.gguf") as model:
        found = perplexity(model, TEXT, n_ctx=n_ctx, kv="f32")
    assert found.perplexity == pytest.approx(math.exp(nll.mean()), rel=1e-5)
    error = math.sqrt(((nll - nll.mean()) ** 2).sum() / (len(nll) - 1) / len(nll)) * math.exp(nll.mean())
    assert found.stderr == pytest.approx(error, rel=1e-4)
    assert (found.tokens, found.n_ctx) == (len(nll), n_ctx)
    assert found.windows == (150 + add_bos) // n_ctx
    assert found.seconds > 0


def by_single_steps(model: Model, ids: list[int], n_ctx: int, pinned: int) -> Array:
    """-log p of each scored token of a stream, fed one by one."""
    session = model.session(n_ctx, "f32", 1, pinned=pinned, overflow="slide")
    scores = []
    for position, (token, behind) in enumerate(itertools.pairwise(ids)):
        logits = session.decode(token).astype(np.float64)
        if position >= n_ctx // 2:
            scores.append(math.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[behind])
    return np.array(scores)


@pytest.mark.parametrize(("n_ctx", "pinned"), [(48, 0), (33, 7), (3, 0), (149, 4), (150, 0)])
@pytest.mark.parametrize("add_bos", [False, True])
def test_a_stream_equals_its_definition(tmp_path: Path, n_ctx: int, pinned: int, add_bos: bool) -> None:
    write_random(tmp_path / "m.gguf", add_bos=add_bos)
    seen: list[tuple[int, int, float]] = []
    with Model(tmp_path / "m.gguf") as model:
        nll = by_single_steps(model, [BOS] * add_bos + list(TEXT.encode()), n_ctx, pinned)
        found = perplexity(
            model,
            TEXT,
            n_ctx=n_ctx,
            kv="f32",
            chunk=16,
            pinned=pinned,
            overflow="slide",
            progress=lambda *at: seen.append(at),
        )
    assert found.perplexity == pytest.approx(math.exp(nll.mean()), rel=1e-5)
    assert (found.tokens, found.windows, found.n_ctx) == (len(nll), 1, n_ctx)
    total = math.ceil((150 + add_bos) / n_ctx)
    assert {n for _, n, _ in seen} == {total} and seen[-1][0] == total
    assert sorted({done for done, _, _ in seen}) == [done for done, _, _ in seen]
    assert len(seen) >= total - 1  # the last may come together with the one before
    assert seen[-1][2] == found.perplexity


def test_a_stream_that_fits_is_one_window(tmp_path: Path) -> None:
    write_random(tmp_path / "m.gguf", add_bos=True)
    with Model(tmp_path / "m.gguf") as model:
        window, stream = (perplexity(model, TEXT, n_ctx=151, overflow=how) for how in ("error", "slide"))
        assert (window.perplexity, window.stderr) == (stream.perplexity, stream.stderr)
        with pytest.raises(InvalidArgument, match="the text has 151 tokens and one window takes 152"):
            perplexity(model, TEXT, n_ctx=152, overflow="slide")
        with pytest.raises(InvalidArgument, match="overflow is 'x'"):
            perplexity(model, TEXT, n_ctx=50, overflow="x")


def test_cache_type(tmp_path: Path) -> None:
    weights = write_random(tmp_path / "m.gguf")
    half = math.exp(by_definition(weights, list(TEXT.encode()), 50, False, "f16").mean())
    full = math.exp(by_definition(weights, list(TEXT.encode()), 50, False, "f32").mean())
    with Model(tmp_path / "m.gguf", repack=False) as model:
        found = {kv: perplexity(model, TEXT, n_ctx=50, kv=kv).perplexity for kv in ("f16", "f32")}
    # Rounding K and V to f16 moves this model's perplexity by no more than float32 sums do, but it moves it.
    assert found["f16"] != found["f32"]
    assert found == pytest.approx({"f16": half, "f32": full}, rel=1e-5)


def test_chunks_and_threads_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_random(tmp_path / "m.gguf")
    found = set()
    for threads, chunk, logits in ((1, 128, 1 << 22), (2, 7, 1 << 22), (2, 128, 1)):
        monkeypatch.setattr(ringlm.perplexity, "_LOGITS", logits)
        with Model(tmp_path / "m.gguf", n_threads=threads) as model:
            found.add(perplexity(model, TEXT, n_ctx=40, chunk=chunk).perplexity)
    assert len(found) == 1


def test_ids_and_progress(tmp_path: Path) -> None:
    write_random(tmp_path / "m.gguf")
    seen: list[tuple[int, int, float]] = []
    with Model(tmp_path / "m.gguf") as model:
        result = perplexity(model, list(TEXT.encode()), n_ctx=40, progress=lambda *at: seen.append(at))
        assert result.perplexity == perplexity(model, TEXT, n_ctx=40).perplexity
        first = perplexity(model, TEXT[:40], n_ctx=40)
    assert [(done, n) for done, n, _ in seen] == [(1, 3), (2, 3), (3, 3)]
    assert seen[0][2] == first.perplexity
    assert seen[-1][2] == result.perplexity


def test_refusals(tmp_path: Path) -> None:
    write_random(tmp_path / "m.gguf")
    with Model(tmp_path / "m.gguf") as model:
        with pytest.raises(InvalidArgument, match="the text has 39 tokens and one window takes 40"):
            perplexity(model, TEXT[:39], n_ctx=40)
        with pytest.raises(InvalidArgument, match="the text has 0 tokens"):
            perplexity(model, "")
        with pytest.raises(InvalidArgument, match="fewer than 3"):
            perplexity(model, TEXT, n_ctx=2)
        with pytest.raises(InvalidArgument, match="n_ctx is 300"):
            perplexity(model, TEXT * 3, n_ctx=300)
        one = perplexity(model, TEXT[:4], n_ctx=4)
        assert one.tokens == 1 and math.isnan(one.stderr)


def test_large_logits() -> None:
    logits = np.array([[3e38, -3e38, 0], [1e4, 1e4, -1e4]], np.float32)
    found = negative_log_likelihoods(logits, [0, 1])
    np.testing.assert_allclose(found, [0.0, math.log(2)], atol=1e-12)
    assert found.dtype == np.float64
