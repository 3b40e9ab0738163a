"""The short version of benchmarks/soak.py; times are left to the long one."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TOKENS = 12_000


def soak_runs(*args: str) -> list[dict[str, Any]]:
    command = [sys.executable, str(BENCHMARKS / "soak.py"), "--json", "--tolerance", "inf", *args]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    runs: list[dict[str, Any]] = json.loads(done.stdout)["runs"]
    for run in runs:
        assert run["allocations"] == 0 and run["growth"] <= 0
    return runs


def test_nothing_grows_or_drifts() -> None:
    runs = soak_runs("--tokens", str(TOKENS), "--repeat")
    assert len({run["digest"] for run in runs}) == 1
    for run in runs:
        assert run["tokens"] == run["decoded"] + run["prefilled"] == TOKENS
        assert run["prefilled"] > 0.2 * TOKENS
        # 256, 96 and 160 visible tokens, and what a chunk of 32 needs besides.
        expected = {"n_ctx 256": 287, "window 96": 127, "window 160": 191}
        assert run["wraps"] == {name: TOKENS // capacity for name, capacity in expected.items()}


def test_nothing_grows_with_threads() -> None:
    alone, team = (soak_runs("--tokens", "1000", "-t", n)[0] for n in ("1", "2"))
    assert team["digest"] == alone["digest"]


def test_the_bars_are_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import soak

    good = soak.Run(
        tokens=5000,
        decoded=4000,
        prefilled=1000,
        seconds=1.0,
        wraps={"n_ctx 256": 17},
        allocations=0,
        rss_at_first_wrap=2**20,
        rss_max=2**20,
        rss_end=2**20 - 4096,
        first_median=100.0,
        first_mean=120.0,
        last_median=109.0,
        last_mean=300.0,
        timed=40,
        digest="1",
    )
    for changes, words in [
        ({}, []),
        ({"allocations": 3}, ["3 heap allocations in steps"]),
        ({"rss_max": 2**20 + 4096}, ["grew by 4,096 bytes"]),
        ({"last_median": 111.0}, ["1.110 times as long"]),
        ({"last_median": float("nan")}, ["nan times as long"]),
        ({"tokens": 4999}, ["at 4999, not 5000"]),
        ({"digest": "0"}, ["different bits"]),
    ]:
        missed = soak.missed([good, dataclasses.replace(good, **changes)], 5000, 0.1)
        assert len(missed) == len(words) and all(w in m for w, m in zip(words, missed, strict=True))
