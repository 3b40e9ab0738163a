"""`ringlm doctor`: a sound file, files with one fault each, and files that cannot be read."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from faulty_models import FAULTS, Fault, G, grown, plus_tokens, write_faulty, write_vocabulary
from gguf.scripts import gguf_new_metadata, gguf_set_metadata
from ringlm.cli import main
from ringlm.doctor import Finding, diagnose
from tiny_chat_model import N_VOCAB, TEMPLATE, write_random


def test_nothing_is_wrong_with_a_sound_file(tmp_path: Path) -> None:
    write_faulty(tmp_path / "a.gguf", Fault())
    write_random(tmp_path / "b.gguf")
    assert diagnose(tmp_path / "a.gguf") == diagnose(tmp_path / "b.gguf") == []


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, tmp_path: Path) -> None:
    fault, severity, where, words = FAULTS[name]
    write_faulty(tmp_path / "m.gguf", fault)
    found = diagnose(tmp_path / "m.gguf")
    (finding,) = [f for f in found if (f.severity, f.where) == (severity, where)]
    for word in words:
        assert word in str(finding), str(finding)
    assert finding.consequence and finding.remedy
    others = [f for f in found if f is not finding and f.severity == "error"]
    assert not others, [str(f) for f in others]
    assert [f.severity for f in found] == sorted(f.severity for f in found)


# ---- what belongs to a family ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "keys", "severity", "words"),
    [
        ("qwen2", {}, "error", ["missing", "1000000", "rope_theta"]),
        ("qwen2", {"qwen2.rope.freq_base": 10000.0}, "note", ["10000; nearly all", "rope_theta"]),
        ("qwen2", {"qwen2.rope.freq_base": 1e6}, None, []),
        ("qwen2", {"qwen2.rope.freq_base": 1e4, "general.name": "Qwen2.5 Math 7B Instruct"}, None, []),
        ("qwen2", {"qwen2.rope.freq_base": 1e4, "general.name": "DeepSeek R1 Distill Qwen 7B"}, None, []),
        ("qwen3", {"qwen3.rope.freq_base": 10000.0}, "error", ["1e+06"]),
        ("gemma3", {"gemma3.rope.freq_base": 1e6, G + "add_bos_token": True}, None, []),
        ("phi3", {"phi3.rope.freq_base": 10000.0}, None, []),
    ],
)
def test_the_base_of_rope(
    arch: str, keys: dict[str, Any], severity: str | None, words: list[str], tmp_path: Path
) -> None:
    write_vocabulary(tmp_path / "m.gguf", arch, 10, keys)
    found = [f for f in diagnose(tmp_path / "m.gguf") if f.where == f"{arch}.rope.freq_base"]
    assert [f.severity for f in found] == ([severity] if severity else [])
    for word in words:
        assert word in str(found[0])


@pytest.mark.parametrize(
    ("keys", "base", "factors"),
    [
        ({"general.name": "Meta Llama 3.1 8B", "llama.rope.freq_base": 10000.0}, "10000; models of", "3.1"),
        ({"general.name": "Meta Llama 3 8B Instruct"}, "missing, so that it is 10000", ""),
        ({"general.base_model.0.name": "Llama-3.2 1B", "llama.rope.freq_base": 500000.0}, "", "3.2"),
    ],
)
def test_base_and_factors_of_llama_3(keys: dict[str, Any], base: str, factors: str, tmp_path: Path) -> None:
    write_vocabulary(tmp_path / "m.gguf", "llama", 128_000, keys)
    errors = {f.where: f.what for f in diagnose(tmp_path / "m.gguf") if f.severity == "error"}
    for where, what in (("llama.rope.freq_base", base), ("rope_freqs.weight", factors)):
        assert (where in errors) is bool(what) and what in errors.get(where, "")


@pytest.mark.parametrize(
    ("template", "more"),
    [
        ("{{ bos_token }}" + TEMPLATE.replace("<|im_end|>", "<|x|><|im_end|>"), []),  # the last of two ends
        (TEMPLATE.replace("<|im_end|>", "<turn|>"), ["<turn|>"]),  # EOS with an unusual name
        (TEMPLATE.replace("<|im_end|>", "</assistant>"), []),  # ends in plain text
        ("{% if messages|length < 9 %}{{ raise_exception('no') }}{% endif %}", []),
    ],
)
def test_templates_that_are_sound(template: str, more: list[str], tmp_path: Path) -> None:
    keys = plus_tokens("<|x|>", *more) | {"tokenizer.chat_template": template}
    keys |= {G + "eos_token_id": N_VOCAB + 1} if more else {}
    write_faulty(tmp_path / "m.gguf", Fault(keys, grown if not more else lambda w: (grown(w), grown(w))))
    assert diagnose(tmp_path / "m.gguf") == []


def test_a_template_that_begins_with_a_turn_and_a_bos_that_is_added(tmp_path: Path) -> None:
    fault = Fault({G + "add_bos_token": True, "tokenizer.chat_template": TEMPLATE})
    write_faulty(tmp_path / "m.gguf", fault)
    assert diagnose(tmp_path / "m.gguf") == []


def test_a_large_vocabulary_without_merges_and_gemma_without_bos(tmp_path: Path) -> None:
    keys = {G + "merges": None, "gemma2.rope.freq_base": 10000.0}
    write_vocabulary(tmp_path / "m.gguf", "gemma2", 2000, keys)
    where = {f.where: str(f) for f in diagnose(tmp_path / "m.gguf") if f.severity == "error"}
    assert "single bytes" in where[G + "merges"] and "gemma2" in where[G + "add_bos_token"]


def test_an_architecture_that_is_not_known_is_no_matter_of_shapes(tmp_path: Path) -> None:
    keys = {
        "context_length": 256,
        "embedding_length": 32,
        "attention.head_count": 2,
        "attention.key_length": 8,
    }
    arch = {"general.architecture": "mine"} | {f"mine.{key}": value for key, value in keys.items()}
    write_faulty(tmp_path / "m.gguf", Fault(arch))
    (finding,) = diagnose(tmp_path / "m.gguf")
    assert finding.where == "the model" and "architecture 'mine' is not supported" in finding.what


# ---- files that cannot be read, and remedies ---------------------------------------------------------------


def test_a_file_that_cannot_be_read_is_one_finding(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_random(path)
    whole = path.read_bytes()

    def only() -> Finding:
        (finding,) = diagnose(path)
        assert finding.severity == "error" and finding.where == "the file"
        return finding

    path.write_bytes(whole[:-100])
    assert "blk.1.ffn_up" in only().what or "beyond" in only().what or "end" in only().what
    assert "fetch the file again" in only().remedy
    path.write_bytes(b"GGML" + whole[4:])
    assert "not a GGUF file" in only().what
    path.write_bytes(b"")
    assert only().what
    write_faulty(path, Fault({"general.alignment": 64}))
    key = b"general.alignment" + struct.pack("<I", 4)  # a u32
    whole = path.read_bytes()
    path.write_bytes(whole.replace(key + struct.pack("<I", 64), key + struct.pack("<I", 24)))
    assert "general.alignment" in only().what and "power of two" in only().what
    path.unlink()
    assert "No such file" in only().what and "may be read" in only().remedy


def test_a_missing_shard(tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-00002.gguf"
    write_faulty(path, Fault({"split.no": 0, "split.count": 2, "split.tensors.count": 30}))
    (finding,) = diagnose(path)
    assert "m-00002-of-00002.gguf" in finding.what


def test_the_remedies_help(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands that findings name take the fault away."""
    faulty, sound = tmp_path / "m.gguf", tmp_path / "new.gguf"

    def run(script: Any, *args: object) -> None:
        monkeypatch.setattr("sys.argv", ["command", *map(str, args)])
        script.main()

    for fault, option in (
        ("pre-missing", ["--pre-tokenizer", "gpt-2"]),
        ("eos-is-a-word", ["--special-token", "eos", "<|im_end|>"]),
        ("end-of-turn-does-not-end", ["--special-token", "eot", "<|stop|>"]),
        ("template-missing", ["--chat-template", TEMPLATE]),
    ):
        write_faulty(faulty, FAULTS[fault][0])
        assert option[0] in diagnose(faulty)[0].remedy
        run(gguf_new_metadata, "--force", *option, faulty, sound)
        assert diagnose(sound) == [], fault
    for fault in ("rope-odd", "context-beyond-scaling", "vocab-size"):
        write_faulty(faulty, FAULTS[fault][0])
        (finding,) = diagnose(faulty)
        *_, key, value = finding.remedy.split()
        run(gguf_set_metadata, "--force", faulty, key, value)
        assert diagnose(faulty) == [], fault


READ = [
    *(f"llama.{key}" for key in ("context_length", "embedding_length", "vocab_size", "rope.dimension_count")),
    *(f"llama.attention.{key}" for key in ("head_count", "head_count_kv", "key_length", "value_length")),
    *(f"llama.rope.{key}" for key in ("freq_base", "scaling.type", "scaling.factor")),
    *(G + f"{key}_token_id" for key in ("bos", "eos", "eot", "padding")),
    *(G + key for key in ("model", "pre", "tokens", "token_type", "scores", "merges", "add_bos_token")),
    *("general.name", "tokenizer.chat_template", "tokenizer.chat_templates"),
]


@pytest.mark.parametrize("key", READ)
def test_values_that_make_no_sense_are_no_accidents(key: str, tmp_path: Path) -> None:
    original = {"llama.rope.scaling.original_context_length": 64, "llama.rope.scaling.factor": 4.0}
    for value in (0, 2**32 - 1, 0.0, float("nan"), float("inf"), "", "no\x00", True, [7], ["x"], [1.5, 2.5]):
        write_faulty(tmp_path / "m.gguf", Fault(original | {key: value}))
        for finding in diagnose(tmp_path / "m.gguf"):
            assert str(finding)


# ---- the command -------------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.gguf"

    def doctor(fault: Fault, *options: str) -> tuple[int, list[str]]:
        write_faulty(path, fault)
        code = main(["doctor", str(path), *options])
        out, err = capsys.readouterr()
        assert err == ""
        return code, out.splitlines()

    assert doctor(Fault()) == (0, ["nothing is wrong"])
    code, lines = doctor(FAULTS["double-bos"][0])
    assert code == 0 and lines[0].startswith("note: tokenizer.ggml.add_bos_token: ")
    assert lines[1:] == ["nothing is wrong, 1 note"]
    code, lines = doctor(Fault({G + "eos_token_id": 65, G + "pre": None, G + "add_bos_token": None}))
    assert code == 1 and [line.split(":")[0] for line in lines[:-1]] == ["error", "error", "note"]
    assert lines[-1] == "2 errors, 1 note"
    assert all(" To do: " in line and "; " in line for line in lines[:-1])
    code, lines = doctor(FAULTS["eos-outside"][0], "--json")
    whole = json.loads("\n".join(lines))
    assert (whole["path"], whole["errors"], whole["notes"]) == (str(path), 1, 0)
    (record,) = whole["findings"]
    assert code == 1 and record.keys() == {"severity", "where", "what", "consequence", "remedy"}
    assert record["where"] == G + "eos_token_id"
    code, lines = doctor(FAULTS["vocab-size"][0], "--json")
    assert code == 0 and json.loads("\n".join(lines))["findings"][0]["severity"] == "note"


def test_characters_of_a_hostile_file_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_faulty(tmp_path / "m.gguf", Fault({"llama.rope.scaling.type": "\x1b[2J\x07\nerror"}))
    assert main(["doctor", str(tmp_path / "m.gguf")]) == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\x07" not in out and len(out.splitlines()) == 2


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path / "none.gguf")]) == 1
    assert "none.gguf" in "".join(capsys.readouterr())
    (tmp_path / "text.gguf").write_text("hello")
    assert main(["doctor", str(tmp_path / "text.gguf")]) == 1
    assert "not a GGUF file" in capsys.readouterr().out
