"""The ring and INT8 keys and values on SmolLM2-135M-Instruct."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from kv_divergence import Array, divergence, kl_divergence, log_softmax
from ringlm import Model, Session
from smollm2_numpy import Int8, SmolLM2

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def smollm2(pulled: Callable[[str], Path]) -> Model:
    return Model(pulled("smollm2-135m"))


# The topics of Python's help(): ordinary technical English that every CPython brings along. On texts that the
# model knows by heart (the US constitution, Genesis) its logits answer several times more to any rounding.
@pytest.fixture(scope="module")
def ids(smollm2: Model) -> list[int]:
    from pydoc_data.topics import topics

    return smollm2.tokenizer.encode("\n\n".join(topics[key] for key in sorted(topics))[:60_000])


def test_int8_predicts_as_f16_does(smollm2: Model, ids: list[int]) -> None:
    d = divergence(smollm2, ids[:3584], "f16", "int8", n_ctx=512)
    assert len(d.expected) == 7 * 511
    assert d.kl.mean() < 3e-4
    assert abs(d.perplexity_change) < 1e-3
    assert d.kl.max() > 1e-6  # they are not the same


# ---- a K bias ----------------------------------------------------------------------------------------------

BIASED = (10, 20)  # layers in the middle: in the first and last ones the model minds less what keys are
PAIRS = (1, 4, 8)  # of the 32, the slowest ones; these turn by less than 0.05 radian in 256 positions
NORM = 900.0


@pytest.fixture(scope="module")
def reference(smollm2: Model) -> SmolLM2:
    return SmolLM2(smollm2.path)


def slow_bias(model: SmolLM2, pairs: int) -> dict[int, Array]:
    """A K bias [n_head_kv, 64] of norm 900 a head, in equal parts on the slowest pairs, at random angles."""
    rng = np.random.default_rng(pairs)
    biases = {}
    for layer in BIASED:
        angles = rng.uniform(0, 2 * np.pi, (model.n_head_kv, pairs))
        bias = np.zeros((model.n_head_kv, 32, 2))
        bias[:, -pairs:] = NORM / np.sqrt(pairs) * np.stack([np.cos(angles), np.sin(angles)], -1)
        biases[layer] = bias.reshape(model.n_head_kv, 64)
    return biases


@pytest.mark.parametrize("pairs", PAIRS)
def test_a_large_k_bias_is_harmless(tmp_path: Path, reference: SmolLM2, ids: list[int], pairs: int) -> None:
    path, bias, n_ctx = tmp_path / "biased.gguf", slow_bias(reference, pairs), 128
    reference.write(path, bias)
    tokens = ids[: 5 * n_ctx + n_ctx // 2]
    with Model(path) as model:
        begin = log_softmax(model.session(n_ctx, "f32").prefill(tokens[:32], all_logits=True))
        d = divergence(model, tokens, "f32", "int8", n_ctx=n_ctx, pinned=8, slide=True)
    path.unlink()
    # The file means what the numpy model computes.
    assert kl_divergence(reference.log_probabilities(tokens[:32], bias), begin).max() < 1e-6
    for epoch in range(0, len(tokens), n_ctx):
        assert d.kl[epoch : epoch + n_ctx].mean() < 1e-3, epoch


@pytest.mark.parametrize("pairs", PAIRS)
def test_what_rotation_and_centring_are_for(reference: SmolLM2, ids: list[int], pairs: int) -> None:
    tokens, bias = ids[:128], slow_bias(reference, pairs)
    exact = reference.log_probabilities(tokens, bias)

    def mean_kl(rotate: bool, centre: bool) -> float:
        stored = reference.log_probabilities(tokens, bias, Int8(rotate, centre, epoch=128))
        return float(kl_divergence(exact, stored).mean())

    both = mean_kl(rotate=True, centre=True)
    assert both < 1e-3
    assert mean_kl(rotate=True, centre=False) > 3e-3
    assert mean_kl(rotate=False, centre=False) > 5e-3  # plain rows
    # With the bias gone, the outliers left to rotation are those that SmolLM2 has of its own.
    assert mean_kl(rotate=False, centre=True) > 2 * both


# ---- endless text ------------------------------------------------------------------------------------------

N_CTX = 128
KEY = "71432"
PROMPT = f"The pass key is {KEY}. Remember it. {KEY} is the pass key.\n\n"
QUESTION = "\n\nWhat is the pass key? The pass key is"


@dataclass(frozen=True)
class Stream:
    """A session that was fed PROMPT, pinned or not, and then 20 times n_ctx tokens."""

    tokens: list[int]
    scores: Array  # of each token behind the first: log p
    session: Session


@pytest.fixture(scope="module")
def stream(smollm2: Model, ids: list[int]) -> Callable[[str, bool], Stream]:
    prompt = smollm2.tokenizer.encode(PROMPT)
    tokens = prompt + ids[: 20 * N_CTX]

    @functools.cache
    def run(kv: str, pin: bool) -> Stream:
        session = smollm2.session(N_CTX, kv, pinned=len(prompt) if pin else 0, overflow="slide")
        scores = []
        for at in range(0, len(tokens), 64):
            part, behind = tokens[at : at + 64], tokens[at + 1 : at + 65]
            scores.append(chosen(session.prefill(part, all_logits=True), behind))
        return Stream(tokens, np.concatenate(scores), session)

    return run


def chosen(logits: Array, tokens: list[int]) -> Array:
    """log p of each token, from the row of logits before it."""
    return log_softmax(logits)[np.arange(len(tokens)), tokens]


SEGMENT = 32


@pytest.fixture(scope="module")
def re_prefilled(smollm2: Model, stream: Callable[[str, bool], Stream]) -> Array:
    """The same scores behind the first n_ctx tokens, each segment from a fresh session (f16): the pinned
    tokens and the last ones that fit are prefilled, then the segment, from which on it sees n_ctx tokens as
    well. No slot of these sessions is used twice, no position comes to 1.3 n_ctx."""
    reference = stream("f16", True)
    tokens, pinned = reference.tokens, reference.session.pinned
    scores = []
    for at in range(N_CTX, len(tokens), SEGMENT):
        segment = tokens[at : at + SEGMENT]
        before = tokens[:pinned] + tokens[at - (N_CTX - pinned) : at]
        with smollm2.session(N_CTX, "f16", pinned=pinned, overflow="slide") as session:
            first = session.prefill(before)[None]
            rest = session.prefill(segment, all_logits=True)
            assert session.position < session.stats.slots
        scores.append(chosen(np.concatenate([first, rest])[:-1], segment))
    return np.concatenate(scores)


def differences(found: Array, expected: Array) -> tuple[float, Array]:
    """Of two rows of log p, relative to ``expected``: in total, and in every tenth."""
    tenths = [found[i].sum() / expected[i].sum() - 1 for i in np.array_split(np.arange(len(expected)), 10)]
    return float(found.sum() / expected.sum() - 1), np.abs(tenths)


@pytest.mark.parametrize("kv", ["f16", "int8"])
def test_an_endless_text_is_read_as_from_a_fresh_start(
    stream: Callable[[str, bool], Stream], re_prefilled: Array, kv: str
) -> None:
    found = stream(kv, True)
    assert found.session.position > 20 * N_CTX and found.session.stats.visible == N_CTX
    total, tenths = differences(found.scores[N_CTX - 1 :], re_prefilled)
    assert abs(total) < 0.01
    assert tenths.max() < 0.05


def test_without_pinned_tokens_it_is_not(stream: Callable[[str, bool], Stream], re_prefilled: Array) -> None:
    total, tenths = differences(stream("f16", False).scores[N_CTX - 1 :], re_prefilled)
    assert total > 0.1 and tenths.min() > 0.05


def pass_keys(model: Model, session: Session) -> tuple[float, Array]:
    """log p of the true key, and of 50 others, behind the question."""
    encode = model.tokenizer.encode
    question = session.prefill(encode(QUESTION))

    def likelihood(key: str) -> float:
        tokens = encode(" " + key)
        rest = session.prefill(tokens, all_logits=True)
        session.rewind(len(tokens))
        return float(chosen(np.concatenate([question[None], rest])[:-1], tokens).sum())

    others = [str(n) for n in np.random.default_rng(1).integers(10_000, 100_000, 50)]
    assert KEY not in others and len(set(others)) == 50
    return likelihood(KEY), np.array([likelihood(key) for key in others])


@pytest.mark.parametrize(("kv", "pin"), [("f16", True), ("int8", True), ("f16", False)])
def test_a_pinned_pass_key_is_remembered(
    smollm2: Model, stream: Callable[[str, bool], Stream], kv: str, pin: bool
) -> None:
    with stream(kv, pin).session.fork() as session:
        key, others = pass_keys(smollm2, session)
    assert (key > others.max()) == pin
    if pin:  # as well as by a session that has never read more than n_ctx tokens before the question
        with smollm2.session(N_CTX, kv, pinned=stream(kv, pin).session.pinned, overflow="slide") as fresh:
            fresh.prefill(stream(kv, pin).session.tokens)
            expected, _ = pass_keys(smollm2, fresh)
        assert key == pytest.approx(expected, abs=2)
