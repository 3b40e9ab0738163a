"""Models by name: download, verify, keep in the cache folder, remove.

A model is named by the registry (``smollm2-135m``) or by its place on Hugging Face
(``hf:owner/repo/file.gguf``, with ``@revision`` at the end for another branch, tag or commit).

Environment: ``RINGLM_CACHE`` (the cache folder), ``RINGLM_OFFLINE=1`` (never touch the network),
``RINGLM_REGISTRY`` (a further registry file).
"""

from __future__ import annotations

from .cache import Progress, ProgressCallback, cache_dir, format_bytes
from .registry import HfFile, ModelInfo, Registry, WheelPart
from .store import Listing, list_models, pull, remove, resolve

__all__ = [
    "HfFile",
    "Listing",
    "ModelInfo",
    "Progress",
    "ProgressCallback",
    "Registry",
    "WheelPart",
    "cache_dir",
    "format_bytes",
    "list_models",
    "pull",
    "remove",
    "resolve",
]
