"""Every name of ``tokenizer.ggml.pre``: ids against the published ``tokenizer.json`` of its model family, run
by Hugging Face ``tokenizers`` with the same vocabulary; and from such a file back to the name."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from ringlm.errors import UnsupportedModelError
from ringlm.pretokenizers import PRE_TOKENIZERS, name_of, supported_names
from ringlm.tokenizer import Tokenizer
from tokenizer_data import CONTROL, NASTY, NORMAL, SENTENCES, keyed, random_texts, train_byte_level
from tokenizer_published import PUBLISHED, published
from tokenizers import Tokenizer as Reference

TEXTS = [*NASTY, *SENTENCES, *random_texts(500, seed=11)]
BOS = "<|bos|>"


@pytest.fixture(scope="module")
def trained() -> tuple[list[str], list[str]]:
    tokens, merges = train_byte_level(1400, words=False)
    # Words that no merge gives: only a vocabulary that ignores merges finds them.
    return [*tokens, "Ġxyzzy", "xyz", BOS], merges


def from_gguf(pre: str | None, trained: tuple[list[str], list[str]]) -> Tokenizer:
    tokens, merges = trained
    n = len(tokens)
    types = [NORMAL] * (n - 1) + [CONTROL]
    data = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": merges}
    return Tokenizer(keyed({**data, "bos_token_id": n - 1}))


def reference(pre: str, trained: tuple[list[str], list[str]]) -> Reference:
    return Reference.from_str(json.dumps(published(pre, *trained)))


def ids_of(theirs: Reference, text: str) -> list[int]:
    ids: list[int] = theirs.encode(text, add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize("pre", PUBLISHED)
def test_ids_equal_the_published_tokenizer(pre: str, trained: tuple[list[str], list[str]]) -> None:
    theirs, ours = reference(pre, trained), from_gguf(pre, trained)
    for text in [*TEXTS, "say xyzzy now", "xyz xyzzy"]:
        assert ours.encode(text, add_special=False) == ids_of(theirs, text), repr(text)
    assert ours.add_bos == PRE_TOKENIZERS[pre].add_bos


@pytest.mark.parametrize("pre", PUBLISHED)
def test_bytes_that_are_no_text_are_encoded_as_replacement_characters(
    pre: str, trained: tuple[list[str], list[str]]
) -> None:
    theirs, ours = reference(pre, trained), from_gguf(pre, trained)
    for raw in (
        b"a\xffb",
        b"\xc3(",
        b"\xe6\x97 \x80\x80",
        b"\xed\xa0\x80",
        b"\xf0\x9f\x98",
        b"x\xc0\xaf\xfe1",
    ):
        escaped = raw.decode("utf-8", "surrogateescape")
        one_each = "".join("\ufffd" if "\udc80" <= c <= "\udcff" else c for c in escaped)
        expected = ids_of(theirs, one_each)
        assert ours.encode(escaped, add_special=False) == expected
        assert ours.decode(expected) == one_each


def test_the_texts_tell_the_families_apart(trained: tuple[list[str], list[str]]) -> None:
    """Or else a wrong rule would pass."""
    texts = [*TEXTS, "say xyzzy now"]
    families = {pre: reference(pre, trained) for pre in PUBLISHED}
    ids = {pre: [ids_of(theirs, text) for text in texts] for pre, theirs in families.items()}
    for a, b in itertools.combinations(PUBLISHED, 2):
        same = [(r.steps, r.nfc, r.ignore_merges) for r in (PRE_TOKENIZERS[a], PRE_TOKENIZERS[b])]
        assert (ids[a] == ids[b]) == (same[0] == same[1]), (a, b)


def test_other_names_are_names_of_published_rules() -> None:
    families = [PRE_TOKENIZERS[pre] for pre in PUBLISHED]
    assert all(rules in families for rules in PRE_TOKENIZERS.values())


@pytest.mark.parametrize(
    ("alias", "pre"),
    [
        ("llama3", "llama-bpe"),
        ("llama-v3", "llama-bpe"),
        ("phi-2", "gpt-2"),
        ("starcoder", "smollm"),
        ("refact", "smollm"),
        ("deepseek-r1-qwen", "qwen2"),
        ("mpt", "olmo"),
        ("llama4", "gpt-4o"),
    ],
)
def test_aliases(alias: str, pre: str, trained: tuple[list[str], list[str]]) -> None:
    a, b = from_gguf(alias, trained), from_gguf(pre, trained)
    assert a.add_bos == b.add_bos
    assert all(a.encode(text) == b.encode(text) for text in TEXTS)


def test_unknown_names_are_refused(trained: tuple[list[str], list[str]]) -> None:
    for name in ("no-such", "", "LLAMA-BPE", "qwen2 "):
        with pytest.raises(UnsupportedModelError) as error:
            from_gguf(name, trained)
        assert repr(name) in str(error.value)
        assert all(known in str(error.value) for known in [*PUBLISHED, "default"])


# -- from tokenizer.json to the name --


@pytest.mark.parametrize("pre", PUBLISHED)
def test_name_of_a_published_file(pre: str, trained: tuple[list[str], list[str]]) -> None:
    name = name_of(published(pre, *trained))
    assert PRE_TOKENIZERS[name] == PRE_TOKENIZERS[pre]
    assert name == next(other for other in PUBLISHED if PRE_TOKENIZERS[other] == PRE_TOKENIZERS[pre])
    # As Hugging Face `tokenizers` writes it again.
    assert name_of(json.loads(reference(pre, trained).to_str())) == name


def test_name_of_other_spellings(trained: tuple[list[str], list[str]]) -> None:
    """The same cuts in other words; the ids of these files are compared too."""
    tail = r"|\s+(?!\S)|\s+"
    possessive = (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]" + tail
    )
    gpt2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+" + tail
    for pre, regexes in [
        ("dbrx", [possessive % "{1,3}"]),
        ("qwen2", [possessive % ""]),
        ("gpt-2", [gpt2]),
        ("smollm", [r"\p{N}", gpt2]),
    ]:
        file = published(pre, *trained)
        splits = [
            {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
            for regex in regexes
        ]
        file["pre_tokenizer"]["pretokenizers"] = [
            *splits,
            published("dbrx", *trained)["pre_tokenizer"]["pretokenizers"][-1],
        ]
        assert name_of(file) == pre
        theirs, ours = Reference.from_str(json.dumps(file)), from_gguf(pre, trained)
        for text in TEXTS:
            assert ours.encode(text, add_special=False) == ids_of(theirs, text), repr(text)


def changed(file: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**file, **more}


def test_files_without_a_name_say_what_was_found(trained: tuple[list[str], list[str]]) -> None:
    file = published("llama-bpe", *trained)
    steps = file["pre_tokenizer"]["pretokenizers"]
    unknown = {**steps[0], "pattern": {"Regex": r"\w+|\s+"}}
    for other, found in [
        (changed(file, normalizer={"type": "NFKC"}), "NFKC"),
        (changed(file, normalizer={"type": "NFC"}), "NFC"),
        (changed(file, normalizer={"type": "Sequence", "normalizers": [{"type": "Lowercase"}]}), "Lowercase"),
        (changed(file, pre_tokenizer=None), "None"),
        (changed(file, pre_tokenizer={"type": "Metaspace", "replacement": "▁"}), "Metaspace"),
        (changed(file, pre_tokenizer={"type": "Sequence", "pretokenizers": steps[1:]}), "use_regex"),
        (changed(file, pre_tokenizer={"type": "Sequence", "pretokenizers": [unknown, steps[1]]}), r"\w"),
        (
            changed(file, pre_tokenizer={**steps[1], "use_regex": True, "add_prefix_space": True}),
            "add_prefix",
        ),
        (changed(file, pre_tokenizer={**steps[0], "behavior": "MergedWithNext"}), "MergedWithNext"),
        (changed(file, pre_tokenizer={**unknown, "behavior": "Removed"}), "Removed"),
        (changed(file, pre_tokenizer={"type": "Punctuation", "behavior": "Isolated"}), "Punctuation"),
        (changed(file, model={"type": "Unigram", "vocab": []}), "Unigram"),
        (changed(file, model={"type": "WordPiece", "vocab": {}}), "WordPiece"),
        (changed(file, model={**file["model"], "byte_fallback": True}), "byte_fallback"),
        (changed(file, model={}), "None"),
    ]:
        with pytest.raises(UnsupportedModelError) as error:
            name_of(other)
        assert found in str(error.value)


def test_supported_names_all_open(trained: tuple[list[str], list[str]]) -> None:
    for name in supported_names():
        if name != "default":
            tokenizer = from_gguf(name, trained)
            assert tokenizer.decode(tokenizer.encode("Hello, world 42!")) == "Hello, world 42!"
