"""The ring on the command line: --kv, --pinned, --overflow, --window, and what is said about it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_cli import ANSWER, LETTERS, Command, Models, models, ringlm

__all__ = ["models", "ringlm"]


def test_a_chat_forgets_and_says_so_once(ringlm: Command, models: Models) -> None:
    lines = [f"message {n}" for n in range(12)]
    done = ringlm("chat", models.chain, "-c", "90", "-s", "Be kind.", stdin="\n".join(lines).encode())
    assert (done.code, done.out) == (0, "\n".join([f"{ANSWER}\n"] * 12))
    assert done.err.count("\n") == 1
    assert done.err.startswith("the context of 90 tokens is full: older turns are being forgotten. /clear ")
    assert ringlm("chat", models.chain, "-c", "90", stdin=b"once\n").err == ""


def test_an_answer_without_end(ringlm: Command, models: Models) -> None:
    done = ringlm("chat", models.endless, "-c", "100", "--pinned", "10", "-p", "x")
    assert done.code == 0 and done.out == (LETTERS * 4)[:90] + "\n"
    assert done.err.splitlines()[0] == "the answer was cut after 90 tokens; -n sets another limit"
    done = ringlm("chat", models.endless, "-c", "100", "-p", "x", "-n", "400")
    assert done.out == (LETTERS * 16)[:400] + "\n" and done.err.count("\n") == 1


def test_a_message_that_is_too_long(ringlm: Command, models: Models) -> None:
    done = ringlm("chat", models.chain, "-c", "90", "-s", "Be kind.", stdin=b"x" * 80 + b"\nhello\n")
    assert (done.code, done.out) == (1, f"{ANSWER}\n")
    assert "has room for" in done.err and done.err.count("\n") == 1
    done = ringlm("chat", models.chain, "-c", "90", "-s", "Be kind. " * 8, "-p", "hello")
    assert (done.code, done.out) == (1, "") and "more than half of the context of 90" in done.err


def test_run_goes_on_behind_the_context(ringlm: Command, models: Models) -> None:
    slide = ("run", models.endless, "-p", "abc", "-c", "40", "--overflow", "slide", "-n", "500")
    for more in ((), ("--kv", "int8"), ("--kv", "f32,int8"), ("--pinned", "5"), ("--chunk", "3")):
        assert ringlm(*slide, *more).out == (LETTERS[3:] + LETTERS * 20)[:500] + "\n"
    err = ringlm(*slide, "--pinned", "5", "--chunk", "3", "-v").err
    assert "context: 40 of 40 tokens visible, 5 pinned, 462 evicted; 42 slots" in err
    assert len(ringlm("run", models.endless, "-p", "abc", "-c", "40").out) == 40 - 3 + 1 + 1


def test_options_reach_the_session(ringlm: Command, models: Models) -> None:
    """The cache is as large as these options make it."""

    def cache(*args: str) -> str:
        done = ringlm("run", models.random, "-p", "hello", "-n", "1", "-c", "256", "-v", *args)
        assert done.code == 0, done.err
        return done.err.split("K/V ")[1].split(" MiB")[0] + done.err.split(";")[1].split("slots")[0]

    def expected(slots: int, row: int) -> str:
        return f"{2 * 2 * slots * row / 2**20:.1f} {slots} "

    assert cache("--chunk", "1") == expected(256, 32)
    assert cache("--chunk", "16", "--kv", "f32") == expected(271, 64)
    assert cache("--chunk", "16", "--kv", "int8") == expected(271, 18)
    assert cache("--chunk", "16", "--window", "32") == expected(47, 32)
    assert cache("--chunk", "16", "--window", "0") == expected(271, 32)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--overflow", "wrap"), "overflow is 'wrap'; expected 'error', or 'slide'"),
        (("--pinned", "256"), "pinned"),
        (("--kv", "int4"), "expected 'f16', 'int8' or 'f32'"),
        (("--pinned", "4", "--window", "16", "--overflow", "slide"), "window"),
    ],
)
@pytest.mark.parametrize("command", ["run", "chat"])
def test_refused_values(
    ringlm: Command, models: Models, command: str, args: tuple[str, ...], says: str
) -> None:
    done = ringlm(command, models.random, "-p", "x", "-n", "1", *args)
    assert (done.code, done.out) == (1, "") and says in done.err and done.err.count("\n") == 1


def test_perplexity_of_a_stream(ringlm: Command, models: Models, tmp_path: Path) -> None:
    from ringlm import Model
    from ringlm.perplexity import perplexity

    text = "It was a dark and stormy night. " * 8
    with Model(models.random) as model:
        expected = perplexity(model, text, n_ctx=64, kv="int8", chunk=16, pinned=4, overflow="slide")
    args = ("-c", "64", "--kv", "int8", "--chunk", "16", "--pinned", "4", "--overflow", "slide")
    done = ringlm("perplexity", models.random, "-f", "-", *args, "--json", stdin=text.encode())
    record = json.loads(done.out)
    assert (record["perplexity"], record["stderr"]) == (expected.perplexity, expected.stderr)
    assert (record["tokens"], record["windows"]) == (256 - 33, 1)
    done = ringlm("perplexity", models.random, "-f", "-", *args, stdin=text.encode())
    assert "223 tokens scored in a stream through 64, " in done.out


def test_the_registrys_temperature(
    ringlm: Command, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default for a model by its name; not for a file of that name, and not if --temp is there."""
    from ringlm.cli import options

    table = "\n".join(
        f"{key} = {value}"
        for key, value in {
            "source": '"hf"',
            "repo": '"a/b"',
            "path": '"m.gguf"',
            "file": '"m.gguf"',
            "size": 1,
            "sha256": f'"{"0" * 64}"',
            "licence": '"x"',
            "description": '"x"',
            "temperature": 0,
        }.items()
    )
    (tmp_path / "registry.toml").write_text(f"[models.cold]\n{table}\n")
    monkeypatch.setenv("RINGLM_REGISTRY", str(tmp_path / "registry.toml"))
    rest = (40, 0.95, 0.05, 1.0, None)
    for name, temp, found in (
        ("cold", None, 0),
        ("cold", 0.7, 0.7),
        ("gemma-3-270m", None, 0.8),
        ("smollm2-135m", None, 0.0),
        (models.chain, None, 0.8),
        ("hf:a/b/m.gguf", None, 0.8),
        ("no-such-model", None, 0.8),
    ):
        assert options.sampling(name, temp, *rest).temperature == found
