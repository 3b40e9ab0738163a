"""The sampler against a plain float64 chain: what it keeps, how often it draws it, what it refuses."""

from __future__ import annotations

import copy
import pickle
import threading
import tracemalloc
from typing import Any

import numpy as np
import pytest
from ringlm import _core
from ringlm.errors import InvalidArgument, NumericError, StateError

OFF: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def expected(logits: np.ndarray, window: list[int] | None = None, **params: Any) -> np.ndarray:
    """Probabilities [n_vocab] in float64: bias, penalties, top-k, top-p, min-p, temperature."""
    p: dict[str, Any] = {
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.05,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "penalty_window": 64,
        "logit_bias": {},
    } | params
    x = logits.astype(np.float64)
    for token, bias in p["logit_bias"].items():
        x[token] += bias
    recent = (window or [])[-p["penalty_window"] :] if p["penalty_window"] else []
    for token in set(recent):
        x[token] = x[token] / p["repetition_penalty"] if x[token] > 0 else x[token] * p["repetition_penalty"]
        x[token] -= p["presence_penalty"] + p["frequency_penalty"] * recent.count(token)
    order = np.lexsort((np.arange(len(x)), -x))
    order = order[np.isfinite(x[order])]
    if p["temperature"] == 0:
        return np.eye(len(x))[order[0]]
    if p["top_k"]:
        order = order[: p["top_k"]]
    kept = np.exp(x[order] - x[order[0]])
    kept /= kept.sum()
    if p["top_p"] < 1:
        n = int(np.argmax(np.cumsum(kept) >= p["top_p"])) + 1
        order, kept = order[:n], kept[:n]
    order = order[kept >= p["min_p"] * kept[0]]
    final = np.exp((x[order] - x[order[0]]) / p["temperature"])
    result = np.zeros(len(x))
    result[order] = final / final.sum()
    return result


def draw(logits: np.ndarray, n: int, window: list[int] | None = None, **params: Any) -> np.ndarray:
    """How often each token comes in n draws from the same state: [n_vocab]."""
    counts = np.zeros(len(logits))
    sampler = _core.Sampler(len(logits), **params)
    penalized = window is not None
    for seed in range(n):
        if penalized:  # a draw enters the window, so each one gets a new sampler
            sampler = _core.Sampler(len(logits), **(params | {"seed": seed}))
            sampler.accept(window)
        counts[sampler.sample(logits)] += 1
    return counts


def assert_follows(counts: np.ndarray, p: np.ndarray) -> None:
    """Chi-squared over tokens, the rare ones together; five standard deviations of its distribution."""
    assert counts[p == 0].sum() == 0, "a token was drawn that is cut off"
    n = counts.sum()
    common = p * n >= 8
    seen, want = counts[common], p[common] * n
    rare = p[~common].sum() * n
    if rare >= 8:
        seen, want = np.append(seen, counts[~common].sum()), np.append(want, rare)
    chi2 = float(((seen - want) ** 2 / want).sum())
    df = max(len(want) - 1, 1)
    assert chi2 < df + 5 * np.sqrt(2 * df) + 5, f"chi-squared {chi2:.1f} with {df} degrees of freedom"


def normal(n: int, scale: float, seed: int = 0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).standard_normal(n)).astype(np.float32)


CHAINS: list[dict[str, Any]] = [
    {},
    OFF | {"temperature": 1.0},
    OFF | {"temperature": 0.3},
    OFF | {"temperature": 2.5},
    OFF | {"top_k": 1},
    OFF | {"top_k": 7, "temperature": 1.7},
    OFF | {"top_p": 0.5},
    OFF | {"top_p": 0.97, "temperature": 1.5},
    OFF | {"top_p": 1e-6},
    OFF | {"min_p": 0.1, "temperature": 2.0},
    OFF | {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.02, "temperature": 3.0},
    OFF | {"logit_bias": {0: 3.0, 1: -float("inf"), 5: -2.0}, "temperature": 1.0},
]


@pytest.mark.parametrize("params", CHAINS, ids=str)
@pytest.mark.parametrize(("n_vocab", "scale"), [(1, 1.0), (23, 1.0), (300, 2.0), (1500, 1.0)])
def test_frequencies_follow_the_chain(n_vocab: int, scale: float, params: dict[str, Any]) -> None:
    params = params | {"seed": 11}
    bias = {k: v for k, v in params.get("logit_bias", {}).items() if k == 0 or n_vocab > 5}
    params["logit_bias"] = bias
    logits = normal(n_vocab, scale, seed=n_vocab)
    want = expected(logits, **{k: v for k, v in params.items() if k != "seed"})
    assert_follows(draw(logits, 4000, **params), want)


@pytest.mark.parametrize("params", CHAINS, ids=str)
@pytest.mark.parametrize("kind", ["normal", "ties", "spread", "sorted", "one block", "long tail"])
def test_support_is_exact(kind: str, params: dict[str, Any]) -> None:
    """At an enormous temperature all kept tokens are alike, so enough draws show each of them."""
    n = 700
    rng = np.random.default_rng(4)
    logits = {
        "normal": normal(n, 2.0, seed=8),
        "ties": rng.integers(-3, 4, n).astype(np.float32) / 2,
        "spread": (rng.standard_normal(n) * 10 ** rng.uniform(-3, 3, n)).astype(np.float32),
        "sorted": np.linspace(9, -9, n, dtype=np.float32),
        "one block": np.concatenate([normal(100, 1.0), normal(n - 100, 1.0) - 60]).astype(np.float32),
        # Tokens that never get into top-p 0.5 themselves, but whose mass moves its end.
        "long tail": np.log([1, 0.3, 0.2, 0.1] + [6.9e-4] * (n - 4)).astype(np.float32),
    }[kind]
    params = params | {"temperature": 1e12}
    want = expected(logits, **params) > 0
    seen = draw(logits, 12 * int(want.sum()) + 60, seed=1, **params) > 0
    np.testing.assert_array_equal(np.flatnonzero(seen), np.flatnonzero(want))


@pytest.mark.parametrize(
    "params",
    [
        OFF | {"top_p": 0.9, "temperature": 1.0},
        OFF | {"top_k": 3000, "temperature": 1.5},
        OFF | {"top_k": 50, "top_p": 0.9},
        OFF | {"min_p": 0.001},
        OFF,
    ],
    ids=str,
)
@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_large_vocabulary(scale: float, params: dict[str, Any]) -> None:
    logits = normal(40_000, scale, seed=2)
    want = expected(logits, **params)
    counts = draw(logits, 3000, seed=5, **params)
    assert counts[want == 0].sum() == 0
    # Tokens by logit, in 40 groups of about equal mass.
    order = np.argsort(-logits, kind="stable")
    group = np.minimum((np.cumsum(want[order]) * 40).astype(int), 39)
    assert_follows(np.bincount(group, counts[order], 40), np.bincount(group, want[order], 40))


def test_equal_logits_are_drawn_evenly() -> None:
    n = 1000
    counts = draw(np.full(n, -3.25, np.float32), 100_000, seed=3, temperature=0.7, **OFF)
    assert_follows(counts, np.full(n, 1 / n))


@pytest.mark.parametrize(
    "penalties",
    [
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 0.7},
        {"presence_penalty": 0.8},
        {"frequency_penalty": 0.3},
        {"frequency_penalty": -0.3},
        {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2, "penalty_window": 4},
        {"repetition_penalty": 3.0, "penalty_window": 0},
        {"frequency_penalty": 0.2, "penalty_window": 1000, "logit_bias": {3: 1.0, 4: -float("inf")}},
    ],
    ids=str,
)
def test_penalties(penalties: dict[str, Any]) -> None:
    logits = normal(12, 1.0, seed=3)
    text = [0, 3, 3, 3, 7, 1, 3, 4, 0]
    params = OFF | {"temperature": 1.0} | penalties
    assert_follows(draw(logits, 4000, window=text, **params), expected(logits, window=text, **params))


def test_repetition_penalty_lowers_both_signs() -> None:
    logits = np.array([2.0, -2.0, 0.1, -2.5], np.float32)
    sampler = _core.Sampler(4, temperature=0, repetition_penalty=1.5, logit_bias={2: -float("inf")})
    sampler.accept([0, 1])
    assert [sampler.sample(logits) for _ in range(2)] == [0, 0]  # 1.33, once more 1.33
    only_negative = _core.Sampler(2, temperature=0, repetition_penalty=1.5)
    only_negative.accept([0])
    assert only_negative.sample(np.array([-2.0, -2.5], np.float32)) == 1  # -3 against -2.5


def test_a_drawn_token_enters_the_window() -> None:
    sampler = _core.Sampler(3, temperature=0, presence_penalty=10.0, penalty_window=2)
    logits = np.array([3.0, 2.0, 1.0], np.float32)
    assert [sampler.sample(logits) for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def xoshiro256pp(seed: int) -> Any:
    """The generator of the sampler in plain Python, from the papers."""
    mask = (1 << 64) - 1
    state = []
    for _ in range(4):
        seed = (seed + 0x9E3779B97F4A7C15) & mask
        z = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        state.append(z ^ (z >> 31))

    def rotate(x: int, k: int) -> int:
        return ((x << k) | (x >> (64 - k))) & mask

    while True:
        yield (rotate((state[0] + state[3]) & mask, 23) + state[0]) & mask
        t = (state[1] << 17) & mask
        state[2] ^= state[0]
        state[3] ^= state[1]
        state[1] ^= state[2]
        state[0] ^= state[3]
        state[2] ^= t
        state[3] = rotate(state[3], 45)


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_a_seed_means_the_same_everywhere(seed: int) -> None:
    """With equal logits a draw is a block from one random number and a place in it from the next."""
    n_blocks = 8
    sampler = _core.Sampler(256 * n_blocks, temperature=1.0, seed=seed, **OFF)
    logits = np.zeros(256 * n_blocks, np.float32)
    rng = xoshiro256pp(seed)
    for _ in range(200):
        block = int((next(rng) >> 11) * 2.0**-53 * n_blocks)
        assert sampler.sample(logits) == 256 * block + (next(rng) >> 56)


def test_reset_and_copy() -> None:
    logits = normal(500, 1.0)
    sampler = _core.Sampler(500, seed=9, frequency_penalty=0.5)
    first = [sampler.sample(logits) for _ in range(30)]
    twin = sampler.copy()
    assert [sampler.sample(logits) for _ in range(30)] == [twin.sample(logits) for _ in range(30)]
    sampler.reset()
    assert [sampler.sample(logits) for _ in range(30)] == first


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan; expected a finite number >= 0"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_k": -1}, "top_k is -1; expected at least 0"),
        ({"top_k": 2**40}, "top_k is 1099511627776"),
        ({"top_p": 1.5}, "top_p is 1.5; expected 0 to 1"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"min_p": -0.5}, "min_p is -0.5; expected 0 to 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0; expected a finite number > 0"),
        ({"presence_penalty": float("inf")}, "presence_penalty is inf"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty is nan"),
        ({"penalty_window": -1}, "penalty_window is -1; expected 0"),
        ({"logit_bias": {10: 1.0}}, r"logit_bias\[10\]: there is no such token; expected an id from 0 to 9"),
        ({"logit_bias": {-1: 1.0}}, r"logit_bias\[-1\]"),
        ({"logit_bias": {2**40: 1.0}}, "token id of logit_bias"),
        ({"logit_bias": {3: float("inf")}}, r"logit_bias\[3\] is inf"),
        ({"logit_bias": dict.fromkeys(range(10), -float("inf"))}, "bans all 10 tokens"),
        ({"seed": -1}, "seed is -1; expected 0 to 2"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
    ],
    ids=lambda v: str(v) if isinstance(v, dict) else "",
)
def test_parameters_out_of_range(params: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        _core.Sampler(10, **params)


def test_n_vocab_out_of_range() -> None:
    for n in (0, -1, 2**31):
        with pytest.raises(InvalidArgument, match=f"n_vocab is {n}"):
            _core.Sampler(n)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_logits_name_the_first_and_change_nothing(temperature: float, value: float) -> None:
    logits = normal(600, 1.0)
    params = {"temperature": temperature, "presence_penalty": 0.5, "seed": 6}
    sampler, untouched = _core.Sampler(600, **params), _core.Sampler(600, **params)
    bad = logits.copy()
    bad[[301, 599]] = value
    for _ in range(3):
        with pytest.raises(NumericError, match=f"logit 301 is {value}"):
            sampler.sample(bad)
        with pytest.raises(InvalidArgument, match="there are 599 logits; expected 600"):
            sampler.sample(logits[:599])
        with pytest.raises(InvalidArgument, match="token 2 is 600; expected an id from 0 to 599"):
            sampler.accept([1, 2, 600])
    assert [sampler.sample(logits) for _ in range(40)] == [untouched.sample(logits) for _ in range(40)]


def test_logits_must_be_a_float32_row() -> None:
    sampler = _core.Sampler(4, temperature=0)
    row = np.array([0, 3, 1, 2], np.float32)
    with pytest.raises(TypeError, match="float64; expected float32"):
        sampler.sample(row.astype(np.float64))
    with pytest.raises(TypeError, match="float32"):
        sampler.sample(row.astype(">f4"))
    with pytest.raises(TypeError, match="list; expected a numpy array"):
        sampler.sample([0.0, 3.0, 1.0, 2.0])
    with pytest.raises(InvalidArgument, match="2 dimensions; expected one"):
        sampler.sample(row[None])
    wide = np.zeros(8, np.float32)
    wide[::2] = row
    assert sampler.sample(wide[::2]) == sampler.sample(row) == 1
    read_only = row.copy()
    read_only.flags.writeable = False
    assert sampler.sample(read_only) == 1
    with pytest.raises(InvalidArgument, match="a token id is"):
        sampler.accept([2**40])


def test_a_contiguous_row_is_not_copied() -> None:
    logits = normal(1 << 20, 1.0)
    sampler = _core.Sampler(len(logits), temperature=0)
    tracemalloc.start()  # numpy reports its buffers
    sampler.sample(logits)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


def test_params_and_refusals() -> None:
    sampler = _core.Sampler(10, temperature=0.1, top_p=0.7, logit_bias={3: 0.1}, seed=2**64 - 1)
    assert sampler.n_vocab == 10
    assert sampler.params == {
        "temperature": 0.1,
        "top_k": 40,
        "top_p": 0.7,
        "min_p": 0.05,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "penalty_window": 64,
        "logit_bias": {3: 0.1},
        "seed": 2**64 - 1,
    }
    with pytest.raises(TypeError):
        _core.Sampler(10, 0.5)  # parameters are given by name
    with pytest.raises(TypeError):
        pickle.dumps(sampler)
    with pytest.raises(TypeError):
        copy.deepcopy(sampler)


def test_two_threads_on_one_sampler_get_an_error_not_a_race() -> None:
    logits = normal(1 << 20, 1.0)
    sampler = _core.Sampler(len(logits), **(OFF | {"top_p": 0.9}))
    outcomes: list[str] = []

    def work() -> None:
        for _ in range(30):
            try:
                sampler.sample(logits)
                outcomes.append("token")
            except StateError as e:
                assert "in use by another thread" in str(e)
                outcomes.append("busy")

    threads = [threading.Thread(target=work) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(outcomes) == 60
    assert set(outcomes) == {"token", "busy"}
    sampler.sample(logits)


def test_log_probabilities() -> None:
    logits = normal(3000, 4.0)
    x = logits.astype(np.float64)
    want = x - (np.log(np.exp(x - x.max()).sum()) + x.max())
    got = [_core.log_probability(logits, i) for i in range(0, 3000, 97)]
    np.testing.assert_allclose(got, want[::97], rtol=2e-7, atol=2e-7)
    order = np.lexsort((np.arange(3000), -x))
    for k in (0, 1, 5, 3000, 9999):
        top = _core.top_log_probabilities(logits, k)
        assert [i for i, _ in top] == order[:k].tolist()
        np.testing.assert_allclose([v for _, v in top], want[order[:k]], rtol=2e-7, atol=2e-7)
    assert _core.argmax(logits) == int(np.argmax(x))
    assert _core.argmax(np.array([1, 5, 5], np.float32)) == 1
    ties = np.zeros(600, np.float32)
    assert [i for i, _ in _core.top_log_probabilities(ties, 3)] == [0, 1, 2]
    np.testing.assert_allclose(_core.log_probability(ties, 5), -np.log(600), rtol=1e-7)


def test_log_probabilities_refuse_bad_input() -> None:
    bad = np.array([0, np.nan, 1], np.float32)
    calls: list[Any] = [
        _core.argmax,
        lambda v: _core.log_probability(v, 0),
        lambda v: _core.top_log_probabilities(v, 1),
    ]
    for call in calls:
        with pytest.raises(NumericError, match="logit 1 is nan"):
            call(bad)
        with pytest.raises(InvalidArgument, match="empty"):
            call(bad[:0])
        with pytest.raises(TypeError, match="float32"):
            call(np.zeros(3))
    row = np.zeros(3, np.float32)
    for token in (-1, 3):
        with pytest.raises(InvalidArgument, match=f"token id is {token}; expected 0 to 2"):
            _core.log_probability(row, token)
    with pytest.raises(InvalidArgument, match="k is -1"):
        _core.top_log_probabilities(row, -1)
