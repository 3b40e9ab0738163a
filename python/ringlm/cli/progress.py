"""A pull as seen on stderr."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from ringlm.hub import Progress

_TITLES = {
    "wait": "waiting for another process to pull {}",
    "download": "downloading {}",
    "verify": "verifying {}",
}


class PullView:
    """A progress callback that draws: a bar on a terminal, else one line at the beginning of each stage.

    Nothing is shown, and rich not imported, before the first call."""

    def __init__(self) -> None:
        self._stage = ""
        self._bar: Bar | None = None

    def __enter__(self) -> PullView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def __call__(self, p: Progress) -> None:
        begins = p.stage != self._stage
        self._stage = p.stage
        if p.total and sys.stderr.isatty():
            if begins:
                self._start(p)
            if self._bar is not None:
                self._bar.update(self._bar.task_ids[0], completed=p.done)
        elif begins:
            self._stop()
            sys.stderr.write(_TITLES[p.stage].format(p.model) + "\n")

    def _start(self, p: Progress) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
        from rich.progress import Progress as Bar

        self._stop()
        title = TextColumn("{task.description}", markup=False)
        columns = (title, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self._bar = Bar(*columns, console=Console(stderr=True))
        self._bar.add_task(_TITLES[p.stage].format(p.model), total=p.total, completed=p.done)
        self._bar.start()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
