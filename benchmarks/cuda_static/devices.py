"""What the architectures and boards have, and how many blocks of a kernel fit on a multiprocessor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Arch:
    """A multiprocessor, as the CUDA C++ Programming Guide's table of compute capabilities has it."""

    sm: int
    warps: int
    blocks: int
    shared: int  # bytes for all blocks
    shared_unit: int  # bytes, of which a block gets a multiple
    shared_reserved: int  # bytes that every block takes besides its own
    registers: int = 65536
    register_unit: int = 256  # registers, of which a warp gets a multiple
    warp_unit: int = 4  # the schedulers share the registers and the warps

    @property
    def name(self) -> str:
        return f"sm_{self.sm}"


TURING = Arch(sm=75, warps=32, blocks=16, shared=64 << 10, shared_unit=256, shared_reserved=0)
ORIN = Arch(sm=87, warps=48, blocks=16, shared=164 << 10, shared_unit=128, shared_reserved=1 << 10)
ARCHS = (TURING, ORIN)


def up(n: int, unit: int) -> int:
    return (n + unit - 1) // unit * unit


def resident_blocks(arch: Arch, threads: int, registers: int, shared: int) -> int:
    """Blocks on a multiprocessor at once: as warps, registers and shared memory allow."""
    warps = (threads + 31) // 32
    by_warps = arch.warps // warps
    of_a_warp = up(max(registers, 1) * 32, arch.register_unit)
    by_registers = arch.registers // of_a_warp // arch.warp_unit * arch.warp_unit // warps
    of_a_block = up(shared, arch.shared_unit) + arch.shared_reserved
    by_shared = arch.shared // of_a_block if of_a_block else arch.blocks
    return min(arch.blocks, by_warps, by_registers, by_shared)


@dataclass(frozen=True)
class Device:
    name: str
    arch: Arch
    sms: int
    ghz: float  # of the GPU, at most
    gbps: float  # 1e9 bytes a second, at most

    @property
    def issue(self) -> float:
        """Warp instructions a second: one for each of the four schedulers and clock."""
        return self.sms * 4 * self.ghz * 1e9

    def budget(self, n_bytes: float) -> float:
        """Warp instructions there is time for while that many bytes arrive at full bandwidth."""
        return self.issue * n_bytes / (self.gbps * 1e9)


NANO = Device("Orin Nano Super", ORIN, sms=8, ghz=1.02, gbps=102)
NX = Device("Orin NX 16GB", ORIN, sms=8, ghz=0.918, gbps=102.4)
AGX = Device("AGX Orin 64GB", ORIN, sms=16, ghz=1.3, gbps=204.8)
T4 = Device("T4", TURING, sms=40, ghz=1.59, gbps=320)
DEVICES = (NANO, NX, AGX, T4)
