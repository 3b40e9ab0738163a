"""A million tokens through a small model: does anything grow, move, slow down or drift?

    python benchmarks/soak.py [--tokens 1000000] [--threads 1] [--kv int8] [--repeat] [--json]

Four layers, two of them windowed, 6 query heads over 2 KV heads of 64. A session of 256 tokens, 8 of them
pinned, slides over a fixed pseudo-random text: decoded tokens, and a prefill of 1 to 64 tokens (in chunks of
at most 32) in every fiftieth place. Behind the first wrap of the widest ring there may be no heap allocation
in any step, no growth of resident memory, and the last 1 % of the decoded tokens may not take longer than the
first 1 %. With --repeat all of it runs twice and has to give the same bits. Exit code 1 if a bar is missed.

The measuring takes its own memory before it begins, and two short sessions run before the measured one, so
that what Python needs for a trace record is there too.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import hashlib
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ringlm import _core

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "python"))
from random_llama import Shape, write_llama

# Tied, so that every step reads every page of the weights: none comes into memory late.
SHAPE = Shape(
    n_vocab=512,
    n_embd=64,
    n_layer=4,
    n_head=6,
    n_head_kv=2,
    head_dim=64,
    n_ff=128,
    n_ctx_train=1024,
    tied=True,
)
WINDOWS = [0, 96, 0, 160]
N_CTX, PINNED, CHUNK = 256, 8, 32
EVERY = 50  # steps from one prefill to the next
LONGEST = 64  # tokens of a prefill
FLUSH = 20  # steps from one look at the trace to the next
SAMPLED = 1009  # steps from one row of logits in the digest to the next
LOOKS = 200  # at resident memory


@dataclass(frozen=True)
class Run:
    """What one run found. Times are in microseconds, memory in bytes, of this process."""

    tokens: int
    decoded: int
    prefilled: int
    seconds: float
    wraps: dict[str, int]  # of the rings of each kind
    allocations: int  # in all steps
    rss_at_first_wrap: int
    rss_max: int
    rss_end: int
    first_median: float
    first_mean: float
    last_median: float
    last_mean: float
    timed: int  # decoded tokens in the first and in the last 1 %
    digest: str  # of sampled logits, and of the state at the end

    @property
    def growth(self) -> int:
        return self.rss_max - self.rss_at_first_wrap

    @property
    def ratio(self) -> float:
        """Of the medians: one step that something else on the machine held up does not count."""
        return self.last_median / self.first_median


def steps(tokens: int) -> np.ndarray:
    """Lengths of the steps; together ``tokens``."""
    rng = np.random.default_rng(20)
    lengths = np.ones(tokens, np.int32)
    lengths[EVERY - 1 :: EVERY] = rng.integers(1, LONGEST + 1, len(lengths[EVERY - 1 :: EVERY]))
    ends = np.cumsum(lengths)
    n = int(np.searchsorted(ends, tokens)) + 1
    lengths = lengths[:n].copy()
    lengths[-1] -= ends[n - 1] - tokens
    return lengths


def resident() -> int:
    """Bytes of this process that are in memory. smaps_rollup counts pages; VmRSS may lag behind."""
    for path, key in (("/proc/self/smaps_rollup", b"Rss:"), ("/proc/self/status", b"VmRSS:")):
        try:
            with open(path, "rb", buffering=0) as file:
                text = file.read(4096)
        except OSError:
            continue
        at = text.index(key) + len(key)
        return int(text[at : text.index(b"kB", at)]) * 1024
    raise SystemExit("there is no /proc: resident memory cannot be measured here")


def soak(path: Path, tokens: int, threads: int, kv: str) -> Run:
    """Runs ``tokens`` tokens through a session."""
    model = _core.Model(path, threads, "cpu", window=WINDOWS)
    for _ in range(2):
        warm_up = _core.Session(model, N_CTX, kv, kv, CHUNK, PINNED, "slide")
        _measure(warm_up, min(tokens, 4000))
        warm_up.close()
    session = _core.Session(model, N_CTX, kv, kv, CHUNK, PINNED, "slide")
    gc.collect()
    gc.disable()
    try:
        return _measure(session, tokens)
    finally:
        gc.enable()
        session.close()
        model.close()


def _measure(session: Any, tokens: int) -> Run:
    # All arrays are written to here, so that their pages are there.
    ids = np.random.default_rng(7).integers(0, SHAPE.n_vocab, tokens).astype(np.int32)
    lengths = steps(tokens)
    n = len(lengths)
    seconds = np.full(n, np.nan)
    rss = np.full(LOOKS + 2, -1, np.int64)
    logits = np.full(SHAPE.n_vocab, np.nan, np.float32)
    digest = hashlib.sha256()
    # Memory is looked at where the records of the trace have just been let go of.
    look = (n // LOOKS // FLUSH + 1) * FLUSH
    clock, looks, allocations, first = time.perf_counter, 0, 0, -1
    session.start_trace(FLUSH * LONGEST)
    at = 0
    began = clock()
    for i in range(n):
        m = int(lengths[i])
        start = clock()
        if m == 1:
            session.decode(int(ids[at]), logits)
        else:
            session.prefill(ids[at : at + m], logits)
        seconds[i] = clock() - start
        at += m
        if i % SAMPLED == 0:
            digest.update(logits)
        if i % FLUSH != FLUSH - 1 and i != n - 1:
            continue
        for record in session.take_trace():
            allocations += record["allocations"]
        record = None
        if first < 0 and at > session.slots:
            first = i + 1
        if first >= 0 and (first == i + 1 or i % look == look - 1):
            rss[looks] = resident()
            looks += 1
    took = clock() - began
    rss[looks] = resident()
    if first < 0:
        raise SystemExit(f"{tokens} tokens do not fill a ring of {session.slots}; take more")
    digest.update(logits)
    session.save(digest.update)

    decoded = seconds[first:][lengths[first:] == 1]
    timed = max(int((lengths == 1).sum()) // 100, 1)
    head, tail = 1e6 * decoded[:timed], 1e6 * decoded[-timed:]
    return Run(
        tokens=session.position,
        decoded=int((lengths == 1).sum()),
        prefilled=int(lengths[lengths > 1].sum()),
        seconds=took,
        wraps={_name(kind): at // kind["capacity"] for kind in session.kinds},
        allocations=allocations,
        rss_at_first_wrap=int(rss[0]),
        rss_max=int(rss[: looks + 1].max()),
        rss_end=int(rss[looks]),
        first_median=float(np.median(head)),
        first_mean=float(head.mean()),
        last_median=float(np.median(tail)),
        last_mean=float(tail.mean()),
        timed=timed,
        digest=digest.hexdigest(),
    )


def _name(kind: dict[str, int]) -> str:
    return f"window {kind['window']}" if kind["window"] else f"n_ctx {kind['visible']}"


def missed(runs: list[Run], tokens: int, tolerance: float) -> list[str]:
    """The bars that were missed, in words."""
    found = []
    for run in runs:
        if run.tokens != tokens:
            found.append(f"the session is at {run.tokens}, not {tokens}")
        if run.allocations:
            found.append(f"{run.allocations} heap allocations in steps")
        if run.growth > 0:
            found.append(f"resident memory grew by {run.growth:,} bytes after the first wrap")
        if not run.ratio <= 1 + tolerance:
            found.append(f"the last steps took {run.ratio:.3f} times as long as the first")
    if len({run.digest for run in runs}) > 1:
        found.append("the runs gave different bits")
    return found


def report(run: Run) -> str:
    wraps = ", ".join(f"{n:,} of {name}" for name, n in run.wraps.items())
    return f"""\
tokens         {run.tokens:,}: {run.decoded:,} decoded, {run.prefilled:,} in prefills; {run.seconds:.1f} s
wraps          {wraps}
allocations    {run.allocations} in steps
resident       {run.rss_at_first_wrap:,} bytes at the first wrap, {run.rss_max:,} at most after it,
               {run.rss_end:,} at the end: growth {run.growth:,}
a decode step  {run.first_median:.1f} us median, {run.first_mean:.1f} mean: the first {run.timed:,} when full
               {run.last_median:.1f} us median, {run.last_mean:.1f} mean: the last {run.timed:,}
               ratio of medians {run.ratio:.3f}
digest         {run.digest}"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("-t", "--threads", type=int, default=1)
    parser.add_argument("--kv", default="int8", choices=("int8", "f16", "f32"))
    parser.add_argument("--repeat", action="store_true", help="run twice and compare")
    parser.add_argument("--tolerance", type=float, default=0.1, help="how much slower the end may be")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "soak.gguf")
        write_llama(path, SHAPE)
        runs = []
        for _ in range(2 if args.repeat else 1):
            runs.append(soak(path, args.tokens, args.threads, args.kv))
            if not args.json:
                print(report(runs[-1]), end="\n\n", flush=True)
    bad = missed(runs, args.tokens, args.tolerance)
    if args.json:
        records = [dataclasses.asdict(r) | {"growth": r.growth, "ratio": r.ratio} for r in runs]
        print(json.dumps({"kv": args.kv, "threads": args.threads, "runs": records, "missed": bad}))
    else:
        print("\n".join(f"MISSED: {line}" for line in bad) or "every bar was kept")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
