"""Tests that run in a process of their own, for instance under a limit of memory."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path


def run_script(source: str, *args: str) -> str:
    """What the script prints; it finds ringlm and the modules beside this one. It must end well."""
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source), *args],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)])},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout
