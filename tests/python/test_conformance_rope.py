"""RoPE scalings that the caller asks for, against Hugging Face transformers on the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hf_llama import export, random_model, reference_logits
from random_llama import worst
from ringlm import InvalidArgument, Model
from ringlm._core import Model as CoreModel

NEEDS = "conformance with transformers needs: pip install 'ringlm[conformance]'"
torch = pytest.importorskip("torch", reason=NEEDS)
pytest.importorskip("transformers", reason=NEEDS)
pytestmark = pytest.mark.conformance

LIMIT = 1e-4  # largest difference over largest logit
ORIGINAL = 64  # tokens that the models were trained for
TOKENS = [int(t) for t in np.random.default_rng(5).integers(0, 96, 2 * ORIGINAL)]
PAIRS = 12
SMALL = {"head_dim": 2 * PAIRS, "max_position_embeddings": ORIGINAL, "seed": 9}
BASE = {"rope_theta": 10000.0}
SHORT = np.linspace(1.0, 1.6, PAIRS).round(2).tolist()
LONG = np.linspace(1.1, 9.0, PAIRS).round(2).tolist()

Rope = dict[str, Any]

#: Our name for it -> what to ask for, and what transformers is told.
SCALINGS: dict[str, tuple[Rope, Rope]] = {
    "none": ({"rope_type": "none"}, {"rope_type": "default", **BASE}),
    "base": ({"rope_theta": 77777.0}, {"rope_type": "default", "rope_theta": 77777.0}),
    "linear": ({"rope_type": "linear", "factor": 2.5}, {"rope_type": "linear", "factor": 2.5, **BASE}),
    # base * factor^(d / (d - 2)), which transformers has no name for
    "ntk": (
        {"rope_type": "ntk", "factor": 4.0},
        {"rope_type": "default", "rope_theta": 10000.0 * 4.0 ** (2 * PAIRS / (2 * PAIRS - 2))},
    ),
    "dynamic": ({"rope_type": "dynamic", "factor": 4.0}, {"rope_type": "dynamic", "factor": 4.0, **BASE}),
    "yarn": (
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 4.0, "beta_slow": 0.5},
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 4.0,
            "beta_slow": 0.5,
            "original_max_position_embeddings": ORIGINAL,
            **BASE,
        },
    ),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": ORIGINAL,
        },
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": ORIGINAL,
            **BASE,
        },
    ),
    "longrope": (
        {
            "rope_type": "longrope",
            "short_factor": SHORT,
            "long_factor": LONG,
            "factor": 8.0,
            "original_max_position_embeddings": ORIGINAL,
        },
        {
            "rope_type": "longrope",
            "short_factor": SHORT,
            "long_factor": LONG,
            "factor": 8.0,
            "original_max_position_embeddings": ORIGINAL,
            **BASE,
        },
    ),
}


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are tiny
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(random_model(**SMALL)).write(tmp_path_factory.mktemp("rope") / "plain.gguf")


def expected(rope: Rope, n: int) -> np.ndarray:
    return reference_logits(random_model(rope_parameters=rope, **SMALL), TOKENS[:n])


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", SCALINGS)
def test_scaling(plain: Path, record_property: Callable[..., None], name: str, backend: str) -> None:
    ask, theirs = SCALINGS[name]
    longer = Model(plain, rope=ask, backend=backend).config.n_ctx_limit > ORIGINAL
    assert longer == (name not in ("none", "base"))
    lengths = [ORIGINAL // 2, 2 * ORIGINAL] if longer else [ORIGINAL]
    for n in lengths:
        with Model(plain, rope=ask, backend=backend) as model, model.session(kv="f32", chunk=13) as session:
            error = worst(session.prefill(TOKENS[:n], all_logits=True), expected(theirs, n))
        record_property("worst_relative_error", error)
        assert error < LIMIT
        other = "linear" if name in ("none", "base") else "none"
        if name != "dynamic" or n > ORIGINAL:  # nothing is scaled below that
            assert worst(expected(SCALINGS[other][1], n), expected(theirs, n)) > 100 * LIMIT


def test_longrope_knows_its_factor_from_the_lengths(tmp_path: Path) -> None:
    """As Phi-3.5's config has it: the trained length is the scaled one, and no factor is there."""
    sizes = SMALL | {"max_position_embeddings": 4 * ORIGINAL}
    theirs = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, **BASE}
    theirs["original_max_position_embeddings"] = ORIGINAL
    path = export(random_model(**sizes)).write(tmp_path / "m.gguf")
    reference = random_model(rope_parameters={**theirs, "factor": 4.0}, **sizes)
    ask = {key: value for key, value in theirs.items() if key != "rope_theta"}
    with Model(path, rope=ask) as model, model.session(kv="f32") as session:
        assert model.config.n_ctx_limit == 4 * ORIGINAL
        assert worst(session.prefill(TOKENS, all_logits=True), reference_logits(reference, TOKENS)) < LIMIT


def test_dynamic_ntk_turns_the_text_anew_at_every_doubling(plain: Path) -> None:
    """Every length up to a doubling has the angles of the doubling; the step that comes to it reads the text
    again, and says so."""
    ask, theirs = SCALINGS["dynamic"]
    with Model(plain, rope=ask) as model, model.session(n_ctx=4 * ORIGINAL, kv="f32", chunk=13) as session:
        trace = session.trace()
        session.prefill(TOKENS[:60])
        for n in range(61, 2 * ORIGINAL + 1):
            found = session.decode(TOKENS[n - 1])
            if n in (61, ORIGINAL):
                assert worst(found, expected(theirs, n)[-1]) < LIMIT
        assert worst(found, expected(theirs, 2 * ORIGINAL)[-1]) < LIMIT
        steps = [(r.kind, r.position, r.n_tokens) for r in trace]
    again = [s for s in steps if s[0] == "rebuild"]
    assert again == [("rebuild", p, min(13, ORIGINAL - p)) for p in range(0, ORIGINAL, 13)]
    at = steps.index(again[-1])
    assert steps[at + 1] == ("decode", ORIGINAL, 1)


def test_text_that_was_rewound_is_turned_back(plain: Path) -> None:
    ask, theirs = SCALINGS["dynamic"]
    with Model(plain, rope=ask) as model, model.session(n_ctx=4 * ORIGINAL, kv="f32", chunk=13) as session:
        session.prefill(TOKENS)
        session.rewind(2 * ORIGINAL - 50)
        found = session.decode(TOKENS[50])
    assert worst(found, expected(theirs, 51)[-1]) < LIMIT


def test_a_text_whose_angles_depend_on_its_length_cannot_slide(plain: Path) -> None:
    with Model(plain, rope=SCALINGS["dynamic"][0]) as model:
        with pytest.raises(InvalidArgument, match=f"longer than {ORIGINAL} tokens.*n_ctx up to that"):
            model.session(n_ctx=ORIGINAL + 1, overflow="slide")
        with model.session(n_ctx=ORIGINAL, overflow="slide", chunk=7) as session:
            session.prefill(TOKENS)
            assert session.position == len(TOKENS)


def test_core_and_model_agree_about_names(plain: Path) -> None:
    for name, (ask, _) in SCALINGS.items():
        with Model(plain, rope=ask) as model:
            assert model.config.rope_scaling == ("none" if name == "base" else name)
    assert CoreModel(str(plain)).config.rope_scaling == "none"
