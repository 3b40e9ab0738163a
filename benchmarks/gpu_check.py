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
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from ringlm import DeviceError

sys.path.insert(0, str(Path(__file__).resolve().parent))
import gpu_stages
from gpu_models import CASES, open_model, path_of
from gpu_stages import SMOLLM2, Result, smollm2, timed_model

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "build" / "gpu" / "tests" / "cuda" / "gpu" / "test_cuda_gpu"
#: Seconds of each stage, at most.
STAGES = {"kernels": 150, "logits": 120, "bandwidth": 60, "speed": 100, "sanitizer": 150}


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    if args.prepare:
        prepare(args)
        return 0
    if args.stage:
        for result in gpu_stages.STAGES[args.stage](args):
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
    parser.add_argument("--layers", type=int, default=28, help="of the model that is timed")
    parser.add_argument("--steps", type=int, default=128, help="decoded tokens that are timed")
    parser.add_argument(
        "--depth", type=int, default=4096, help="tokens before them (default %(default)s), besides 32"
    )
    parser.add_argument("--only", default="", help="logits: of models with this in their name")
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


def prepare(args: argparse.Namespace) -> None:
    args.models.mkdir(parents=True, exist_ok=True)
    for case in CASES.values():
        path_of(args.models, case)
    timed_model(args)
    if args.pull:
        smollm2(True)


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
    for name in ("device", "layers", "steps", "depth", "sanitizer", "only", "out"):
        if (value := getattr(args, name)) is not None:
            command += [f"--{name}={value}"]
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
            why = " | ".join(errors.read().splitlines()[-3:])
            why = why if in_time else f"it took more than {seconds:.0f} s"
            yield Result(stage, "ended early", status, "exit code", "0", False, why)


def line_of(r: Result, copy: float | None) -> str:
    value = ""
    if r.value is not None:
        whole = abs(r.value) >= 1000 or r.value == r.value // 1
        value = f"{r.value:,.0f}" if whole else f"{r.value:.3g}"
    text = f"{r.stage:9}  {r.name:56}  {value:>9} {r.unit:8}"
    if r.gbs is not None:
        text += f"  {r.gbs:7.1f} GB/s" + (f"  {100 * r.gbs / copy:3.0f} % of a copy" if copy else "")
    if r.bound:
        text += f"  {r.bound}"
    if r.ok is not None:
        text += "  met" if r.ok else "  NOT MET"
    return (text + (f"  {r.detail}" if r.detail else "")).rstrip()


if __name__ == "__main__":
    sys.exit(main())
