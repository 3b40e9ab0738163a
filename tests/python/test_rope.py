"""RoPE scaling that the caller asks for: what is refused, and what a session then allows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_sessions import TEXT
from random_family import FAMILIES, write
from ringlm import InvalidArgument, Model, errors
from ringlm.cli import main
from ringlm.rope import rope_options

NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A llama that was trained for 256 tokens, with heads of 8 pairs."""
    return write(tmp_path_factory.mktemp("rope") / "llama.gguf", FAMILIES["llama"])


FACTORS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 48}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
BAD_ROPE: list[tuple[Any, str]] = [
    *((x, "rope is ") for x in ("linear", 2.0, ["linear"], [("rope_type", "linear")], True, b"")),
    *(({"rope_type": x}, "the type is") for x in ("other", "", 1, ["linear"], {}, b"linear", True)),
    ({"rope_type": "linear", "type": "yarn", "factor": 2.0}, "'rope_type' is 'linear' and 'type' is 'yarn'"),
    *(({"rope_type": x}, f"'{x}' needs 'factor'") for x in ("linear", "ntk", "dynamic", "yarn", "llama3")),
    *((LLAMA3 | {key: None}, f"'llama3' needs '{key}'") for key in LLAMA3 if key != "rope_type"),
    *(({"rope_type": "longrope"} | FACTORS | {key: None}, f"needs '{key}'") for key in FACTORS),
    ({"factor": 4.0}, "'factor' means nothing to the type 'none'"),
    ({"rope_type": "linear", "factor": 2.0, "short_factor": [1.0] * 8}, "'short_factor' means nothing"),
    ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3.0}, "'beta_fast' means nothing"),
    ({"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}, "'mscale' is not known"),
    ({"rope_type": "linear", "factor": 2.0, 3: 4}, "3 is not known"),
    *(
        ({"rope_type": "linear", "factor": x}, "'factor' is")
        for x in (NAN, INF, -2.0, 0, "2", b"2", True, [2.0], {}, 2j, 10**400, object())
    ),
    *(({"rope_type": "linear", "factor": x}, "factor is") for x in (0.5, 1025.0, 1e300)),
    *(({"rope_theta": x}, "'rope_theta' is") for x in (0, -1.0, NAN, INF, "1e4")),
    *(({"rope_theta": x}, "base is") for x in (0.5, 1e31)),
    *(
        ({"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": x}, "original")
        for x in (0, 0.5, -64, NAN, 1e10, "64")
    ),
    *(
        ({"rope_type": "longrope"} | FACTORS | {"original_max_position_embeddings": x}, "2 to 1e9")
        for x in (1, 1.5)
    ),
    *(
        ({"rope_type": "longrope"} | FACTORS | {"long_factor": x}, words)
        for x, words in [
            ([2.0] * 7, "there are 7 factors; expected one for each of the 8 pairs"),
            ([], "there are 0 factors"),
            ([1e30] * 8, "a factor is 1e\\+30"),
            ([1e300] * 8, "a factor is inf"),
            ([1e-300] * 8, "a factor is 0"),
            ([2.0] * 7 + [NAN], "'long_factor' is nan"),
            ([2.0] * 7 + ["2"], "'long_factor' is '2'"),
            ([2.0] * 7 + [-2.0], "'long_factor' is -2"),
            ("22222222", "'long_factor' is"),
            (2.0, "'long_factor' is"),
            ({1.0, 2.0}, "'long_factor' is"),
        ]
    ),
    *(
        ({"rope_type": "yarn", "factor": 2.0} | more, "beta_fast is")
        for more in ({"beta_fast": 1.0}, {"beta_fast": 0.5}, {"beta_slow": 32.0})
    ),
    ({"rope_type": "yarn", "factor": 2.0, "attention_factor": 2000.0}, "attention factor is 2000"),
    (LLAMA3 | {"high_freq_factor": 1.0}, "high_freq_factor is 1 and low_freq_factor 1"),
]


@pytest.mark.parametrize(("rope", "words"), BAD_ROPE)
def test_nonsense_is_refused(path: str, rope: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        Model(path, rope=rope)


def test_names_are_those_of_hugging_face() -> None:
    assert rope_options(None) is None
    assert rope_options({"type": "default"}) == {"scaling": "none"}
    assert rope_options({"rope_type": "yarn", "factor": 4, "rope_theta": 1e6, "beta_fast": None}) == {
        "scaling": "yarn",
        "factor": 4.0,
        "base": 1e6,
    }


def test_factors_may_be_an_array() -> None:
    asked = {"rope_type": "longrope", "original_max_position_embeddings": 48, "long_factor": np.full(8, 2.0)}
    found = rope_options(asked | {"short_factor": np.ones(8, np.float32)})
    assert found == {"scaling": "longrope", "original": 48.0, "factors": [1.0] * 8, "long_factors": [2.0] * 8}


def test_heads_of_one_pair(tmp_path: Path) -> None:
    one = write(tmp_path / "m.gguf", FAMILIES["llama"], {"rope.dimension_count": 2})
    for kind in ("ntk", "dynamic"):
        with pytest.raises(InvalidArgument, match="more than one pair"):
            Model(one, rope={"rope_type": kind, "factor": 2.0})


@pytest.mark.parametrize(
    ("rope", "most"),
    [
        (None, 256),
        ({"rope_type": "none"}, 256),
        *(({"rope_type": kind, "factor": 2.5}, 640) for kind in ("linear", "ntk", "dynamic", "yarn")),
        ({"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 32}, 256),
        (LLAMA3, 512),
        ({"rope_type": "longrope"} | FACTORS, 256),
    ],
)
def test_the_longest_text_of_each_scaling(path: str, rope: Any, most: int) -> None:
    with Model(path, rope=rope) as model:
        assert model.config.n_ctx_limit == most
        with model.session(n_ctx=most, kv="f32", chunk=64) as session:
            logits = session.prefill(np.resize(TEXT, most))
            assert np.isfinite(logits).all()
            with pytest.raises(errors.ContextOverflow):
                session.decode(1)
        with pytest.raises(InvalidArgument, match=f"n_ctx is {most + 1}; expected 1 to {most}"):
            model.session(n_ctx=most + 1)


def test_longrope_that_is_asked_for_is_longrope_of_a_file(tmp_path: Path, path: str) -> None:
    """Also its magnitude, which without a factor comes from the two lengths."""
    keys = {"rope.scaling.original_context_length": 48}
    factors = {
        "rope_factors_short.weight": np.ones(8, np.float32),
        "rope_factors_long.weight": np.full(8, 2, np.float32),
    }
    file = write(tmp_path / "m.gguf", FAMILIES["llama"], keys, factors)
    with Model(file) as own, Model(path, rope={"rope_type": "longrope"} | FACTORS) as asked:
        for n in (48, 60):
            logits = [m.session(kv="f32").prefill(TEXT[:n]) for m in (own, asked)]
            assert np.array_equal(logits[0], logits[1])


def test_on_the_command_line(path: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", path, "--rope", "yarn,factor=4", "-c", "1024"]) == 0
    assert "1,024 tokens" in capfd.readouterr().out
    assert main(["plan", path, "--rope", "yarn,factor"]) == 1
    assert "--rope: 'factor' is not of the form KEY=NUMBER" in capfd.readouterr().err
