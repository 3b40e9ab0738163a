"""Byte-level BPE against a naive encoder over independently written splits."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import pytest
from ringlm.errors import FileFormatError
from ringlm.pretokenizers import PRE_TOKENIZERS, build_splitter
from ringlm.tokenizer import Tokenizer
from tokenizer_data import (
    CONTROL,
    NASTY,
    NORMAL,
    NORMALIZED,
    ORACLE_SPLITS,
    SENTENCES,
    USER_DEFINED,
    keyed,
    oracle_byte_level,
    oracle_split,
    random_texts,
    train_byte_level,
    write_vocab,
)

PRES = [pre for pre in ORACLE_SPLITS if pre != "default"]
TEXTS = [*NASTY, *SENTENCES, *random_texts(300, seed=1)]


@pytest.fixture(scope="module")
def trained() -> tuple[list[str], list[str]]:
    return train_byte_level(700)


def metadata(trained: tuple[list[str], list[str]], **more: Any) -> dict[str, Any]:
    tokens, merges = trained
    # A token that no merge gives: only a vocabulary that ignores merges finds it.
    tokens = [*tokens, "Ġxyzzy", "<|end|>", "<|pad|>", "<tool>", "<tool>s", "  x"]
    types = [NORMAL] * (len(tokens) - 5) + [CONTROL] * 2 + [USER_DEFINED] * 3
    return {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": types,
        "merges": merges,
        "eos_token_id": len(tokens) - 5,
        "bos_token_id": len(tokens) - 4,
        **more,
    }


@pytest.fixture(scope="module", params=PRES)
def case(
    request: pytest.FixtureRequest,
    trained: tuple[list[str], list[str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[str, dict[str, Any], Tokenizer]:
    data = metadata(trained, pre=request.param, add_bos_token=False)
    path = write_vocab(tmp_path_factory.mktemp("vocab") / "bpe.gguf", data)
    return request.param, data, Tokenizer(path)


@pytest.mark.parametrize("pre", PRES)
def test_splits_equal_independent_patterns(pre: str) -> None:
    splitter = build_splitter(PRE_TOKENIZERS[pre])
    for text in [*TEXTS, *random_texts(1500, seed=2)]:
        found = [text[a:b] for _, (a, b) in splitter.pre_tokenize_str(text)]
        assert found == oracle_split(text, pre), repr(text)


def test_ids_equal_naive_encoder(case: tuple[str, dict[str, Any], Tokenizer]) -> None:
    pre, data, tokenizer = case
    for text in [*TEXTS, "say xyzzy now"]:
        expected = oracle_with_user_defined(text, pre, data)
        assert tokenizer.encode(text) == expected, repr(text)


def oracle_with_user_defined(text: str, pre: str, data: dict[str, Any]) -> list[int]:
    tokens, merges = data["tokens"], data["merges"]
    if "  x" in text:
        head, tail = text.split("  x", 1)
        found = [tokens.index("  x")]
        return oracle_with_user_defined(head, pre, data) + found + oracle_with_user_defined(tail, pre, data)
    return oracle_byte_level(text, pre, tokens[:-5], merges)


def test_round_trip(case: tuple[str, dict[str, Any], Tokenizer]) -> None:
    pre, _, tokenizer = case
    for text in TEXTS:
        expected = unicodedata.normalize("NFC", text) if pre in NORMALIZED else text
        assert tokenizer.decode(tokenizer.encode(text)) == expected


def test_token_bytes(case: tuple[str, dict[str, Any], Tokenizer]) -> None:
    _, data, tokenizer = case
    ids = tokenizer.encode("Bär 😀\n")
    assert b"".join(map(tokenizer.token_bytes, ids)) == "Bär 😀\n".encode()
    assert {tokenizer.token_bytes(i) for i in range(256)} == {bytes([b]) for b in range(256)}
    assert tokenizer.token_bytes(data["tokens"].index("<|end|>")) == b"<|end|>"


def test_user_defined_tokens_are_always_found_longest_first(
    case: tuple[str, dict[str, Any], Tokenizer],
) -> None:
    _, data, tokenizer = case
    index = data["tokens"].index
    for parse in (False, True):
        ids = tokenizer.encode("<tool>sx<tool> <tool>s", parse_special=parse)
        assert [i for i in ids if i >= index("<tool>")] == [
            index("<tool>s"),
            index("<tool>"),
            index("<tool>s"),
        ]
        assert tokenizer.decode(ids) == "<tool>sx<tool> <tool>s"


def test_typed_control_tokens_stay_text(case: tuple[str, dict[str, Any], Tokenizer]) -> None:
    _, data, tokenizer = case
    end = data["tokens"].index("<|end|>")
    text = "a<|end|>b<|pad|><|end|>"
    typed = tokenizer.encode(text)
    assert not any(map(tokenizer.is_control, typed))
    assert tokenizer.decode(typed) == text
    parsed = tokenizer.encode(text, parse_special=True)
    assert parsed == [*tokenizer.encode("a"), end, *tokenizer.encode("b"), end + 1, end]
    assert tokenizer.decode(parsed) == "ab"
    assert tokenizer.decode(parsed, skip_special=False) == text


@pytest.mark.parametrize("pre", PRES)
def test_merges_never_form_a_control_token(pre: str, trained: tuple[list[str], list[str]]) -> None:
    data = metadata(trained, pre=pre)
    ids = {t: i for i, t in enumerate(data["tokens"])}
    plain = Tokenizer(keyed(data))
    text = " and the and" * 3
    victims = set(plain.encode(text, add_special=False))
    assert any(data["tokens"][i] == "Ġand" for i in victims)
    data["token_type"] = list(data["token_type"])
    for name in ("Ġand", "Ġthe", "an"):
        if name in ids:
            data["token_type"][ids[name]] = CONTROL
    tokenizer = Tokenizer(keyed(data))
    encoded = tokenizer.encode(text, add_special=False)
    assert not any(map(tokenizer.is_control, encoded))
    assert tokenizer.decode(encoded) == text


def test_missing_bytes_are_dropped_not_made_control(trained: tuple[list[str], list[str]]) -> None:
    data = metadata(trained)
    gone = data["tokens"].index("Ā")  # the byte 0
    data["tokens"] = list(data["tokens"])
    data["tokens"][gone] = "no such text"
    data["unknown_token_id"] = data["eos_token_id"]
    tokenizer = Tokenizer(keyed(data))
    ids = tokenizer.encode("x\0y", add_special=False)
    assert tokenizer.decode(ids, skip_special=False) == "xy"


@pytest.mark.parametrize("name", [None, "default"])
def test_unnamed_pre_tokenizer_warns_and_splits_as_llama_cpp_does(
    name: str | None, trained: tuple[list[str], list[str]]
) -> None:
    data = metadata(trained)
    with pytest.warns(UserWarning, match=r"tokenizer\.ggml\.pre"):
        tokenizer = Tokenizer(keyed({**data, "pre": name}))
    for text in TEXTS:
        assert tokenizer.encode(text) == oracle_with_user_defined(text, "default", data), repr(text)


def test_bad_merges_are_named(trained: tuple[list[str], list[str]]) -> None:
    for bad in ("nospace", "a b c", "zz qq", "", " "):
        data = metadata(trained)
        data["merges"] = [*data["merges"][:3], bad, *data["merges"][3:]]
        with pytest.raises(FileFormatError, match=r"merges\[3\]"):
            Tokenizer(keyed(data))


def test_duplicate_tokens_do_not_break(trained: tuple[list[str], list[str]], tmp_path: Path) -> None:
    data = metadata(trained)
    data["tokens"] = [*data["tokens"], "Ġand", "Ġand"]
    data["token_type"] = [*data["token_type"], CONTROL, NORMAL]
    tokenizer = Tokenizer(write_vocab(tmp_path / "dup.gguf", data))
    text = "you and me and"
    ids = tokenizer.encode(text, add_special=False)
    assert not any(map(tokenizer.is_control, ids))
    assert tokenizer.decode(ids) == text
