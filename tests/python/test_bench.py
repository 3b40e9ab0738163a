"""ringlm bench: what it measures, counts, prints and refuses. Speed itself is not a test's business."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from random_llama import Shape, write_llama
from ringlm import Model
from ringlm.bench import Report, bench, step_bytes
from ringlm.cli import bench as command
from ringlm.cli import main
from ringlm.errors import InvalidArgument

SHAPE = Shape(n_layer=3, n_head=4, n_head_kv=2, head_dim=64, n_ctx_train=512)
OPERATIONS = ["embed", "norm_qkv", "rope_append", "attend"]
OPERATIONS += ["out_residual", "norm_gate_up", "down_residual", "norm_head"]
FIELDS = {"kind", "n", "depth", "kv", "threads", "tokens_per_second", "bytes_per_token", "gbs"}
FIELDS |= {"fraction_of_read_bandwidth", "p50_ms", "p99_ms"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "m.gguf"
    write_llama(path, SHAPE)
    return path


@pytest.fixture(scope="module")
def report(path: Path) -> Report:
    return bench(
        path, n_prefill=20, n_decode=6, depths=[0, 40], kv=["f16", "int8"], threads=[1, 2], chunk=8,
        repeat=2, profile=True,
    )  # fmt: skip


def row_bytes(kv: str) -> int:
    return {"f32": 4 * 64, "f16": 2 * 64, "int8": 64 + 2}[kv]


def weight_bytes(tokens: int, head: bool) -> int:
    """Of a step, from the shape: float32 all."""
    s = SHAPE
    q, kv = s.n_head * s.dim, s.n_head_kv * s.dim
    matrices = q * s.n_embd * 2 + 2 * kv * s.n_embd + 3 * s.n_ff * s.n_embd
    vectors = 2 * s.n_embd + (q + 2 * kv + s.n_embd) + (2 * s.n_ff + s.n_embd)
    return 4 * (
        tokens * s.n_embd + s.n_layer * (matrices + vectors) + head * (s.n_embd + s.n_vocab * s.n_embd)
    )


# ---- what is measured --------------------------------------------------------------------------------------


def test_every_combination_is_there_once(report: Report) -> None:
    found = [(r.threads, r.depth, r.kv, r.kind, r.n) for r in report.results]
    expected = [
        (threads, depth, kv, kind, n)
        for threads in (1, 2)
        for depth in (0, 40)
        for kv in ("f16", "int8")
        for kind, n in (("prefill", 20), ("decode", 6))
    ]
    assert found == expected


def test_figures_belong_together(report: Report) -> None:
    for r in report.results:
        assert r.tokens_per_second > 0 and 0 < r.p50_ms <= r.p99_ms
        assert r.gbs == pytest.approx(r.bytes_per_token * r.tokens_per_second / 1e9)
        limit = r.gbs / r.fraction_of_read_bandwidth
        assert limit <= report.read_bandwidth_gbs_by_threads[r.threads] * (1 + 1e-9)
    assert set(report.read_bandwidth_gbs_by_threads) == {1, 2}
    assert report.read_bandwidth_gbs == max(report.read_bandwidth_gbs_by_threads.values())
    assert report.load_s > 0
    assert report.first_token_ms > 50  # a Python process starts, and loads ringlm
    assert 10 * 2**20 < report.peak_memory_bytes < 4 * 2**30


def test_bytes_are_those_of_the_shape(report: Report) -> None:
    heads = SHAPE.n_layer * SHAPE.n_head_kv * 2
    for r in report.results:
        if r.kind == "decode":
            seen = sum(r.depth + i + 1 for i in range(6)) / 6
            expected = weight_bytes(1, True) + heads * row_bytes(r.kv) * seen
        else:  # chunks of 8, 8 and 4; only the last makes logits
            seen = (r.depth + 8) + (r.depth + 16) + (r.depth + 20)
            weights = weight_bytes(8, False) * 2 + weight_bytes(4, True)
            expected = (weights + heads * row_bytes(r.kv) * seen) / 20
        assert r.bytes_per_token == pytest.approx(expected)


@pytest.mark.parametrize("options", [{}, {"window": 24}, {"window": [0, 24, 100]}], ids=str)
@pytest.mark.parametrize("session", [{}, {"n_ctx": 48, "overflow": "slide", "pinned": 5}], ids=str)
def test_a_decoded_token_reads_what_the_trace_counts(
    path: Path, options: dict[str, Any], session: dict[str, Any]
) -> None:
    if options == {"window": 24}:  # which pins nothing
        session = {**session, "pinned": 0}
    with Model(path, n_threads=1, **options) as model, model.session(kv=("int8", "f32"), **session) as s:
        trace = s.trace()
        for token in range(90):
            s.decode(token)
        for record in trace:
            assert step_bytes(s, record) == (record.weight_bytes, record.kv_bytes)
            assert sum(record.operation_bytes.values()) == record.weight_bytes + record.kv_bytes
            assert record.operation_bytes["norm_head"] == 4 * 64 * (SHAPE.n_vocab + 1)
            assert record.operation_bytes["rope_append"] == 0


def test_rows_of_a_chunk_count_once(path: Path) -> None:
    """A chunk sees what its tokens see, together."""
    windows = [0, 24, 0]
    rows = SHAPE.n_head_kv * 2 * row_bytes("f16")
    with Model(path, n_threads=1, window=windows) as model, model.session(chunk=8) as s:
        trace = s.trace()
        s.prefill([1] * 60)
        for r in trace:
            seen = {
                (layer, t)
                for layer, window in enumerate(windows)
                for p in range(r.position, r.position + r.n_tokens)
                for t in range(max(p - window + 1, 0) if window else 0, p + 1)
            }
            assert step_bytes(s, r)[1] == rows * len(seen)


def test_a_profile_sums_to_the_step(report: Report) -> None:
    runs = {(c.kind, c.depth, c.kv, c.threads) for c in report.profile}
    assert runs == {(r.kind, r.depth, r.kv, r.threads) for r in report.results}
    for r in report.results:
        costs = [
            c
            for c in report.profile
            if (c.kind, c.depth, c.kv, c.threads) == (r.kind, r.depth, r.kv, r.threads)
        ]
        assert [c.operation for c in costs] == [*OPERATIONS, "other"]
        assert sum(c.share_of_step for c in costs) == pytest.approx(1)
        assert all(c.ms >= 0 and c.gbs >= 0 for c in costs)
        steps = r.n / (1 if r.kind == "decode" else 20 / 3)
        assert sum(c.bytes for c in costs) == pytest.approx(r.bytes_per_token * r.n / steps)


def test_parts_are_skipped(path: Path) -> None:
    only_prefill = bench(path, n_prefill=8, n_decode=0, repeat=1, threads=[1])
    assert [r.kind for r in only_prefill.results] == ["prefill"]
    only_decode = bench(path, n_prefill=0, n_decode=3, repeat=1, threads=[1], depths=[2, 2])
    assert [(r.kind, r.depth) for r in only_decode.results] == [("decode", 2)]
    assert only_decode.profile == []


@pytest.mark.parametrize("window", [None, 16, [0, 16, 0]], ids=str)
def test_depths_that_rings_do_not_hold(path: Path, window: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows wrap, sessions slide: the depth is the one asked for, in every round."""
    from ringlm import bench as module

    seen = []
    whole_round = module._round

    def look(s: Any, *rest: Any) -> None:
        seen.append((s.session.position, s.session.stats.visible))
        whole_round(s, *rest)

    monkeypatch.setattr(module, "_round", look)
    monkeypatch.setattr(module, "first_token_seconds", lambda *_: 1.0)
    monkeypatch.setattr(module, "_open", lambda path, n: Model(path, n_threads=1, window=window))
    bench(path, n_prefill=12, n_decode=12, depths=[60], chunk=4, repeat=3, threads=[1])
    assert seen == [(60, 16 if window == 16 else 60)] * 3
    seen.clear()
    slides = {"n_ctx": 32, "overflow": "slide", "chunk": 4, "pinned": 0 if window == 16 else 3}
    r = bench(path, n_prefill=12, n_decode=12, depths=[0, 600], repeat=3, threads=[1], **slides)
    assert [position for position, _ in seen[:3]] == [0] * 3
    assert all(position >= 600 for position, _ in seen[3:])
    assert r.results[2].bytes_per_token >= r.results[0].bytes_per_token


# ---- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_prefill": -1}, "n_prefill is -1; expected how many"),
        ({"n_decode": 2.5}, "n_decode is 2.5"),
        ({"n_prefill": 0, "n_decode": 0}, "nothing to measure"),
        ({"depths": [0, -4]}, "depth is -4"),
        ({"depths": []}, "depths is empty"),
        ({"kv": ["f16", "int4"]}, "kv is 'int4'; expected 'f16', 'int8' or 'f32'"),
        ({"kv": [("f16", "q8")]}, "expected 'f16', 'int8' or 'f32'"),
        ({"threads": [0]}, "threads is 0; expected at least 1"),
        ({"threads": [1, 5000]}, "at most 1024"),
        ({"repeat": 0}, "repeat is 0"),
        ({"chunk": 0}, "chunk is 0"),
        ({"overflow": "wrap"}, "overflow is 'wrap'"),
        ({"depths": [0, 500]}, "1012, and what the model was trained for is 512; take less"),
        ({"n_ctx": 100, "n_prefill": 50, "depths": [51]}, "are 179, and the context is 100"),
        ({"pinned": 600, "n_prefill": 1, "n_decode": 1}, "trained"),
    ],
    ids=str,
)
def test_bad_options_are_refused(path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        bench(path, **{"threads": [1], **options})


def test_the_command_refuses_in_one_line(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for args, code, message in [
        (["-d", "0,many"], 2, "'0,many' is no number"),
        (["-p", "-3"], 2, "'--prefill'"),
        (["--kv", "f16,q4"], 1, "kv is 'q4'"),
        (["-d", "9999"], 1, "trained for is 512"),
        (["-t", "0"], 1, "threads is 0"),
    ]:
        assert main(["bench", str(path), *args]) == code
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and message in err


def test_a_chart_needs_matplotlib(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [m for m in sys.modules if m.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # importing it fails
    assert main(["bench", str(path), "--plot", "out.png"]) == 1
    assert "pip install 'ringlm[plot]'" in capsys.readouterr().err


# ---- what is shown -----------------------------------------------------------------------------------------


def test_json(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["-p", "8", "-n", "4", "-d", "0,16", "--kv", "int8/f16", "-t", "1", "--repeat", "1", "--json"]
    assert main(["bench", str(path), *args]) == 0
    out = json.loads(capsys.readouterr().out)
    assert set(out["machine"]) == {"cpu", "cores", "isa", "ringlm", "os", "date"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", out["machine"]["date"])
    assert isinstance(out["read_bandwidth_gbs"], float) and out["read_bandwidth_gbs"] > 0
    assert [(r["kind"], r["n"], r["depth"], r["kv"]) for r in out["results"]] == [
        (kind, n, depth, "int8/f16") for depth in (0, 16) for kind, n in (("prefill", 8), ("decode", 4))
    ]
    assert all(set(r) == FIELDS for r in out["results"])
    assert {"load_s", "first_token_ms", "peak_memory_bytes"} <= set(out)


@pytest.mark.parametrize("columns", [80, 120])
def test_tables_fit_the_terminal(report: Report, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "dumb")
    wide = [
        dataclasses.replace(
            r, depth=131072, kv="int8/f16", n=512, bytes_per_token=4.1e9, tokens_per_second=9999.9
        )
        for r in report.results
    ]
    command._show(dataclasses.replace(report, model="m.gguf", results=wide))
    lines = screen.getvalue().splitlines()
    tables = [line for line in lines if re.match(r"(prefill|decode) 512 ", line)]
    assert len(tables) == len(wide)
    for line in tables:
        assert len(line) <= columns and "…" not in line
        assert re.search(
            r"131072 +int8/f16 +\d +9,999\.9 +\d+\.\d\d +\d+\.\d\d +4100\.0 +\d+\.\d +\d+%", line
        )
    for operation in OPERATIONS:
        assert sum(line.startswith(operation + " ") for line in lines) == len(wide)


def test_a_chart_is_drawn(report: Report, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from ringlm.bench_plot import plot

    plot(report, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    plot(dataclasses.replace(report, results=report.results[:1]), tmp_path / "out.svg")
    assert "prefill" in (tmp_path / "out.svg").read_text(encoding="utf-8")
    with pytest.raises(InvalidArgument, match=r"ends in '\.xyz'; a chart is written as \.png"):
        plot(report, tmp_path / "out.xyz")
