"""The stages of gpu_check.py: each yields what it finds, and runs in a process of its own."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ringlm import Model, hub
from ringlm.bench import step_bytes
from ringlm.errors import Error

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "python"))
import random_model
from block_llama import vocabulary, write_block_llama
from gpu_models import CASES, MOST_GAP, MOST_KL, compare, greedy, open_model, parting, path_of, read, text_of

SMOLLM2 = "smollm2-135m"
PROMPT = "Once upon a time there was a"
TIMED = "random llama, Q4_K and Q6_K"
#: What compute-sanitizer is given: it makes kernels ten to a hundred times slower. Of every kernel something.
SANITIZED = (
    "rows can be packed in portions",
    "embeddings in every order*",
    "three products*",
    "residual and the next input",
    "gate and up",
    "experts",
    "to_quantized*",
    "to_halves",
    "add_normed",
    "gate_up",
    "check_finite",
    "route*",
    "mix_experts",
    "heads of *",
    "windows",
    "groups of more than 8 heads",
    "prefill attention: every order",
    "top_k of small rows",
)


@dataclass(frozen=True)
class Result:
    """One line of the table. ``ok`` None: nothing that could be wrong."""

    stage: str
    name: str
    value: float | None
    unit: str
    bound: str = ""
    ok: bool | None = None
    detail: str = ""
    #: 1e9 bytes a second that had to be moved, where that is what is measured.
    gbs: float | None = None


def timed_model(args: argparse.Namespace) -> Path:
    path: Path = args.models / f"timed-{args.layers}.gguf"
    if not path.exists():
        shape = random_model.SHAPE.with_(
            n_layer=args.layers, types={"default": "Q4_K", "output.weight": "Q6_K", "ffn_down.weight": "Q6_K"}
        )
        part = path.with_suffix(".part")
        write_block_llama(part, shape, vocabulary(shape.n_vocab))
        part.rename(path)
    return path


def smollm2(pull: bool) -> Path | None:
    if pull:
        return hub.pull(SMOLLM2)
    return next((m.path for m in hub.list_models() if m.info.name == SMOLLM2), None)


# ---- test_cuda_gpu -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    status: int
    text: str  # of both outputs

    def last_line(self) -> str:
        lines = [line for line in self.text.splitlines() if line.strip()]
        return lines[-1].strip() if lines else ""

    def cases(self) -> tuple[int, int] | None:
        """How many test cases there were, and passed; None where the program did not come to its end."""
        found = re.search(r"test cases: +(\d+) \| +(\d+) passed", self.text)
        return (int(found[1]), int(found[2])) if found else None


def run(args: argparse.Namespace, command: Sequence[Any], log: str, **env: str) -> Run:
    """Runs a program. Its output is in a file, beside --out or the models: it is there if time runs out."""
    path = (args.out.parent if args.out else args.models) / f"gpu-{log}.txt"
    with path.open("w+", errors="replace") as out:
        done = subprocess.run(
            [str(part) for part in command], stdout=out, stderr=out, check=False, env={**os.environ, **env}
        )
    return Run(done.returncode, path.read_text(errors="replace"))


def kernels(args: argparse.Namespace) -> Iterator[Result]:
    done = run(args, [args.tests, "--duration=true"], "kernels")
    if done.status in (0, 1) and (cases := done.cases()):
        failed = "; ".join(dict.fromkeys(re.findall(r"^TEST CASE: +(.+?)$", done.text, re.M)))
        yield Result("kernels", "test cases", cases[1], "passed", f"all {cases[0]}", done.status == 0, failed)
        return
    # One test case has ended them all: each by itself.
    yield Result("kernels", "all in one process", done.status, "exit code", "0", False, done.last_line())
    for name in run(args, [args.tests, "--list-test-cases"], "names").text.splitlines():
        if name.startswith(("[doctest]", "=")) or not name.strip():
            continue
        pattern = name.replace(",", "?")  # a comma would begin another one
        one = run(args, [args.tests, f"--test-case={pattern}"], "kernel")
        why = one.last_line() if one.status else ""
        yield Result("kernels", name, one.status, "exit code", "0", one.status == 0, why)


def sanitizer(args: argparse.Namespace) -> Iterator[Result]:
    toolkit = ["/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer"]
    places = os.pathsep.join([os.environ.get("PATH", ""), *toolkit])
    program = args.sanitizer or shutil.which("compute-sanitizer", path=places)
    if program is None:
        yield Result("sanitizer", "compute-sanitizer", None, "", detail="not installed")
        return
    for tool in ("memcheck", "racecheck"):
        command = [program, "--tool", tool, "--error-exitcode", "9", args.tests]
        command.append(f"--test-case={','.join(SANITIZED)}")
        # It knows the sizes of buffers itself: no guards.
        done = run(args, command, tool, RINGLM_GPU_NO_GUARDS="1")
        errors = re.findall(r"^=+ (.*(?:Invalid|hazard|ERROR SUMMARY|RACECHECK SUMMARY).*)$", done.text, re.M)
        cases = done.cases()
        detail = "; ".join([f"{cases[1] if cases else 0} test cases passed", *errors[-2:]])
        ok = done.status == 0 and cases is not None
        yield Result("sanitizer", tool, done.status, "exit code", "0", ok, detail)


def bandwidth(args: argparse.Namespace) -> Iterator[Result]:
    done = run(args, [args.tests, "--measure"], "bandwidth")
    for line in done.text.splitlines():
        if not line.startswith("{"):
            continue
        m = json.loads(line)
        rate = f"{m['flops'] / m['seconds'] / 1e12:.2f} TFLOP/s" if m["flops"] else ""
        gbs = m["bytes"] / m["seconds"] / 1e9
        yield Result("bandwidth", m["name"], 1e6 * m["seconds"], "us", detail=rate, gbs=gbs)
    if done.status != 0:
        yield Result("bandwidth", "the rest", done.status, "exit code", "0", False, done.last_line())


# ---- logits ------------------------------------------------------------------------------------------------


def logits(args: argparse.Namespace) -> Iterator[Result]:
    for case in CASES.values():
        if args.only in case.name:
            options = {} if case.window is None else {"window": case.window}
            yield from compared(
                args, path_of(args.models, case), case.name, case.options, options, case.most_gap
            )
    path = smollm2(args.pull)
    if path is None:
        yield Result(
            "logits", SMOLLM2, None, "", detail=f"not in the cache: ringlm pull {SMOLLM2}, or --pull"
        )
    elif args.only in SMOLLM2:
        for kv in ("int8", "f16"):
            session = {"n_ctx": 256, "kv": kv, "pinned": 16, "overflow": "slide"}
            yield from compared(
                args, path, f"{SMOLLM2}, K/V {kv}", session, {}, MOST_GAP, n=300, prompt=PROMPT
            )


def compared(
    args: argparse.Namespace,
    path: Path,
    name: str,
    session: dict[str, Any],
    options: dict[str, Any],
    most_gap: float,
    n: int = 150,
    prompt: str = "",
) -> Iterator[Result]:
    try:
        with open_model(path, "cpu", **options) as cpu, open_model(path, args.device, **options) as gpu:
            ids = text_of(cpu, n)
            found = compare(read(cpu, ids, session, n // 2), read(gpu, ids, session, n // 2))
            detail = f"at most {found.kl_max:.1e}; logits are off by {found.worst:.1e} of the largest"
            yield Result("logits", name, found.kl_mean, "KL", f"< {MOST_KL:g}", found.met, detail)
            begin = np.array(cpu.tokenizer.encode(prompt), np.int32) if prompt else ids[:20]
            expected, rows = greedy(cpu, begin, 64, session)
            parts = parting(expected, rows, greedy(gpu, begin, 64, session)[0])
            same = parts.n == len(expected)
            detail = "the texts are equal" if same else f"the texts part after {parts.n} tokens"
            ok = parts.gap <= most_gap
            yield Result("logits", f"{name}: greedy gap", parts.gap, "", f"<= {most_gap:g}", ok, detail)
    except Error as e:  # other models may do
        yield Result("logits", name, None, "", "no error", False, f"{type(e).__name__}: {e}")


# ---- speed -------------------------------------------------------------------------------------------------


def speed(args: argparse.Namespace) -> Iterator[Result]:
    models = {TIMED: timed_model(args)}
    if path := smollm2(False):
        models[SMOLLM2] = path
    for name, path in models.items():
        rates = {}
        for graph in (True, False):
            os.environ["RINGLM_CUDA_GRAPH"] = str(int(graph))  # read when the model is opened
            with open_model(path, args.device) as model:
                how = f"{name}, {'graph' if graph else 'no graph'}"
                for kv in ("int8", "f16"):
                    for depth in (32, args.depth):
                        rate, gbs = decode_rate(model, kv, depth, args.steps)
                        rates[graph, kv, depth] = rate
                        yield Result("speed", f"{how}, {kv}: decode at {depth}", rate, "tokens/s", gbs=gbs)
                if graph:
                    rate = prefill_rate(model, min(512, args.depth))
                    yield Result("speed", f"{name}: prefill {min(512, args.depth)}", rate, "tokens/s")
                    yield from operations(model, name, args.depth)
        gain = min(rates[True, kv, 32] / rates[False, kv, 32] for kv in ("int8", "f16"))
        yield Result("speed", f"{name}: graph over no graph", gain, "times")


def decode_rate(model: Model, kv: str, depth: int, n: int) -> tuple[float, float]:
    """Tokens a second of a greedy text by the median token, and 1e9 bytes a second of what has to be read for
    one."""
    ids = text_of(model, depth)
    marks = []
    with model.session(n_ctx=depth + n, kv=kv, chunk=512) as session:
        for _ in session.generate(ids, max_tokens=n, stop_ids=(), temperature=0):
            marks.append(time.perf_counter())
        with session.trace(1) as trace:
            session.decode(int(ids[-1]))
            nbytes = sum(step_bytes(session, next(trace)))
    seconds = statistics.median(np.diff(marks[n // 4 :]).tolist())
    return 1 / seconds, nbytes / seconds / 1e9


def prefill_rate(model: Model, n: int) -> float:
    ids = text_of(model, n)
    out = np.empty(model.n_vocab, np.float32)
    seconds = []
    with model.session(n_ctx=n, kv="int8", chunk=512) as session:
        for _ in range(4):  # the first one warms up
            began = time.perf_counter()
            session.prefill(ids, out=out)
            seconds.append(time.perf_counter() - began)
            session.rewind(n)
    return n / min(seconds[1:])


def operations(model: Model, name: str, depth: int) -> Iterator[Result]:
    """What each operation takes in a decoded token, over all layers. The device is waited for behind every
    one, so together they take more than a step does."""
    n = 16
    ids = text_of(model, depth + n)
    with model.session(n_ctx=depth + n, kv="int8", chunk=512) as session:
        session.prefill(ids[:depth])
        with session.trace(n) as trace:
            for token in ids[depth:].tolist():
                session.decode(token)
            records = list(trace)[n // 4 :]
    for operation in records[0].operations:
        seconds = statistics.median(r.operations[operation] for r in records)
        nbytes = records[-1].operation_bytes[operation]
        gbs = nbytes / seconds / 1e9 if nbytes else None
        yield Result("speed", f"{name}: {operation} at {depth}", 1e6 * seconds, "us", gbs=gbs)


STAGES = {
    "kernels": kernels,
    "logits": logits,
    "bandwidth": bandwidth,
    "speed": speed,
    "sanitizer": sanitizer,
}
