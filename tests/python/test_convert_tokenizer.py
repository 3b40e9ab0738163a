"""Tokenizers of checkpoints as GGUF metadata.

Ids are compared with `tokenizers` and `sentencepiece`, special tokens with what the gguf package finds in the
same folder."""

from __future__ import annotations

import base64
import itertools
import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from checkpoints import llama_config, llama_tensors, write_checkpoint
from ringlm import Tokenizer
from ringlm.convert import convert
from ringlm.convert.tokenizer import tokenizer_metadata
from ringlm.errors import Error, FileFormatError, UnsupportedModelError
from tokenizer_data import (
    BYTE,
    CONTROL,
    NASTY,
    NORMAL,
    SENTENCES,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    byte_spelling,
    random_texts,
    train_byte_level,
)

TEXTS = [*NASTY, *SENTENCES, *random_texts(150, seed=9)]
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ADDED = [
    ("<|endoftext|>", True),
    ("<|im_start|>", True),
    ("<|im_end|>", True),
    ("<tool>", False),
    ("<|fim|>", False),
]


def token(i: int, content: str, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": i, "content": content, "special": special, **flags}


def byte_level_json(pairs: bool = True, template: bool = False) -> dict[str, Any]:
    """tokenizer.json as Qwen2 has it, of 600 tokens and ADDED behind them."""
    tokens, merges = train_byte_level(600)
    n = len(tokens)
    split = {"type": "Split", "pattern": {"Regex": QWEN2}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    single: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    start = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
    post: dict[str, Any] = {
        "type": "TemplateProcessing",
        "single": [start, *single],
        "pair": [start, *single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<|im_start|>": {"id": "<|im_start|>", "ids": [n + 1], "tokens": ["<|im_start|>"]}
        },
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [token(n + i, text, special) for i, (text, special) in enumerate(ADDED)],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "post_processor": post if template else level,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "byte_fallback": False,
            "vocab": {t: i for i, t in enumerate(tokens)},
            "merges": [m.split(" ") for m in merges] if pairs else merges,
        },
    }


def write_folder(folder: Path, files: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in {"config.json": {}, **files}.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def key(name: str) -> str:
    return f"tokenizer.ggml.{name}"


@pytest.mark.parametrize("pairs", [True, False])
def test_byte_level_ids(tmp_path: Path, pairs: bool) -> None:
    import tokenizers

    parsed = byte_level_json(pairs)
    oracle = tokenizers.Tokenizer.from_str(json.dumps(parsed))
    found = tokenizer_metadata(write_folder(tmp_path / "m", {"tokenizer.json": parsed}), 620)
    assert (found[key("model")], found[key("pre")]) == ("gpt2", "qwen2")
    ours = Tokenizer(found)
    for text in [*TEXTS, "<tool>x<|fim|>", "a<|im_end|>b"]:
        assert ours.encode(text, parse_special=True) == oracle.encode(text).ids, repr(text)


def test_types_and_padding(tmp_path: Path) -> None:
    found = tokenizer_metadata(write_folder(tmp_path / "m", {"tokenizer.json": byte_level_json()}), 620)
    types = found[key("token_type")]
    # <|fim|> is not called special, but it looks like it.
    assert types == [NORMAL] * 600 + [CONTROL] * 3 + [USER_DEFINED, CONTROL] + [UNUSED] * 15
    assert found[key("tokens")][600:606] == [*(text for text, _ in ADDED), "[PAD605]"]
    assert len(found[key("tokens")]) == 620


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing-said": ({}, {}),
    "names": ({"eos_token": "<|im_end|>", "pad_token": {"content": "<|endoftext|>"}, "bos_token": None}, {}),
    "ids": ({}, {"eos_token_id": 602, "bos_token_id": 601}),
    "names-before-ids": ({"eos_token": "<|im_end|>"}, {"eos_token_id": 600, "bos_token_id": 600}),
    "adds-bos": ({"bos_token": "<|im_start|>", "add_bos_token": True, "add_eos_token": False}, {}),
    "adds-eos": ({"eos_token": "<|im_end|>", "add_eos_token": True}, {}),
    "template": ({"chat_template": "{{ messages }}"}, {}),
}


@pytest.mark.parametrize("template", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_special_tokens_as_the_gguf_package_reads_them(tmp_path: Path, name: str, template: bool) -> None:
    tokenizer_config, config = CASES[name]
    if template:
        tokenizer_config = {"bos_token": "<|im_start|>", **tokenizer_config}
    files = {
        "tokenizer.json": byte_level_json(template=template),
        "tokenizer_config.json": tokenizer_config,
        "config.json": config,
    }
    folder = write_folder(tmp_path / "m", files)
    expected = gguf.SpecialVocab(folder, load_merges=True, n_vocab=620)
    found = tokenizer_metadata(folder, 620)
    ids = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    assert {k: found.get(key(f"{ours}_token_id")) for k, ours in ids.items()} == {
        k: expected.special_token_ids.get(k) for k in ids
    }
    assert found[key("merges")] == expected.merges
    for which in ("bos", "eos"):
        assert found[key(f"add_{which}_token")] is bool(expected.add_special_token.get(which)), which
    assert found.get("tokenizer.chat_template") == expected.chat_template


def test_templates(tmp_path: Path) -> None:
    def template(**files: Any) -> str | None:
        folder = write_folder(
            tmp_path / str(len([*tmp_path.iterdir()])), {"tokenizer.json": byte_level_json(), **files}
        )
        return tokenizer_metadata(folder, 620).get("tokenizer.chat_template")

    several = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert template() is None
    assert template(**{"tokenizer_config.json": {"chat_template": several}}) == "D"
    assert template(**{"chat_template.json": {"chat_template": "J"}}) == "J"
    both = {"chat_template.jinja": "{# é #}", "tokenizer_config.json": {"chat_template": "old"}}
    assert template(**both) == "{# é #}"


@pytest.mark.parametrize(
    "tokens, eos, listed, expected",
    [
        # Llama 3: all are well known, the most specific is the end of a turn
        (["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"], 2, [0, 1, 2], {"eot": 2, "eom": 1}),
        # Phi-3: one that nobody knows
        (["<|endoftext|>", "<|assistant|>", "<|end|>"], 0, [2, 1, 0], {"eot": 2, "eom": 1}),
        # Gemma 3
        (["<eos>", "<end_of_turn>"], 0, [0, 1], {"eot": 1}),
        (["<eos>", "<x>"], 0, 0, {}),
    ],
)
def test_every_end_of_generation_config_ends(
    tmp_path: Path, tokens: list[str], eos: int, listed: Any, expected: dict[str, int]
) -> None:
    parsed = byte_level_json()
    parsed["added_tokens"] = [token(600 + i, text, True) for i, text in enumerate(tokens)]
    ends = [600 + i for i in listed] if isinstance(listed, list) else 600 + listed
    files = {
        "tokenizer.json": parsed,
        "tokenizer_config.json": {"eos_token": tokens[eos]},
        "generation_config.json": {"eos_token_id": ends},
    }
    found = tokenizer_metadata(write_folder(tmp_path / "m", files), 620)
    assert found[key("eos_token_id")] == 600 + eos
    assert {
        n: found[key(f"{n}_token_id")] - 600 for n in ("eot", "eom") if key(f"{n}_token_id") in found
    } == expected
    reads = Tokenizer(found)
    assert {*(ends if isinstance(ends, list) else [ends])} <= {*reads.eog_ids}


def test_ids_of_generation_config_come_last(tmp_path: Path) -> None:
    """The first Qwen's are there only."""
    files = {
        "tokenizer.json": byte_level_json(),
        "config.json": {"eos_token_id": None, "pad_token_id": 603},
        "generation_config.json": {"eos_token_id": 602, "pad_token_id": 600},
    }
    found = tokenizer_metadata(write_folder(tmp_path / "m", files), 620)
    assert (found[key("eos_token_id")], found[key("padding_token_id")]) == (602, 603)


def test_tiktoken(tmp_path: Path) -> None:
    """The first Qwen: ranks in place of merges, control tokens behind them."""
    tokens, merges = train_byte_level(600)
    spelled = {c: b for b, c in byte_spelling().items()}
    lines = [
        base64.b64encode(bytes(spelled[c] for c in text)).decode() + f" {i}" for i, text in enumerate(tokens)
    ]
    folder = write_folder(tmp_path / "m", {"qwen.tiktoken": "\n".join(lines) + "\n"})
    found = tokenizer_metadata(folder, 1024)
    assert found[key("tokens")][:600] == tokens and found[key("merges")] == merges
    assert found[key("tokens")][600:604] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|extra_0|>"]
    assert found[key("token_type")][600:] == [CONTROL] * 208 + [UNUSED] * 216
    (folder / "qwen.tiktoken").write_text("\n".join([*lines[:-5], "YWI=x 1"]))
    with pytest.raises(FileFormatError, match="line 596 is no base64 word and rank"):
        tokenizer_metadata(folder, 1024)


# SentencePiece.


def train_sentencepiece(folder: Path, prefix: bool, kind: str = "bpe") -> Any:
    spm = pytest.importorskip("sentencepiece")
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter([line for s in SENTENCES for line in s.splitlines()] * 3),
        model_prefix=str(folder / "tokenizer"),
        model_type=kind,
        vocab_size=520 if kind == "bpe" else 400,
        byte_fallback=True,
        add_dummy_prefix=prefix,
        user_defined_symbols=["<tool>"],
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        character_coverage=0.98,
        minloglevel=2,
        num_threads=1,
    )
    return spm.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_model(tmp_path: Path, prefix: bool) -> None:
    folder = write_folder(
        tmp_path / "m",
        {
            "tokenizer_config.json": {
                "add_bos_token": True,
                "bos_token": "<s>",
                "eos_token": "</s>",
                "unk_token": "<unk>",
                "added_tokens_decoder": {"520": {"content": "<|end|>", "special": True}},
            },
            "added_tokens.json": {"<|end|>": 520, "<more>": 521},
        },
    )
    sp = train_sentencepiece(folder, prefix)
    found = tokenizer_metadata(folder, 530)
    assert found[key("model")] == "llama" and found[key("add_space_prefix")] is prefix
    assert found[key("tokens")][:520] == [sp.id_to_piece(i) for i in range(520)]
    assert found[key("scores")][:520] == [sp.get_score(i) for i in range(520)]
    assert found[key("tokens")][520:523] == ["<|end|>", "<more>", "[PAD522]"]
    types = found[key("token_type")]
    assert types[:4] == [UNKNOWN, CONTROL, CONTROL, USER_DEFINED] and types[4:260] == [BYTE] * 256
    assert {*types[260:520]} == {NORMAL} and types[520:523] == [CONTROL, USER_DEFINED, UNUSED]
    special = {n: found.get(key(f"{n}_token_id")) for n in ("bos", "eos", "unknown", "padding")}
    assert special == {"bos": 1, "eos": 2, "unknown": 0, "padding": None}
    assert (found[key("add_bos_token")], found[key("add_eos_token")]) == (True, False)
    ours = Tokenizer(found)
    for text in TEXTS:
        if "<s>" not in text and "<more>" not in text:
            assert ours.encode(text, add_special=False) == sp.encode(text), repr(text)


def test_sentencepiece_model_alone(tmp_path: Path) -> None:
    """Without any config the names are SentencePiece's own, and BOS is added, as readers assume."""
    folder = write_folder(tmp_path / "m", {})
    train_sentencepiece(folder, True)
    found = tokenizer_metadata(folder, 520)
    special = {n: found.get(key(f"{n}_token_id")) for n in ("bos", "eos", "unknown", "padding")}
    assert special == {"bos": 1, "eos": 2, "unknown": 0, "padding": None}
    assert found[key("add_bos_token")] is True
    (folder / "tokenizer_config.json").write_text('{"bos_token": null, "add_prefix_space": false}')
    found = tokenizer_metadata(folder, 520)
    assert key("bos_token_id") not in found and found[key("add_bos_token")] is False
    assert found[key("add_space_prefix")] is False


def test_unigram_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", {})
    train_sentencepiece(folder, True, "unigram")
    with pytest.raises(UnsupportedModelError, match="of kind Unigram; supported is BPE"):
        tokenizer_metadata(folder, 600)


def as_merges(sp: Any) -> dict[str, Any]:
    """tokenizer.json of a SentencePiece BPE: every split into two pieces is a merge, the best first."""
    n = sp.get_piece_size()
    pieces = {sp.id_to_piece(i): i for i in range(n)}
    normal = [i for i in range(n) if not (sp.is_unknown(i) or sp.is_control(i) or sp.is_byte(i))]
    merges = []
    for i in sorted(normal, key=sp.get_score, reverse=True):
        piece = sp.id_to_piece(i)
        splits = [(piece[:k], piece[k:]) for k in range(1, len(piece))]
        merges += [[a, b] for a, b in splits if a in pieces and b in pieces and piece != "<tool>"]
    return {
        "added_tokens": [token(i, sp.id_to_piece(i), i < 3) for i in range(4)],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": SPACE},
                {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": pieces,
            "merges": merges,
        },
    }


def test_merges_with_byte_fallback(tmp_path: Path) -> None:
    """tokenizer.json alone gives the ids of the SentencePiece model that it was made of."""
    folder = write_folder(tmp_path / "m", {})
    sp = train_sentencepiece(folder, True)
    (folder / "tokenizer.model").unlink()
    (folder / "tokenizer.json").write_text(json.dumps(as_merges(sp)))
    found = tokenizer_metadata(folder, 520)
    assert found[key("model")] == "llama" and found[key("add_space_prefix")] is True
    types = found[key("token_type")]
    assert types[:5] == [UNKNOWN, CONTROL, CONTROL, USER_DEFINED, BYTE]
    ours = Tokenizer(found)
    for text in TEXTS:
        if "<s>" not in text:
            assert ours.encode(text, add_special=False) == sp.encode(text), repr(text)


def test_space_prefix_of_metaspace(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", {})
    parsed = as_merges(train_sentencepiece(folder, True))
    (folder / "tokenizer.model").unlink()
    parsed["normalizer"] = None
    for step, expected in (
        ({"prepend_scheme": "first"}, True),
        ({"prepend_scheme": "never"}, False),
        ({"add_prefix_space": False}, False),
        ({}, True),
    ):
        parsed["pre_tokenizer"] = {"type": "Metaspace", "replacement": SPACE, **step}
        (folder / "tokenizer.json").write_text(json.dumps(parsed))
        assert tokenizer_metadata(folder, 520)[key("add_space_prefix")] is expected
    parsed["pre_tokenizer"] = None
    (folder / "tokenizer.json").write_text(json.dumps(parsed))
    assert tokenizer_metadata(folder, 520)[key("add_space_prefix")] is False


# What does not fit.


def test_more_tokens_than_rows(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", {"tokenizer.json": byte_level_json()})
    with pytest.raises(FileFormatError, match="the tokenizer has 600 tokens, the embedding 580 rows"):
        tokenizer_metadata(folder, 580)
    with pytest.warns(UserWarning, match="2 added tokens have no row.*'<tool>', '<|fim|>'"):
        found = tokenizer_metadata(folder, 603)
    assert found[key("tokens")][-1] == "<|im_end|>" and len(found[key("tokens")]) == 603


def test_a_pre_tokenizer_without_a_name_is_refused(tmp_path: Path) -> None:
    parsed = byte_level_json()
    parsed["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": "[a-z]+"}
    with pytest.raises(UnsupportedModelError, match="pre-tokenizer"):
        tokenizer_metadata(write_folder(tmp_path / "m", {"tokenizer.json": parsed}), 620)


def test_odd_tokenizer_files_are_typed_errors(tmp_path: Path) -> None:
    good = byte_level_json()
    odd: list[Any] = [None, 0, "x", [], ["x"], [[]], {}, {"a": 1}, {"type": "BPE"}]
    n_failed = 0
    paths: list[tuple[str, ...]] = [(k,) for k in good]
    paths += [("model", k) for k in good["model"]]
    for path, value in itertools.product(paths, odd):
        parsed = json.loads(json.dumps(good))
        at = parsed
        for k in path[:-1]:
            at = at[k]
        at[path[-1]] = value
        folder = write_folder(tmp_path / "m", {"tokenizer.json": parsed})
        try:
            tokenizer_metadata(folder, 620)
        except Error:
            n_failed += 1
    assert n_failed > 30


def test_odd_values_beside_the_tokenizer_are_passed_over(tmp_path: Path) -> None:
    """Configs say more than is needed: what is not as expected there is as if it were not there."""
    odd: list[Any] = [0, -1, 1e9, "x", [], [[]], {}, {"content": []}, [{"name": [], "template": 1}], True]
    keys = [
        "bos_token",
        "eos_token",
        "add_bos_token",
        "chat_template",
        "added_tokens_decoder",
        "eos_token_id",
    ]
    for name, value in itertools.product(keys, odd):
        files = {
            "tokenizer.json": byte_level_json(),
            "tokenizer_config.json": {name: value},
            "generation_config.json": {name: value},
            "config.json": {name: value, "text_config": value},
        }
        found = tokenizer_metadata(write_folder(tmp_path / "m", files), 620)
        assert Tokenizer(found).n_vocab == 620


def test_truncated_sentencepiece_models_are_typed_errors(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", {})
    train_sentencepiece(folder, True)
    data = (folder / "tokenizer.model").read_bytes()
    n_failed = 0
    for cut in range(0, len(data), 37):
        (folder / "tokenizer.model").write_bytes(data[:cut])
        try:
            tokenizer_metadata(folder, 600)
        except Error:
            n_failed += 1
    assert n_failed > len(data) // 37 // 2
    (folder / "tokenizer.model").write_bytes(b"<html>not found</html>")
    with pytest.raises(FileFormatError, match=r"tokenizer\.model: .*(no SentencePiece model|past the end)"):
        tokenizer_metadata(folder, 600)


def test_a_converted_file_has_its_vocabulary(tmp_path: Path) -> None:
    config = llama_config(vocab_size=620)
    folder = write_checkpoint(tmp_path / "m", config, llama_tensors(config))
    (folder / "tokenizer.json").write_text(json.dumps(byte_level_json(template=True)))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": "{{ 1 }}"})
    )
    convert(folder, tmp_path / "m.gguf", "q8_0")
    ours = Tokenizer(tmp_path / "m.gguf")
    expected = Tokenizer(tokenizer_metadata(folder, 620))
    for text in SENTENCES:
        ids = ours.encode(text)
        assert ids[0] == 601 and ids == expected.encode(text)
        assert ours.decode(ids) == text
