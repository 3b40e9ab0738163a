"""Are decode steps even, and do they stay quick beside another busy process?

    python benchmarks/steady.py MODEL.gguf [-t 2] [--steps 512] [--rounds 4] [--busy 1]

A control says what the machine allows: as many threads that read a buffer of the size of the weights, with a
barrier of the team behind each of as many parts as a decode step has operations, and do nothing else. Both
take turns of 32 steps, so that what happens on the machine meets both.

1. On a quiet machine: p99 over p50 of the step times. Bar: at most 1.1 times the control's.
2. With another process that is busy, and is pinned to no core: the mean step compared with the quiet one.
   Bar: decode keeps at least 0.9 of the part of its speed that the control keeps.

Quiet and busy phases alternate. Exit code 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import ringlm
from ringlm import _core

TURN = 32  # steps
EVEN, KEEP = 1.1, 0.9


@dataclass
class Times:
    """Seconds of steps."""

    quiet: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)

    def spread(self) -> float:
        p50, p99 = np.percentile(self.quiet, (50, 99))
        return float(p99 / p50)

    def kept(self) -> float:
        return float(np.mean(self.quiet) / np.mean(self.busy))


@contextmanager
def busy(n: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n)]
    try:
        time.sleep(0.5)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
        time.sleep(0.2)


def measure(args: argparse.Namespace) -> tuple[Times, Times, int]:
    """Times of decode and of the control, and the parts of a pass."""
    decode, control = Times(), Times()
    rng = np.random.default_rng(0)
    with (
        ringlm.Model(args.model, n_threads=args.threads) as model,
        model.session(n_ctx=args.depth + TURN, kv=args.kv) as session,
    ):
        parts = args.barriers or 6 * model.config.n_layer + 2
        reader = _core.MemoryReader(model.nbytes, model.n_threads)
        ids = rng.integers(0, model.n_vocab, args.depth + TURN, np.int32)
        out = np.zeros(model.n_vocab, np.float32)
        if args.depth:
            session.prefill(ids[: args.depth], out=out)
        tokens = ids[args.depth :].tolist()
        clock = time.perf_counter

        def turn() -> tuple[list[float], list[float]]:
            marks = [clock()]
            for token in tokens:
                session.decode(token, out=out)
                marks.append(clock())
            session.rewind(TURN)
            return np.diff(marks).tolist(), reader.read(TURN, parts)

        turn()  # warms up
        gc.disable()
        turns = max(args.steps // args.rounds // TURN, 1)
        for i in range(args.rounds):
            for _ in range(turns):
                steps, passes = turn()
                decode.quiet += steps
                control.quiet += passes
            with busy(args.busy):
                for _ in range(turns):
                    steps, passes = turn()
                    decode.busy += steps
                    control.busy += passes
            print(f"round {i + 1} of {args.rounds}", file=sys.stderr)
        gc.enable()
    return decode, control, parts


def verdict(decode: Times, control: Times) -> tuple[list[str], bool]:
    """What to print, and whether both bars are met."""

    def milliseconds(times: list[float]) -> str:
        p50, p99 = 1e3 * np.percentile(times, (50, 99))
        return f"mean {1e3 * np.mean(times):.3f}, p50 {p50:.3f}, p99 {p99:.3f}"

    lines = []
    for name, t in (("decode", decode), ("control", control)):
        lines += [f"{name}, quiet: {milliseconds(t.quiet)} ms", f"{name}, busy:  {milliseconds(t.busy)} ms"]
    spread = decode.spread() / control.spread()
    kept = decode.kept() / control.kept()
    even, keeps = spread <= EVEN, kept >= KEEP
    lines.append(
        f"p99/p50: decode {decode.spread():.3f}, control {control.spread():.3f}, ratio {spread:.3f}: "
        f"{'at most' if even else 'NOT at most'} {EVEN}"
    )
    lines.append(
        f"speed kept beside a busy process: decode {decode.kept():.3f}, control {control.kept():.3f}, "
        f"ratio {kept:.3f}: {'at least' if keeps else 'NOT at least'} {KEEP}"
    )
    return lines, even and keeps


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-d", "--depth", type=int, default=0)
    parser.add_argument("--kv", default="f16")
    parser.add_argument("--steps", type=int, default=512, help="of each kind, quiet and busy")
    parser.add_argument("--rounds", type=int, default=4, help="of a quiet and a busy phase")
    parser.add_argument("--busy", type=int, default=1, metavar="N", help="processes")
    parser.add_argument("--barriers", type=int, help="of a pass of the control; 6 a layer and 2 otherwise")
    args = parser.parse_args()
    decode, control, parts = measure(args)
    lines, met = verdict(decode, control)
    print(f"{args.model}, {args.threads} threads, {len(decode.quiet)} steps, control in {parts} parts")
    print("\n".join(lines))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
