"""BPE over characters (gemma4) against Hugging Face ``tokenizers``, set up as Gemma's tokenizer.json is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ringlm.errors import FileFormatError
from ringlm.tokenizer import Tokenizer
from tokenizer_data import (
    BYTE,
    CONTROL,
    NASTY,
    NORMAL,
    SENTENCES,
    SPACE,
    UNKNOWN,
    USER_DEFINED,
    keyed,
    random_texts,
)
from tokenizers import Tokenizer as Reference
from tokenizers import models, normalizers, trainers

SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]
USER = ["<|tool>", "\n\n", "▁▁▁"]
TEXTS = [*NASTY, *SENTENCES, *random_texts(500, seed=21)]


@pytest.fixture(scope="module")
def trained() -> tuple[list[str], list[str]]:
    """Tokens and merges: control, bytes, user-defined, then what training found."""
    trainer = trainers.BpeTrainer(vocab_size=900, show_progress=False)
    tokenizer = Reference(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.train_from_iterator(SENTENCES * 3, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    found = sorted(model["vocab"], key=model["vocab"].get)
    first = [*SPECIAL, *(f"<0x{b:02X}>" for b in range(256)), *USER]
    return [*first, *(t for t in found if t not in first)], [" ".join(m) for m in model["merges"]]


def metadata(trained: tuple[list[str], list[str]], **more: Any) -> dict[str, Any]:
    tokens, merges = trained
    types = [CONTROL, CONTROL, CONTROL, UNKNOWN, *[BYTE] * 256, *[USER_DEFINED] * len(USER)]
    return {
        "model": "gemma4",
        "tokens": tokens,
        "token_type": types + [NORMAL] * (len(tokens) - len(types)),
        "merges": merges,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "unknown_token_id": 3,
        "add_bos_token": True,
        "add_space_prefix": False,
        **more,
    }


@pytest.fixture(scope="module")
def case(trained: tuple[list[str], list[str]]) -> tuple[Reference, Tokenizer]:
    tokens, merges = trained
    added = [
        {"id": tokens.index(t), "content": t, "special": False, "normalized": False}
        | {"single_word": False, "lstrip": False, "rstrip": False}
        for t in USER
        if SPACE not in t
    ]
    file = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {t: i for i, t in enumerate(tokens)},
            "merges": merges,
        },
    }
    return Reference.from_str(json.dumps(file)), Tokenizer(keyed(metadata(trained)))


def test_ids_equal_gemmas(case: tuple[Reference, Tokenizer]) -> None:
    theirs, ours = case
    for text in TEXTS:
        if SPACE * 3 in text.replace(" ", SPACE):
            continue  # an added token that the other side would look for before it replaces spaces
        assert ours.encode(text, add_special=False) == theirs.encode(text).ids, repr(text)


def test_round_trip(case: tuple[Reference, Tokenizer]) -> None:
    _, ours = case
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids[0] == ours.bos_id
        assert ours.decode(ids) == text.replace(SPACE, " ")


def test_user_defined_and_control_tokens(case: tuple[Reference, Tokenizer]) -> None:
    _, ours = case
    tool, spaces, eos = (ours.id_of(t) for t in ("<|tool>", "▁▁▁", "<eos>"))
    assert ours.encode("<|tool>   ", add_special=False) == [tool, spaces]
    assert eos not in ours.encode("a<eos>b")
    assert ours.encode("<eos>", add_special=False, parse_special=True) == [eos]
    assert ours.decode(ours.encode("a<eos>b")) == "a<eos>b"


def test_byte_tokens_must_be_there(trained: tuple[list[str], list[str]]) -> None:
    data = metadata(trained)
    data["tokens"] = ["x" if t == "<0x7F>" else t for t in data["tokens"]]
    with pytest.raises(FileFormatError, match="<0x7F>"):
        Tokenizer(keyed(data))


def test_bad_merges_are_named(trained: tuple[list[str], list[str]]) -> None:
    data = metadata(trained)
    data["merges"] = [*data["merges"][:3], "no such", *data["merges"][3:]]
    with pytest.raises(FileFormatError, match=r"merges\[3\]"):
        Tokenizer(keyed(data))
