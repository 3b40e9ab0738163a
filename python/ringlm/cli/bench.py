"""``ringlm bench``."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import options as opt
from .app import app
from .progress import PullView

if TYPE_CHECKING:
    from rich.table import Table

    from ringlm.bench import KvFormat, OperationCost, Report

_EACH = "several: separate them by commas"


@app.command("bench")
def bench_command(
    name: opt.ModelName = opt.DEFAULT_MODEL,
    n_prefill: Annotated[
        int, typer.Option("-p", "--prefill", metavar="N", min=0, help="Tokens to prefill; 0 skips that.")
    ] = 512,
    n_decode: Annotated[
        int, typer.Option("-n", "--decode", metavar="N", min=0, help="Tokens to decode; 0 skips that.")
    ] = 128,
    depths: Annotated[
        str, typer.Option("-d", "--depth", metavar="N,N", help=f"Tokens that come before; {_EACH}.")
    ] = "0",
    kv: Annotated[
        str,
        typer.Option(
            "--kv", metavar="TYPE,TYPE", help=f"K/V cache: f16, int8, f32 or K/V as int8/f16; {_EACH}."
        ),
    ] = "f16",
    threads: Annotated[
        str | None,
        typer.Option(
            "-t", "--threads", metavar="N,N", help=f"CPU threads; {_EACH}.", show_default="all cores"
        ),
    ] = None,
    n_ctx: Annotated[
        int | None,
        typer.Option(
            "-c", "--ctx", metavar="N", min=1, help="Tokens of context.", show_default="as many as needed"
        ),
    ] = None,
    pinned: opt.Pinned = 0,
    overflow: opt.Overflow = "error",
    chunk: opt.Chunk = 128,
    repeat: Annotated[int, typer.Option("--repeat", metavar="N", min=1, help="Rounds to measure.")] = 5,
    profile: Annotated[
        bool, typer.Option("--profile", help="Show where the time goes, by operation.")
    ] = False,
    as_json: opt.Json = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw a chart: out.png, .svg, .pdf.")
    ] = None,
) -> None:
    """Measure prefill and decode, and how near they are to the machine's read bandwidth.

    The bandwidth is measured in the same run, by as many threads, between the rounds."""
    from ringlm import hub
    from ringlm.bench import bench

    depth_list = _numbers(depths, "-d")
    thread_list = [None] if threads is None else _numbers(threads, "-t")
    if plot is not None:
        from ringlm.bench_plot import new_figure

        new_figure(plot)  # before a long run, not behind it
    with PullView() as pulling:
        path = hub.resolve(name, progress=pulling)
    status = opt.StatusLine()
    try:
        report = bench(
            path,
            n_prefill=n_prefill,
            n_decode=n_decode,
            depths=depth_list,
            kv=[_format(part) for part in kv.split(",")],
            threads=thread_list,
            n_ctx=n_ctx,
            pinned=pinned,
            chunk=chunk,
            overflow=overflow,
            repeat=repeat,
            profile=profile,
            progress=status.show,
        )
    finally:
        status.clear()
    if plot is not None:
        from ringlm.bench_plot import plot as draw

        draw(report, plot)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(report), indent=2))
    else:
        _show(report)


def _numbers(text: str, option: str) -> list[int]:
    """``0,4096``. The benchmark knows which ones make sense."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"{text!r:.60} is no number, and no numbers with commas between them", param_hint=option
        ) from None


def _format(text: str) -> KvFormat:
    k, slash, v = text.strip().partition("/")
    return (k, v) if slash else k


def _show(report: Report) -> None:
    from rich.console import Console

    from ringlm.plan import format_size

    # A pipe gets whole lines however long.
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)

    def line(label: str, value: str) -> None:
        console.print(f"{label:15}{value}", markup=False, soft_wrap=True)

    m = report.machine
    by_threads = ", ".join(
        f"{gbs:.1f} GB/s with {n} thread" + "s" * (n != 1)
        for n, gbs in report.read_bandwidth_gbs_by_threads.items()
    )
    line("model", "".join(c if c.isprintable() else repr(c)[1:-1] for c in report.model))
    line("machine", f"{m.cpu}, {m.cores} core" + "s" * (m.cores != 1) + f", {m.isa}; {m.os}")
    line("ringlm", f"{m.ringlm}, {m.date}")
    line("memory reads", by_threads)
    line("load", f"{report.load_s:.2f} s; first token {report.first_token_ms / 1e3:.2f} s from process start")
    line("peak memory", format_size(report.peak_memory_bytes))
    console.print()
    console.print(_results(report, console.width))
    if report.profile:
        runs = dict.fromkeys((c.kind, c.n, c.depth, c.kv, c.threads) for c in report.profile)
        for run in runs:
            costs = [c for c in report.profile if (c.kind, c.n, c.depth, c.kv, c.threads) == run]
            kind, n, depth, kv, threads = run
            step = "token" if kind == "decode" else "chunk"
            console.print(
                f"\n{kind} {n} at depth {depth}, K/V {kv}, {threads} thread"
                + "s" * (threads != 1)
                + f": the mean {step}",
                markup=False,
            )
            console.print(_profile(costs, console.width))


def _table(room: int, *columns: str) -> Table:
    from rich.table import Table

    gap = 2 if room >= 90 else 1
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    return table


def _results(report: Report, room: int) -> Table:
    table = _table(
        room, "", "depth", "K/V", "thr", "tokens/s", "p50 ms", "p99 ms", "MB/tok", "GB/s", "of limit"
    )
    for r in report.results:
        table.add_row(
            f"{r.kind} {r.n}",
            str(r.depth),
            r.kv,
            str(r.threads),
            f"{r.tokens_per_second:,.1f}",
            f"{r.p50_ms:.2f}",
            f"{r.p99_ms:.2f}",
            f"{r.bytes_per_token / 1e6:.1f}",
            f"{r.gbs:.1f}",
            f"{r.fraction_of_read_bandwidth:.0%}",
        )
    return table


def _profile(costs: list[OperationCost], room: int) -> Table:
    table = _table(room, "operation", "ms", "of step", "MB", "GB/s", "of limit")
    for c in costs:
        read = [f"{c.bytes / 1e6:.2f}", f"{c.gbs:.1f}", f"{c.fraction_of_read_bandwidth:.0%}"]
        table.add_row(
            c.operation, f"{c.ms:.3f}", f"{c.share_of_step:.1%}", *(read if c.bytes else ["-", "-", "-"])
        )
    total, nbytes = sum(c.ms for c in costs), sum(c.bytes for c in costs)
    table.add_row("step", f"{total:.3f}", "", f"{nbytes / 1e6:.2f}", f"{nbytes / total / 1e6:.1f}", "")
    return table
