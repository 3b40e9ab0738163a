"""What can be said of the CUDA kernels without a GPU: tables for docs/cuda.md.

    python -m benchmarks.cuda_static [--build FOLDER]

Needs nvcc, cuobjdump (with nvdisasm beside it), CMake, doctest and boost.context, no network and no GPU; some
minutes on two cores. `--build` keeps what was built for the next time; otherwise it goes to a temporary
folder. Exit code 1 if a bar is missed: see the text between the tables.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import textwrap
from collections.abc import Iterable
from pathlib import Path

from . import counts, sass, speed, toolchain
from .devices import ARCHS, DEVICES, resident_blocks
from .ptxas import Kernel, Usage
from .tables import Bars, span, table
from .toolchain import Compiled, ToolError

NO_SPILLS = ("attend_kernel", "gemv_rows", "prefill_attention_kernel")
FOUR_BITS = ("Q4_0", "Q4_1", "Q4_K")
KV_BYTES = 260  # K and V of a token and KV head, INT8 at head size 128
Q4_BYTES = 18 / 32  # of a 4-bit weight


def family(kernel: Kernel) -> str:
    """Kernels that share a row: attention by head size, gemv by rows of the step."""
    if kernel.name == "attend_kernel":
        return f"attend_kernel, head size {kernel.args[2]}"
    if kernel.name == "prefill_attention_kernel":
        return f"prefill_attention_kernel, head size {kernel.args[0]}"
    if kernel.name == "gemv_rows":
        return f"gemv_rows, M {'= 1' if kernel.args[1] == 1 else f'to {kernel.args[1]}'}"
    return kernel.name


def resources(compiled: Iterable[Compiled], dynamic: dict[str, int], bars: Bars) -> str:
    found: dict[str, dict[int, list[tuple[Usage, int, int]]]] = {}
    for c in compiled:
        for u in c.usages:
            shared = u.shared + dynamic.get(str(u.kernel), dynamic.get(u.kernel.name, 0))
            found.setdefault(family(u.kernel), {}).setdefault(c.sm, []).append(
                (u, shared, c.threads[u.mangled])
            )
            if u.kernel.name in NO_SPILLS:
                bars.check(u.spills == 0, f"{u.kernel} spills {u.spills} bytes on sm_{c.sm}")
    rows = []
    for name, by_arch in sorted(found.items()):
        first = next(iter(by_arch.values()))
        row: list[object] = [name, len(first), span({t for *_, t in first})]
        for arch in ARCHS:
            of = by_arch[arch.sm]
            blocks = [resident_blocks(arch, t, u.registers, shared) for u, shared, t in of]
            warps = [b * t // 32 for b, (*_, t) in zip(blocks, of, strict=True)]
            occupancy = span((100 * w / arch.warps for w in warps), "{:.0f}") + " %"
            row += [span(u.registers for u, *_ in of), sum(u.spills for u, *_ in of), occupancy]
        row.insert(3, span(round(shared / 1024, 1) for us in by_arch.values() for _, shared, _ in us))
        row.insert(4, max(u.stack for us in by_arch.values() for u, *_ in us))
        rows.append(row)
    head = ["kernel", "templates", "threads", "shared KiB", "stack"]
    for arch in ARCHS:
        head += [f"{arch.name}: registers", "spills", "occupancy"]
    return table(head, rows)


class Loops:
    """Instructions of hot loops by architecture."""

    def __init__(self, compiled: Iterable[Compiled]) -> None:
        self.attention: dict[int, dict[int, tuple[int, float]]] = {}  # sm, head tiles: in the loop, a token
        self.products: dict[int, dict[tuple[str, int], tuple[int, float]]] = {}  # sm, (type, M): .., a weight
        for c in compiled:
            wanted = {u.mangled: u.kernel for u in c.usages if self.wants(u.kernel)}
            if not wanted:
                continue
            code = sass.functions(toolchain.disassemble(c.cubin, wanted))
            for mangled, kernel in wanted.items():
                self.add(c.sm, kernel, code[mangled])
        if not (self.attention.keys() == self.products.keys() == {arch.sm for arch in ARCHS}):
            raise ToolError(
                "there is no attend_kernel of INT8 and head size 128, or no gemv_rows: see `wants`"
            )

    @staticmethod
    def wants(kernel: Kernel) -> bool:
        if kernel.name == "attend_kernel":
            return kernel.args[:3] == ("int8", "int8", 128)
        return kernel.name == "gemv_rows" and kernel.args[0] not in ("F32", "F16", "BF16")

    def add(self, sm: int, kernel: Kernel, code: list[sass.Instruction]) -> None:
        if kernel.name == "attend_kernel":
            tiles = int(kernel.args[3])
            loop = sass.hot_loop(code, "HMMA")
            n = len(loop.body)
            self.attention.setdefault(sm, {})[tiles] = (n, n / sass.attention_tokens(loop, 128, tiles))
        else:
            kind, M = str(kernel.args[0]), int(kernel.args[1])
            loop = sass.hot_loop(code, "IDP")
            n = len(loop.body)
            self.products.setdefault(sm, {})[kind, M] = (n, n / sass.lane_weights(loop, M))

    def attention_table(self, bars: Bars) -> str:
        rows = []
        for tiles in sorted(self.attention[ARCHS[0].sm]):
            heads = f"{8 * tiles - 7} to {8 * tiles}"
            row: list[object] = [heads]
            for arch in ARCHS:
                n, each = self.attention[arch.sm][tiles]
                row += [n, f"{each:.1f}"]
            for device in DEVICES:
                each, budget = self.attention[device.arch.sm][tiles][1], device.budget(KV_BYTES)
                row.append(f"{each / budget:.2f}")
                bars.check(
                    each <= budget, f"attention, {heads} heads: {each:.1f} on {device.name}, {budget:.0f} fit"
                )
            rows.append(row)
        return table(self.head("heads a KV head", KV_BYTES, 1), rows)

    def product_table(self, bars: Bars) -> str:
        rows = []
        four_bits = [(kind, M) for kind, M in self.products[ARCHS[0].sm] if kind in FOUR_BITS]
        for kind, M in sorted(four_bits, key=lambda of: (of[1], of[0])):
            row: list[object] = [f"{kind}, M {'= 1' if M == 1 else f'to {M}, all {M}'}"]
            for arch in ARCHS:
                n, each = self.products[arch.sm][kind, M]
                row += [n, f"{each:.2f}"]
            for device in DEVICES:
                each, budget = self.products[device.arch.sm][kind, M][1], 32 * device.budget(Q4_BYTES)
                row.append(f"{each / budget:.2f}")
                if M == 1:
                    bars.check(
                        each <= budget, f"gemv of {kind}: {each:.2f} on {device.name}, {budget:.1f} fit"
                    )
            rows.append(row)
        return table(self.head("product", Q4_BYTES, 32), rows)

    @staticmethod
    def head(first: str, n_bytes: float, lanes: int) -> list[str]:
        head = [first]
        for arch in ARCHS:
            head += [f"{arch.name}: loop", "each"]
        form = "{:.0f}" if lanes == 1 else "{:.1f}"
        return head + [f"of {d.name}'s {form.format(lanes * d.budget(n_bytes))}" for d in DEVICES]

    def of_weights(self) -> dict[int, dict[str, float]]:
        """By architecture and type, M = 1."""
        return {
            sm: {k: each for (k, M), (_, each) in of.items() if M == 1} for sm, of in self.products.items()
        }

    def of_tokens(self) -> dict[int, float]:
        """By architecture, groups of up to 8."""
        return {sm: of[1][1] for sm, of in self.attention.items()}


RESOURCES = """
From ptxas; ranges are over the templates of a row. Spills are bytes, of all templates together. Occupancy
is that of a full multiprocessor, with the largest block that the launch bounds allow. Bar: no spills in
attention and gemv.
"""
ATTENTION = f"""
From the executor: 4,096 tokens, 2 KV heads with 1, 4, 7, 8 or 16 heads each; the worst of these. K, V and
scales count by the sectors that loads touch, over their bytes in the cache; all else, which is small and
comes from L1 and L2 when it comes again, by its bytes, over those of the cache too. The floor is what any
kernel has to move: the cache, and q and the output in float32 once. At head size 256 a group of more than 8
heads reads K and V once for every 8, in blocks beside one another and so from L2: that counts once.
`sectors`: those of K and V that are read, for one that their bytes fill. Partial sums, written and read
within microseconds, are in no other column: over the cache's bytes, for groups of 4 / 8 / 16, with the
splits for 8 and for 40 multiprocessors. Bars: {counts.MOST} of the floor, 1 for `sectors`,
{counts.MOST_WAVEFRONTS:.0f} for bank conflicts.
"""
GEMV = f"""
From the executor: 64 rows of {counts.ROWS_7B} with 4096 and with 14336 columns, M = 1 and 8; the worst of
these. The weights count by sectors, over their bytes in the file; the input, once for all {counts.ROWS_7B}
rows, and the output by their bytes. The floor is the weights as the file has them, and input and output in
float32 once. `input from L1`: sectors of the input that warps load, over those of the weights. Bars:
{counts.MOST} of the floor, 1 for `sectors`, {counts.MOST_WAVEFRONTS:.0f} for bank conflicts.
"""
ATTENTION_LOOP = f"""
From the SASS: INT8, head size 128. `loop` is the innermost loop with the products, all of it, what is
skipped most of the time included; `each` is warp instructions for a token of the cache and KV head, which
are {KV_BYTES} bytes. The budget is what a device can issue (four a clock and multiprocessor) while these
bytes arrive at its full bandwidth; the columns are the part of it that the loop takes. Bar: at most 1.
"""
GEMV_LOOP = """
From the SASS, likewise: `each` is lane instructions for a weight. Bar: at most 1 with M = 1. The loop for
several rows skips those that a step does not have.
"""
SPEED = f"""
**Predictions, not measurements.** Assumed: one session with {speed.TOKENS:,} tokens in an INT8 cache;
weights as in Q4_K_M files (the head, and attn_v and ffn_down of half of the layers, in Q6_K), packed;
{speed.BANDWIDTH:.0%} of the peak bandwidth; {speed.LAUNCHES} launches a layer and 3 more, with {
    speed.GAP
    * 1e6:.0f} µs between them; the loops alone, at the highest clock and four instructions a clock and
multiprocessor. The slower of the two counts, and the gaps.
"""


def section(title: str, rows: str, text: str) -> None:
    paragraph = textwrap.fill(" ".join(text.split()), 130, break_long_words=False, break_on_hyphens=False)
    print(f"### {title}\n\n{rows}\n\n{paragraph}\n")


def report(build: Path) -> Bars:
    bars = Bars()
    toolchain.check()
    compiled = toolchain.compile_all(build)
    attend, gemv, dynamic = counts.read(toolchain.count(build))
    loops = Loops(compiled)
    section("Registers, shared memory and occupancy", resources(compiled, dynamic, bars), RESOURCES)
    section("Bytes moved by decode attention", counts.attention_table(attend, bars), ATTENTION)
    section("Bytes moved by gemv", counts.product_table(gemv, bars), GEMV)
    section("Instructions of decode attention", loops.attention_table(bars), ATTENTION_LOOP)
    section("Instructions of gemv", loops.product_table(bars), GEMV_LOOP)
    predictions = speed.speed_table(counts.bytes_per_weight(gemv), loops.of_weights(), loops.of_tokens())
    section("Predicted tokens per second", predictions, SPEED)
    for source in speed.SOURCES:
        print(f"- {source}")
    return bars


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cuda_static", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--build", type=Path, help="folder for what is built; kept")
    args = parser.parse_args()
    try:
        if args.build:
            bars = report(args.build)
        else:
            with tempfile.TemporaryDirectory() as folder:
                bars = report(Path(folder))
    except (ToolError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    for missed in bars.missed:
        print(f"MISSED: {missed}", file=sys.stderr)
    return 1 if bars.missed else 0


if __name__ == "__main__":
    sys.exit(main())
