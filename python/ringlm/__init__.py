"""ringlm: decoder-only language models on the device itself."""

from __future__ import annotations

__version__ = "0.1.0"
