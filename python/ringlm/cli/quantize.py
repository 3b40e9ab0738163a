"""``ringlm quantize`` and ``ringlm regroup``: model files made of model files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options as opt
from .app import app
from .progress import PullView, RewriteView

_Output = Annotated[
    str, typer.Argument(metavar="OUT", help="The GGUF file to write; replaced if it is there.")
]
_TYPES = "q4_0, q4_1, q8_0 or f16"


@app.command("quantize")
def quantize_command(
    name: opt.ModelName,
    target: _Output,
    type: Annotated[str, typer.Option("--type", metavar="TYPE", help=f"Of the matrices: {_TYPES}.")] = "q4_1",
    embedding_type: Annotated[
        str | None,
        typer.Option(
            "--embedding-type",
            metavar="TYPE",
            help=f"Of token_embd and output: {_TYPES}.",
            show_default="q8_0 with 4 bits, else as --type",
        ),
    ] = None,
) -> None:
    """Write a model with its weight matrices in another type.

    Norms, biases, routers and metadata are copied. Works a piece of a tensor at a time: memory does not
    depend on the model. The output appears when it is complete."""
    from ringlm.quantize import quantize

    source = _resolved(name)
    with opt.plain_warnings(), RewriteView(f"quantizing {Path(target).name}") as progress:
        done = quantize(source, target, type, embedding_type=embedding_type, progress=progress)
    types = ", ".join(f"{n} {t}" for t, n in sorted(done.types.items(), key=lambda item: -item[1]))
    typer.echo(
        f"{target}: {done.nbytes:,} bytes, {done.nbytes / done.source_nbytes:.3f} of the input\n"
        f"{done.changed} tensors changed; now {types}; {done.seconds:.1f} s"
    )
    if done.uneven:
        typer.echo(f"F16 since their columns are no multiple of 32: {_some(done.uneven)}")


@app.command("regroup")
def regroup_command(
    name: opt.ModelName,
    target: _Output,
    kv_heads: Annotated[
        int,
        typer.Option("--kv-heads", metavar="N", min=1, help="KV heads of the result; divides the present."),
    ],
) -> None:
    """Pool the KV heads of a model: MHA to GQA, or GQA to fewer heads.

    Keys and values of each group are averaged (arXiv:2305.13245), which makes the K/V cache smaller by the
    same factor. The result is a start for up-training, not a model to use as it is."""
    from ringlm.regroup import regroup

    source = _resolved(name)
    with RewriteView(f"regrouping {Path(target).name}") as progress:
        done = regroup(source, target, kv_heads, progress=progress)
    typer.echo(
        f"{target}: {done.n_head_kv_now} KV heads of {done.n_head_kv}, for {done.n_head} query heads; "
        f"{done.nbytes:,} bytes"
    )
    if done.retyped:
        before = ", ".join(sorted({old for old, _ in done.retyped.values()}))
        now = ", ".join(sorted({new for _, new in done.retyped.values()}))
        typer.echo(f"{before} cannot be written, so these are {now} now: {_some(tuple(done.retyped))}")
    typer.echo(
        "It needs up-training before use: averaged heads predict otherwise than the original's. "
        "'ringlm compare' measures how far."
    )


def _resolved(name: str) -> Path:
    from ringlm import hub

    with PullView() as progress:
        return hub.resolve(name, progress=progress)


def _some(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:4])
    return shown + (f" and {len(names) - 4} more" if len(names) > 4 else "")
