"""The application object that the commands register with, and the options before a command."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

app = typer.Typer(
    name="ringlm",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@dataclass
class State:
    debug: bool = False


state = State()


def _print_version(wanted: bool) -> None:
    if wanted:
        from ringlm import __version__

        typer.echo(f"ringlm {__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Decoder-only language models on the device itself.

    MODEL is the path of a GGUF file, a name of 'ringlm list', or hf:owner/repo/file.gguf."""
    state.debug = debug
