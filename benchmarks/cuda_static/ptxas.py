"""Registers, shared memory and spills, from what ptxas says; names of kernels, from their mangled ones."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

KV_FORMATS = {0: "f32", 1: "f16", 2: "int8"}
DTYPES = {
    **{0: "F32", 1: "F16", 30: "BF16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0"},
    **{12: "Q4_K", 13: "Q5_K", 14: "Q6_K"},
}
ENUMS = {"KvFormat": KV_FORMATS, "DType": DTYPES}


@dataclass(frozen=True)
class Kernel:
    name: str
    args: tuple[int | str, ...]  # of the template

    def __str__(self) -> str:
        return self.name + (f"<{', '.join(map(str, self.args))}>" if self.args else "")


def source_name(text: str, at: int) -> tuple[str, int]:
    """`6ringlm` at `at`: the name, and where it ends."""
    digits = re.compile(r"\d+").match(text, at)
    if not digits:
        raise ValueError(f"no name at {at} of {text}")
    end = digits.end() + int(digits[0])
    return text[digits.end() : end], end


def template_args(text: str, at: int) -> Iterator[int | str]:
    """Integers, enumerators and types of builtin and source names: what kernels here are templates of."""
    enum = ""  # a substitution stands for one that was there: kernels have one enumeration each
    while text[at] != "E":
        if text[at] != "L":
            if text[at].isdigit():
                name, at = source_name(text, at)
                yield name
            else:
                yield {"f": "float", "i": "int"}.get(text[at], text[at])
                at += 1
            continue
        at += 1
        is_enum = text[at] in "NS"
        if text[at] == "N":
            at += 1
            while text[at] != "E":
                if text[at] == "S":
                    at = text.index("_", at) + 1
                else:
                    enum, at = source_name(text, at)
            at += 1
        elif text[at] == "S":
            at = text.index("_", at) + 1
        else:
            at += 1  # of a builtin type
        end = text.index("E", at)
        value = int(text[at:end].replace("n", "-"))
        yield ENUMS.get(enum, {}).get(value, value) if is_enum else value
        at = end + 1


def kernel_of(mangled: str) -> Kernel:
    """_ZN6ringlm4cuda9gemv_rowsILNS_4gguf5DTypeE2ELi1EEEvNS0_4GemvE: gemv_rows of Q4_0 and 1."""
    at, name = (3 if mangled.startswith("_ZN") else 2), ""
    while mangled[at].isdigit():
        name, at = source_name(mangled, at)
    args = template_args(mangled, at + 1) if mangled[at] == "I" else ()
    return Kernel(name, tuple(args))


@dataclass(frozen=True)
class Usage:
    """What a kernel takes on one architecture."""

    mangled: str
    sm: int
    registers: int
    shared: int  # static
    stack: int
    spills: int  # bytes stored and loaded

    @property
    def kernel(self) -> Kernel:
        return kernel_of(self.mangled)


ENTRY = re.compile(r"Compiling entry function '(\w+)' for 'sm_(\d+)'")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")


def usages(text: str) -> list[Usage]:
    """Of the entries in what `ptxas -v` prints."""
    found: list[Usage] = []
    entry, frame = None, None
    for line in text.splitlines():
        if m := ENTRY.search(line):
            entry, frame = m, None
        elif m := FRAME.search(line):
            frame = m
        elif entry and (m := USED.search(line)):
            if frame is None:
                raise ValueError(f"ptxas says nothing of the stack of {entry[1]}")
            shared = SHARED.search(line)
            found.append(
                Usage(
                    mangled=entry[1],
                    sm=int(entry[2]),
                    registers=int(m[1]),
                    shared=int(shared[1]) if shared else 0,
                    stack=int(frame[1]),
                    spills=int(frame[2]) + int(frame[3]),
                )
            )
            entry = None
    return found


def block_threads(ptx: str) -> dict[str, int]:
    """By mangled name: the largest block that __launch_bounds__ allows."""
    entries = re.finditer(r"\.entry (\w+)\s*\(.*?\)(.*?)\{", ptx, re.DOTALL)
    bounds = ((m[1], re.search(r"\.maxntid\s+(\d+)", m[2])) for m in entries)
    return {name: int(bound[1]) for name, bound in bounds if bound}
