"""``ringlm plan``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from . import options as opt
from .app import app

if TYPE_CHECKING:
    from ringlm.cache import LayerKind
    from ringlm.plan import Plan


@app.command("plan")
def plan_command(
    name: opt.ModelName = opt.DEFAULT_MODEL,
    n_ctx: opt.Context = None,
    kv: opt.Kv = "f16",
    pinned: opt.Pinned = 0,
    chunk: opt.Chunk = 128,
    sessions: Annotated[
        int, typer.Option("--sessions", metavar="N", min=1, help="How many are open at once.")
    ] = 1,
    memory: Annotated[
        str | None,
        typer.Option("--memory", metavar="SIZE", help="What may be used: 8GiB.", show_default="free now"),
    ] = None,
    threads: opt.Threads = None,
    window: opt.Window = None,
    rope: opt.Rope = None,
    as_json: opt.Json = False,
) -> None:
    """Show what sessions will take, to the byte, and the largest context that fits.

    K/V is shown by kind of layer, and next to what f16 and multi-head attention (keys and values for every
    query head) would take."""
    from ringlm.errors import InvalidArgument
    from ringlm.plan import parse_size, plan

    try:
        size = None if memory is None else parse_size(memory)
    except InvalidArgument as e:
        raise typer.BadParameter(str(e), param_hint="--memory") from None
    with opt.opened(name, threads, "cpu", None, window, rope) as model:
        result = plan(
            model,
            n_ctx=n_ctx,
            kv=opt.kv_types(kv),
            pinned=pinned,
            chunk=chunk,
            sessions=sessions,
            memory=size,
        )
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(result), indent=2))
    else:
        typer.echo("\n".join(_lines(result, "free now" if memory is None else "given")))


def _lines(p: Plan, whose_memory: str) -> Iterator[str]:
    heads = f"{p.n_head} query heads over {p.n_head_kv} KV heads of {p.head_dim}"
    path = "".join(c if c.isprintable() else repr(c)[1:-1] for c in p.model)
    yield f"model        {path}"
    yield f"shape        {_count(p.n_layer, 'layer')}, {heads}"
    yield f"session      {_count(p.n_ctx, 'token')}, {p.pinned} pinned, chunk {p.chunk}, K/V {_formats(p)}"
    yield ""
    yield _row("weights", p.weight_nbytes)
    yield _row("shared by all sessions", p.shared_nbytes)
    for kind in p.kinds:
        yield _row(_kind(kind), kind.nbytes)
    yield _row("activations", p.activation_nbytes)
    yield _row("scratch", p.scratch_nbytes)
    yield _row("token ids, logits, bookkeeping", p.state_nbytes)
    yield _row("one session", p.session_nbytes)
    yield _row(f"weights and {_count(p.sessions, 'session')}", p.total_nbytes)
    yield ""
    yield from _comparison(p)
    yield ""
    yield from _verdict(p, whose_memory)


def _comparison(p: Plan) -> Iterator[str]:
    formats, mha = _formats(p), f"{p.n_head} KV heads (MHA)"
    rows = [
        (f"{formats}", p.kv_nbytes, p.total_nbytes),
        ("f16", p.f16.kv_nbytes, p.f16.total_nbytes),
        (f"{formats}, {mha}", p.mha.kv_nbytes, p.mha.total_nbytes),
        (f"f16, {mha}", p.mha_f16.kv_nbytes, p.mha_f16.total_nbytes),
    ]
    yield f"{'':32}{'K/V of one session':>20}{'total':>20}"
    for label, rows_nbytes, total in dict.fromkeys(rows):  # asked for f16, or a model without groups
        yield f"{label:32}{rows_nbytes:20,}{total:20,}"


def _verdict(p: Plan, whose_memory: str) -> Iterator[str]:
    from ringlm.plan import format_size

    difference = p.memory_nbytes - p.total_nbytes
    answer = (
        f"fits, {format_size(difference)} to spare"
        if p.fits
        else f"does NOT fit, {format_size(-difference)} short"
    )
    yield f"memory       {p.memory_nbytes:,} bytes ({format_size(p.memory_nbytes)}) {whose_memory}: {answer}"
    all_of_them = _count(p.sessions, "session")
    if p.largest_n_ctx:
        limit = ", the trained length" if p.largest_n_ctx >= p.n_ctx_limit else ""
        yield f"largest      {_count(p.largest_n_ctx, 'token')} of context for {all_of_them}{limit}"
    elif p.weight_nbytes > p.memory_nbytes:
        yield "largest      none: the weights alone do not fit"
    else:
        yield f"largest      none: no context fits for {all_of_them}"
    if p.fits:
        return
    if p.largest_n_ctx_int8 > p.largest_n_ctx:
        yield f"             {_count(p.largest_n_ctx_int8, 'token')} with --kv int8"
    if p.most_sessions:
        yield f"             {_count(p.most_sessions, 'session')} of {_count(p.n_ctx, 'token')}"


def _kind(kind: LayerKind) -> str:
    what = f"window {kind.window:,}" if kind.window else f"{_count(kind.visible, 'token')}"
    return f"K/V, {_count(kind.n_layer, 'layer')}, {what}, {kind.capacity:,} rows"


def _formats(p: Plan) -> str:
    k, v = p.kv
    return k if k == v else f"{k},{v}"


def _row(label: str, n: int) -> str:
    from ringlm.plan import format_size

    return f"{label:46}{n:16,}{format_size(n):>12}"


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}" + ("" if n == 1 else "s")
