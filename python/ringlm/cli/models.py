"""``ringlm pull``, ``ringlm list``, ``ringlm rm``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from .app import app
from .progress import PullView

if TYPE_CHECKING:
    from ringlm.hub import Listing


@app.command("pull")
def pull_command(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="A name of 'ringlm list', or hf:owner/repo/file.gguf[@revision]."
        ),
    ],
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Check the SHA-256 of a file that is there; fetch it anew if wrong."),
    ] = False,
) -> None:
    """Download a model and print the path of its file."""
    from ringlm import hub

    with PullView() as progress:
        path = hub.pull(name, progress=progress, verify=verify)
    typer.echo(path)


@app.command("list")
def list_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False,
) -> None:
    """Show the models that have a name, and those that were pulled."""
    from ringlm import hub

    listings = hub.list_models()
    if as_json:
        import json

        typer.echo(json.dumps([_as_dict(listing) for listing in listings], indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("NAME", overflow="fold")
    table.add_column("SIZE", justify="right", no_wrap=True)
    table.add_column("LICENCE")
    table.add_column("STATE", no_wrap=True)
    table.add_column("DESCRIPTION")
    for listing in listings:
        info = listing.info
        size = hub.format_bytes(info.size) if info.size is not None else "-"
        table.add_row(
            info.name, size, info.licence or "-", "pulled" if listing.path else "-", info.description or "-"
        )
    # A pipe gets whole lines however long they are.
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 10_000)
    console.print(table)


@app.command("rm")
def rm_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A pulled model, as 'ringlm list' names it.")],
) -> None:
    """Delete a pulled model from the cache folder."""
    from ringlm import hub

    freed = hub.remove(name)
    typer.echo(f"removed {name}, freed {hub.format_bytes(freed)} ({freed} bytes)")


def _as_dict(listing: Listing) -> dict[str, object]:
    info = listing.info
    return {
        "name": info.name,
        "file": info.file,
        "size": info.size,
        "sha256": info.sha256,
        "licence": info.licence,
        "description": info.description,
        "pulled": listing.path is not None,
        "path": str(listing.path) if listing.path else None,
    }
