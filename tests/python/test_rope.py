"""RoPE scaling that the caller asks for: what is refused, and what a session then allows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from random_llama import Shape, write_llama
from ringlm import InvalidArgument, Model
from ringlm.cli import main
from ringlm.rope import rope_options

SHAPE = Shape(n_ctx_train=64)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rope") / "m.gguf"
    write_llama(path, SHAPE)
    return path


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ("yarn", "rope is 'yarn'; expected a mapping"),
        ({"rope_type": "su"}, "the type is 'su'; there are none, default, linear"),
        ({"type": ["linear"]}, r"the type is \['linear'\]"),
        ({"rope_type": "linear"}, "'linear' needs 'factor'"),
        ({"rope_type": "llama3", "factor": 8.0}, "'llama3' needs 'low_freq_factor', 'high_freq_factor'"),
        ({"rope_type": "linear", "factor": "2"}, "'factor' is '2'; expected a number"),
        ({"rope_type": "linear", "factor": True}, "'factor' is True; expected a number"),
        (
            {"rope_type": "linear", "factor": 2, "scale": 3},
            "'scale' is not known; there are rope_type, rope_theta",
        ),
        ({"rope_type": "linear", "factor": 0.5}, "factor is 0.5; expected 1 to 1024"),
        ({"rope_type": "linear", "factor": float("nan")}, "factor is nan"),
        ({"rope_theta": float("inf")}, "base is inf"),
        (
            {"rope_type": "yarn", "factor": 4, "beta_fast": 1, "beta_slow": 2},
            "expected the former to be larger",
        ),
        ({"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": -3}, "original length is -3"),
        ({"short_factor": [1.0, 2.0]}, "there are 2 factors; expected one for each of the 8 pairs"),
        ({"short_factor": [0.0] * 8}, "a factor is not positive"),
        ({"short_factor": "11111111"}, "expected a number for each pair"),
        (
            {
                "rope_type": "longrope",
                "short_factor": [1.0] * 8,
                "long_factor": [],
                "original_max_position_embeddings": 8,
            },
            "there are 0 factors",
        ),
    ],
)
def test_nonsense_is_refused(path: Path, rope: Any, words: str) -> None:
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


@pytest.mark.parametrize("kind", ["linear", "ntk", "dynamic", "yarn"])
def test_a_scaled_model_reads_more(path: Path, kind: str) -> None:
    with Model(path, rope={"rope_type": kind, "factor": 2.5}) as model:
        assert (model.config.rope_scaling, model.config.n_ctx_limit) == (kind, 160)
        with model.session(n_ctx=160) as session:
            session.prefill([1, 2, 3] * 53)
        with pytest.raises(InvalidArgument, match=r"n_ctx is 161; expected 1 to 160.*times its RoPE scaling"):
            model.session(n_ctx=161)


def test_on_the_command_line(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(path), "--rope", "yarn,factor=4", "-c", "256"]) == 0
    assert "256 tokens" in capfd.readouterr().out
    assert main(["plan", str(path), "--rope", "yarn,factor"]) == 1
    assert "--rope: 'factor' is not of the form KEY=NUMBER" in capfd.readouterr().err
