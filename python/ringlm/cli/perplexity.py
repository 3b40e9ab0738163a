"""``ringlm perplexity``."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Annotated

import typer

from . import options as opt
from .app import app


@app.command("perplexity")
def perplexity_command(
    file: Annotated[str, typer.Option("-f", "--file", metavar="FILE", help="UTF-8 text; - reads stdin.")],
    name: opt.ModelName = opt.DEFAULT_MODEL,
    n_ctx: Annotated[int, typer.Option("-c", "--ctx", metavar="N", min=3, help="Tokens of a window.")] = 512,
    kv: opt.Kv = "f16",
    pinned: opt.Pinned = 0,
    overflow: opt.Overflow = "error",
    window: opt.Window = None,
    rope: opt.Rope = None,
    chunk: opt.Chunk = 128,
    threads: opt.Threads = None,
    device: opt.Device = "cpu",
    backend: opt.Backend = None,
    as_json: opt.Json = False,
) -> None:
    """Measure how well a model predicts a text.

    The definition is llama.cpp's: windows of -c tokens, each read anew; the second half of each is scored.
    With --overflow slide the text is one stream through a context of -c tokens."""
    from ringlm.perplexity import perplexity

    text = opt.read_text(None if file == "-" else Path(file))
    status, began = opt.StatusLine(), time.monotonic()

    def progress(done: int, total: int, so_far: float) -> None:
        left = (time.monotonic() - began) / done * (total - done)
        status.show(f"part {done} of {total}, perplexity {so_far:.4f}, {left:.0f} s left")

    with opt.opened(name, threads, device, backend, window, rope) as model:
        status.show("reading the text")
        try:
            began = time.monotonic()
            result = perplexity(
                model,
                text,
                n_ctx=n_ctx,
                kv=opt.kv_types(kv),
                chunk=chunk,
                pinned=pinned,
                overflow=overflow,
                progress=progress,
            )
        finally:
            status.clear()
    if as_json:
        record = {"model": str(model.path), **dataclasses.asdict(result)}
        # JSON has no NaN.
        typer.echo(json.dumps({k: None if v != v else v for k, v in record.items()}))
        return
    how = "a stream through" if overflow == "slide" else f"{result.windows} windows of"
    typer.echo(
        f"perplexity {result.perplexity:.4f} +/- {result.stderr:.4f}\n"
        f"{result.tokens} tokens scored in {how} {result.n_ctx}, {result.seconds:.1f} s"
    )
