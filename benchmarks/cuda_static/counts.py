"""Bytes moved, from what tests/cuda/counts.cpp prints."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

from .tables import Bars, span, table

MOST = 1.05  # of the floor
MOST_WAVEFRONTS = 2.0  # of a shared access, over those it would need without conflicts
STREAMED = ("k", "v", "k scales", "v scales", "weights")
ROWS_7B = 4096  # of the whole product that the slice is of
GROUPS = (1, 4, 7, 8, 16)


def passes(head_dim: int, group: int) -> int:
    """How often attention reads K and V: csrc/cuda/attend.h has 8 heads a block at head size 256, else 16.

    The blocks of a pass run beside those of the others, which find in L2 what one of them has read.
    """
    return -(-group // (8 if head_dim > 128 else 16))


@dataclass(frozen=True)
class Case:
    what: dict[str, Any]
    floor: int  # K and V with their scales, or the weights, as the cache or the file has them
    operands: int  # q and att, or x and y, in float32
    buffers: dict[str, dict[str, int]]
    lines: list[dict[str, Any]]

    def sectors(self, *names: str) -> int:
        """Bytes of the sectors that loads of these buffers touch."""
        return 32 * sum(self.buffers[name]["sectors_read"] for name in names if name in self.buffers)

    def unique(self, *names: str) -> int:
        return sum(self.buffers[n]["unique_read"] + self.buffers[n]["unique_written"] for n in names)

    @property
    def streamed(self) -> int:
        return self.sectors(*STREAMED)

    @property
    def full(self) -> float:
        """Sectors of K and V, or of the weights, over those that their bytes fill."""
        names = [name for name in ("k", "v", "weights") if name in self.buffers]
        there = sum((self.buffers[name]["unique_read"] + 31) // 32 * 32 for name in names)
        return self.sectors(*names) / there

    @property
    def conflicts(self) -> float:
        """The worst line's wavefronts over the least."""
        ways = (line["wavefronts"] / line["least_wavefronts"] for line in self.lines if line["wavefronts"])
        return max(ways, default=1.0)


def read(text: str) -> tuple[list[Case], list[Case], dict[str, int]]:
    """Attention, products, and dynamic shared memory by kernel."""
    attend: list[Case] = []
    gemv: list[Case] = []
    dynamic: dict[str, int] = {}
    for line in text.splitlines():
        found = json.loads(line)
        if "dynamic" in found:
            dynamic = found["dynamic"]
            continue
        what = "attend" if "attend" in found else "gemv"
        buffers = {b["name"]: b for b in found["buffers"] if b["unique_read"] + b["unique_written"]}
        case = Case(found[what], found["floor"], found["operands"], buffers, found["lines"])
        (attend if what == "attend" else gemv).append(case)
    return attend, gemv, dynamic


def attention_table(cases: Iterable[Case], bars: Bars) -> str:
    by = {tuple(case.what[k] for k in ("sms", "format", "head_dim", "group")): case for case in cases}
    rows = []
    for kv, head_dim in product(("int8", "f16"), (64, 128, 256)):
        ratios, small, totals, full, conflicts = [], [], [], [], []
        for group in GROUPS:
            case = by[8, kv, head_dim, group]
            n, name = (
                passes(head_dim, group),
                f"attention, {kv}, head size {head_dim}, {group} heads a KV head",
            )
            others = [b for b in case.buffers if b not in STREAMED and b != "partial"]
            ratios.append(case.streamed / n / case.floor)
            small.append(case.unique(*others) / case.floor)
            totals.append((case.streamed / n + case.unique(*others)) / (case.floor + case.operands))
            full.append(case.full / n)
            conflicts.append(case.conflicts)
            bars.check(totals[-1] <= MOST, f"{name}: {totals[-1]:.3f} of the floor are moved, {MOST} may be")
            bars.check(full[-1] <= 1.0, f"{name}: {full[-1]:.2f} sectors of K and V for one")
            bars.check(conflicts[-1] <= MOST_WAVEFRONTS, f"{name}: {conflicts[-1]:.1f}-way conflicts")
        partial = [
            [by[sms, kv, head_dim, g].unique("partial") / by[sms, kv, head_dim, g].floor for g in (4, 8, 16)]
            for sms in (8, 40)
        ]
        rows.append(
            (
                kv,
                head_dim,
                f"{max(ratios):.3f}",
                span((100 * x for x in small), "{:.1f}") + " %",
                f"{max(totals):.3f}",
                f"{max(full):.2f}",
                f"{max(conflicts):.1f}",
                *(" / ".join(f"{100 * x:.0f}" for x in row) + " %" for row in partial),
            )
        )
    head = ("K/V", "head size", "K, V, scales", "all else", "over the floor", "sectors", "bank conflicts")
    return table((*head, "partial sums, 8 SMs", "40 SMs"), rows)


def product_table(cases: Iterable[Case], bars: Bars) -> str:
    by: dict[str, list[Case]] = {}
    for case in cases:
        by.setdefault(case.what["type"], []).append(case)
    rows = []
    for kind, found in by.items():
        ratios, small, totals, full, conflicts = [], [], [], [], []
        for case in found:
            M, cols, slices = case.what["M"], case.what["cols"], ROWS_7B / case.what["rows"]
            name = f"gemv of {kind}, {cols} columns, M = {M}"
            inputs = [b for b in case.buffers if b.startswith("input")]
            others, floor = case.unique(*inputs) + slices * case.unique("y"), slices * case.floor
            ratios.append(case.streamed / case.floor)
            small.append(others / floor)
            totals.append((slices * case.streamed + others) / (floor + 4 * M * (cols + ROWS_7B)))
            full.append(case.full)
            conflicts.append(case.conflicts)
            bars.check(totals[-1] <= MOST, f"{name}: {totals[-1]:.3f} of the floor are moved, {MOST} may be")
            bars.check(full[-1] <= 1.0, f"{name}: {full[-1]:.2f} sectors of the weights for one")
            bars.check(conflicts[-1] <= MOST_WAVEFRONTS, f"{name}: {conflicts[-1]:.1f}-way conflicts")
        again = [
            max(
                c.sectors(*(b for b in c.buffers if b.startswith("input"))) / c.streamed
                for c in found
                if c.what["M"] == M
            )
            for M in (1, 8)
        ]
        rows.append(
            (
                kind,
                f"{max(ratios):.3f}",
                span((100 * x for x in small), "{:.1f}") + " %",
                f"{max(totals):.3f}",
                f"{max(full):.2f}",
                f"{max(conflicts):.1f}",
                *(f"{x:.1f}" for x in again),
            )
        )
    head = ("type", "weights", "all else", "over the floor", "sectors", "bank conflicts")
    return table((*head, "input from L1, M = 1", "M = 8"), rows)


def bytes_per_weight(cases: Iterable[Case]) -> dict[str, float]:
    """By type, as read from the packed matrix."""
    return {
        c.what["type"]: c.streamed / (c.what["rows"] * c.what["cols"])
        for c in cases
        if c.what["M"] == 1 and c.what["cols"] == 4096
    }
