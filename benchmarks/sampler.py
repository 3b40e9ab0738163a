"""Time of one sampling step. One thread; the best of a few rounds, because other work shares the machine.

    python benchmarks/sampler.py [--vocab 262144] [--steps 50]

Rows are logits, columns times in microseconds: `peaked` has a few likely tokens, as a language model's
logits mostly do; `flat` spreads the mass over the vocabulary, the worst case for top-p.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from ringlm import _core

SETTINGS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "defaults (top-k 40, top-p 0.95, min-p 0.05)": {},
    "top-k 40": {"top_k": 40, "top_p": 1.0, "min_p": 0.0},
    "top-k 1000": {"top_k": 1000, "top_p": 1.0, "min_p": 0.0},
    "top-k 50000": {"top_k": 50000, "top_p": 1.0, "min_p": 0.0},
    "top-p 0.95": {"top_k": 0, "top_p": 0.95, "min_p": 0.0},
    "top-p 0.95, temperature 1": {"top_k": 0, "top_p": 0.95, "min_p": 0.0, "temperature": 1.0},
    "top-p 0.5, temperature 1.5": {"top_k": 0, "top_p": 0.5, "min_p": 0.0, "temperature": 1.5},
    "min-p 0.05": {"top_k": 0, "top_p": 1.0, "min_p": 0.05},
    "top-p 0.95, min-p 0.05": {"top_k": 0, "top_p": 0.95, "min_p": 0.05},
    "temperature alone": {"top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "greedy, penalties": {"temperature": 0.0, "repetition_penalty": 1.1, "penalty_window": 1024},
    "defaults, penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "penalty_window": 1024},
    "top-p 0.95, penalties": {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.1, "penalty_window": 1024},
}


def step_time(vocab: int, steps: int, logits: np.ndarray, settings: dict[str, object]) -> float:
    """Seconds per step: the best median of five rounds."""
    sampler = _core.Sampler(vocab, seed=1, **settings)
    sampler.accept(np.arange(min(vocab, 1024)).tolist())
    rounds = []
    for _ in range(5):
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            sampler.sample(logits)
            times.append(time.perf_counter() - start)
        rounds.append(float(np.median(times)))
    return min(rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--vocab", type=int, default=262_144)
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()

    rng = np.random.default_rng(0)
    normal = rng.standard_normal(args.vocab)
    peaked = 2.5 * normal
    peaked[rng.integers(0, args.vocab, 20)] += 18
    rows = {"peaked": peaked, "sigma 3": 3 * normal, "flat (sigma 1)": normal, "all equal": 0 * normal}
    print(f"{'microseconds, vocabulary ' + str(args.vocab):44}" + "".join(f"{name:>16}" for name in rows))
    for name, settings in SETTINGS.items():
        times = [step_time(args.vocab, args.steps, x.astype(np.float32), settings) for x in rows.values()]
        print(f"{name:44}" + "".join(f"{1e6 * t:16.0f}" for t in times))
    x = peaked.astype(np.float32)
    for name, function in {
        "argmax": lambda: _core.argmax(x),
        "log_probability": lambda: _core.log_probability(x, 5),
        "top_log_probabilities, k 20": lambda: _core.top_log_probabilities(x, 20),
    }.items():
        times = []
        for _ in range(args.steps):
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
        print(f"{name:44}{1e6 * float(np.median(times)):16.0f}")


if __name__ == "__main__":
    main()
