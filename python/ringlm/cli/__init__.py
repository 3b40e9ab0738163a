"""The command ``ringlm``. Commands live in modules of this package and import what is heavy when they run."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

# Importing a module registers its commands, in the order of the help.
from . import chat as chat  # isort: skip
from . import run as run  # isort: skip
from . import info as info  # isort: skip
from . import doctor as doctor  # isort: skip
from . import plan as plan  # isort: skip
from . import perplexity as perplexity  # isort: skip
from . import compare as compare  # isort: skip
from . import convert as convert  # isort: skip
from . import quantize as quantize  # isort: skip
from . import bench as bench  # isort: skip
from . import models as models  # isort: skip
from .app import app, state


def main(args: Sequence[str] | None = None) -> int:
    """Run a command line (default: of this process) and return its exit code.

    0 done, 1 failed, 2 wrong usage, 130 interrupted, 143 terminated. An error is one line on stderr."""
    state.debug = False
    _open_missing_streams()
    args = sys.argv[1:] if args is None else list(args)
    try:
        try:
            with _terminable():
                code = app(args=args or ["--help"], prog_name="ringlm", standalone_mode=False)
            sys.stdout.flush()
        except SystemExit as e:
            code = e.code
        return code if isinstance(code, int) else 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has left. Python must not try to flush once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as e:
        return _fail(e)


def _open_missing_streams() -> None:
    """Standard streams that the caller has closed (``>&-``) become empty, so that no other file gets their
    number and nobody has to ask whether they exist."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that child processes are stopped and temporary files removed."""

    def terminate(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _fail(e: Exception) -> int:
    from ringlm.errors import Error

    # typer carries its own copy of click, older ones use click itself: known by what they offer.
    message = getattr(e, "format_message", None)
    if message is not None:
        text, code = message(), int(getattr(e, "exit_code", 2))
        ctx = getattr(e, "ctx", None)
        if ctx is not None:
            text = f"{text.rstrip('.')} (see '{ctx.command_path} --help')"
    elif isinstance(e.__cause__, KeyboardInterrupt):  # Abort of older ones
        return 130
    elif isinstance(e, Error):
        text, code = str(e), 1
    elif isinstance(e, OSError) and e.strerror:
        text, code = f"{e.filename}: {e.strerror}" if e.filename else e.strerror, 1
    else:
        text, code = f"{type(e).__name__}: {e} (ringlm --debug COMMAND shows where)", 1
    if state.debug and code == 1:
        import traceback

        traceback.print_exception(e)
    sys.stderr.write(f"ringlm: error: {' '.join(text.split())}\n")
    return code
