"""Instructions of hot loops, from the disassembly that cuobjdump prints."""

from __future__ import annotations

import re
from dataclasses import dataclass

INSTRUCTION = re.compile(
    r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?);", re.MULTILINE
)
TARGET = re.compile(r"0x([0-9a-f]+)\W*$")


@dataclass(frozen=True)
class Instruction:
    address: int
    opcode: str  # with its suffixes
    operands: str
    predicate: str = ""

    @property
    def base(self) -> str:
        return self.opcode.split(".")[0]

    @property
    def target(self) -> int | None:
        """Where a branch goes that names an address."""
        if self.base not in ("BRA", "JMP"):
            return None
        to = TARGET.search(self.operands)
        return int(to[1], 16) if to else None


def functions(text: str) -> dict[str, list[Instruction]]:
    """By mangled name."""
    parts = re.split(r"^\s*Function : (\S+)\s*$", text, flags=re.MULTILINE)
    return {
        name: [Instruction(int(m[1], 16), m[3], m[4].strip(), m[2] or "") for m in INSTRUCTION.finditer(body)]
        for name, body in zip(parts[1::2], parts[2::2], strict=True)
    }


@dataclass(frozen=True)
class Loop:
    body: tuple[Instruction, ...]  # from the target of a branch backwards to the branch

    def count(self, base: str) -> int:
        return sum(i.base == base for i in self.body)


def loops(code: list[Instruction]) -> list[Loop]:
    """One for every branch backwards, the shortest first.

    Code that is seldom needed lies behind the end of a function and branches back from there. Such a
    branch spans nearly everything, and is never the shortest one around an instruction.
    """
    found = [
        Loop(tuple(i for i in code if branch.target <= i.address <= branch.address))
        for branch in code
        if branch.target is not None and branch.target <= branch.address
    ]
    return sorted(found, key=lambda loop: len(loop.body))


def hot_loop(code: list[Instruction], product: str) -> Loop:
    """The innermost loop with all of the kernel's products (HMMA or IDP) and with loads of global memory.

    An error where products lie in several loops: what one iteration does would be a guess.
    """
    n = sum(i.base == product for i in code)
    for loop in loops(code):
        here = loop.count(product)
        if here and loop.count("LDG"):
            if here != n:
                raise ValueError(f"{here} of {n} {product} are in the innermost loop that has any")
            return loop
    raise ValueError(f"no loop has {product} and loads")


DEPTH = re.compile(r"HMMA\.(1688|16816)\b")


def attention_tokens(loop: Loop, head_dim: int, head_tiles: int) -> float:
    """Tokens an iteration of a warp is for, by its products: two a token, element and column of 8 heads."""
    depths = [DEPTH.search(i.opcode) for i in loop.body if i.base == "HMMA"]
    if not all(depths):
        raise ValueError("an HMMA of a shape that is not known here")
    macs = sum(16 * 8 * {"1688": 8, "16816": 16}[m[1]] for m in depths if m)
    return macs / (2 * head_dim * 8 * head_tiles)


def lane_weights(loop: Loop, M: int) -> float:
    """Weights an iteration of a lane is for: four a dp4a, and two digits of each of M inputs."""
    return loop.count("IDP") * 4 / 2 / M
