"""Every error that ringlm raises. A message says what was found, what was expected and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = [
    "BatchError",
    "Cancelled",
    "ContextOverflow",
    "DeviceError",
    "DownloadError",
    "Error",
    "FileFormatError",
    "InvalidArgument",
    "NumericError",
    "OutOfMemory",
    "StateError",
    "TemplateError",
    "TemplateWarning",
    "UnsupportedModelError",
]


class Error(Exception):
    """Base class of every error that ringlm raises."""


class FileFormatError(Error):
    """The bytes of a file contradict its format: truncated, altered, or not that kind of file."""


class UnsupportedModelError(Error):
    """The file is well formed, but ringlm cannot run what it describes."""


class ContextOverflow(Error):
    """The tokens do not fit into what is left of the context. Nothing was computed."""


class OutOfMemory(Error, MemoryError):
    """Memory for a model or a session is not there. Nothing was kept."""


class Cancelled(Error):
    """A step was cancelled. ``consumed`` tokens of the call are in the cache; the rest is not."""

    def __init__(self, message: str, consumed: int = 0) -> None:
        super().__init__(message)
        self.consumed = consumed


class BatchError(Error):
    """Sessions of a batch failed and are as before; the others advanced. ``tokens`` has the token that each
    session was fed, None where it failed; ``errors`` has the error of each that failed, by its index."""

    def __init__(
        self,
        message: str,
        tokens: Sequence[int | None] = (),
        errors: Mapping[int, Error] | None = None,
    ) -> None:
        super().__init__(message)
        self.tokens = list(tokens)
        self.errors = dict(errors or {})


class DeviceError(Error):
    """A device (GPU, driver, thread team) refused or failed."""


class NumericError(Error, ArithmeticError):
    """NaN or infinity where a finite number has to be."""


class InvalidArgument(Error, ValueError):
    """An argument is out of its range."""


class StateError(Error, RuntimeError):
    """The object cannot do this now: closed, busy in another thread, or carried over a fork."""


class TemplateError(Error):
    """A chat template cannot be compiled, was stopped, or refused the conversation."""


class TemplateWarning(UserWarning):
    """A warning: a chat template does not take a conversation as it is; another form of it was rendered."""


class DownloadError(Error):
    """A model could not be fetched or verified. A partial file may be kept for resuming."""
