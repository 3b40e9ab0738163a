"""Long work as seen on stderr: bytes that are fetched or written."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from typing_extensions import Self

    from ringlm.hub import Progress

_TITLES = {
    "wait": "waiting for another process to pull {}",
    "download": "downloading {}",
    "verify": "verifying {}",
}


class _Bar:
    """A bar of bytes on a terminal, or one line that says what begins.

    Nothing is shown, and rich not imported, before the first one begins."""

    def __init__(self) -> None:
        self._bar: Bar | None = None

    def begin(self, title: str, total: int | None, done: int = 0) -> None:
        self.stop()
        if not total or not sys.stderr.isatty():
            sys.stderr.write(title + "\n")
            return
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
        from rich.progress import Progress as Bar

        text = TextColumn("{task.description}", markup=False)
        columns = (text, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self._bar = Bar(*columns, console=Console(stderr=True))
        self._bar.add_task(title, total=total, completed=done)
        self._bar.start()

    def update(self, done: int) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class _View:
    """A progress callback that draws while its block runs."""

    def __init__(self) -> None:
        self._bar = _Bar()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


class PullView(_View):
    """Shows a pull: every stage begins anew."""

    def __init__(self) -> None:
        super().__init__()
        self._stage = ""

    def __call__(self, p: Progress) -> None:
        if p.stage != self._stage:
            self._stage = p.stage
            self._bar.begin(_TITLES[p.stage].format(p.model), p.total, p.done)
        self._bar.update(p.done)


class RewriteView(_View):
    """Shows how a file is written."""

    def __init__(self, title: str) -> None:
        super().__init__()
        self._title = title
        self._begun = False

    def __call__(self, done: int, total: int, name: str) -> None:
        if not self._begun:
            self._begun = True
            self._bar.begin(self._title, total)
        self._bar.update(done)
