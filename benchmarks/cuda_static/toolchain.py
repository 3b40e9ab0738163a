"""Runs nvcc, cuobjdump and cmake."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .devices import ARCHS
from .ptxas import Usage, block_threads, usages

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "csrc" / "cuda"


class ToolError(RuntimeError):
    """A program is missing, or failed."""


def wheel_folders() -> list[Path]:
    """bin/ of the CUDA packages from the Python package index."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    return [bin_ for root in roots for bin_ in sorted(root.glob("*/bin"))]


def find(tool: str, install: str) -> str:
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    folders = [*os.get_exec_path(), *(str(Path(home, "bin")) for home in homes if home)]
    folders += [str(folder) for folder in wheel_folders()]
    path = shutil.which(tool, path=os.pathsep.join(folders))
    if path is None:
        raise ToolError(f"there is no {tool} on PATH, in $CUDA_HOME/bin or /usr/local/cuda/bin; {install}")
    return path


def nvcc() -> str:
    return find("nvcc", "install NVIDIA's CUDA toolkit")


def cuobjdump() -> str:
    return find("cuobjdump", "pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")


def cmake() -> str:
    return find("cmake", "pip install cmake")


def check() -> None:
    """That all of them are there, before minutes have gone by."""
    nvcc(), cuobjdump(), cmake()


def run(*command: str | Path) -> tuple[str, str]:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ToolError(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout, done.stderr


@dataclass(frozen=True)
class Compiled:
    """A source for one architecture."""

    sm: int
    cubin: Path
    usages: list[Usage]
    threads: dict[str, int]  # by mangled name: of a block


def sources() -> list[Path]:
    """Those with kernels of operations, the largest first: they take longest."""

    def has_kernels(cu: Path) -> bool:
        own = [cu, cu.with_suffix(".h")]
        return cu.stem != "library" and any("__global__" in path.read_text() for path in own if path.exists())

    return sorted(filter(has_kernels, SOURCES.glob("*.cu")), key=lambda cu: -len(cu.read_text()))


def compile_one(source: Path, sm: int, build: Path) -> Compiled:
    folder = build / f"sm_{sm}"
    folder.mkdir(parents=True, exist_ok=True)
    cubin, log, ptx = (folder / f"{source.stem}.{end}" for end in ("cubin", "log", "ptx"))
    newest = max(p.stat().st_mtime for p in (ROOT / "csrc").rglob("*") if p.suffix in (".h", ".cu"))
    if not log.exists() or log.stat().st_mtime < newest:
        include = (f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'csrc' / 'include'}")
        options = ("-std=c++20", f"-arch=sm_{sm}", "-Xptxas", "-v", "--keep", "--keep-dir", str(folder))
        _, said = run(nvcc(), *options, *include, "-cubin", source, "-o", cubin)
        log.write_text(said)
    return Compiled(sm, cubin, usages(log.read_text()), block_threads(ptx.read_text()))


def compile_all(build: Path) -> list[Compiled]:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(compile_one, s, arch.sm, build) for s in sources() for arch in ARCHS]
        return [job.result() for job in jobs]


def disassemble(cubin: Path, kernels: Iterable[str]) -> str:
    return run(cuobjdump(), "-sass", "-fun", ",".join(kernels), cubin)[0]


def count(build: Path) -> str:
    """What the executor counts: builds cuda_counts and runs it."""
    folder = build / "counts"
    # The core library, which is here only to be linked, compiles sooner so.
    options = ("-DRINGLM_CUDA_TESTS=ON", "-DCMAKE_CXX_FLAGS_RELEASE=-O1")
    run(cmake(), "-S", ROOT, "-B", folder, *options)
    run(cmake(), "--build", folder, "--target", "cuda_counts", "-j", str(os.cpu_count() or 1))
    return run(folder / "tests" / "cuda" / "cuda_counts")[0]
