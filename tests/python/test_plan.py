"""The planner: what it says against what sessions take, and `ringlm plan`."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from random_llama import Shape, write_llama
from ringlm import Model
from ringlm.cli import main
from ringlm.errors import InvalidArgument
from ringlm.plan import format_size, parse_size, plan

SHAPE = Shape(n_layer=4, n_head=6, n_head_kv=2, head_dim=64, n_ctx_train=4096)
GROUP = 3


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "m.gguf"
    write_llama(path, SHAPE)
    return path


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    with Model(path, n_threads=2) as opened:
        yield opened


def row_bytes(kv: str, head_dim: int = 64) -> int:
    return {"f32": 4 * head_dim, "f16": 2 * head_dim, "int8": head_dim + 2}[kv]


# ---- sizes as text -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("1000000", 1_000_000),
        ("640B", 640),
        ("512MiB", 512 * 2**20),
        ("4G", 4 * 2**30),
        ("8GiB", 8 * 2**30),
        (" 8 gib ", 8 * 2**30),
        ("8GB", 8 * 10**9),
        ("1.5k", 1536),
        ("1.5kB", 1500),
        ("0.1M", 104857),  # 104857.6
        ("2T", 2**41),
        ("9223372036854775807", 2**63 - 1),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "G", "GiB", "-1", "+1", "1e9", "inf", "nan", "0x10", "8 GiB x", "8GiBB", "8 i", "1."),
        *(".5G", "1,000", "1_000", "8gibibytes", "\u0668G", "1\n2", "9" * 5000, "9223372036854775808"),
        "8388608T",
    ],
)
def test_no_sizes(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"is no size|more than any machine"):
        parse_size(text)


def test_sizes_for_people() -> None:
    for n, text in [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.00 KiB"),
        (1536 * 2**20, "1.50 GiB"),
        (12 * 2**20, "12.0 MiB"),
        (10235, "10.0 KiB"),
        (300 * 2**10, "300 KiB"),
        (2**40, "1.00 TiB"),
        (2**52, "4096 TiB"),
    ]:
        assert format_size(n) == text


# ---- the plan ----------------------------------------------------------------------------------------------

OPTIONS: list[dict[str, Any]] = [
    {},
    {"n_ctx": 1},
    {"n_ctx": 300, "kv": "int8", "pinned": 37, "chunk": 5},
    {"n_ctx": 4096, "kv": ("int8", "f16"), "chunk": 512},
    {"n_ctx": 100, "kv": ("f16", "f32"), "chunk": 64, "pinned": 99},
    {"n_ctx": 64, "kv": "f32", "chunk": 1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("window", [None, 48, [None, 48, None, 200]], ids=str)
def test_the_plan_is_what_sessions_take(path: Path, window: Any, options: dict[str, Any]) -> None:
    with Model(path, n_threads=2, window=window) as model:
        p = plan(model, **options, sessions=3)
        sessions = [model.session(**options) for _ in range(3)]
        for session in sessions:
            assert (session.n_ctx, session.chunk) == (p.n_ctx, p.chunk)
            assert session.kv_nbytes == p.kv_nbytes and session.nbytes == p.session_nbytes
        assert p.total_nbytes - p.shared_nbytes == model.nbytes + sum(session.nbytes for session in sessions)
        for session in sessions:
            session.close()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_kv_is_the_formula(path: Path, options: dict[str, Any]) -> None:
    windows = [0, 48, 0, 200]
    with Model(path, n_threads=2, window=[w or None for w in windows]) as model:
        p = plan(model, **options)
    k, v = p.kv
    expected = 0
    for window in windows:
        visible = window if 0 < window < p.n_ctx else p.n_ctx
        expected += 2 * (row_bytes(k) + row_bytes(v)) * (visible + p.chunk - 1)
    assert p.kv_nbytes == expected == sum(kind.nbytes for kind in p.kinds)
    assert sum(kind.n_layer for kind in p.kinds) == 4
    assert {kind.window for kind in p.kinds} == {w if w < p.n_ctx else 0 for w in windows}
    for kind in p.kinds:
        assert kind.capacity == kind.visible + p.chunk - 1
        assert kind.pinned == (0 if kind.window else p.pinned)
    parts = p.kv_nbytes + p.activation_nbytes + p.scratch_nbytes + p.state_nbytes
    assert parts == p.session_nbytes


def test_comparisons(model: Model, tmp_path: Path) -> None:
    options: dict[str, Any] = {"n_ctx": 1000, "chunk": 32, "pinned": 8, "sessions": 2}
    p, f16 = plan(model, kv="int8", **options), plan(model, kv="f16", **options)
    assert dataclasses.astuple(p.f16) == (f16.kv_nbytes, f16.session_nbytes, f16.total_nbytes)
    assert p.f16 == f16.f16 and p.mha_f16 == f16.mha == f16.mha_f16
    # The K/V of the same model without groups.
    write_llama(tmp_path / "mha.gguf", SHAPE.with_(n_head_kv=6))
    with Model(tmp_path / "mha.gguf", n_threads=2) as other:
        assert plan(other, kv="int8", **options).kv_nbytes == p.mha.kv_nbytes == GROUP * p.kv_nbytes
    assert p.mha.session_nbytes - p.session_nbytes == p.mha.kv_nbytes - p.kv_nbytes
    assert p.mha.total_nbytes - p.total_nbytes == 2 * (p.mha.kv_nbytes - p.kv_nbytes)


@pytest.mark.parametrize("kv", ["f16", "int8", ("f32", "int8")], ids=str)
@pytest.mark.parametrize("sessions", [1, 3])
def test_the_largest_context_fits_and_one_more_does_not(model: Model, kv: Any, sessions: int) -> None:
    options: dict[str, Any] = {"kv": kv, "sessions": sessions, "chunk": 16, "pinned": 4}
    for n_ctx in (5, 6, 63, 64, 65, 1000, 4000):
        needed = plan(model, n_ctx=n_ctx, **options).total_nbytes
        for memory in (needed, needed + sessions):
            p = plan(model, n_ctx=n_ctx, memory=memory, **options)
            assert p.fits and p.largest_n_ctx >= n_ctx and p.most_sessions >= sessions
            best = p.largest_n_ctx
            assert plan(model, n_ctx=best, memory=memory, **options).fits
            assert not plan(model, n_ctx=best + 1, memory=memory, **options).fits
        p = plan(model, n_ctx=n_ctx, memory=needed - 1, **options)
        assert not p.fits and p.largest_n_ctx < n_ctx and p.most_sessions == sessions - 1


def test_memory_at_its_ends(model: Model) -> None:
    p = plan(model, memory=2**50)
    assert p.fits and p.largest_n_ctx == p.largest_n_ctx_int8 == 4096
    for memory in (0, 1000, model.nbytes - 1, model.nbytes, model.nbytes + 100):
        p = plan(model, memory=memory)
        assert not p.fits and (p.largest_n_ctx, p.largest_n_ctx_int8, p.most_sessions) == (0, 0, 0)
    tight = plan(model, n_ctx=1000).total_nbytes
    p = plan(model, n_ctx=2000, memory=tight)
    assert p.largest_n_ctx_int8 > 1.8 * p.largest_n_ctx
    assert plan(model).memory_nbytes > 2**20  # what is free now


def test_defaults_are_those_of_a_session(model: Model) -> None:
    p = plan(model)
    with model.session() as session:
        assert (p.n_ctx, p.chunk, p.pinned, p.kv) == (session.n_ctx, session.chunk, 0, ("f16", "f16"))
    assert plan(model, n_ctx=10, chunk=128).chunk == 10  # a chunk is no longer than the context


def test_planning_allocates_nothing(tmp_path: Path) -> None:
    write_llama(tmp_path / "long.gguf", SHAPE.with_(n_ctx_train=2**24))
    with Model(tmp_path / "long.gguf", n_threads=2) as model:
        p = plan(model, n_ctx=2**24, kv="f32", sessions=1000, memory=2**40)
    assert not p.fits and p.kv_nbytes > 4 * 2**24 * 2 * 2 * 256
    assert p.total_nbytes > 1000 * p.kv_nbytes and p.mha.kv_nbytes == 3 * p.kv_nbytes


@pytest.mark.parametrize(
    "options",
    [
        *({name: bad} for name in ("n_ctx", "chunk", "sessions") for bad in (0, -1, 2**31, 1.5, "1")),
        *({"pinned": bad} for bad in (-1, 2**31, 1.0, "0")),
        *({"memory": bad} for bad in (-1, 2**63, 1e9, "8GiB")),
        *(
            {"kv": bad}
            for bad in ("f8", "", ("f16",), ["f16", "f16"], ("f16", "f16", "f16"), None, ("f16", 1))
        ),
        {"n_ctx": 4097},
        {"n_ctx": 8, "pinned": 8},
    ],
    ids=str,
)
def test_what_no_session_takes_cannot_be_planned(model: Model, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(options)) if len(options) == 1 else "pinned"):
        plan(model, **options)


# ---- the command -------------------------------------------------------------------------------------------

Command = Callable[..., str]


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str], path: Path) -> Command:
    """Runs `ringlm plan` on the model and returns what it printed, or the error."""

    def run(*args: str, code: int = 0) -> str:
        found = main(["plan", str(path), "-t", "2", *args])
        out, err = capfd.readouterr()
        assert found == code, err
        assert (err if code == 0 else out) == ""
        return out if code == 0 else err

    return run


def test_json_is_the_plan(command: Command, model: Model) -> None:
    args = ("-c", "512", "--kv", "int8,f16", "--pinned", "8", "--chunk", "32", "--sessions", "4")
    record = json.loads(command(*args, "--memory", "64MiB", "--json"))
    expected = plan(model, n_ctx=512, kv=("int8", "f16"), pinned=8, chunk=32, sessions=4, memory=64 * 2**20)
    assert record == json.loads(json.dumps(dataclasses.asdict(expected)))
    assert record["kinds"] == [
        {
            "window": 0,
            "n_layer": 4,
            "capacity": 543,
            "visible": 512,
            "pinned": 8,
            "nbytes": 4 * 2 * (66 + 128) * 543,
        }
    ]
    assert set(record["f16"]) == {"kv_nbytes", "session_nbytes", "total_nbytes"}
    record = json.loads(command("--json"))
    assert record["memory_nbytes"] > 2**20 and record["fits"] is True


def test_the_table(command: Command, model: Model, path: Path) -> None:
    out = command("-c", "512", "--kv", "int8", "--pinned", "8", "--sessions", "2", "--memory", "1GiB")
    p = plan(model, n_ctx=512, kv="int8", pinned=8, sessions=2, memory=2**30)
    lines = out.splitlines()
    assert lines[0] == f"model        {path}"
    assert lines[1] == "shape        4 layers, 6 query heads over 2 KV heads of 64"
    assert lines[2] == "session      512 tokens, 8 pinned, chunk 128, K/V int8"
    table = {m[1]: int(m[2].replace(",", "")) for m in re.finditer(r"(?m)^(.+?)  +([\d,]+)  ", out)}
    assert table.pop("K/V, 4 layers, 512 tokens, 639 rows") == p.kv_nbytes == 4 * 2 * 2 * 66 * 639
    assert table.pop("weights and 2 sessions") == p.total_nbytes
    assert table.pop("one session") == p.session_nbytes
    assert table.pop("weights") == p.weight_nbytes == model.nbytes
    assert table.pop("shared by all sessions") == p.shared_nbytes > 4 * 64 * 9
    for label, rows in [
        ("int8", p.kv_nbytes),
        ("f16", p.f16.kv_nbytes),
        ("int8, 6 KV heads (MHA)", 3 * p.kv_nbytes),
        ("f16, 6 KV heads (MHA)", 3 * p.f16.kv_nbytes),
    ]:
        assert table.pop(label) == rows
    assert set(table) == {"activations", "scratch", "token ids, logits, bookkeeping"}
    assert "memory       1,073,741,824 bytes (1.00 GiB) given: fits, " in out
    assert "largest      4,096 tokens of context for 2 sessions, the trained length\n" in out
    assert max(map(len, lines[1:])) <= 80


def test_what_is_the_same_is_said_once(command: Command, tmp_path: Path) -> None:
    out = command("-c", "64")
    assert out.count("\nf16  ") == 1 and out.count("MHA") == 1
    assert "free now" in out


def test_what_does_not_fit_says_what_would(command: Command, model: Model) -> None:
    memory = plan(model, n_ctx=1000).total_nbytes
    out = command("-c", "2000", "--sessions", "2", "--memory", str(memory))
    assert ": does NOT fit, " in out and " short\n" in out
    p = plan(model, n_ctx=2000, sessions=2, memory=memory)
    assert 0 < p.largest_n_ctx < p.largest_n_ctx_int8 and p.most_sessions == 0
    assert f"largest      {p.largest_n_ctx} tokens of context for 2 sessions\n" in out
    assert f"             {p.largest_n_ctx_int8} tokens with --kv int8\n" in out
    out = command("-c", "900", "--sessions", "2", "--memory", str(memory))
    assert "             1 session of 900 tokens\n" in out
    out = command("--memory", "1k")
    assert "largest      none: the weights alone do not fit\n" in out
    out = command("--sessions", "1000", "--memory", str(memory))
    assert "largest      none: no context fits for 1,000 sessions\n" in out


def test_errors_of_the_command(command: Command) -> None:
    assert "'8 GiX' is no size" in command("--memory", "8 GiX", code=2)
    assert "--sessions" in command("--sessions", "0", code=2)
    assert "4097" in command("-c", "4097", code=1)
    assert "f8" in command("--kv", "f8", code=1)
