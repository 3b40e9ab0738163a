"""Speed of ringlm next to llama.cpp and OpenVINO GenAI: same GGUF file, same threads, alternating rounds.

    pip install llama-cpp-python openvino-genai      # here, or each in an environment of its own:
    python benchmarks/compare.py MODEL.gguf [-t 2] [--llama-python PATH]... [--openvino-python PATH]

Prints a table in Markdown: tokens per second, and ringlm's ratio to each peer. Every program runs in a
process of its own, all of them take turns (A B C A B C ...), and the median of the rounds counts. A peer is
there with its best: llama.cpp with and without flash attention, with K/V in f16 and q8_0, and, on processors
with AMX, with and without it; OpenVINO GenAI with each of its attention backends and K/V in its default and
f16. Every variant is tried once, those within 15 % of the peer's fastest go on into the rounds, and the
fastest of these is in the table. A program that is not installed, or fails, is left out, and the report says
why.

llama.cpp is driven through llama_decode, as its own benchmark does, so that nothing of Python counts against
it, and makes logits for the last token only. OpenVINO GenAI is taken at its own word (perf_metrics): tokens
over time to first token, and time per output token.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import platform
import random
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROMPT = "The capital of France is"
NEAR = 0.85  # of the fastest variant's speed: goes on into the rounds


def tokens(n: int, n_vocab: int, seed: int) -> list[int]:
    """Another text in every round: nothing can be remembered from the one before."""
    rng = random.Random(seed)
    return [rng.randrange(n_vocab) for _ in range(n)]


# ---- in the other processes: the standard library and the program itself, nothing else ---------------------


class Ringlm:
    """What is measured. Options: kv, chunk."""

    def __init__(self, model: str, threads: int, options: dict[str, Any], room: int = 512) -> None:
        import numpy as np
        import ringlm

        self.version = ringlm.__version__
        self.model = ringlm.Model(model, n_threads=threads)
        self.n_vocab, self.options, self.room = self.model.n_vocab, options, room
        self.out = np.zeros(self.n_vocab, np.float32)
        self.sessions: dict[int, Any] = {}
        self.note = self.model.backend

    def session(self, depth: int) -> Any:
        """At that depth, with room for more. It is filled once."""
        if depth not in self.sessions:
            session = self.model.session(n_ctx=depth + self.room, **self.options)
            if depth:
                session.prefill(tokens(depth, self.n_vocab, 0), out=self.out)
            self.sessions[depth] = session
        return self.sessions[depth]

    def prefill(self, n: int, depth: int, seed: int) -> float:
        ids = tokens(n, self.n_vocab, seed)
        session = self.session(depth)
        began = time.perf_counter()
        session.prefill(ids, out=self.out)
        took = time.perf_counter() - began
        session.rewind(n)
        return n / took

    def decode(self, n: int, depth: int, seed: int) -> float:
        ids = tokens(n, self.n_vocab, seed)
        session, out = self.session(depth), self.out
        began = time.perf_counter()
        for token in ids:
            session.decode(token, out=out)
        took = time.perf_counter() - began
        session.rewind(n)
        return n / took

    @staticmethod
    def first_token(model: str, threads: int) -> str:
        import ringlm

        with ringlm.Model(model, n_threads=threads) as opened, opened.session(n_ctx=512) as session:
            token = int(session.prefill(opened.tokenizer.encode(PROMPT)).argmax())
            return opened.tokenizer.decode([token])


class LlamaCpp:
    """Options: flash (0, 1), kv (f16, q8_0), amx (0: the kernel is made to refuse it)."""

    def __init__(self, model: str, threads: int, options: dict[str, Any], room: int = 512) -> None:
        if not options.get("amx", 1):
            refuse_amx()
        import llama_cpp as c

        self.c, self.threads, self.options, self.room = c, threads, options, room
        self.version = c.__version__
        c.llama_log_set(_silent(c), ctypes.c_void_p(0))
        c.llama_backend_init()
        self.model = c.llama_model_load_from_file(os.fsencode(model), c.llama_model_default_params())
        if not self.model:
            raise RuntimeError("llama.cpp does not load the file")
        self.vocab = c.llama_model_get_vocab(self.model)
        self.n_vocab = c.llama_vocab_n_tokens(self.vocab)
        self.contexts: dict[int, Any] = {}
        self.note = c.llama_print_system_info().decode()

    def context(self, n_ctx: int) -> Any:
        c = self.c
        p = c.llama_context_default_params()
        p.n_ctx, p.n_batch, p.n_ubatch = n_ctx, 512, 512
        p.n_threads = p.n_threads_batch = self.threads
        p.flash_attn_type = int(self.options.get("flash", 1))
        kv = {"f16": c.GGML_TYPE_F16, "q8_0": c.GGML_TYPE_Q8_0}[self.options.get("kv", "f16")]
        p.type_k = p.type_v = kv
        context = c.llama_init_from_model(self.model, p)
        if not context:
            raise RuntimeError("llama.cpp makes no context with these options")
        return context

    def feed(self, context: Any, ids: Any) -> None:
        """A batch; logits of the last token alone."""
        c = self.c
        for i in range(0, len(ids), 512):
            part = (c.llama_token * len(ids[i : i + 512]))(*ids[i : i + 512])
            if c.llama_decode(context, c.llama_batch_get_one(part, len(part))):
                raise RuntimeError("llama_decode fails")
        c.llama_synchronize(context)

    def at(self, depth: int) -> Any:
        if depth not in self.contexts:
            self.contexts[depth] = self.context(depth + self.room)
            if depth:
                self.feed(self.contexts[depth], tokens(depth, self.n_vocab, 0))
        return self.contexts[depth]

    def back(self, context: Any, depth: int) -> None:
        memory = self.c.llama_get_memory(context)
        if not self.c.llama_memory_seq_rm(memory, 0, depth, -1):
            raise RuntimeError("llama.cpp cannot go back")

    def prefill(self, n: int, depth: int, seed: int) -> float:
        ids, context = tokens(n, self.n_vocab, seed), self.at(depth)
        began = time.perf_counter()
        self.feed(context, ids)
        took = time.perf_counter() - began
        self.back(context, depth)
        return n / took

    def decode(self, n: int, depth: int, seed: int) -> float:
        c, context = self.c, self.at(depth)
        one = (c.llama_token * 1)()
        batch = c.llama_batch_get_one(one, 1)
        ids = tokens(n, self.n_vocab, seed)
        began = time.perf_counter()
        for token in ids:
            one[0] = token
            c.llama_decode(context, batch)
            c.llama_synchronize(context)
        took = time.perf_counter() - began
        self.back(context, depth)
        return n / took

    @classmethod
    def first_token(cls, model: str, threads: int) -> str:
        refuse_amx()  # the variant that every build survives; five tokens gain nothing from it
        self = cls(model, threads, {})
        c = self.c
        text = PROMPT.encode()
        ids = (c.llama_token * 32)()
        n = c.llama_tokenize(self.vocab, text, len(text), ids, 32, True, False)
        context = self.context(512)
        self.feed(context, ids[:n])
        logits = c.llama_get_logits_ith(context, -1)
        best = max(range(self.n_vocab), key=logits[: self.n_vocab].__getitem__)
        piece = ctypes.create_string_buffer(64)
        n = c.llama_token_to_piece(self.vocab, best, piece, 64, 0, False)
        return piece.raw[:n].decode(errors="replace")


def _silent(c: Any) -> Any:
    global _keep
    _keep = c.llama_log_callback(lambda *_: None)
    return _keep


def refuse_amx() -> None:
    """From now on the kernel refuses this process the tiles of AMX, as one without AMX would: a program that
    asks for them (arch_prctl(ARCH_REQ_XCOMP_PERM)) goes on without. Some builds use tiles with a wrong
    configuration and end in SIGILL (GCC before 13 drops the stores that fill it)."""
    if platform.machine() != "x86_64":
        return
    load, equal, answer = 0x20, 0x15, 0x06  # BPF: the system call's number, its first argument
    program = b"".join(
        struct.pack("=HBBI", *line)
        for line in (
            (load, 0, 0, 0),
            (equal, 0, 3, 158),
            (load, 0, 0, 16),
            (equal, 0, 1, 0x1023),
            (answer, 0, 0, 0x00050001),  # EPERM
            (answer, 0, 0, 0x7FFF0000),
        )
    )
    text = ctypes.create_string_buffer(program, len(program))
    filter_ = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(text)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, filter_, 0, 0):
        raise RuntimeError(f"no filter of system calls: {os.strerror(ctypes.get_errno())}")


class OpenVino:
    """Options: those of LLMPipeline on the CPU."""

    def __init__(self, model: str, threads: int, options: dict[str, Any], room: int = 512) -> None:
        import numpy as np
        import openvino
        import openvino_genai as genai

        self.np, self.openvino, self.genai = np, openvino, genai
        self.version = genai.__version__.split("-")[0]
        self.pipeline = genai.LLMPipeline(model, "CPU", INFERENCE_NUM_THREADS=threads, **options)
        self.n_vocab = len(self.pipeline.get_tokenizer().get_vocab())
        self.note = " ".join(f"{k}={v}" for k, v in options.items()) or "defaults"

    def generate(self, ids: list[int], n: int) -> Any:
        config = self.genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = n, True, False
        config.apply_chat_template = False
        array = self.np.array([ids], self.np.int64)
        inputs = self.genai.TokenizedInputs(
            self.openvino.Tensor(array), self.openvino.Tensor(self.np.ones_like(array))
        )
        return self.pipeline.generate(inputs, config).perf_metrics

    def prefill(self, n: int, depth: int, seed: int) -> float:
        assert depth == 0
        metrics = self.generate(tokens(n, self.n_vocab, seed), 1)
        return 1e3 * n / metrics.get_ttft().mean

    def decode(self, n: int, depth: int, seed: int) -> float:
        # It has to have a prompt: at depth 0 that is one token.
        metrics = self.generate(tokens(max(depth, 1), self.n_vocab, seed), n + 1)
        return 1e3 / metrics.get_tpot().mean

    @classmethod
    def first_token(cls, model: str, threads: int) -> str:
        self = cls(model, threads, {})
        config = self.genai.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.apply_chat_template = 1, False, False
        return str(self.pipeline.generate(PROMPT, config))


PROGRAMS: dict[str, Any] = {"ringlm": Ringlm, "llama.cpp": LlamaCpp, "OpenVINO GenAI": OpenVino}


def serve(program: str, model: str, threads: int, options: dict[str, Any], room: int, out: int) -> None:
    """Answers tasks from stdin, a JSON object a line each way, on a stream that libraries do not print to."""
    with os.fdopen(out, "w", buffering=1) as answers:
        worker = PROGRAMS[program](model, threads, options, room)
        print(json.dumps({"version": worker.version, "note": worker.note}), file=answers)
        for line in sys.stdin:
            task = json.loads(line)
            print(json.dumps(getattr(worker, task.pop("do"))(**task)), file=answers)


# ---- in this process ---------------------------------------------------------------------------------------


class Failed(Exception):
    """A program is not there, or ended."""


@dataclass(eq=False)
class Runner:
    """A process with one variant of a program in it."""

    program: str
    python: str
    options: dict[str, Any]
    speeds: dict[str, list[float]] = field(default_factory=dict)  # by work

    @property
    def name(self) -> str:
        return ", ".join(f"{k} {v}" for k, v in self.options.items()) or "defaults"

    def start(self, model: str, threads: int, room: int) -> None:
        read, write = os.pipe()
        self.errors = tempfile.TemporaryFile("w+b")  # noqa: SIM115
        command = [self.python, __file__, model, "-t", str(threads), "--serve", self.program]
        command += ["--options", json.dumps(self.options), "--out", str(write), "--room", str(room)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self.errors,
            pass_fds=[write],
            text=True,
        )
        os.close(write)
        self.answers = os.fdopen(read)
        hello = self.answer()
        self.version, self.note = hello["version"], hello["note"]

    def ask(self, **task: Any) -> float:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # answer() says why
            print(json.dumps(task), file=self.process.stdin, flush=True)
        return float(self.answer())

    def answer(self) -> Any:
        line = self.answers.readline()
        if line:
            return json.loads(line)
        code = self.process.wait()
        self.errors.seek(0)
        said = self.errors.read().decode(errors="replace").strip().splitlines()
        raise Failed(f"ended by signal {-code}" if code < 0 else said[-1] if said else f"exit code {code}")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.answers.close()
        self.errors.close()
        if self.process.stdin is not None:
            self.process.stdin.close()


@dataclass
class Work:
    label: str
    do: str
    n: int


@dataclass
class Group:
    """Work at one depth, and who does it."""

    depth: int
    works: list[Work]
    ringlm: dict[str, dict[str, Any]]  # what the label says besides, and the session's options
    peers: dict[str, list[dict[str, Any]]]

    @property
    def room(self) -> int:
        return max(32, *(work.n for work in self.works))


def groups(args: argparse.Namespace) -> list[Group]:
    builds: list[dict[str, Any]] = [{"amx": 1}, {"amx": 0}] if "amx_tile" in cpu_flags() else [{}]
    llama = [{"kv": "f16", "flash": flash, **b} for b in builds for flash in (1, 0)]
    openvino: list[dict[str, Any]] = [{}, {"ATTENTION_BACKEND": "SDPA"}]
    chunk = {"chunk": args.chunk} if args.chunk else {}
    decode = Work(f"decode {args.decode}", "decode", args.decode)
    works = [Work(f"prefill {args.prefill}", "prefill", args.prefill), decode]
    works = [work for work in works if work.n]
    found = [Group(0, works, {"": chunk}, {"llama.cpp": llama, "OpenVINO GenAI": openvino})] if works else []
    for depth in args.depth if args.decode else []:
        ours = {f", {kv} K/V": {"kv": kv, **chunk} for kv in ("f16", "int8")}
        peers = {
            "llama.cpp": [*llama, *({"kv": "q8_0", "flash": 1, **b} for b in builds)],
            "OpenVINO GenAI": [{**o, **kv} for o in openvino for kv in ({}, {"KV_CACHE_PRECISION": "f16"})],
        }
        found.append(Group(depth, [decode], ours, peers))
    return found


Row = tuple[str, dict[str, tuple[float, str]]]  # label; by program: tokens/s, and the fastest variant


def run_group(
    args: argparse.Namespace, group: Group, versions: dict[str, str], skipped: list[str]
) -> list[Row]:
    started: list[Runner] = []
    try:
        pythons = {"llama.cpp": args.llama_python, "OpenVINO GenAI": [args.openvino_python]}
        ours = {label: Runner("ringlm", args.ringlm_python, o) for label, o in group.ringlm.items()}
        chosen = {
            work.label: list(started_runners)
            for work, started_runners in trial(
                args, group, list(ours.values()), 0.0, started, versions, skipped
            )
        }
        if not all(len(runners) == len(ours) for runners in chosen.values()):
            raise SystemExit("ringlm itself fails: " + "; ".join(skipped))
        for program, variants in group.peers.items():
            if program in args.without:
                continue
            runners = [Runner(program, p, options) for p in pythons[program] for options in variants]
            for work, near in trial(args, group, runners, NEAR, started, versions, skipped):
                chosen[work.label] += near
        for i in range(args.repeat):
            say(f"depth {group.depth}: round {i + 1} of {args.repeat}")
            for work in group.works:
                for runner in chosen[work.label]:
                    time.sleep(args.rest)
                    speed = runner.ask(do=work.do, n=work.n, depth=group.depth, seed=100 + i)
                    runner.speeds.setdefault(work.label, []).append(speed)
    finally:
        for runner in started:
            runner.stop()
    rows: list[Row] = []
    for work in group.works:
        peers: dict[str, tuple[float, str]] = {}
        for runner in chosen[work.label]:
            speed = statistics.median(runner.speeds[work.label])
            if runner.program != "ringlm" and speed > peers.get(runner.program, (0.0, ""))[0]:
                peers[runner.program] = (speed, runner.name)
        for label, runner in ours.items():
            where = f", depth {group.depth}" if work.do == "decode" else ""
            speed = statistics.median(runner.speeds[work.label])
            rows.append((f"{work.label}{where}{label}", {"ringlm": (speed, runner.name), **peers}))
    return rows


def trial(
    args: argparse.Namespace,
    group: Group,
    runners: list[Runner],
    near: float,
    started: list[Runner],
    versions: dict[str, str],
    skipped: list[str],
) -> list[tuple[Work, list[Runner]]]:
    """For each work the runners of one program that have at least ``near`` of the fastest one's speed. Those
    that are near in nothing are stopped."""
    speeds: dict[str, dict[int, float]] = {work.label: {} for work in group.works}
    for i, runner in enumerate(runners):
        where = f" in {runner.python}" if len({r.python for r in runners}) > 1 else ""
        try:
            runner.start(args.model, args.threads, group.room)
            for work in group.works:
                # Warms up, and fills.
                runner.ask(do=work.do, n=min(work.n, 16), depth=group.depth, seed=0)
                tries = [runner.ask(do=work.do, n=work.n, depth=group.depth, seed=s) for s in (1, 2)]
                speeds[work.label][i] = max(tries)
                place = f"{work.label}, depth {group.depth}"
                say(f"{place}: {runner.program}{where}, {runner.name}: {max(tries):.1f}")
            versions[runner.program] = runner.version
            started.append(runner)
        except Failed as e:
            runner.stop()
            for tried in speeds.values():
                tried.pop(i, None)
            missing = "No module named" in str(e)
            text = f"{runner.program}{where}" + (": not installed" if missing else f", {runner.name}: {e}")
            say(text)
            if text not in skipped:
                skipped.append(text)
    found = []
    for work in group.works:
        tried = speeds[work.label]
        reach = near * max(tried.values(), default=0.0)
        found.append((work, [runners[i] for i in tried if tried[i] >= reach]))
    for runner in runners:
        if runner in started and not any(runner in kept for _, kept in found):
            runner.stop()
            started.remove(runner)
    return found


def first_tokens(args: argparse.Namespace, skipped: list[str]) -> dict[str, tuple[float, str]]:
    """Median seconds from the start of a process to the first token's text, the programs in turns."""
    pythons = {
        "ringlm": args.ringlm_python,
        "llama.cpp": args.llama_python[-1],
        "OpenVINO GenAI": args.openvino_python,
    }
    found: dict[str, list[float]] = {name: [] for name in pythons if name not in args.without}
    for i in range(args.repeat + 1):
        for program in list(found):
            command = [pythons[program], __file__, args.model, "-t", str(args.threads), "--first", program]
            with tempfile.TemporaryFile() as errors:
                began = time.perf_counter()
                with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors) as process:
                    assert process.stdout is not None
                    text = process.stdout.read(1)
                    took = time.perf_counter() - began
                errors.seek(0)
                said = errors.read().decode(errors="replace").strip().splitlines()
            if not text:
                del found[program]
                if not any(s.startswith(program) and "not installed" in s for s in skipped):
                    skipped.append(f"{program}, first token: {said[-1] if said else 'it said nothing'}")
            elif i:  # the first one warms the page cache
                found[program].append(took)
    return {program: (statistics.median(times), "") for program, times in found.items()}


def table(
    rows: list[tuple[str, dict[str, Any]]], first: dict[str, tuple[float, str]], args: Any
) -> list[str]:
    peers = [p for p in ("llama.cpp", "OpenVINO GenAI") if any(p in best for _, best in rows) or p in first]
    head = [f"{Path(args.model).name}, {args.threads} threads", "ringlm", *peers]
    lines = ["| " + " | ".join(head + [f"ringlm / {p}" for p in peers]) + " |"]
    lines.append("|---|" + "---:|" * (1 + 2 * len(peers)))
    for label, best in rows:
        cells = [f"{label}, tokens/s"]
        cells += [f"{best[p][0]:,.0f}" if p in best else "-" for p in ("ringlm", *peers)]
        cells += [f"{best['ringlm'][0] / best[p][0]:.2f}" if p in best else "-" for p in peers]
        lines.append("| " + " | ".join(cells) + " |")
    if "ringlm" in first:
        cells = ["first token from process start, s"]
        cells += [f"{first[p][0]:.2f}" if p in first else "-" for p in ("ringlm", *peers)]
        cells += [f"{first[p][0] / first['ringlm'][0]:.2f}" if p in first else "-" for p in peers]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def cpu_flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    return set(next((line for line in text.splitlines() if line.startswith("flags")), "").split())


def cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name"))
    return next(names, platform.machine())


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-p", "--prefill", type=int, default=512, help="tokens; 0 skips it")
    parser.add_argument("-n", "--decode", type=int, default=128, help="tokens; 0 skips it")
    parser.add_argument("-d", "--depth", type=int, action="append", help="4096; may be given several times")
    parser.add_argument("--no-depth", action="store_true", help="decode at depth 0 only")
    parser.add_argument("--no-first", action="store_true", help="no first tokens")
    parser.add_argument("--chunk", type=int, help="of ringlm's prefill; its default otherwise")
    parser.add_argument("--repeat", type=int, default=5, help="rounds")
    parser.add_argument("--rest", type=float, default=0.2, help="seconds between two measurements")
    parser.add_argument("--ringlm-python", default=sys.executable, metavar="PATH")
    parser.add_argument(
        "--llama-python", action="append", metavar="PATH", help="may be given several times: the best counts"
    )
    parser.add_argument("--openvino-python", default=sys.executable, metavar="PATH")
    parser.add_argument("--without", action="append", default=[], choices=("llama.cpp", "OpenVINO GenAI"))
    parser.add_argument("--json", metavar="FILE", help="write the figures as well")
    for hidden in ("--serve", "--options", "--out", "--room", "--first"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.llama_python = args.llama_python or [sys.executable]
    args.depth = [] if args.no_depth else args.depth or [4096]
    if args.serve:
        serve(args.serve, args.model, args.threads, json.loads(args.options), int(args.room), int(args.out))
        return 0
    if args.first:
        text = PROGRAMS[args.first].first_token(args.model, args.threads)
        os.write(1, text.encode() or b" ")
        return 0
    date = time.strftime("%Y-%m-%d")
    rows: list[Row] = []
    versions: dict[str, str] = {}
    skipped: list[str] = []
    for group in groups(args):
        rows += run_group(args, group, versions, skipped)
    first = {} if args.no_first else first_tokens(args, skipped)
    named = ", ".join(f"{program} {version}" for program, version in versions.items())
    print(
        f"{cpu_name()}, {os.cpu_count()} cores, {platform.system()}; {named}; {date}. "
        f"Medians of {args.repeat} rounds.\n"
    )
    print("\n".join(table(rows, first, args)))
    print()
    for label, best in rows:
        used = "; ".join(f"{p}: {name}" for p, (_, name) in best.items() if p != "ringlm")
        if used:
            print(f"{label}: fastest variants, {used}")
    for text in skipped:
        print(f"left out: {text}")
    if args.json:
        record = {"versions": versions, "rows": rows, "first_token": first, "skipped": skipped, "date": date}
        Path(args.json).write_text(json.dumps(record, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
