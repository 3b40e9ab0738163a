from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


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
