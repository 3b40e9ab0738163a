"""The machine and the process that a benchmark runs on."""

from __future__ import annotations

import gc
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ringlm.errors import DeviceError

__all__ = ["Machine", "PeakMemory", "first_token_seconds", "no_garbage", "this_machine"]

PROMPT, PROMPT_IDS = "The capital of France is", (1, 2, 3, 4, 5)


@dataclass(frozen=True)
class Machine:
    cpu: str
    #: That this process may use.
    cores: int
    #: The instruction set of the kernels: ``"avx512"``, ``"avx2"``, ``"neon"``, ``"generic"``.
    isa: str
    ringlm: str
    os: str
    #: When the run began: ISO 8601, UTC.
    date: str


def this_machine(isa: str, date: str) -> Machine:
    from ringlm import __version__

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(_cpu_name(), cores, isa, __version__, platform.platform(terse=True), date)


def _cpu_name() -> str:
    """The kernel's name of the processor; ARM boards name only the board."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model", "Hardware") and value.strip():
                return value.strip()
        return Path("/proc/device-tree/model").read_text(encoding="utf-8", errors="replace").strip("\0\n ")
    except OSError:
        return platform.processor() or platform.machine()


@contextmanager
def no_garbage() -> Iterator[None]:
    """No collection of garbage in between."""
    gc.collect()
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


class PeakMemory:
    """Highest resident memory of this process since the object was made; 0 where the system does not say."""

    def __init__(self) -> None:
        #: What is resident and does not count.
        self.besides = 0
        self.bytes = 0
        self._reset()

    def _reset(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return  # then the peak is that of the process so far

    def look(self) -> None:
        try:
            status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        except OSError:
            return
        peak = next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")), 0)
        self.bytes = max(self.bytes, 1024 * peak - self.besides)
        self._reset()


_FIRST_TOKEN = """
import sys
from ringlm import Error, Model
with Model(sys.argv[1], n_threads=int(sys.argv[2]) or None) as model:
    try:
        ids = model.tokenizer.encode(sys.argv[3])
    except Error:  # a file without a vocabulary
        ids = [int(i) % model.n_vocab for i in sys.argv[4].split()]
    with model.session(n_ctx=min(512, model.config.n_ctx_train)) as session:
        token = int(session.prefill(ids).argmax())
    try:
        text = model.tokenizer.decode([token])
    except Error:
        text = str(token)
    sys.stdout.buffer.write(text.encode() + b"\\n")
    sys.stdout.flush()
"""


def first_token_seconds(path: Path, n_threads: int | None) -> float:
    """Seconds from the start of a new process to the text of its first token."""
    ids = " ".join(map(str, PROMPT_IDS))
    command = [sys.executable, "-c", _FIRST_TOKEN, str(path), str(n_threads or 0), PROMPT, ids]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        first = process.stdout.read(1)
        took = time.perf_counter() - began
        message = process.stderr.read().decode(errors="replace").strip()
    if not first:
        raise DeviceError(
            f"a new process with {sys.executable} did not come to a token: "
            f"{message.splitlines()[-1] if message else 'it said nothing'}"
        )
    return took
