"""`ringlm doctor` on every family: what transformers builds and `ringlm convert` writes is sound."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

NEEDS = "conformance with transformers needs: pip install 'ringlm[conformance]'"
pytest.importorskip("torch", reason=NEEDS)
pytest.importorskip("transformers", reason=NEEDS)
pytestmark = pytest.mark.conformance

import families  # noqa: E402
import recipes  # noqa: E402
from ringlm.doctor import diagnose  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def _files() -> Iterator[None]:
    yield
    families.forget()


@pytest.mark.parametrize("name", recipes.names())
def test_no_false_alarm(name: str) -> None:
    """The files have no vocabulary. Some recipes have a base or a length that no published model has."""
    found = diagnose(families.made(name).path)
    assert [f.where for f in found if f.where.startswith("tokenizer")] == ["tokenizer.ggml.model"]
    others = {f.where.partition(".")[2] for f in found if not f.where.startswith("tokenizer")}
    assert others <= {"rope.freq_base", "context_length"}, [str(f) for f in found]
