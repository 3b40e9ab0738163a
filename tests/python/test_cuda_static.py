"""The parsers of benchmarks/cuda_static, on texts as the tools print them. Needs neither nvcc nor a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.cuda_static import counts, ptxas, sass, speed  # noqa: E402
from benchmarks.cuda_static.devices import AGX, NANO, NX, ORIN, T4, TURING, resident_blocks  # noqa: E402
from benchmarks.cuda_static.tables import Bars, span, table  # noqa: E402

ATTEND = "_ZN6ringlm4cuda13attend_kernelILNS_8KvFormatE2ELS2_1ELi128ELi1EEEvNS0_6AttendE"
GEMV = "_ZN6ringlm4cuda9gemv_rowsILNS_4gguf5DTypeE12ELi8EEEvNS0_4GemvE"

PTXAS = f"""ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '{ATTEND}' for 'sm_75'
ptxas info    : Function properties for {ATTEND}
    16 bytes stack frame, 24 bytes spill stores, 32 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 33028 bytes smem, 488 bytes cmem[0]
ptxas info    : Compile time = 3248.821 ms
ptxas info    : Compiling entry function '{GEMV}' for 'sm_87'
ptxas info    : Function properties for {GEMV}
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, 632 bytes cmem[0]
"""


def test_what_ptxas_says() -> None:
    attend, gemv = ptxas.usages(PTXAS)
    assert (attend.sm, attend.registers, attend.shared, attend.stack, attend.spills) == (
        75,
        128,
        33028,
        16,
        56,
    )
    assert (gemv.sm, gemv.registers, gemv.shared, gemv.spills) == (87, 40, 0, 0)
    assert attend.kernel == ptxas.Kernel("attend_kernel", ("int8", "f16", 128, 1))
    assert str(gemv.kernel) == "gemv_rows<Q4_K, 8>"


@pytest.mark.parametrize(
    ("mangled", "name"),
    [
        ("_ZN6ringlm4cuda12route_kernelENS0_5RouteE", "route_kernel"),
        ("_ZN6ringlm4cuda18mix_experts_kernelI6float4EEvPKT_S4_PKfiiPS2_", "mix_experts_kernel<float4>"),
        ("_ZN6ringlm4cuda18mix_experts_kernelIfEEvPKT_S3_PKfiiPS1_", "mix_experts_kernel<float>"),
        ("_ZN6ringlm4cuda18rope_append_kernelILi4ELi128EEEvNS0_10RopeAppendE", "rope_append_kernel<4, 128>"),
        ("_Z5probev", "probe"),
    ],
)
def test_names(mangled: str, name: str) -> None:
    assert str(ptxas.kernel_of(mangled)) == name


def test_blocks_of_launch_bounds() -> None:
    text = f"""
.visible .entry {GEMV}(
	.param .align 8 .b8 gemv_param_0[272]
)
.maxntid 256
.minnctapersm 3
{{
	ret;
}}
.visible .entry free(.param .u64 free_param_0)
{{
}}
"""
    assert ptxas.block_threads(text) == {GEMV: 256}


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared", "blocks"),
    [  # by hand, from the limits in the CUDA C++ Programming Guide
        (TURING, 256, 32, 0, 4),  # 32 warps
        (ORIN, 256, 32, 0, 6),  # 48 warps
        (TURING, 128, 128, 0, 4),  # 64K registers of 16K
        (TURING, 128, 129, 0, 3),  # 136 registers a thread, for 15 warps, in fours 12
        (ORIN, 256, 80, 2080, 3),  # 2560 registers a warp: 25, in fours 24
        (TURING, 32, 16, 0, 16),  # blocks
        (TURING, 128, 32, 17 << 10, 3),  # 64 KiB of 17
        (ORIN, 128, 32, 40 << 10, 4),  # 164 KiB of 41
        (ORIN, 128, 32, 41 << 10, 3),
        (TURING, 1024, 80, 0, 0),  # does not fit at all
    ],
)
def test_occupancy(arch: object, threads: int, registers: int, shared: int, blocks: int) -> None:
    assert resident_blocks(arch, threads, registers, shared) == blocks  # type: ignore[arg-type]


# Two loops, one in the other, and code behind the end that branches back into both.
SASS = f"""
	code for sm_87
		Function : {ATTEND}
	.headerflags	@"EF_CUDA_SM87"
        /*0000*/                   MOV R1, c[0x0][0x28] ;                          /* 0x00000a0000017a02 */
                                                                                  /* 0x000fc40000000f00 */
        /*0010*/                   LDG.E.64 R4, [R2.64] ;                          /* 0x0000000402047981 */
        /*0020*/                   LDG.E.EF.128 R8, [R2.64+0x10] ;                 /* 0x0000000402047981 */
        /*0030*/                   HMMA.16816.F32 R12, R8, R4, R12 ;               /* 0x000000040a0c723c */
        /*0040*/               @!P1 BRA 0x60 ;                                     /* 0x0000001000001947 */
        /*0050*/                   FMUL R12, R12, R3 ;                             /* 0x000000030c0c7220 */
        /*0060*/                   HMMA.16816.F32 R16, R8, R6, R16 ;               /* 0x000000060a10723c */
        /*0070*/                   BRA.DIV UR4, 0xb0 ;                             /* 0x0000000000007947 */
        /*0080*/              @!UP0 BRA.U 0x20 ;                                   /* 0xffffff9000008947 */
        /*0090*/               @P0 BRA 0x10 ;                                      /* 0xffffff8000000947 */
        /*00a0*/                   EXIT ;                                          /* 0x000000000000794d */
        /*00b0*/                   SHFL.BFLY PT, R9, R9, 0x1, 0x1f ;               /* 0x0c201f0009097f89 */
        /*00c0*/                   BRA 0x80 ;                                      /* 0xffffffb000007947 */
        /*00d0*/                   BRA 0xd0;                                       /* 0xfffffff000007947 */
		..........

		Function : other
        /*0000*/                   EXIT ;                                          /* 0x000000000000794d */
"""


def test_loops() -> None:
    code = sass.functions(SASS)
    assert list(code) == [ATTEND, "other"] and [len(c) for c in code.values()] == [14, 1]
    assert code[ATTEND][8].predicate == "@!UP0" and code[ATTEND][8].target == 0x20
    spans = [(loop.body[0].address, loop.body[-1].address) for loop in sass.loops(code[ATTEND])]
    assert spans == [(0xD0, 0xD0), (0x80, 0xC0), (0x20, 0x80), (0x10, 0x90)]
    loop = sass.hot_loop(code[ATTEND], "HMMA")
    assert len(loop.body) == 7 and loop.count("LDG") == 1
    assert sass.attention_tokens(loop, 16, 1) == 16  # 2 products of 16 keys, 8 columns and 16 elements
    with pytest.raises(ValueError, match="no loop"):
        sass.hot_loop(code[ATTEND], "IDP")


def test_products_outside_of_the_loop_are_an_error() -> None:
    split = SASS.replace(
        "/*0010*/                   LDG.E.64 R4, [R2.64]", "/*0010*/  HMMA.1688.F32 R0, R8, R4, R12"
    )
    with pytest.raises(ValueError, match="2 of 3 HMMA"):
        sass.hot_loop(sass.functions(split)[ATTEND], "HMMA")


def test_weights_of_an_iteration() -> None:
    dp4a = sass.Instruction(0, "IDP.4A.S8.S8", "R1, R2, R3, R4")
    assert sass.lane_weights(sass.Loop((dp4a,) * 512), 8) == 128


def test_budgets() -> None:
    assert [round(d.budget(260)) for d in (NANO, NX, AGX, T4)] == [83, 75, 106, 207]
    assert [round(32 * d.budget(18 / 32), 1) for d in (NANO, NX, AGX, T4)] == [5.8, 5.2, 7.3, 14.3]


def attention(**change: int) -> dict[str, object]:
    k = {
        "name": "k",
        "bytes_read": 640,
        "unique_read": 640,
        "unique_written": 0,
        "sectors_read": 20,
        **change,
    }
    line = {"at": "x.h:1", "op": "shared load", "wavefronts": 6, "least_wavefronts": 2}
    return {"attend": {"group": 1}, "floor": 640, "operands": 8, "buffers": [k], "lines": [line]}


def test_counts() -> None:
    text = json.dumps({"dynamic": {"x": 7}}) + "\n" + json.dumps(attention(sectors_read=30))
    (case,), products, dynamic = counts.read(text)
    assert not products and dynamic == {"x": 7}
    assert case.streamed == 960 and case.full == 1.5 and case.conflicts == 3.0
    assert [counts.passes(d, g) for d, g in ((128, 16), (128, 17), (256, 8), (256, 16))] == [1, 2, 1, 2]


def test_predictions() -> None:
    # Parameters of the models, without norms and biases; the embedding of Qwen2.5-1.5B is its head.
    assert sum(speed.QWEN.weights().values()) == pytest.approx(1.5437e9, rel=1e-4)
    assert sum(speed.LLAMA.weights().values()) == pytest.approx(8.0303e9 - 4096 * 128256, rel=1e-4)
    each = {"Q4_K": 0.5, "Q6_K": 0.5}
    p = speed.predict(NANO, speed.LLAMA, each, {"Q4_K": 1.0, "Q6_K": 1.0}, 10.0)
    n = sum(speed.LLAMA.weights().values())
    kv = 32 * 8 * 1024
    assert p.by_bandwidth == pytest.approx(102e9 * speed.BANDWIDTH / (n / 2 + kv * 260))
    assert p.by_issue == pytest.approx(8 * 4 * 1.02e9 / (n / 32 + 10 * kv))
    assert 1 / p.tokens == pytest.approx(1 / min(p.by_bandwidth, p.by_issue) + 195 * speed.GAP)


def test_tables() -> None:
    assert table(("a", "b"), [("x", 1)]) == "| a | b |\n|---|--:|\n| x | 1 |"
    assert span([3, 1, 2]) == "1 to 3" and span([1.04, 1.01], "{:.1f}") == "1.0"
    bars = Bars()
    bars.check(True, "good")
    bars.check(False, "bad")
    assert bars.missed == ["bad"]
