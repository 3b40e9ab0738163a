"""``ringlm compare``."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import options as opt
from .app import app

if TYPE_CHECKING:
    from ringlm.compare import Comparison, Side


@app.command("compare")
def compare_command(
    name_a: Annotated[
        str, typer.Argument(metavar="A", help="The model to compare with, as MODEL elsewhere.")
    ],
    name_b: Annotated[str, typer.Argument(metavar="B", help="The model that is compared.")],
    file: Annotated[str, typer.Option("-f", "--file", metavar="FILE", help="UTF-8 text; - reads stdin.")],
    n_ctx: Annotated[int, typer.Option("-c", "--ctx", metavar="N", min=3, help="Tokens of a window.")] = 512,
    kv: opt.Kv = "f16",
    kv_b: Annotated[
        str | None, typer.Option("--kv-b", metavar="TYPE", help="K/V cache of B.", show_default="as --kv")
    ] = None,
    chunk: opt.Chunk = 128,
    threads: opt.Threads = None,
    device: opt.Device = "cpu",
    backend: opt.Backend = None,
    as_json: opt.Json = False,
) -> None:
    """Measure how far model B predicts otherwise than model A over a text.

    Shows the perplexity of both, KL divergence of B from A, how often both find the same token most probable,
    and the bytes of weights and K/V. Windows and scored tokens are those of 'ringlm perplexity'. A and B need
    the same vocabulary; they may be one model with two caches."""
    from ringlm.compare import compare

    text = opt.read_text(None if file == "-" else Path(file))
    status, began = opt.StatusLine(), time.monotonic()

    def progress(done: int, total: int, so_far: float) -> None:
        left = (time.monotonic() - began) / done * (total - done)
        status.show(f"part {done} of {total}, mean KL divergence {so_far:.6f}, {left:.0f} s left")

    with opt.opened(name_a, threads, device, backend) as a, opt.opened(name_b, threads, device, backend) as b:
        status.show("reading the text")
        try:
            began = time.monotonic()
            result = compare(
                a,
                b,
                text,
                n_ctx=n_ctx,
                kv=opt.kv_types(kv),
                kv_b=None if kv_b is None else opt.kv_types(kv_b),
                chunk=chunk,
                progress=progress,
            )
        finally:
            status.clear()
    if as_json:
        typer.echo(json.dumps(_without_nan(dataclasses.asdict(result))))
    else:
        _show(result)


def _without_nan(record: dict[str, object]) -> dict[str, object]:
    """JSON has no NaN, which the standard error of one token is."""
    return {
        key: _without_nan(value) if isinstance(value, dict) else None if value != value else value
        for key, value in record.items()
    }


def _show(r: Comparison) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for letter, side in (("A", r.a), ("B", r.b)):
        path = "".join(c if c.isprintable() else repr(c)[1:-1] for c in side.model)
        table.add_column(f"{letter}: {path}", justify="right", overflow="fold")
    table.add_column("B / A", justify="right")
    for label, a, b in (
        ("weights, bytes", r.a.weight_nbytes, r.b.weight_nbytes),
        ("K/V of a token, bytes", r.a.kv_nbytes_per_token, r.b.kv_nbytes_per_token),
        ("K/V of a session, bytes", r.a.kv_nbytes, r.b.kv_nbytes),
    ):
        table.add_row(label, f"{a:,}", f"{b:,}", f"{b / a:.4f}")
    table.add_row("K/V type", _kv(r.a), _kv(r.b), "")
    table.add_row("perplexity", _perplexity(r.a), _perplexity(r.b), f"{r.b.perplexity / r.a.perplexity:.4f}")
    # A pipe gets whole lines however long they are.
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 10_000)
    console.print(table)
    typer.echo(
        f"\nKL divergence of B from A: mean {r.kl_mean:.6f}, 99th percentile {r.kl_p99:.6f}\n"
        f"same most probable token: {100 * r.same_top:.2f} %\n"
        f"{r.tokens} tokens scored in {r.windows} windows of {r.n_ctx}, {r.seconds:.1f} s"
    )


def _kv(side: Side) -> str:
    k, v = side.kv
    return k if k == v else f"{k},{v}"


def _perplexity(side: Side) -> str:
    return f"{side.perplexity:.4f} +/- {side.stderr:.4f}"
