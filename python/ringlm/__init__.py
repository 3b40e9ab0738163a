"""ringlm: decoder-only language models on the device itself."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ringlm.errors import (
    BatchError,
    Cancelled,
    ContextOverflow,
    DeviceError,
    DownloadError,
    Error,
    FileFormatError,
    InvalidArgument,
    NumericError,
    OutOfMemory,
    StateError,
    TemplateError,
    TemplateWarning,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    from ringlm.chat import Chat
    from ringlm.generation import Generation
    from ringlm.model import Model
    from ringlm.sampling import Sampling, TokenLogprobs
    from ringlm.session import Session
    from ringlm.template import ChatTemplate
    from ringlm.tokenizer import Tokenizer

__version__ = "0.1.0"

# name -> module that defines it, imported when the name is first used
_LAZY = {
    "Chat": "chat",
    "ChatTemplate": "template",
    "Generation": "generation",
    "Model": "model",
    "Sampling": "sampling",
    "Session": "session",
    "TokenLogprobs": "sampling",
    "Tokenizer": "tokenizer",
}

__all__ = [
    "BatchError",
    "Cancelled",
    "Chat",
    "ChatTemplate",
    "ContextOverflow",
    "DeviceError",
    "DownloadError",
    "Error",
    "FileFormatError",
    "Generation",
    "InvalidArgument",
    "Model",
    "NumericError",
    "OutOfMemory",
    "Sampling",
    "Session",
    "StateError",
    "TemplateError",
    "TemplateWarning",
    "TokenLogprobs",
    "Tokenizer",
    "UnsupportedModelError",
]


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'ringlm' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"ringlm.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
