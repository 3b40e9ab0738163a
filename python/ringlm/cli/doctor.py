"""``ringlm doctor``."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING

import typer

from . import options as opt
from .app import app
from .info import visible
from .progress import PullView

if TYPE_CHECKING:
    from ringlm.doctor import Finding

_COLOURS = {"error": typer.colors.RED, "note": typer.colors.YELLOW}


@app.command("doctor")
def doctor_command(name: opt.ModelName = opt.DEFAULT_MODEL, as_json: opt.Json = False) -> None:
    """Say what is wrong with a model file, what comes of it, and what to do.

    Exit code 1 when something is wrong; notes are worth knowing, no more. Works on files that ringlm cannot
    run, and on those that cannot be read."""
    from ringlm import hub
    from ringlm.doctor import diagnose

    with PullView() as progress:
        path = hub.resolve(name, progress=progress)
    findings = diagnose(path)
    errors = sum(finding.severity == "error" for finding in findings)
    notes = len(findings) - errors
    if as_json:
        record = {"path": str(path), "errors": errors, "notes": notes}
        typer.echo(json.dumps(record | {"findings": [_plain(finding) for finding in findings]}, indent=2))
    else:
        for finding in findings:
            typer.echo(_entry(finding))
        typer.echo(_summary(errors, notes))
    if errors:
        raise typer.Exit(1)


def _plain(finding: Finding) -> dict[str, str]:
    return {key: visible(value) for key, value in dataclasses.asdict(finding).items()}


def _entry(finding: Finding) -> str:
    """A line; on a terminal it is wrapped, and its first word coloured."""
    line = visible(str(finding))
    if not sys.stdout.isatty():
        return line
    width = max(shutil.get_terminal_size().columns, 40)
    wrapped = textwrap.fill(line, width, subsequent_indent="  ", break_on_hyphens=False)
    head = finding.severity
    return typer.style(head, fg=_COLOURS[head], bold=True) + wrapped[len(head) :]


def _summary(errors: int, notes: int) -> str:
    wrong = f"{errors} error{'s' if errors != 1 else ''}" if errors else "nothing is wrong"
    return wrong + (f", {notes} note{'s' if notes != 1 else ''}" if notes else "")
