"""Files of Hugging Face, from a server on 127.0.0.1. huggingface_hub reads HF_ENDPOINT when it is imported,
so every pull runs in a process of its own."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from model_servers import Server, clean_env, serve, sha256

pytest.importorskip("huggingface_hub")

COMMIT = "c0ffee" + "0" * 34
DATA = random.Random(2).randbytes(3_000_000)
REF = "hf:owner/repo/q4/model.gguf"
MAIN = "import sys; from ringlm.cli import main; sys.exit(main(sys.argv[1:]))"


class Hub:
    def __init__(self, server: Server, folder: Path) -> None:
        self.server = server
        self.models = folder / "cache" / "models"
        self.file = self.models / "hf" / "owner" / "repo" / "q4" / "model.gguf"
        self.env = clean_env(
            HF_ENDPOINT=server.url,
            HF_HOME=str(folder / "hf_home"),
            HF_HUB_DISABLE_XET="1",
            HF_HUB_DISABLE_TELEMETRY="1",
            RINGLM_CACHE=str(folder / "cache"),
        )

    def add(self, revision: str, data: bytes, etag: str, path: str = "q4/model.gguf") -> str:
        """Serve ``data`` as a file of owner/repo; returns its path on the server."""
        for name in (revision, COMMIT):
            url = f"/owner/repo/resolve/{name}/{path}"
            self.server.files[url] = data
            self.server.headers[url] = {
                "ETag": f'"{etag}"',
                "X-Repo-Commit": COMMIT,
                "Accept-Ranges": "bytes",
            }
        return f"/owner/repo/resolve/{COMMIT}/{path}"

    def run(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", MAIN, *args],
            env={**self.env, **env},
            capture_output=True,
            text=True,
            timeout=60,
        )


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with serve(Server()) as server:
        yield Hub(server, tmp_path)


def test_pull_list_and_remove(hub: Hub) -> None:
    hub.add("main", DATA, sha256(DATA))
    done = hub.run("pull", REF)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(hub.file)]
    assert hub.file.read_bytes() == DATA
    assert "downloading" in done.stderr and "%" not in done.stderr and "Traceback" not in done.stderr
    files = sorted(str(p.relative_to(hub.file.parent)) for p in hub.file.parent.rglob("*"))
    assert files == ["model.gguf", "model.gguf.json"]
    requests = len(hub.server.log)
    code = f"""
from ringlm.cli import main
assert main(["pull", "{REF}", "--verify"]) == 0
assert main(["list", "--json"]) == 0
assert main(["rm", "{REF}"]) == 0
"""
    done = subprocess.run([sys.executable, "-c", code], env=hub.env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    path, _, rest = done.stdout.partition("\n")
    listed, end = json.JSONDecoder().raw_decode(rest)
    entry = listed[-1]
    assert path == entry["path"] == str(hub.file)
    assert (entry["name"], entry["size"], entry["sha256"]) == (REF, len(DATA), sha256(DATA))
    assert rest[end:].strip().startswith(f"removed {REF}, freed 3 MB")
    assert list(hub.models.iterdir()) == []
    assert len(hub.server.log) == requests


def test_revision_has_a_place_of_its_own(hub: Hub) -> None:
    hub.add("refs/pr/1".replace("/", "%2F"), DATA[:1000], sha256(DATA[:1000]))
    done = hub.run("pull", REF + "@refs/pr/1")
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.strip())
    assert path == hub.models / "hf" / "owner" / "repo@refs%2Fpr%2F1" / "q4" / "model.gguf"
    assert path.read_bytes() == DATA[:1000]


def test_interrupted_then_pulled_again(hub: Hub) -> None:
    url = hub.add("main", DATA, sha256(DATA))
    hub.server.stall = url
    child = subprocess.Popen(
        [sys.executable, "-c", MAIN, "pull", REF], env=hub.env, stderr=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert hub.server.stalled.wait(30)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=30)
    assert (child.returncode, out) == (130, b"") and b"Traceback" not in err
    assert not hub.file.exists()
    assert hub.server.left.wait(10)
    # What a process that was killed leaves; huggingface_hub never takes it up.
    staging = hub.file.with_name("model.gguf.download")
    junk = staging / ".cache" / "huggingface" / "download" / "q4" / f"x.{sha256(DATA)}.0123abcd.incomplete"
    junk.parent.mkdir(parents=True, exist_ok=True)
    junk.write_bytes(DATA)
    hub.server.stall = None
    done = hub.run("pull", REF)
    assert done.returncode == 0, done.stderr
    assert hub.file.read_bytes() == DATA
    assert sorted(p.name for p in hub.file.parent.iterdir()) == ["model.gguf", "model.gguf.json"]


def test_wrong_hash(hub: Hub) -> None:
    hub.add("main", DATA[:1000], "ab" * 32)
    done = hub.run("pull", REF)
    assert done.returncode == 1 and done.stdout == ""
    message = done.stderr.splitlines()[-1]
    assert f"SHA-256 is {sha256(DATA[:1000])}, expected {'ab' * 32}" in message
    assert [p for p in hub.models.rglob("*.gguf") if p.is_file()] == []


def test_file_outside_large_file_storage_is_checked_by_size(hub: Hub) -> None:
    hub.add("main", DATA[:1000], "0123456789abcdef0123456789abcdef01234567")
    assert hub.run("pull", REF).returncode == 0
    hub.file.write_bytes(b"?" * 1000)
    assert hub.run("pull", REF, "--verify").returncode == 0  # by the hash of what was downloaded
    assert hub.file.read_bytes() == DATA[:1000]


def test_registry_entry_with_this_source(hub: Hub, tmp_path: Path) -> None:
    hub.add("main", DATA[:1000], sha256(DATA[:1000]))
    entry = f"""
[models.mine]
source = "hf"
repo = "owner/repo"
path = "q4/model.gguf"
file = "mine.gguf"
size = 1000
sha256 = "{sha256(DATA[:1000])}"
licence = "CC0-1.0"
description = "a test"
"""
    (tmp_path / "registry.toml").write_text(entry)
    done = hub.run("pull", "mine", RINGLM_REGISTRY=str(tmp_path / "registry.toml"))
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in (hub.models / "mine").iterdir()) == ["mine.gguf"]
    (tmp_path / "registry.toml").write_text(entry.replace("size = 1000", "size = 1001"))
    done = hub.run("pull", "mine", RINGLM_REGISTRY=str(tmp_path / "registry.toml"))
    assert done.returncode == 1 and "the registry expects 1001 bytes" in done.stderr


def test_answers_of_the_server_become_one_line(hub: Hub) -> None:
    answers = {
        "RepoNotFound": "no repository owner/repo",
        "RevisionNotFound": "no revision 'main'",
        "EntryNotFound": "has no file EntryNotFound.gguf",
        "GatedRepo": "HF_TOKEN",
        "Unheard-of": "download failed",
    }
    for code in answers:
        hub.server.headers[f"/owner/repo/resolve/main/{code}.gguf"] = {"X-Error-Code": code}
    code = "import sys; from ringlm.cli import main; print([main(['pull', ref]) for ref in sys.argv[1:]])"
    refs = [f"hf:owner/repo/{code}.gguf" for code in answers]
    done = subprocess.run(
        [sys.executable, "-c", code, *refs], env=hub.env, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "[1, 1, 1, 1, 1]\n"
    lines = done.stderr.splitlines()
    assert len(lines) == len(answers), done.stderr
    for line, ref, says in zip(lines, refs, answers.values(), strict=True):
        assert line.startswith(f"ringlm: error: {ref}: ") and says in line


def test_server_that_is_not_there(hub: Hub) -> None:
    done = hub.run("pull", REF, HF_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == 1 and "download failed" in done.stderr
    assert "HF_HUB_OFFLINE" in hub.run("pull", REF, HF_HUB_OFFLINE="1").stderr
    assert hub.server.log == []


def test_without_the_extra(hub: Hub) -> None:
    code = "import sys; sys.modules['huggingface_hub'] = None\n" + MAIN
    done = subprocess.run(
        [sys.executable, "-c", code, "pull", REF], env=hub.env, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 1 and "pip install 'ringlm[hub]'" in done.stderr
