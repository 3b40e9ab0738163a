from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

# Before numpy is imported: the threads of its matrix products would only get in the way of ringlm's.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def pulled() -> Callable[[str], Path]:
    """The file of a registry model that was pulled before; tests never download one of that size."""

    def find(name: str) -> Path:
        from ringlm import hub

        path = next(m.path for m in hub.list_models() if m.info.name == name)
        if path is None:
            pytest.skip(f"{name} is not in the cache folder: ringlm pull {name}")
        return path

    return find
