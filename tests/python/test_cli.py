"""ringlm run, chat, info and perplexity, in this process and as processes with signals and terminals."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import gguf
import numpy as np
import pytest
from random_blocks import READABLE
from random_llama import Shape, reference_logits, write_llama
from ringlm import _core
from ringlm.cli import main
from tiny_chat_model import BOS, END, RANDOM, tokenizer_metadata, write_chain, write_random

ANSWER = "Hi, you!"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
MAIN = [sys.executable, "-c", "import sys; from ringlm.cli import main; sys.exit(main())"]
posix = pytest.mark.skipif(sys.platform == "win32", reason="signals and terminals of POSIX")


@dataclass
class Models:
    random: str  # random weights
    chain: str  # answers ANSWER
    endless: str  # never stops


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    found = Models(*(str(folder / f"{name}.gguf") for name in ("random", "chain", "endless")))
    write_random(Path(found.random))
    write_chain(Path(found.chain), ANSWER)
    write_chain(Path(found.endless), LETTERS, endless=True, n_ctx=100_000)
    return found


@dataclass
class Done:
    code: int
    out: str
    err: str


Command = Callable[..., Done]


@pytest.fixture
def ringlm(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Command]:
    """Runs a command line with these bytes piped in; None: stdin is a terminal."""
    monkeypatch.setenv("RINGLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("RINGLM_OFFLINE", "1")

    def run(*args: str, stdin: bytes | None = b"") -> Done:
        piped = io.TextIOWrapper(io.BytesIO(stdin or b""), encoding="utf-8")
        monkeypatch.setattr(piped, "isatty", lambda: stdin is None)
        monkeypatch.setattr(sys, "stdin", piped)
        code = main(args)
        out, err = capfd.readouterr()
        return Done(code, out, err)

    yield run


# ---- run ---------------------------------------------------------------------------------------------------


def test_run_continues_raw_text(ringlm: Command, models: Models) -> None:
    assert ringlm("run", models.chain, "-p", "abc", "-n", "5") == Done(0, "defgh\n", "")
    # No template: a newline in the prompt begins the answer, and its end is the end of generation.
    assert ringlm("run", models.chain, "-p", "x\n") == Done(0, ANSWER + "\n", "")


def test_run_reads_the_prompt_from_a_pipe(ringlm: Command, models: Models) -> None:
    for args in ((), ("-p", "-")):
        assert ringlm("run", models.chain, "-n", "3", *args, stdin=b"abc\n") == Done(0, "def\n", "")
    # One newline of several goes.
    assert ringlm("run", models.chain, "-n", "2", stdin=b"abc\n\n").out == ANSWER[:2] + "\n"
    # -p leaves stdin alone.
    assert ringlm("run", models.chain, "-n", "2", "-p", "m", stdin=b"abc").out == "no\n"
    done = ringlm("run", models.chain, stdin=None)
    assert (done.code, done.out) == (2, "") and "there is no prompt" in done.err
    done = ringlm("run", models.chain, stdin=b"\n")
    assert (done.code, done.out) == (1, "") and "the prompt is empty" in done.err
    done = ringlm("run", models.chain, stdin=b"ab\xffc")
    assert done.code == 1 and "stdin is not UTF-8 text: byte 2 is 0xff" in done.err


def test_run_json(ringlm: Command, models: Models) -> None:
    done = ringlm("run", models.chain, "-p", "ab\n", "--json", "--seed", "7")
    assert done.out.count("\n") == 1 and done.err == ""
    record = json.loads(done.out)
    assert record.pop("prefill_seconds") > 0 and record.pop("decode_seconds") > 0
    assert record == {
        "model": models.chain,
        "text": ANSWER,
        "tokens": list(ANSWER.encode()),
        "finish_reason": "stop",
        "prompt_tokens": 3,
        "generated_tokens": len(ANSWER),
        "seed": 7,
    }
    record = json.loads(ringlm("run", models.chain, "-p", "ab", "--json", "-n", "4").out)
    assert (record["text"], record["finish_reason"], record["generated_tokens"]) == ("cdef", "length", 4)
    assert 0 <= record["seed"] < 2**64


def test_run_stop_strings(ringlm: Command, models: Models) -> None:
    assert ringlm("run", models.chain, "-p", "012", "--stop", "78").out == "3456\n"
    found = json.loads(ringlm("run", models.chain, "-p", "012", "--stop", "zz", "--stop", "56", "--json").out)
    assert (found["text"], found["finish_reason"]) == ("34", "stop")


def test_run_context(ringlm: Command, models: Models) -> None:
    done = ringlm("run", models.chain, "-p", "012", "-c", "9", "--json")
    record = json.loads(done.out)
    # Six more are in the cache, and one more is drawn behind the last.
    assert (record["text"], record["finish_reason"]) == ("3456789", "length")
    done = ringlm("run", models.chain, "-p", "abcdefghij", "-c", "9")
    assert (done.code, done.out) == (1, "") and done.err.count("\n") == 1
    assert "10 tokens" in done.err and "9" in done.err


def _next_logits(models: Models, prompt: str, kv: str = "f32") -> np.ndarray:
    weights = write_random(Path(models.random + ".copy"))
    Path(models.random + ".copy").unlink()
    return reference_logits(RANDOM, weights, list(prompt.encode()), kv)[-1]


def test_run_sampling_options_reach_the_sampler(ringlm: Command, models: Models) -> None:
    """Each of them, with the others open, cuts the draw to what its definition leaves."""
    logits = _next_logits(models, "hello")
    order = np.argsort(-logits)
    p = np.exp(logits - logits.max())
    p /= p.sum()
    top_p = 0.3
    nucleus = set(order[: int(np.searchsorted(np.cumsum(p[order]), top_p)) + 1].tolist())
    min_p = set(np.flatnonzero(p >= 0.5 * p.max()).tolist())
    wide = ("--top-k", "0", "--top-p", "1", "--min-p", "0", "--temp", "1")

    def drawn(*args: str, n: int = 12) -> set[int]:
        ids = set()
        for seed in range(n):
            done = ringlm(
                "run",
                models.random,
                "-p",
                "hello",
                "-n",
                "1",
                "-t",
                "1",
                "--json",
                "--seed",
                str(seed),
                *args,
            )
            ids.update(json.loads(done.out)["tokens"])
        return ids

    assert drawn("--temp", "0", n=2) == {int(order[0])}
    assert drawn(*wide, "--top-k", "3") <= set(order[:3].tolist())
    assert drawn(*wide, "--top-p", str(top_p)) <= nucleus
    assert drawn(*wide, "--min-p", "0.5") <= min_p
    everything = drawn(*wide)
    assert not everything <= nucleus and not everything <= min_p and len(everything) > 5
    assert len(drawn(*wide, "--temp", "100")) > len(drawn(*wide, "--temp", "0.05"))


def test_run_repeat_penalty(ringlm: Command, models: Models) -> None:
    args = ("run", models.chain, "-p", "abcdefghi" + "abc", "-n", "1", "--temp", "0")
    assert ringlm(*args).out == "d\n"
    # The logits of what was there are divided; d is no longer the best.
    assert ringlm(*args, "--repeat-penalty", "1000").out != "d\n"


def test_run_same_seed_same_text(ringlm: Command, models: Models) -> None:
    def text(seed: str, *args: str) -> str:
        done = ringlm(
            "run", models.random, "-p", "x", "-n", "20", "--temp", "2", "--seed", seed, "--json", *args
        )
        return json.loads(done.out)["tokens"]

    assert text("1") == text("1") == text("1", "-t", "1", "--chunk", "1")
    assert text("1") != text("2")


def test_run_runtime_options(ringlm: Command, models: Models) -> None:
    args = ("run", models.random, "-p", "hello", "-n", "2", "--temp", "0")
    plain = ringlm(*args)
    assert ringlm(*args, "--backend", "reference", "--kv", "f32,f16", "-t", "1").out == plain.out
    done = ringlm(*args, "-v", "-t", "1", "-c", "64", "--kv", "f32", "--backend", "reference")
    assert done.out == plain.out
    # 2 layers, 1 KV head, K and V of 16 elements, 64 tokens, 4 bytes
    assert f"backend reference, 1 threads, context 64, K/V {2 * 2 * 16 * 64 * 4 / 2**20:.1f} MiB" in done.err
    assert "prefill: 5 tokens" in done.err and "decode: 1 tokens" in done.err


# ---- chat --------------------------------------------------------------------------------------------------


def test_chat_answers_once(ringlm: Command, models: Models) -> None:
    assert ringlm("chat", models.chain, "-p", "Hello") == Done(0, ANSWER + "\n", "")
    assert ringlm("chat", models.chain, "-p", "-", stdin=b"one\ntwo\n") == Done(0, ANSWER + "\n", "")
    assert ringlm("chat", models.chain, "-p", "x", "-n", "2", "-s", "Be brief.").out == "Hi\n"
    assert ringlm("chat", models.chain, "-p", "x", "--stop", "yo").out == "Hi, \n"
    done = ringlm("chat", models.chain, "-p", "x", "-v")
    assert done.out == ANSWER + "\n" and f"{len(ANSWER)} said" in done.err


def test_chat_from_a_pipe(ringlm: Command, models: Models, tmp_path: Path) -> None:
    """A line is a message of one conversation; commands work."""
    saved = tmp_path / "a file.json"
    lines = ["first", "", "  ", "second /clear", f"/save {saved}", "/clear", "/nonsense", "/etc/hosts?"]
    lines += ["/help", "/save", "/exit", "never"]
    done = ringlm("chat", models.chain, "-s", "Be kind.", stdin="\n".join(lines).encode())
    assert done.code == 0
    assert done.out == f"{ANSWER}\n\n{ANSWER}\n\n{ANSWER}\n"
    roles = [(m["role"], m["content"]) for m in json.loads(saved.read_text())["messages"]]
    assert roles == [
        ("system", "Be kind."),
        ("user", "first"),
        ("assistant", ANSWER),
        ("user", "second /clear"),
        ("assistant", ANSWER),
    ]
    notes = done.err.splitlines()
    assert notes[0] == f"saved {saved}" and notes[1] == "new conversation"
    assert notes[2] == "there is no command /nonsense; /help lists them"
    assert notes[3].startswith("/clear") and notes[-1] == "where to? /save FILE"
    assert ringlm("chat", models.chain, stdin=b"") == Done(0, "", "")


def test_chat_overflow(ringlm: Command, models: Models) -> None:
    long, error = "x" * 60, ("--overflow", "error")
    stdin = f"hello\n{long}\n/clear\n{long}\n".encode()
    done = ringlm("chat", models.chain, "-c", "90", *error, stdin=stdin)
    assert done.code == 1  # something was not answered
    assert done.out == f"{ANSWER}\n\n{ANSWER}\n"
    errors = [line for line in done.err.splitlines() if line.startswith("ringlm: error:")]
    assert len(errors) == 1 and errors[0].endswith("; /clear begins a new conversation")
    done = ringlm("chat", models.chain, "-c", "20", *error, "-p", long)
    assert (done.code, done.out) == (1, "") and done.err.count("\n") == 1
    done = ringlm("chat", models.endless, "-c", "50", *error, "-p", "x")
    assert done.code == 0 and done.out.startswith(LETTERS[:10])
    assert "the context of 50 tokens is full" in done.err and done.err.count("\n") == 1


def test_chat_save_errors_do_not_end_it(ringlm: Command, models: Models, tmp_path: Path) -> None:
    done = ringlm("chat", models.chain, stdin=f"/save {tmp_path}/no/such.json\nhello\n".encode())
    assert (done.code, done.out) == (1, ANSWER + "\n")
    assert done.err.startswith("ringlm: error: ") and done.err.count("\n") == 1


def test_chat_warns_without_a_template(ringlm: Command, tmp_path: Path) -> None:
    write_chain(tmp_path / "base.gguf", ANSWER, template=None)
    done = ringlm("chat", str(tmp_path / "base.gguf"), "-p", "x")
    assert done.out == ANSWER + "\n"  # ChatML, as the vocabulary suggests
    assert (
        done.err.startswith("ringlm: warning: the model has no chat template") and done.err.count("\n") == 1
    )


def test_chat_named_template(ringlm: Command, tmp_path: Path) -> None:
    metadata = {"tokenizer.chat_templates": ["other"], "tokenizer.chat_template.other": "m\n\n"}
    write_chain(tmp_path / "m.gguf", ANSWER, more=metadata)
    assert ringlm("chat", str(tmp_path / "m.gguf"), "-p", "x", "--template", "other").out == ANSWER + "\n"
    done = ringlm("chat", str(tmp_path / "m.gguf"), "-p", "x", "--template", "none")
    assert done.code == 1 and "'none'" in done.err and "default, other" in done.err


@posix
def test_interrupt_while_the_prompt_is_read(
    models: Models, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The message is as if never sent, and the conversation goes on."""
    from ringlm import Model
    from ringlm.cli import options
    from ringlm.cli.chat import Conversation

    seen: list[str] = []

    def interrupt(_: object, text: str) -> None:
        seen.append(text)
        if len(seen) == 1:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(options.StatusLine, "show", interrupt)
    before = signal.getsignal(signal.SIGINT)
    with Model(models.chain) as model, model.chat(chunk=8) as chat:
        talk = Conversation(chat, verbose=False)
        assert talk.say("x" * 40) is False
        assert chat.messages == []
        # <|im_start|>user\n, the message, <|im_end|>\n<|im_start|>assistant\n
        assert seen == [f"reading 8 of {1 + 5 + 40 + 2 + 1 + 10} tokens"]
        assert talk.say("hello") is True
        assert [m["content"] for m in chat.messages] == ["hello", ANSWER]
    assert capfd.readouterr().out == f"\n{ANSWER}\n"
    assert signal.getsignal(signal.SIGINT) is before


# ---- info --------------------------------------------------------------------------------------------------


def test_info_json(ringlm: Command, models: Models) -> None:
    record = json.loads(ringlm("info", models.random, "--json").out)
    reader = gguf.GGUFReader(models.random)
    assert record["parameters"] == sum(int(t.n_elements) for t in reader.tensors)
    assert record["quantization"] == [
        {
            "type": "F32",
            "tensors": len(reader.tensors),
            "elements": record["parameters"],
            "bytes": 4 * record["parameters"],
            "share": 1.0,
            "fast": True,
        }
    ]
    assert record["file_bytes"] == Path(models.random).stat().st_size
    expected = {
        "path": models.random,
        "architecture": "llama",
        "name": "tiny",
        "supported": True,
        "reason": None,
        "n_layer": 2,
        "n_embd": 32,
        "n_ff": 32,
        "n_head": 2,
        "n_head_kv": 1,
        "group": 2,
        "head_dim": 16,
        "n_ctx_train": 256,
        "n_ctx_default": 256,
        "chat_templates": ["default"],
        # layers, KV heads, K and V, elements, bytes; a scale of 2 bytes
        "kv_bytes_per_token": {"f16": 2 * 2 * 16 * 2, "int8": 2 * 2 * (16 + 2), "f32": 2 * 2 * 16 * 4},
        # slots: the context, and a chunk of 128 without its first token
        "kv_bytes": {"f16": (256 + 127) * 128, "int8": (256 + 127) * 72, "f32": (256 + 127) * 256},
    }
    assert {key: record[key] for key in expected} == expected
    assert record["rope"]["base"] == 10000 and record["rope"]["dims"] == 16
    assert record["tokens"]["n_vocab"] == RANDOM.n_vocab
    assert record["tokens"]["bos"] == {"id": BOS, "text": "<|bos|>"}
    assert record["tokens"]["eog"] == [{"id": END, "text": "<|im_end|>"}]
    assert record["tokens"]["add_bos"] is False


def test_info_agrees_with_a_session(ringlm: Command, models: Models) -> None:
    from ringlm import Model

    record = json.loads(ringlm("info", models.endless, "--json").out)
    with Model(models.endless) as model:
        for kv in ("f16", "int8", "f32"):
            with model.session(kv=kv) as session:
                assert session.n_ctx == record["n_ctx_default"] == 4096
                assert session.kv_nbytes == record["kv_bytes"][kv]


def test_info_text(ringlm: Command, models: Models) -> None:
    done = ringlm("info", models.random)
    lines = dict(
        re.match(r"(\S.{14})(.*)", line).groups() for line in done.out.splitlines() if line[0] != " "
    )
    lines = {key.strip(): value for key, value in lines.items()}
    assert lines["heads"] == "2 query, 1 KV, group 2, 16 wide"
    assert lines["K/V per token"] == "128 bytes in f16, 72 bytes in int8, 256 bytes in f32"
    assert lines["runs"] == "yes" and lines["template"] == "default"
    assert "\x1b" not in done.out and done.err == ""


def test_info_names_types_without_a_fast_kernel(
    ringlm: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "m.gguf")
    types = {"attn_v.weight": "Q8_0", "ffn_down.weight": "IQ4_NL", "default": "Q4_1"}
    write_llama(Path(path), Shape(types=types))
    fast = _core.fast_types()
    assert {"F32", "Q8_0", "IQ4_NL", "Q4_1"} <= set(fast) <= set(READABLE)
    assert "runs           yes\n" in ringlm("info", path).out

    monkeypatch.setattr(_core, "fast_types", lambda: [t for t in fast if t not in ("F32", "IQ4_NL", "Q8_0")])
    out = ringlm("info", path).out
    assert "runs           yes, but without a fast kernel: IQ4_NL, Q8_0\n" in out  # F32: vectors alone
    assert f"IQ4_NL: 2 tensors, {2 * 64 * 96 // 32 * 18 / 1000:.2f} kB, " in out
    record = json.loads(ringlm("info", path, "--json").out)
    assert {t["type"]: t["fast"] for t in record["quantization"]} == {
        "Q4_1": True,
        "IQ4_NL": False,
        "Q8_0": False,
        "F32": True,
    }

    w = gguf.GGUFWriter(tmp_path / "slow.gguf", "llama")
    w.add_tensor("token_embd.weight", np.zeros((2, 66), np.uint8), raw_dtype=gguf.GGMLQuantizationType.TQ2_0)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    record = json.loads(ringlm("info", str(tmp_path / "slow.gguf"), "--json").out)
    assert record["supported"] is False and record["quantization"][0]["fast"] is False
    assert "runs           no: " in ringlm("info", str(tmp_path / "slow.gguf")).out


def write_unusual(path: Path, arch: str, tensors: bool, metadata: dict[str, object]) -> str:
    w = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        add = {
            bool: w.add_bool,
            int: w.add_uint32,
            float: w.add_float32,
            str: w.add_string,
            list: w.add_array,
        }
        add[type(value)](key, value)
    if tensors:
        w.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
        w.add_tensor("blk.0.w", np.zeros((32, 32), np.float16))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return str(path)


def test_info_of_what_cannot_run(ringlm: Command, tmp_path: Path) -> None:
    path = write_unusual(
        tmp_path / "m.gguf",
        "mystery",
        True,
        {
            "mystery.block_count": 3,
            "mystery.embedding_length": 32,
            "mystery.attention.head_count": [4, 4, 8],
            "mystery.attention.head_count_kv": [2, 1, 8],
            "mystery.attention.key_length": 8,
            "mystery.attention.value_length": 16,
            "mystery.context_length": 1000,
            "mystery.rope.scaling.type": "yarn",
            "mystery.rope.scaling.factor": 4.0,
            "tokenizer.ggml.model": "rwkv",
            "tokenizer.ggml.tokens": ["a", "b"],
        },
    )
    record = json.loads(ringlm("info", path, "--json").out)
    assert record["supported"] is False and "'mystery' is not supported" in record["reason"]
    assert record["group"] == [2, 4, 1] and record["n_head_kv"] == [2, 1, 8]
    assert record["kv_bytes_per_token"] == {"f16": 11 * 24 * 2, "int8": 11 * (24 + 4), "f32": 11 * 24 * 4}
    assert record["kv_bytes"]["int8"] == record["n_ctx_default"] * 11 * (24 + 4)
    assert record["rope"]["scaling"] == "yarn" and record["rope"]["factor"] == 4
    assert [(t["type"], t["elements"]) for t in record["quantization"]] == [("F16", 1024), ("F32", 128)]
    assert record["tokens"]["n_vocab"] == 2 and "'rwkv'" in record["tokens"]["reason"]
    out = ringlm("info", path).out
    assert "no: architecture 'mystery'" in out and "1/2/8 by layer KV" in out and "not readable" in out


def test_info_of_a_vocabulary_and_of_nonsense(ringlm: Command, tmp_path: Path) -> None:
    path = write_unusual(tmp_path / "vocab.gguf", "llama", False, tokenizer_metadata())
    record = json.loads(ringlm("info", path, "--json").out)
    assert record["supported"] is False and "no tensors" in record["reason"]
    assert record["parameters"] == 0 and record["kv_bytes"] is None and record["tokens"]["n_vocab"] > 0
    assert "none: the file has no tensors" in ringlm("info", path).out
    # Keys of other types than they should have, and text that would steer the terminal.
    path = write_unusual(
        tmp_path / "nonsense.gguf",
        "llama",
        True,
        {
            "general.name": "evil\x1b[31m\nname",
            "general.license": 5,
            "llama.block_count": "many",
            "llama.embedding_length": 33,
            "llama.attention.head_count": 0,
            "llama.attention.head_count_kv": [1, 2],
            "llama.context_length": True,
            "llama.rope.freq_base": "high",
            "tokenizer.ggml.model": 7,
            "tokenizer.chat_template": 3,
        },
    )
    done = ringlm("info", path)
    assert done.code == 0 and "\x1b" not in done.out and r"evil\x1b[31m\nname" in done.out
    assert ringlm("info", path, "--json").code == 0


# ---- perplexity --------------------------------------------------------------------------------------------


def test_perplexity_command(ringlm: Command, models: Models, tmp_path: Path) -> None:
    from ringlm import Model
    from ringlm.perplexity import perplexity

    text = "It was a dark and stormy night. " * 8
    (tmp_path / "t.txt").write_text(text)
    with Model(models.random) as model:
        expected = perplexity(model, text, n_ctx=64, kv="f32")
    args = ("perplexity", models.random, "-c", "64", "--kv", "f32", "-t", "1", "--chunk", "16")
    done = ringlm(*args, "-f", str(tmp_path / "t.txt"), "--json")
    record = json.loads(done.out)
    assert record["perplexity"] == expected.perplexity and record["stderr"] == expected.stderr
    assert (record["tokens"], record["n_ctx"], record["windows"]) == (4 * 31, 64, 4)
    assert done.err == "" and done.out.count("\n") == 1
    done = ringlm(*args, "-f", "-", stdin=text.encode())
    assert done.out.startswith(f"perplexity {expected.perplexity:.4f} +/- {expected.stderr:.4f}\n")
    assert "124 tokens scored in 4 windows of 64" in done.out
    record = json.loads(
        ringlm("perplexity", models.random, "-f", "-", "-c", "4", "--json", stdin=b"abcd").out
    )
    assert record["tokens"] == 1 and record["stderr"] is None


def test_perplexity_errors(ringlm: Command, models: Models, tmp_path: Path) -> None:
    (tmp_path / "short").write_text("too short")
    (tmp_path / "latin").write_bytes(b"caf\xe9" * 100)
    for name, says in (
        ("short", "the text has 9 tokens and one window takes 64"),
        ("latin", "is not UTF-8 text: byte 3 is 0xe9"),
        ("absent", "No such file or directory"),
    ):
        done = ringlm("perplexity", models.random, "-c", "64", "-f", str(tmp_path / name))
        assert (done.code, done.out) == (1, "") and done.err.count("\n") == 1 and says in done.err


# ---- wrong usage -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [
        ("run", "m", "-p", "x", "--temp", "-1"),
        ("run", "m", "-p", "x", "--top-p", "1.5"),
        ("run", "m", "-p", "x", "--top-k", "-1"),
        ("run", "m", "-p", "x", "--min-p", "x"),
        ("run", "m", "-p", "x", "--seed", "-1"),
        ("run", "m", "-p", "x", "-n", "0"),
        ("run", "m", "-p", "x", "-c", "0"),
        ("run", "m", "-p", "x", "-t", "0"),
        ("run", "m", "-p", "x", "--chunk", "0"),
        ("run", "m", "more", "-p", "x"),
        ("run", "m", "-p"),
        ("chat", "m", "--nonsense"),
        ("perplexity", "m"),
        ("perplexity", "m", "-f", "x", "-c", "2"),
        ("info", "m", "-x"),
        ("nonsense",),
    ],
)
def test_usage(ringlm: Command, args: tuple[str, ...]) -> None:
    done = ringlm(*args)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("ringlm: error: ") and done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--kv", "f8"), "'f8'"),
        (("--kv", "f16,f8"), "'f8'"),
        (("--backend", "gpu"), "'gpu'"),
        (("--repeat-penalty", "0"), "repetition_penalty"),
        (("-c", "100000"), "n_ctx is 100000"),
        (("-c", "9" * 30), "n_ctx is 999"),
        (("--chunk", "9" * 30), "chunk is 999"),
        (("--top-k", "9" * 30), "top_k=999"),
        (("--stop", ""), "stop"),
    ],
)
def test_refused_values(ringlm: Command, models: Models, args: tuple[str, ...], says: str) -> None:
    done = ringlm("run", models.random, "-p", "x", "-n", "1", *args)
    assert (done.code, done.out) == (1, "")
    assert says in done.err and done.err.count("\n") == 1


@posix
@pytest.mark.parametrize("closed", [0, 1, 2])
def test_closed_standard_streams(models: Models, closed: int) -> None:
    done = subprocess.run(
        [*MAIN, "chat", models.chain, "--temp", "0", *(["-p", "x"] if closed else [])],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        preexec_fn=lambda: os.close(closed),
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == (b"" if closed < 2 else f"{ANSWER}\n".encode())
    assert done.stderr == b""


@pytest.mark.parametrize("command", ["run", "chat", "info", "perplexity"])
def test_models_that_are_not_there(ringlm: Command, command: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("x")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(10))
    args = {"info": (), "perplexity": ("-f", str(tmp_path / "text"))}.get(command, ("-p", "x"))
    for model, says in (
        ("no-such-model", "no-such-model"),
        (str(tmp_path / "absent.gguf"), "absent.gguf"),
        (str(tmp_path / "bad.gguf"), "bad.gguf"),
        ("smollm2-135m", "RINGLM_OFFLINE"),
    ):
        done = ringlm(command, model, *args)
        assert (done.code, done.out) == (1, ""), (model, done)
        assert done.err.startswith("ringlm: error: ") and done.err.count("\n") == 1 and says in done.err
    assert ringlm(command, *args).code == 1  # smollm2-135m by default
    assert "Traceback" in ringlm("--debug", command, "no-such-model", *args).err


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from ringlm.cli import main\n"
        "for c in 'run chat info perplexity compare quantize regroup'.split(): main([c, '--help'])\n"
        "heavy = {'numpy', 'tokenizers', 'jinja2', 'gguf', 'prompt_toolkit', 'ringlm._core'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


# ---- signals and terminals ---------------------------------------------------------------------------------


def read_until(stream: IO[bytes], enough: Callable[[bytes], bool]) -> bytes:
    got = b""
    while not enough(got):
        byte = stream.read(1)
        assert byte, f"ended after {got!r}"
        got += byte
    return got


@posix
@pytest.mark.parametrize("args", [("run",), ("chat",)])
def test_interrupt(models: Models, args: tuple[str, ...]) -> None:
    """What was generated stands there, then a newline; exit code 130."""
    process = subprocess.Popen(
        [*MAIN, *args, models.endless, "-p", "x\n", "-c", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        bufsize=0,
    )
    assert process.stdout is not None and process.stderr is not None
    with process:
        got = read_until(process.stdout, lambda got: len(got) >= 30)
        process.send_signal(signal.SIGINT)
        got += process.stdout.read()
        err = process.stderr.read()
    assert (process.returncode, err) == (130, b"")
    text = got.decode()
    assert text.endswith("\n") and text[:-1] == (LETTERS * (len(text) // 26 + 1))[: len(text) - 1]


@posix
def test_output_comes_as_it_is_generated(models: Models) -> None:
    """A reader that leaves ends the run."""
    process = subprocess.Popen(
        [*MAIN, "run", models.endless, "-p", "x\n", "-c", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
    )
    assert process.stdout is not None and process.stderr is not None
    with process:
        assert read_until(process.stdout, lambda got: len(got) >= 5) == b"abcde"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


class Terminal:
    """A command in a pseudo terminal; ``screen`` is all it wrote, without escape sequences."""

    def __init__(self, *args: str, cache: Path) -> None:
        import pty

        self._end, child = pty.openpty()
        env = {**os.environ, "RINGLM_CACHE": str(cache), "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
        self.process = subprocess.Popen(
            [*MAIN, *args], stdin=child, stdout=child, stderr=child, env=env, start_new_session=True
        )
        os.close(child)
        self._raw = b""

    @property
    def screen(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]|\r", "", self._raw.decode("utf-8", "replace"))

    def expect(self, text: str, since: int = 0, limit: float = 20) -> None:
        """Waits until the text has appeared behind so many characters of the screen."""
        import select

        end = time.monotonic() + limit
        while text not in self.screen[since:]:
            assert time.monotonic() < end, f"no {text!r} in {self.screen!r}"
            if select.select([self._end], [], [], 0.1)[0]:
                got = os.read(self._end, 1 << 16)
                self._raw += got
                if b"\x1b[6n" in got:  # where is the cursor?
                    self.type("\x1b[1;1R")

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def close(self) -> int:
        code = self.process.wait(20)
        os.close(self._end)
        return code


@posix
def test_chat_in_a_terminal(models: Models, tmp_path: Path) -> None:
    t = Terminal("chat", models.chain, cache=tmp_path)
    t.expect("tiny, context 512; /help lists commands")
    t.expect("\n>")
    t.type("hello\r")
    t.expect(ANSWER)
    at = len(t.screen)
    t.expect(">", at)
    t.type(f"/save {tmp_path}/talk.json\r")
    t.expect("saved ")
    t.type("/exit\r")
    assert t.close() == 0
    messages = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert [m["content"] for m in messages] == ["hello", ANSWER]
    # The next session knows what was typed.
    history = tmp_path / "chat_history"
    assert "+hello" in history.read_text() and history.stat().st_mode & 0o077 == 0


@posix
def test_interrupts_in_a_terminal(models: Models, tmp_path: Path) -> None:
    """The first stops the answer and keeps what was said; one where there is no answer leaves."""
    t = Terminal("chat", models.endless, "-c", "100000", cache=tmp_path)
    t.expect("\n>")
    t.type("hello\r")
    t.expect(LETTERS * 2)
    at = len(t.screen)
    t.process.send_signal(signal.SIGINT)
    t.expect("\n>", at)
    t.type(f"/save {tmp_path}/talk.json\r")
    t.expect("saved ")
    t.expect(">", t.screen.index("saved "))
    t.type("\x03")
    assert t.close() == 130
    said = json.loads((tmp_path / "talk.json").read_text())["messages"][-1]
    assert said["role"] == "assistant" and said["content"].startswith(LETTERS * 2)
