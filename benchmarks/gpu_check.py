"""Does the CUDA backend compute what it should on this GPU, and how quickly? Eight minutes at most.

    python benchmarks/gpu_check.py --tests build/gpu/tests/cuda/gpu/test_cuda_gpu [--out gpu.json]

    kernels    test_cuda_gpu: every kernel against float64
    logits     small models that meet every kernel, and SmolLM2-135M where it is in the cache: KL divergence
               of the CPU's logits and the GPU's, and where two greedy texts part
    bandwidth  single kernels, next to a copy within device memory
    speed      tokens a second, with CUDA graphs and without; what every operation takes
    sanitizer  compute-sanitizer's memcheck and racecheck on a part of the kernel tests, where it is installed

Each stage is a process of its own: a GPU that a kernel has brought down is there again for the next one.
docs/cuda.md says how test_cuda_gpu is built. --prepare writes the models, 400 MB, so that no time on the GPU
goes into that. Exit code 0: all bars are met; 1: not; 2: something is missing, and the message says what.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ringlm import DeviceError, Model, hub
from ringlm.bench import step_bytes

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "python"))
import random_model
from block_llama import vocabulary, write_block_llama
from gpu_models import CASES, MOST_GAP, MOST_KL, compare, greedy, open_model, parting, path_of, read, text_of

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "build" / "gpu" / "tests" / "cuda" / "gpu" / "test_cuda_gpu"
SMOLLM2 = "smollm2-135m"
#: Seconds of each stage, at most.
STAGES = {"kernels": 150, "logits": 120, "bandwidth": 60, "speed": 100, "sanitizer": 150}
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


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    if args.prepare:
        prepare(args)
        return 0
    if args.stage:
        for result in STAGE[args.stage](args):
            print(json.dumps(asdict(result)), flush=True)
        return 0
    if absent := missing(args):
        print("not checked, as something is missing:\n  " + "\n  ".join(absent), file=sys.stderr)
        return 2
    with work_folder(args):
        return check(args)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tests", type=Path, default=TESTS, help="test_cuda_gpu (default %(default)s)")
    parser.add_argument("--stages", default=",".join(STAGES), help="default %(default)s")
    parser.add_argument("--out", type=Path, help="write the results as JSON, after every stage")
    parser.add_argument("--models", type=Path, help="folder for the models; a temporary one by default")
    parser.add_argument("--prepare", action="store_true", help="write the models to --models, and end")
    parser.add_argument("--pull", action="store_true", help=f"download {SMOLLM2} if it is not in the cache")
    parser.add_argument("--seconds", type=float, default=470, help="for everything (default %(default)s)")
    parser.add_argument(
        "--device", default="cuda", choices=("cuda", "cpu", "reference"), help="cpu: a rehearsal"
    )
    parser.add_argument("--sanitizer", help="compute-sanitizer; looked for on PATH and in the toolkit")
    parser.add_argument(
        "--layers", type=int, default=random_model.SHAPE.n_layer, help="of the model that is timed"
    )
    parser.add_argument("--steps", type=int, default=128, help="decoded tokens that are timed")
    parser.add_argument(
        "--depth", type=int, default=4096, help="tokens before them (default %(default)s), besides 32"
    )
    parser.add_argument("--only", help="logits: of models with this in their name")
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.stages = args.stages.split(",")
    if unknown := set(args.stages) - set(STAGES):
        parser.error(f"--stages {','.join(unknown)}: expected some of {', '.join(STAGES)}")
    if args.prepare and not args.models:
        parser.error("--prepare needs --models")
    return args


# ---- before ------------------------------------------------------------------------------------------------


def missing(args: argparse.Namespace) -> list[str]:
    absent = []
    if {"kernels", "bandwidth"} & set(args.stages) and not args.tests.is_file():
        absent.append(f"test_cuda_gpu: there is no {args.tests}; docs/cuda.md says how it is built")
    try:
        with tempfile.TemporaryDirectory() as folder:
            case = next(iter(CASES.values()))
            open_model(path_of(Path(folder), case), args.device).close()
    except DeviceError as e:
        absent.append(f"a GPU: {e}")
    return absent


@contextmanager
def work_folder(args: argparse.Namespace) -> Iterator[None]:
    if args.models:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="ringlm-gpu-") as folder:
        args.models = Path(folder)
        yield


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


def prepare(args: argparse.Namespace) -> None:
    args.models.mkdir(parents=True, exist_ok=True)
    for case in CASES.values():
        path_of(args.models, case)
    timed_model(args)
    if args.pull:
        smollm2(True)


# ---- all stages --------------------------------------------------------------------------------------------


def check(args: argparse.Namespace) -> int:
    args.models.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    about = {"device": device_name(args), "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    print(about["device"])
    results: list[Result] = []
    copy = None
    for stage in args.stages:
        left = args.seconds - (time.perf_counter() - began)
        at = time.perf_counter()
        for result in run_stage(args, stage, min(STAGES[stage], left)):
            results.append(result)
            if result.name == "copy":
                copy = result.gbs
            print(line_of(result, copy), flush=True)
        results.append(Result(stage, "stage", time.perf_counter() - at, "s"))
        print(line_of(results[-1], copy), flush=True)
        if args.out:
            record = {**about, "seconds": time.perf_counter() - began, "copy_gbs": copy}
            args.out.write_text(json.dumps({**record, "results": [asdict(r) for r in results]}, indent=1))
    failed = [r for r in results if r.ok is False]
    print(f"{len(failed)} of {sum(r.ok is not None for r in results)} checks failed, in "
          f"{time.perf_counter() - began:.0f} s")  # fmt: skip
    return 1 if failed else 0


def device_name(args: argparse.Namespace) -> str:
    if args.device != "cuda":
        return f"a rehearsal on the {args.device.upper()}"
    done = subprocess.run(
        [args.tests, "--test-case=none at all"], capture_output=True, text=True, check=False
    )
    return done.stdout.partition("\n")[0] or "a GPU"


def run_stage(args: argparse.Namespace, stage: str, seconds: float) -> Iterator[Result]:
    """The stage's results, as they come out of its process."""
    if seconds <= 0:
        yield Result(stage, "not run", None, "", ok=False, detail="no time was left: --seconds")
        return
    command = [sys.executable, __file__, "--stage", stage, "--models", args.models, "--tests", args.tests]
    for name in ("device", "layers", "steps", "depth", "sanitizer", "only"):
        if (value := getattr(args, name)) is not None:
            command += [f"--{name}", value]
    if args.pull:
        command.append("--pull")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            list(map(str, command)),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=env,
            start_new_session=True,
        )
        timer = threading.Timer(seconds, os.killpg, (child.pid, signal.SIGKILL))  # and what it has started
        timer.start()
        assert child.stdout is not None
        for line in child.stdout:
            yield Result(**json.loads(line))
        status = child.wait()
        in_time = timer.is_alive()
        timer.cancel()
        if status != 0:
            errors.seek(0)
            why = (
                " | ".join(errors.read().splitlines()[-3:])
                if in_time
                else f"it took more than {seconds:.0f} s"
            )
            yield Result(stage, "ended early", float(status), "exit code", "0", False, why)


def line_of(r: Result, copy: float | None) -> str:
    value = ""
    if r.value is not None:
        value = f"{r.value:,.0f}" if r.value >= 1000 or r.value == round(r.value) else f"{r.value:.3g}"
    text = f"{r.stage:9}  {r.name:58}  {value:>9} {r.unit:8}"
    if r.gbs is not None:
        text += f"  {r.gbs:7.1f} GB/s" + (f"  {100 * r.gbs / copy:3.0f} % of a copy" if copy else "")
    if r.bound:
        text += f"  {r.bound}"
    if r.ok is not None:
        text += "  met" if r.ok else "  NOT MET"
    return (text + (f"  {r.detail}" if r.detail else "")).rstrip()


# ---- kernels -----------------------------------------------------------------------------------------------


def kernels(args: argparse.Namespace) -> Iterator[Result]:
    done = subprocess.run([args.tests], capture_output=True, text=True, check=False)
    counts = re.search(r"test cases: +(\d+) \| +(\d+) passed \| +(\d+) failed", done.stdout)
    if done.returncode in (0, 1) and counts:
        total, passed, _ = map(int, counts.groups())
        detail = "; ".join(dict.fromkeys(re.findall(r"^TEST CASE: +(.+?)$", done.stdout, re.M)))
        yield Result("kernels", "test cases", passed, "passed", f"all {total}", done.returncode == 0, detail)
        return
    # One test case has ended them all: each by itself.
    yield Result(
        "kernels", "all in one process", float(done.returncode), "exit code", "0", False, last_line(done)
    )
    listed = subprocess.run([args.tests, "--list-test-cases"], capture_output=True, text=True, check=False)
    for name in listed.stdout.splitlines():
        if name.startswith(("[doctest]", "=")) or not name.strip():
            continue
        one = subprocess.run(
            [args.tests, f"--test-case={pattern_of(name)}"], capture_output=True, text=True, check=False
        )
        yield Result("kernels", name[:58], float(one.returncode), "exit code", "0", one.returncode == 0,
                     "" if one.returncode == 0 else last_line(one))  # fmt: skip


def pattern_of(name: str) -> str:
    """A filter of doctest that has the name: a comma would begin another one."""
    return name.replace(",", "?")


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return lines[-1] if lines else ""


# ---- logits ------------------------------------------------------------------------------------------------


def logits(args: argparse.Namespace) -> Iterator[Result]:
    for case in CASES.values():
        if args.only and args.only not in case.name:
            continue
        options = {} if case.window is None else {"window": case.window}
        path = path_of(args.models, case)
        yield from guarded(case.name, compared(args, path, case.name, case.options, options, case.most_gap))
    path = smollm2(args.pull)
    if args.only and args.only not in SMOLLM2:
        return
    if path is None:
        yield Result("logits", SMOLLM2, None, "", detail="not in the cache: ringlm pull " + SMOLLM2)
        return
    for kv in ("int8", "f16"):
        session = {"n_ctx": 256, "kv": kv, "pinned": 16, "overflow": "slide"}
        name = f"{SMOLLM2}, K/V {kv}"
        yield from guarded(name, compared(args, path, name, session, {}, MOST_GAP, n=300, prompt=PROMPT))


PROMPT = "Once upon a time there was a"


def guarded(name: str, results: Iterator[Result]) -> Iterator[Result]:
    """An error is a result: other models may do."""
    try:
        yield from results
    except DeviceError as e:
        yield Result("logits", name, None, "", "no error", False, str(e))


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
    with open_model(path, "cpu", **options) as cpu, open_model(path, args.device, **options) as gpu:
        ids = text_of(cpu, n)
        found = compare(read(cpu, ids, session, n // 2), read(gpu, ids, session, n // 2))
        yield Result("logits", name, found.kl_mean, "KL", f"< {MOST_KL:g}", found.met,
                     f"KL at most {found.kl_max:.1e}, logits off by {found.worst:.1e}")  # fmt: skip
        begin = np.array(cpu.tokenizer.encode(prompt), np.int32) if prompt else ids[:20]
        expected, rows = greedy(cpu, begin, 64, session)
        parts = parting(expected, rows, greedy(gpu, begin, 64, session)[0])
        where = (
            "the texts are equal" if parts.n == len(expected) else f"the texts part after {parts.n} tokens"
        )
        yield Result("logits", f"{name}: gap where greedy texts part", parts.gap, "", f"<= {most_gap:g}",
                     parts.gap <= most_gap, where)  # fmt: skip


# ---- bandwidth and speed -----------------------------------------------------------------------------------


def bandwidth(args: argparse.Namespace) -> Iterator[Result]:
    child = subprocess.Popen(
        [args.tests, "--measure"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stderr is not None
    for line in child.stdout:
        m = json.loads(line)
        rate = f"{m['flops'] / m['seconds'] / 1e12:.2f} TFLOP/s" if m["flops"] else ""
        gbs = m["bytes"] / m["seconds"] / 1e9
        yield Result("bandwidth", m["name"], 1e6 * m["seconds"], "us", detail=rate, gbs=gbs)
    errors = child.stderr.read()
    if child.wait() != 0:
        yield Result(
            "bandwidth",
            "ended early",
            float(child.returncode),
            "exit code",
            "0",
            False,
            errors.strip()[-200:],
        )


def speed(args: argparse.Namespace) -> Iterator[Result]:
    models = {"random llama, Q4_K and Q6_K": timed_model(args)}
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
    """Tokens a second by the median step, and 1e9 bytes a second of what those steps had to read."""
    ids = text_of(model, depth + n)
    out = np.empty(model.n_vocab, np.float32)
    clock = time.perf_counter
    with model.session(n_ctx=depth + n, kv=kv, chunk=512) as session:
        session.prefill(ids[:depth], out=out)
        for token in ids[depth : depth + n // 4].tolist():
            session.decode(token, out=out)
        marks = [clock()]
        for token in ids[depth + n // 4 :].tolist():
            session.decode(token, out=out)
            marks.append(clock())
        session.rewind(1)
        with session.trace(1) as trace:
            session.decode(int(ids[-1]), out=out)
            nbytes = sum(step_bytes(session, next(trace)))
    seconds = statistics.median(np.diff(marks).tolist())
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
        yield Result(
            "speed", f"{name}: {operation} at {depth}", 1e6 * seconds, "us", gbs=nbytes / seconds / 1e9
        )


# ---- sanitizer ---------------------------------------------------------------------------------------------


def sanitizer(args: argparse.Namespace) -> Iterator[Result]:
    places = os.pathsep.join(
        (os.environ.get("PATH", ""), "/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
    )
    program = args.sanitizer or shutil.which("compute-sanitizer", path=places)
    if program is None:
        yield Result("sanitizer", "compute-sanitizer", None, "", detail="not installed")
        return
    env = {**os.environ, "RINGLM_GPU_NO_GUARDS": "1"}  # it knows the sizes of buffers itself
    for tool in ("memcheck", "racecheck"):
        command = [
            program,
            "--tool",
            tool,
            "--error-exitcode",
            "9",
            args.tests,
            f"--test-case={','.join(SANITIZED)}",
        ]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, env=env)
        counts = re.search(r"test cases: +(\d+) \| +(\d+) passed", done.stdout)
        errors = re.findall(
            r"^=+ (.*(?:Invalid|hazard|ERROR SUMMARY|RACECHECK SUMMARY).*)$", done.stdout, re.M
        )
        ran = f"{counts[2] if counts else 0} test cases passed"
        ok = done.returncode == 0 and counts is not None
        yield Result("sanitizer", tool, float(done.returncode), "exit code", "0", ok,
                     "; ".join([ran, *errors[-2:]]))  # fmt: skip


STAGE = {"kernels": kernels, "logits": logits, "bandwidth": bandwidth, "speed": speed, "sanitizer": sanitizer}

if __name__ == "__main__":
    sys.exit(main())
