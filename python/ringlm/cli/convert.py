"""``ringlm convert``: a checkpoint of transformers becomes a model file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options as opt
from .app import app
from .progress import RewriteView


@app.command("convert")
def convert_command(
    folder: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER", help="With config.json, safetensors and a tokenizer, as Hugging Face has it."
        ),
    ],
    target: Annotated[
        str, typer.Argument(metavar="OUT", help="The GGUF file to write; replaced if it is there.")
    ],
    type: Annotated[
        str,
        typer.Option(
            "--type",
            metavar="TYPE",
            help="Of the matrices: f32, f16, q8_0, q4_0 or q4_1. Embeddings are q8_0 with 4 bits.",
        ),
    ] = "f16",
    tokenizer: Annotated[
        bool, typer.Option("--tokenizer/--no-tokenizer", help="Whether the file gets a vocabulary.")
    ] = True,
) -> None:
    """Convert a Hugging Face checkpoint to a GGUF file.

    Works a piece of a tensor at a time: memory does not depend on the model. The output appears when it is
    complete. AWQ and GPTQ checkpoints keep their own four bits, as q4_1."""
    from ringlm.convert import convert

    with opt.plain_warnings(), RewriteView(f"converting {Path(folder).name}") as progress:
        done = convert(folder, target, type, tokenizer=tokenizer, progress=progress)
    typer.echo(f"{done.path}: {done.architecture}, {done.n_tensors} tensors, {done.nbytes:,} bytes")
