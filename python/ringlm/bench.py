"""How fast a model runs, and how near that is to what the machine's memory allows.

Decoding a token reads every weight and every K/V row in sight once, so bytes per token over the read
bandwidth is the least time that it can take. The bandwidth is measured in the same run, by the same number of
threads, between the rounds that are compared with it.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringlm._machine import Machine, PeakMemory, first_token_seconds, no_garbage, this_machine
from ringlm.cache import cache_options, check_count
from ringlm.errors import InvalidArgument
from ringlm.session import Session

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    import ringlm._core as core
    from ringlm.model import Model
    from ringlm.trace import TraceRecord

__all__ = ["KvFormat", "Machine", "OperationCost", "Report", "Result", "bench", "kv_name", "step_bytes"]

KvFormat = str | tuple[str, str]
Progress = Callable[[str], None]

WARM_UP = 8  # tokens decoded before anything is measured
PASSES = 5  # over the reader's buffer, before and behind every round
LARGEST_BUFFER = 1 << 30  # no cache is as large; a larger buffer would say the same
PROFILED = 64  # decoded tokens that a profile is the mean of, at most


@dataclass(frozen=True)
class Result:
    """A step is a decoded token, or a chunk of a prefill."""

    #: ``"prefill"`` or ``"decode"``.
    kind: str
    #: Tokens, after ``depth`` others.
    n: int
    depth: int
    kv: str
    threads: int
    #: The median of the rounds.
    tokens_per_second: float
    #: What has to be read: in each step every weight that it uses and every K/V row that it sees, once.
    bytes_per_token: float
    #: 1e9 bytes a second.
    gbs: float
    fraction_of_read_bandwidth: float
    #: Percentiles of the steps of all rounds.
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True)
class OperationCost:
    """One operation, over all layers, in the mean step of a traced round."""

    kind: str
    n: int
    depth: int
    kv: str
    threads: int
    #: One of the eight, or ``"other"``: the rest of the step.
    operation: str
    ms: float
    share_of_step: float
    bytes: float
    gbs: float
    fraction_of_read_bandwidth: float


@dataclass(frozen=True)
class Report:
    machine: Machine
    model: str
    #: The best of all passes over a buffer as large as the weights, by as many threads as are fastest.
    read_bandwidth_gbs: float
    read_bandwidth_gbs_by_threads: dict[int, float]
    results: list[Result]
    #: Opening the file and packing the weights, the fastest opening.
    load_s: float
    #: From the start of a process to the first token's text, for a prompt of five tokens, with the most of
    #: the threads; the median.
    first_token_ms: float
    #: Resident, at most, while models were open: weights, sessions and Python, without the reader's buffer.
    peak_memory_bytes: int
    #: Empty unless it was asked for.
    profile: list[OperationCost] = field(default_factory=list)


@dataclass
class _Series:
    """What the rounds of one session have found so far."""

    session: Session
    kv: str
    depth: int
    prefill_seconds: list[float] = field(default_factory=list)
    decode_seconds: list[float] = field(default_factory=list)
    chunk_seconds: list[float] = field(default_factory=list)
    token_seconds: list[float] = field(default_factory=list)
    bandwidth: float = 0.0


@dataclass(frozen=True)
class _Plan:
    n_prefill: int
    n_decode: int
    depths: list[int]
    kv: list[KvFormat]
    threads: list[int | None]
    session: dict[str, Any]
    repeat: int
    profile: bool
    progress: Progress


def bench(
    path: str | os.PathLike[str],
    *,
    n_prefill: int = 512,
    n_decode: int = 128,
    depths: Sequence[int] = (0,),
    kv: Sequence[KvFormat] = ("f16",),
    threads: Sequence[int | None] = (None,),
    n_ctx: int | None = None,
    pinned: int = 0,
    chunk: int = 128,
    overflow: str = "error",
    repeat: int = 5,
    profile: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Measures a model in every combination of ``depths``, ``kv`` and ``threads`` (None: all cores).

    A session is filled with ``depth`` tokens; then, ``repeat`` times, ``n_prefill`` tokens are prefilled and
    ``n_decode`` decoded behind them, and the session goes back. 0 skips a part. The K/V formats take turns.
    ``n_ctx`` None is as long as needed, or the session's default if it slides. The tokens are random, the
    same in every run. ``progress`` is called with a line that says what is being done.

    Raises InvalidArgument, and what Model and Session raise.
    """
    plan = _Plan(
        check_count("n_prefill", n_prefill, 0, "how many tokens to prefill, 0 to skip that part"),
        check_count("n_decode", n_decode, 0, "how many tokens to decode, 0 to skip that part"),
        _several(
            "depths", [check_count("depth", d, 0, "how many tokens come before, at least 0") for d in depths]
        ),
        _several("kv", list(kv)),
        _several(
            "threads",
            [t if t is None else check_count("threads", t, 1, "at least 1", 1024) for t in threads],
        ),
        {"n_ctx": n_ctx, "pinned": pinned, "chunk": chunk, "overflow": overflow},
        check_count("repeat", repeat, 1, "how many rounds to measure, at least 1"),
        profile,
        progress or (lambda _: None),
    )
    for each in plan.kv:
        cache_options(n_ctx, each, chunk, pinned, overflow)  # refuses bad ones before anything is opened
    if not n_prefill and not n_decode:
        raise InvalidArgument("n_prefill and n_decode are both 0: nothing to measure; give one of them")
    return _run(Path(path), plan)


def _run(path: Path, plan: _Plan) -> Report:
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    results: list[Result] = []
    profile: list[OperationCost] = []
    bandwidth: dict[int, float] = {}
    load, peak, isa = float("inf"), 0, ""
    for n_threads in plan.threads:
        plan.progress("loading the model")
        memory = PeakMemory()
        began = time.perf_counter()
        model = _open(path, n_threads)
        with model:
            load = min(load, time.perf_counter() - began)
            _check_fits(model, plan)
            isa = model.backend
            memory.look()
            reader = _reader(model)
            memory.besides = reader.nbytes
            found: list[Result] = []
            for depth in plan.depths:
                found += _at_depth(model, reader, plan, depth, profile)
            memory.look()
        results += found
        best = max(r.gbs / r.fraction_of_read_bandwidth for r in found)
        bandwidth[found[0].threads] = max(best, bandwidth.get(found[0].threads, 0.0))
        peak = max(peak, memory.bytes)
        del reader
    plan.progress("timing the first token")
    most = None if None in plan.threads else max(t for t in plan.threads if t)
    first = [first_token_seconds(path, most) for _ in range(min(plan.repeat, 3))]
    return Report(
        machine=this_machine(isa, date),
        model=str(path),
        read_bandwidth_gbs=max(bandwidth.values()),
        read_bandwidth_gbs_by_threads=bandwidth,
        results=results,
        load_s=load,
        first_token_ms=1e3 * statistics.median(first),
        peak_memory_bytes=peak,
        profile=profile,
    )


def _open(path: Path, n_threads: int | None) -> Model:
    from ringlm.model import Model

    return Model(path, n_threads=n_threads)


def _reader(model: Model) -> core.MemoryReader:
    import ringlm._core as core

    return core.MemoryReader(min(model.nbytes, LARGEST_BUFFER), model.n_threads)


# ---- one depth ---------------------------------------------------------------------------------------------


def _at_depth(
    model: Model, reader: core.MemoryReader, plan: _Plan, depth: int, profile: list[OperationCost]
) -> list[Result]:
    """Results of every K/V format, in turns, so that a drift of the machine meets all of them alike."""
    import numpy as np

    ids = np.random.default_rng(0).integers(
        0, model.n_vocab, depth + max(plan.n_prefill, plan.n_decode) + WARM_UP, np.int32
    )
    out = np.zeros(model.n_vocab, np.float32)
    several: list[_Series] = []
    try:
        for kv in plan.kv:
            name = kv_name(kv)
            plan.progress(f"{_count(model.n_threads, 'thread')}, K/V {name}: filling {depth} tokens")
            session = model.session(kv=kv, **_session_options(plan, depth))
            several.append(_Series(session, name, depth))
            if depth:
                session.prefill(ids[:depth], out=out)
            _warm_up(several[-1], plan, ids, out)
        with no_garbage():
            for i in range(plan.repeat):
                for s in several:
                    plan.progress(
                        f"{_count(model.n_threads, 'thread')}, K/V {s.kv}, depth {depth}: "
                        f"round {i + 1} of {plan.repeat}"
                    )
                    _round(s, reader, plan, ids, out)
        found: list[Result] = []
        for s in several:
            found += _evaluate(s, model, plan, ids, out, profile)
        return found
    finally:
        for s in several:
            s.session.close()


def _session_options(plan: _Plan, depth: int) -> dict[str, Any]:
    needed = depth + max(plan.n_prefill, plan.n_decode)
    fit = None if plan.session["overflow"] == "slide" else max(needed, plan.session["pinned"] + 1)
    return {**plan.session, "n_ctx": plan.session["n_ctx"] or fit}


def _warm_up(s: _Series, plan: _Plan, ids: npt.NDArray[np.int32], out: npt.NDArray[np.float32]) -> None:
    """Runs the code, and brings all weights into memory, once."""
    if plan.n_prefill:
        s.session.prefill(ids[s.depth :][: min(plan.n_prefill, s.session.chunk)], out=out)
        _go_back(s, ids, out)
    if plan.n_decode:
        for token in ids[s.depth :][: min(plan.n_decode, WARM_UP)].tolist():
            s.session.decode(token, out=out)
        _go_back(s, ids, out)


def _round(
    s: _Series,
    reader: core.MemoryReader,
    plan: _Plan,
    ids: npt.NDArray[np.int32],
    out: npt.NDArray[np.float32],
) -> None:
    clock = time.perf_counter

    def read() -> None:
        s.bandwidth = max(s.bandwidth, reader.nbytes / min(reader.read(PASSES)) / 1e9)

    read()
    if plan.n_prefill:
        marks = [clock()]
        s.session.prefill(
            ids[s.depth :][: plan.n_prefill], out=out, progress=lambda _, __: marks.append(clock())
        )
        end = clock()
        s.prefill_seconds.append(end - marks[0])
        s.chunk_seconds += [b - a for a, b in pairwise(marks)]
        _go_back(s, ids, out)
        read()
    if plan.n_decode:
        step, marks = s.session.decode, [clock()]
        for token in ids[s.depth :][: plan.n_decode].tolist():
            step(token, out=out)
            marks.append(clock())
        s.decode_seconds.append(marks[-1] - marks[0])
        s.token_seconds += [b - a for a, b in pairwise(marks)]
        _go_back(s, ids, out)
        read()


def _go_back(s: _Series, ids: npt.NDArray[np.int32], out: npt.NDArray[np.float32]) -> None:
    """To the depth. Where every layer's ring has wrapped the next token costs what the last one did, and the
    session just goes on; where only some have, it may have to be filled anew."""
    session = s.session
    if session.overflow == "slide" and session.position - session.n_ctx >= s.depth:
        return
    try:
        session.rewind(session.position - s.depth)
    except InvalidArgument:
        session.rewind(session.position)
        session.prefill(ids[: s.depth], out=out)


# ---- what was found ----------------------------------------------------------------------------------------


def _evaluate(
    s: _Series,
    model: Model,
    plan: _Plan,
    ids: npt.NDArray[np.int32],
    out: npt.NDArray[np.float32],
    profile: list[OperationCost],
) -> list[Result]:
    found = []
    for kind, n, rounds, steps in (
        ("prefill", plan.n_prefill, s.prefill_seconds, s.chunk_seconds),
        ("decode", plan.n_decode, s.decode_seconds, s.token_seconds),
    ):
        if not n:
            continue
        records = _traced(s, kind, ids[s.depth :][:n], out)
        _go_back(s, ids, out)
        if plan.profile:
            profile += _costs(s, model, n, records[:PROFILED])
        nbytes = sum(sum(step_bytes(s.session, r)) for r in records) / n
        rate = n / statistics.median(rounds)
        found.append(
            Result(
                kind=kind,
                n=n,
                depth=s.depth,
                kv=s.kv,
                threads=model.n_threads,
                tokens_per_second=rate,
                bytes_per_token=nbytes,
                gbs=nbytes * rate / 1e9,
                fraction_of_read_bandwidth=nbytes * rate / 1e9 / s.bandwidth,
                p50_ms=1e3 * _percentile(steps, 50),
                p99_ms=1e3 * _percentile(steps, 99),
            )
        )
    return found


def _traced(
    s: _Series, kind: str, ids: npt.NDArray[np.int32], out: npt.NDArray[np.float32]
) -> list[TraceRecord]:
    with s.session.trace(len(ids)) as trace:
        if kind == "prefill":
            s.session.prefill(ids, out=out)
        else:
            for token in ids.tolist():
                s.session.decode(token, out=out)
        return list(trace)


def step_bytes(session: Session, r: TraceRecord) -> tuple[int, int]:
    """(weights, K/V rows) that a step had to read, in bytes, everything once.

    The trace counts the rows of each query; tokens of one chunk see mostly the same ones.
    """
    rows = 0
    for kind in session.kinds:
        seen = min(r.position + r.n_tokens, kind.visible + r.n_tokens - 1)
        rows += kind.nbytes // kind.capacity * seen
    return r.weight_bytes, rows


def _costs(s: _Series, model: Model, n: int, records: list[TraceRecord]) -> list[OperationCost]:
    steps = len(records)
    names = list(records[0].operations)
    seconds = {name: sum(r.operations[name] for r in records) / steps for name in names}
    nbytes = {name: sum(r.operation_bytes[name] for r in records) / steps for name in names}
    rows = sum(step_bytes(s.session, r)[1] for r in records)
    nbytes["attend"] += (rows - sum(r.kv_bytes for r in records)) / steps
    whole = sum(r.seconds for r in records) / steps
    seconds["other"] = max(whole - sum(seconds.values()), 0.0)
    nbytes["other"] = 0.0

    def rate(name: str) -> float:
        return nbytes[name] / seconds[name] / 1e9 if seconds[name] else 0.0

    return [
        OperationCost(
            kind=records[0].kind,
            n=n,
            depth=s.depth,
            kv=s.kv,
            threads=model.n_threads,
            operation=name,
            ms=1e3 * seconds[name],
            share_of_step=seconds[name] / whole,
            bytes=nbytes[name],
            gbs=rate(name),
            fraction_of_read_bandwidth=rate(name) / s.bandwidth,
        )
        for name in seconds
    ]


def _percentile(values: list[float], percent: int) -> float:
    import numpy as np

    return float(np.percentile(values, percent))


# ---- checks and names --------------------------------------------------------------------------------------


def _several(name: str, values: list[Any]) -> list[Any]:
    """Each once, in order."""
    if not values:
        raise InvalidArgument(f"{name} is empty; give at least one")
    return list(dict.fromkeys(values))


def kv_name(kv: KvFormat) -> str:
    """``f16``, or ``int8/f16`` where keys and values differ."""
    return kv if isinstance(kv, str) else "/".join(dict.fromkeys(kv))


def _check_fits(model: Model, plan: _Plan) -> None:
    if plan.session["overflow"] == "slide":
        return
    most = max(plan.n_prefill, plan.n_decode)
    needed = max(plan.depths) + most
    trained = model.config.n_ctx_limit
    limit = min(plan.session["n_ctx"] or trained, trained)
    if needed <= limit:
        return
    whose = "the context" if limit < trained else "what the model was trained for"
    raise InvalidArgument(
        f"{max(plan.depths)} tokens of depth and {most} more are {needed}, and {whose} is {limit}; "
        "take less, or let the oldest leave: overflow slide and a context of some thousand"
    )


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" + ("" if n == 1 else "s")
