"""benchmarks/gpu_check.py without a GPU: the CPU stands in for it, a script for the kernel tests."""

from __future__ import annotations

import json
import re
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import gpu_models
import numpy as np
import pytest
from gpu_models import CASES, compare, open_model, path_of, read, text_of
from ringlm import Model

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import gpu_check
import gpu_stages
from gpu_check import ROOT

#: What test_cuda_gpu prints, with the test cases of this list and the exit code of each.
PROGRAM = """#!{python}
import json, os, sys
codes = {codes}
if "--measure" in sys.argv:
    print(json.dumps({{"name": "copy", "bytes": 2e9, "flops": 0, "seconds": 0.01}}))
    print(json.dumps({{"name": "gemv Q4_K", "bytes": 1e6, "flops": 2e6, "seconds": 1e-5}}))
    sys.exit(0)
if "--list-test-cases" in sys.argv:
    print("[doctest] listing all test case names", "=" * 9, *codes, "=" * 9, sep="\\n")
    sys.exit(0)
chosen = [a.partition("=")[2] for a in sys.argv if a.startswith("--test-case=")]
if chosen and "," not in chosen[0]:
    codes = {{name: code for name, code in codes.items() if name.replace(",", "?") == chosen[0]}}
print("Stand-in, sm_00")
for name, code in codes.items():
    if code > 1:
        print(f'an error, in or after the test case "{{name}}"', file=sys.stderr)
        sys.exit(code)
    if code == 1:
        print(f"TEST CASE:  {{name}}")
failed = sum(codes.values())
passed = len(codes) - failed
print(f"[doctest] test cases: {{len(codes)}} | {{passed}} passed | {{failed}} failed | 0 skipped")
sys.exit(failed > 0)
"""

#: Runs the program that it is given, as compute-sanitizer does.
SANITIZER = """#!{python}
import subprocess, sys
at = next(i for i, a in enumerate(sys.argv) if "test_cuda_gpu" in a)
assert sys.argv[1] == "--tool" and sys.argv[2] in ("memcheck", "racecheck")
print("========= ERROR SUMMARY: 0 errors", flush=True)
sys.exit(subprocess.run(sys.argv[at:]).returncode)
"""


def script(path: Path, text: str, **values: Any) -> Path:
    path.write_text(text.format(python=sys.executable, **values))
    path.chmod(0o755)
    return path


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """Runs the whole check on the CPU; the exit code, the results by name, and what was printed."""
    monkeypatch.setenv("RINGLM_CACHE", str(tmp_path / "cache"))

    def run(*options: str, codes: dict[str, int] | None = None) -> tuple[int, dict[str, Any], str]:
        program = script(
            tmp_path / "test_cuda_gpu", PROGRAM, codes=codes or {"first, of two": 0, "second": 0}
        )
        out = tmp_path / "out.json"
        small = ["--device", "cpu", "--layers", "1", "--steps", "8", "--depth", "40", "--only", "llama, Q4_0"]
        places = ["--tests", str(program), "--out", str(out), "--models", str(tmp_path / "models")]
        status = gpu_check.main([*small, *places, *options])
        found = json.loads(out.read_text())["results"]
        return status, {r["name"]: r for r in found}, capfd.readouterr().out

    return run


def test_a_rehearsal_of_everything(check: Any, tmp_path: Path) -> None:
    sanitizer = script(tmp_path / "compute-sanitizer", SANITIZER)
    status, results, printed = check("--sanitizer", str(sanitizer))
    assert status == 0, printed
    assert results["test cases"]["value"] == 2 and results["test cases"]["ok"]
    assert results["llama, Q4_0"]["value"] == 0 and results["llama, Q4_0"]["ok"]  # of the CPU and itself
    assert results["llama, Q4_0: greedy gap"]["detail"] == "the texts are equal"
    assert results["copy"]["gbs"] == pytest.approx(200)
    assert results["gemv Q4_K"]["detail"] == "0.20 TFLOP/s"
    assert "50 % of a copy" in next(line for line in printed.splitlines() if "gemv Q4_K" in line)
    for name in ("graph, int8: decode at 32", "no graph, f16: decode at 40"):
        rate = results[f"random llama, Q4_K and Q6_K, {name}"]
        assert rate["value"] > 0 and rate["gbs"] > 0
    assert results["random llama, Q4_K and Q6_K: prefill 40"]["value"] > 0
    assert results["random llama, Q4_K and Q6_K: attend at 40"]["gbs"] > 0
    assert results["memcheck"]["ok"] and results["racecheck"]["ok"]
    assert "0 of 5 checks failed" in printed


def test_failures_are_failures(check: Any) -> None:
    stages = ["--stages", "kernels"]
    status, results, _ = check(*stages, codes={"good": 0, "bad": 1})
    assert status == 1 and results["test cases"]["ok"] is False and results["test cases"]["detail"] == "bad"
    # A test that ends the process: the others are run all the same.
    status, results, _ = check(*stages, codes={"good": 0, "lost, for ever": 3, "also good": 0})
    assert status == 1 and results["all in one process"]["ok"] is False
    assert [results[n]["ok"] for n in ("good", "lost, for ever", "also good")] == [True, False, True]
    assert "lost, for ever" in results["lost, for ever"]["detail"]


def test_a_stage_that_takes_too_long_is_ended(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu_check.STAGES, "logits", 0.1)
    status, results, _ = check("--stages", "logits")
    assert status == 1 and "more than 0 s" in results["ended early"]["detail"]
    status, results, _ = check("--stages", "logits", "--seconds", "0")
    assert status == 1 and results["not run"]["ok"] is False


def test_what_is_missing_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setenv("RINGLM_CUDA_LIBRARY", "/nowhere/libringlm_cuda.so")
    assert gpu_check.main(["--tests", str(tmp_path / "test_cuda_gpu")]) == 2
    error = capsys.readouterr().err
    assert f"there is no {tmp_path / 'test_cuda_gpu'}" in error and "/nowhere/libringlm_cuda.so" in error


def test_every_weight_type_head_size_and_group_is_met() -> None:
    met: dict[str, set[Any]] = {"type": set(), "head": set(), "group": set(), "kv": set()}
    for case in CASES.values():
        f = case.family
        met["type"] |= set(f.types.values())
        met["head"].add(f.head_dim)
        met["group"].add(f.n_head // f.n_head_kv)
        met["kv"].add(case.kv)
        assert f.types["default"] in {"F16", "BF16", "F32"} or f.n_embd % 256 == 0
    quantized = {f"Q{x}" for x in ("4_0", "4_1", "5_0", "5_1", "8_0", "4_K", "5_K", "6_K")}
    assert met["type"] == quantized | {"F32", "F16", "BF16"}
    assert met["head"] == {64, 80, 96, 128, 256}
    assert met["group"] >= {1, 4, 7, 8, 16}
    assert met["kv"] == {"int8", "f16", ("int8", "f16"), ("f16", "int8")}
    assert {case.session.get("pinned", 0) > 0 for case in CASES.values()} == {False, True}
    assert all(case.options["chunk"] > 8 for case in CASES.values())


def test_every_pattern_of_the_sanitizer_names_a_test_case() -> None:
    sources = "".join(p.read_text() for p in (ROOT / "tests" / "cuda").glob("test_*.cpp"))
    names = re.findall(r'TEST_CASE\("(.+?)"', sources)
    for pattern in gpu_stages.SANITIZED:
        assert "," not in pattern and any(fnmatchcase(name, pattern) for name in names), pattern


def test_the_bars_are_bars(tmp_path: Path) -> None:
    case = CASES["mistral, Q5_K and Q6_K, heads of 128, window"]
    path = path_of(tmp_path, case)
    with open_model(path, "cpu", window=48) as cpu, open_model(path, "reference", window=48) as plain:
        ids = text_of(cpu, 60)
        expected = read(cpu, ids, case.options, 30)
        other = compare(expected, read(plain, ids, case.options, 30))
        assert other.met and 0 < other.kl_mean < 1e-5  # another order of sums
    with Model(path, window=40) as wrong:  # the last twelve tokens alone tell them apart
        assert not compare(expected, read(wrong, ids, case.options, 30)).met
    rows = np.array([[1.0, 0.5, 0.99], [0.0, 2.0, 1.0]], np.float32)
    assert gpu_models.parting([0, 1], rows, [0, 1]) == gpu_models.Parting(2, 0.0)
    assert gpu_models.parting([0, 1], rows, [2, 1]).gap == pytest.approx(0.01)
    assert gpu_models.parting([0, 1], rows, [0, 2]) == gpu_models.Parting(1, 0.5)
    nothing = compare(expected, np.full_like(expected, np.nan))
    assert not nothing.met
